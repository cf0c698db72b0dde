"""The page of `colar serve` in real Chromium: against a server of the same API without a model."""

from __future__ import annotations

import copy
import json
import re
import urllib.request

import browser
import pytest
from fake_serve import CHAIN, HOSTILE, PAGE, VIEWER, FakeServe, thoughts

from colar.look.page import VIEWER as SHARED

expect = browser.playwright_api.expect


@pytest.fixture(scope="module", name="browser")
def chromium():
    with browser.opened() as running:
        yield running


@pytest.fixture
def server():
    running = FakeServe()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def page(browser, server):
    """The page, opened; it fails the test where anything was said on the console or thrown."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    said = []
    opened.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(server.url)
    expect(opened.locator("#model option")).to_have_count(len(server.models))
    yield opened
    # Chromium itself says that a status was no 200; nothing else may be said, CSP violations least of all.
    assert [text for text in said if "Failed to load resource" not in text] == []
    context.close()


def ask(page, question="What is 5 times 5?"):
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()


def chips(page):
    return page.locator("#runs .chain .chip").all_text_contents()


def test_a_question_streams_thoughts_and_an_answer(page, server):
    slider = page.get_by_label("Speed")
    slider.focus()
    slider.press("End")
    assert slider.get_attribute("aria-valuetext") == "c = 5"
    slider.press("ArrowLeft")
    expect(page.locator("#speed-value")).to_have_text("c = 3")
    ask(page)
    expect(page.locator(".card .answer strong")).to_have_text("5")
    (request,) = server.requests
    assert request == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is 5 times 5?"}],
        "seed": 0,
        "compression_factor": 3,
        # A default too: the speed replaces all values of the checkpoint's own.
        "confidence_threshold": 0,
        "stream": True,
        "return_thoughts": True,
    }
    assert page.locator(".chain li").count() == 7
    assert chips(page) == list(CHAIN)
    costs = page.locator(".card .costs div").all_inner_texts()
    assert [re.sub(r"\s+", " ", text) for text in costs] == [
        "thoughts 7",
        "forward passes 10",
        "thinking 140 ms",
        "answering 40 ms",
    ]
    expect(page.locator("#status")).to_have_text("smollm2, c = 3: 7 thoughts, answer 5.")


def test_shade_is_the_cosine_and_the_bar_is_sigma(page):
    ask(page)
    expect(page.locator(".card .answer strong")).to_have_text("5")
    first = thoughts(2)[0]
    shown = page.locator(".chain li").first
    shades = shown.locator(".chip").evaluate_all(
        "nodes => nodes.map(n => n.style.getPropertyValue('--shade'))"
    )
    assert [float(shade) for shade in shades] == [token["cosine"] for token in first["tokens"]]
    # sigma 0.03 on a scale of two decades from 0.01: log10(3) / 2
    part = shown.locator(".sigma").evaluate("node => node.style.getPropertyValue('--part')")
    assert float(part) == pytest.approx(0.4771 / 2, abs=1e-3)
    assert shown.get_by_role("button").get_attribute("aria-label") == "Thought 1: << 0.97, 5 0.81; sigma 0.03"


def test_thoughts_arrive_one_by_one_and_stop_leaves(page, server):
    server.pause = 0.3
    ask(page)
    expect(page.locator(".chain li").first).to_be_visible()
    assert page.locator(".chain li").count() < 5
    assert page.locator(".card").get_attribute("aria-busy") == "true"
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".card .error")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Ask")).to_be_focused()
    assert server.gone.wait(10)


def test_speeds_side_by_side(page, server):
    page.get_by_role("button", name="Compare speeds").click()
    expect(page.locator("#summary tbody tr")).to_have_count(4)
    expect(page.locator(".card.waiting")).to_have_count(0)
    rows = page.locator("#summary tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["c = 1", "21", "24", "460 ms", "5"],
        ["c = 2", "11", "14", "260 ms", "5"],
        ["c = 5", "5", "8", "140 ms", "5"],
        ["CoT (chain)", "21", "24", "460 ms", "5"],
    ]
    choices = [(request["model"], request.get("compression_factor")) for request in server.requests]
    assert choices == [("smollm2", 1), ("smollm2", 2), ("smollm2", 5), ("chain", None)]
    # Beside one another, not below: all four begin at one height.
    tops = page.locator(".card").evaluate_all("cards => cards.map(c => c.getBoundingClientRect().top)")
    assert len(set(tops)) == 1


def test_without_a_cot_model_c_1_stands_for_it(page, server):
    server.models = server.models[:1]
    page.reload()
    expect(page.locator("#model option")).to_have_count(1)
    page.get_by_role("button", name="Compare speeds").click()
    expect(page.locator("#summary tbody tr")).to_have_count(3)
    titles = page.locator("#summary tbody th").all_inner_texts()
    assert titles == ["c = 1", "c = 2", "c = 5"]


def test_the_checkpoints_own_speed_is_chosen_and_named(page, server):
    expect(page.locator("#speed-value")).to_have_text("c = 2")
    (own, *others) = copy.deepcopy(server.models)
    own["colar"]["params"]["compression_factor"]["default"] = 5.0
    own["colar"]["params"]["confidence_threshold"]["default"] = 0.8
    server.models = [own, *others]
    page.reload()
    expect(page.locator("#speed-value")).to_have_text("c = 5")
    page.get_by_role("button", name="Compare speeds").click()
    expect(page.locator("#summary tbody tr")).to_have_count(4)
    titles = page.locator("#summary tbody th").all_inner_texts()
    assert titles == [*(f"c = {c}, confidence threshold 0.8" for c in (1, 2, 5)), "CoT (chain)"]
    assert [request.get("confidence_threshold") for request in server.requests] == [0.8, 0.8, 0.8, None]


def test_a_model_of_one_speed_has_no_slider(page, server):
    page.get_by_label("Model").select_option("chain")
    expect(page.get_by_label("Speed")).to_be_hidden()
    ask(page)
    expect(page.locator("#status")).to_have_text("chain: 21 thoughts, answer 5.")
    assert not {"compression_factor", "reasoning_effort"} & server.requests[-1].keys()


def test_a_thought_opens_its_neighbours_by_keyboard(page):
    ask(page)
    expect(page.locator(".card .answer strong")).to_have_text("5")
    buttons = page.locator(".chain button")
    assert buttons.evaluate_all("all => all.filter(b => b.tabIndex === 0).length") == 1
    buttons.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(buttons.nth(2)).to_be_focused()
    assert buttons.nth(2).get_attribute("aria-expanded") == "true"
    rows = page.locator(".details tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows][:2] == [["10", "0.900"], ["11", "0.820"]]
    assert len(rows) == 10
    page.keyboard.press("Enter")
    expect(page.locator(".details")).to_have_count(0)
    page.keyboard.press("End")
    expect(buttons.last).to_be_focused()
    # One at a time.
    buttons.first.click()
    buttons.nth(1).click()
    expect(page.locator(".details")).to_have_count(1)
    expect(page.locator(".details")).to_have_attribute("aria-label", "Thought 2")
    expect(page.locator(".chain [aria-expanded=true]")).to_have_count(1)


def test_text_of_a_model_is_never_markup(page):
    ask(page, "hostile")
    expect(page.locator(".card .answer strong")).to_have_text(HOSTILE)
    page.locator(".chain button").first.click()
    assert chips(page)[0] == HOSTILE
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None


def test_a_link_restores_question_and_settings(page, server):
    page.get_by_label("Model").select_option("smollm2")
    page.get_by_label("Speed").press("End")
    page.get_by_text("More settings").click()
    page.get_by_label("confidence threshold").fill("0.25")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("Most thoughts").fill("40")
    page.get_by_label("API key").fill("secret-key")
    ask(page, "Wie viel ist 5 & 5 = #?")
    expect(page.locator(".card .answer strong")).to_have_text("5")
    first = server.requests[-1]
    assert first["compression_factor"] == 5
    assert (first["confidence_threshold"], first["thinking_token_budget"]) == (0.25, 40)
    link = page.url
    assert "secret-key" not in link
    other = page.context.new_page()
    other.goto(link)
    expect(other.get_by_label("Question")).to_have_value("Wie viel ist 5 & 5 = #?")
    expect(other.locator("#model option")).to_have_count(2)
    other.get_by_role("button", name="Ask").click()
    expect(other.locator(".card .answer strong")).to_have_text("5")
    assert server.requests[-1] == first


def test_a_link_may_hold_anything(page, server):
    for hash in ("#speed=%22%5D%7B&model=nobody&seed=x", "#%%%", "#q=%3Cscript%3E&speed=99"):
        page.goto(server.url + hash)
        page.reload()
        expect(page.locator("#model option")).to_have_count(2)
        ask(page)
        expect(page.locator(".card .answer strong")).to_have_text("5")


def test_the_key_is_kept_for_the_tab_alone(page, server):
    server.key = "secret-key"
    page.reload()
    expect(page.locator("#error")).to_contain_text("wants an API key")
    page.get_by_label("API key").fill("secret-key")
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#model option")).to_have_count(2)
    expect(page.locator("#error")).to_be_empty()
    ask(page)
    expect(page.locator(".card .answer strong")).to_have_text("5")
    assert page.evaluate("JSON.stringify(localStorage)") == "{}"
    assert page.evaluate("JSON.stringify(sessionStorage)") == '{"colar-api-key":"secret-key"}'


def test_errors_are_shown_in_the_servers_words(page):
    for question, words in (
        ("refuse this", "compression_factor must be a number, 1 or more"),
        ("busy", "the queue is full (try again in 7 s)"),
        ("break in the middle", "the model's numbers were not finite"),
    ):
        ask(page, question)
        expect(page.locator(".card [role=alert]")).to_have_text(words)
        expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_a_lost_connection_is_an_error(page, server):
    server.cut_after = 3
    ask(page)
    expect(page.locator(".card [role=alert]")).to_have_text(
        "the connection was lost before the answer was complete"
    )
    assert page.locator(".chain li").count() == 3
    server.shutdown()
    server.server_close()
    ask(page)
    expect(page.locator(".card [role=alert]")).to_have_text("the server cannot be reached; is it running?")


def colours(page):
    return page.evaluate(
        "[document.body, document.querySelector('h1')].map(n => [getComputedStyle(n).backgroundColor, getComputedStyle(n).color])"
    )


CONTRAST = """() => {
  const lum = (rgb) => {
    const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
  // Painted on what lies below: a colour may be see-through.
  const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const pixel = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(":disabled, .skip")) continue;
    const parents = [];
    for (let at = node; at; at = at.parentElement) parents.unshift(at);
    for (const at of parents) paint(getComputedStyle(at).backgroundColor);
    const below = lum(pixel());
    paint(getComputedStyle(node).color);
    const text = lum(pixel());
    const ratio = (Math.max(below, text) + 0.05) / (Math.min(below, text) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName} ${node.className} ${node.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


def test_all_text_can_be_read_and_fits_in_the_theme_of_the_system(page):
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="Compare speeds").click()
    expect(page.locator("#summary tbody tr")).to_have_count(4)
    expect(page.locator(".card.waiting")).to_have_count(0)
    expect(page.locator(".legend .sigma")).to_be_visible()
    page.locator(".chain button").first.click()
    themes = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        themes.append(colours(page))
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            # 4.5 to 1 is what WCAG AA asks of text.
            assert page.evaluate(CONTRAST) == [], (scheme, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            # The table is seen whole, too: what has to be moved sideways is not beside anything.
            beyond = page.locator("#summary").evaluate("node => node.scrollWidth - node.clientWidth")
            assert beyond <= 0, (scheme, width)
    assert themes[0] != themes[1]
    assert page.locator(".chain li").first.evaluate("node => getComputedStyle(node).animationName") == "none"


def test_all_fields_have_names(page):
    page.locator("summary").click()
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea")].filter((n) => !n.labels.length).map((n) => n.id)"""
    )
    assert nameless == []
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.locator("[role=status][aria-live=polite]").count() == 1


def test_the_viewer_works_from_a_file(browser, tmp_path):
    made = thoughts(2)
    made[0]["ordered"] = True
    made[0]["tokens"][0]["logprob"] = -0.5
    html = (
        "<!doctype html><meta charset=utf-8><style>" + (VIEWER / "viewer.css").read_text() + "</style>"
        "<main></main><script>" + (VIEWER / "viewer.js").read_text() + "</script>"
        f"<script>const made = {json.dumps(made)}; document.querySelector('main')"
        ".append(ColarViewer.chain(made), ColarViewer.legend(made))</script>"
    )
    path = tmp_path / "report.html"
    path.write_text(html)
    opened = browser.new_page()
    opened.goto(path.as_uri())
    assert opened.locator(".chain li").count() == 11
    opened.locator(".chain button").first.click()
    captions = opened.locator("caption").all_inner_texts()
    assert captions == ["chosen, in order", "nearest tokens"]
    # exp(-0.5) of the token that was chosen with it.
    assert "0.607" in opened.locator("table").first.inner_text()
    opened.close()


@pytest.fixture(scope="module")
def real():
    """`colar serve` itself, over tiny random models of three kinds."""
    pytest.importorskip("fastapi", reason="needs the extra serve")
    serving = pytest.importorskip("serving")
    models = {
        "gaussian": serving.colar_model(),
        "sequential": serving.sequential_model(),
        "chain": serving.cot_model(),
    }
    served = [serving.serve_model(name, model) for name, model in models.items()]
    # As the command serves without keys: the page is of this machine.
    with serving.running(*served, hosts=("127.0.0.1",)) as running:
        yield running


def answered(running, **fields):
    """The same question, asked in one piece."""
    body = {
        "messages": [{"role": "user", "content": "What is 5 times 5?"}],
        "return_thoughts": True,
        "seed": 0,
        **fields,
    }
    request = urllib.request.Request(
        running.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("name", ["gaussian", "sequential"])
def test_the_real_server_is_asked_and_understood(browser, real, name):
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(real.url)
    expect(page.locator("#model option")).to_have_count(3)
    page.get_by_label("Model").select_option(name)
    page.get_by_label("Question").fill("What is 5 times 5?")
    page.get_by_role("button", name="Compare speeds").click()
    cards = page.locator(".card")
    expect(cards).to_have_count(4)
    expect(page.locator(".card.waiting, .card.busy")).to_have_count(0, timeout=60_000)
    assert page.locator("[role=alert]").all_inner_texts() == [""]
    choices = [(name, 1), (name, 2), (name, 5), ("chain", None)]
    shown = 0
    for card, (model, c) in zip(cards.all(), choices, strict=True):
        whole = answered(real, model=model, **({} if c is None else {"compression_factor": c}))
        message = whole["choices"][0]["message"]
        thoughts = message["colar"]["thoughts"]
        assert (card.locator(".answer strong").all_text_contents() or [""]) == [message["content"]]
        groups = card.locator("button.thought").all()
        assert len(groups) == len(thoughts)
        for group, thought in zip(groups, thoughts, strict=True):
            assert group.locator(".chip").count() == len(thought["tokens"])
        passes = card.locator(".costs dd").nth(1)
        expect(passes).to_have_text(str(message["colar"]["forward_passes"]))
        shown += len(thoughts)
    assert shown
    # What the server refuses is shown.
    page.get_by_text("More settings").click()
    page.get_by_label("Seed").fill("99999999999999999999")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".card [role=alert]")).to_contain_text("seed")
    assert [text for text in said if "Failed to load resource" not in text] == []
    page.close()


def test_the_page_needs_nothing_from_elsewhere():
    files = sorted([*PAGE.iterdir(), *SHARED])
    assert {"index.html", "page.css", "page.js", "viewer.css", "viewer.js"} <= {path.name for path in files}
    for path in files:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE).replace(" // ", ""), path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (path, word)
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", html)
