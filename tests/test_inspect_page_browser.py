"""The page of `colar inspect` in real Chromium, opened from a file."""

from __future__ import annotations

import copy

import browser
import pytest
from inspect_data import HOSTILE, inspected

from colar.look import page as inspect_page

WHOLE, QUESTIONS, CHAINS = inspected()
"""Three systems, 40 questions. Every third answer is wrong, and at c = 5 every second one, too."""

expect = browser.playwright_api.expect


@pytest.fixture(scope="module", name="browser")
def chromium():
    with browser.opened() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(inspect_page.render(WHOLE, QUESTIONS, CHAINS), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser):
    """Open a file; the test fails where anything was said on the console, thrown or requested."""
    contexts, said = [], []

    def opened(path, fragment="", width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url[:4] == "http" else None)
        page.goto(path.as_uri() + fragment)
        return page

    yield opened
    assert said == []
    for context in contexts:
        context.close()


def items(page):
    return page.locator("#list .item")


def test_questions_are_searched_and_filtered(visit, file):
    page = visit(file)
    expect(page.locator("#count")).to_have_text("40 questions")
    page.get_by_label("Search").fill("has 17 BEADS")
    expect(items(page)).to_have_count(1)
    expect(page.locator("#count")).to_have_text("1 of 40 questions")
    page.get_by_label("Search").fill("")
    page.get_by_label("System").select_option("c = 5")
    page.get_by_label("What happened").select_option("right")
    # Right at c = 5: even, and no multiple of three.
    expect(items(page)).to_have_count(13)
    page.get_by_label("What happened").select_option("systems disagree")
    expect(items(page)).to_have_count(13)
    page.get_by_label("Search").fill("nothing like that")
    expect(items(page)).to_have_count(0)
    expect(page.locator("#count")).to_have_text("0 of 40 questions")
    page.get_by_label("Search").press("Enter")
    assert "?" not in page.url


def test_the_turns_before_a_question_are_shown_and_found(visit, tmp_path):
    path = tmp_path / "one.html"
    question = {**QUESTIONS[0], "context": [["system", "Be brief."], ["user", "Ann has 3 <b>eggs</b>."]]}
    path.write_text(
        inspect_page.render(WHOLE, [question], [chains[:1] for chains in CHAINS]), encoding="utf-8"
    )
    page = visit(path)
    expect(page.locator("#count")).to_have_text("1 question")
    page.get_by_label("Search").fill("<b>eggs</b>")
    expect(items(page)).to_have_count(1)
    items(page).first.click()
    turns = page.locator("#chains > .turn").all_inner_texts()
    assert turns == ["system: Be brief.", "user: Ann has 3 <b>eggs</b>."]


def test_a_question_has_its_chains_side_by_side(visit, file):
    page = visit(file)
    items(page).nth(3).click()
    expect(page.locator("#question h3")).to_have_text("sums/3")
    cards = page.locator("#question .card")
    assert cards.locator("h4").all_inner_texts() == ["c = 1", "c = 2", "c = 5"]
    assert cards.locator("ol.chain > li:not(.missing)").count() == 20 + 10 + 4
    tops = cards.evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    assert cards.locator(".badge").all_inner_texts() == ["wrong result"] * 3
    # Chips: the c nearest tokens of a thought.
    chips = cards.nth(2).locator("button.thought").first.locator(".chip")
    assert chips.count() == 5
    assert chips.first.evaluate("one => one.style.getPropertyValue('--shade')") == "0.910"
    # The reference below it, group by group; the second thought is the first wrong one.
    marks = cards.nth(2).locator(".expected .mark").all_inner_texts()
    assert marks == ["✓", "✗", "≠", "≠", "–"]
    assert cards.nth(2).locator(".expected.wrong .unsaid").inner_text() == "1"
    label = cards.nth(2).locator("button.thought").nth(1).get_attribute("aria-label")
    assert label.endswith("wrong, the reference has << 1")
    assert page.locator(".gold strong").inner_text() == "3"
    # By keyboard: a thought opens its neighbours.
    thoughts = cards.first.locator("button.thought")
    thoughts.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(thoughts.nth(1)).to_have_attribute("aria-expanded", "true")
    details = page.locator("#question .details")
    expect(details.locator(".facts")).to_have_text("thought 2 · sigma 0.080 · stop 0.013")
    assert details.locator("tbody tr").count() == 10


def test_a_link_opens_its_question(visit, file):
    page = visit(file, "#q=sums%2F31")
    expect(page.locator("#question h3")).to_have_text("sums/31")
    expect(page.locator("#list [aria-current]")).to_have_count(1)
    expect(page.locator("#question")).to_be_in_viewport()
    page.get_by_label("Search").fill("has 2 beads")
    page.evaluate("location.hash = '#q=sums%2F7'")
    expect(page.locator("#question h3")).to_have_text("sums/7")
    expect(page.get_by_label("Search")).to_have_value("")
    page.get_by_role("button", name="Next question").click()
    assert page.url.endswith("#q=sums%2F8")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 380)])
def test_themes_and_widths(visit, file, scheme, width):
    page = visit(file, width=width, scheme=scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(244, 246, 249)", "rgb(15, 19, 24)"
    assert page.evaluate(ground) == (light if scheme == "light" else dark)
    # Nothing is wider than the window, but inside boxes that scroll.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_is_never_markup(visit, tmp_path):
    whole, questions, chains = inspected(4)
    whole = copy.deepcopy(whole)
    whole["systems"][0]["model"] = HOSTILE
    whole["provenance"]["command"] = HOSTILE
    questions[0] |= {"id": HOSTILE, "question": HOSTILE, "answer": HOSTILE, "steps": [HOSTILE]}
    chain = chains[0][0]
    chain["answer"] = chain["cause"] = HOSTILE
    for token in (chain["thoughts"][0]["neighbours"][0], chain["thoughts"][0]["reference"][0]):
        token["text"] = HOSTILE
    path = tmp_path / "hostile.html"
    path.write_text(inspect_page.render(whole, questions, chains), encoding="utf-8")
    page = visit(path)
    expect(page.locator("#question .asked")).to_have_text(HOSTILE)
    assert page.evaluate("window.hit") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("#question .gold strong").inner_text() == HOSTILE
    page.locator("#question button.thought").first.click()
    assert HOSTILE in page.locator("#question .chain").first.inner_text()
    assert page.locator("h1").inner_text().startswith(f"Inspection of {HOSTILE}")
    page.get_by_role("button", name="Next question").click()
    page.get_by_role("button", name="Previous question").click()
    page.reload()
    expect(page.locator("#question h3")).to_have_text(HOSTILE)
