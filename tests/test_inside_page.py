"""What the page of `colar inspect` is made of, without a browser: texts, charts, tables, the data in it."""

from __future__ import annotations

import copy
import json
import re

import pytest
from inside_data import HOSTILE, inside

from colar.look import page as inside_page
from colar.look.page import charts, cost, embedded, figures, reading

WHOLE, QUESTIONS, CHAINS = inside()
"""Three systems, 40 questions. Every third answer is wrong, and at c = 5 every second one, too."""


def test_the_page_is_one_file_that_may_fetch_nothing():
    page = inside_page.render(WHOLE, QUESTIONS, CHAINS)
    assert len(re.findall(r"<script|<style", page)) == 3
    assert not re.search(r"""\s(src|href)=["']?(?!#)[^"' >]""", page.replace("location.href", ""))
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy
    for path in inside_page.SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert "</script" not in text
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
            assert word not in text, (path, word)


@pytest.mark.parametrize(("models", "tokens"), [(("colar",), 40), (("a", "b"), 60)])
def test_two_hundred_questions_are_below_5_mb(models, tokens):
    page = inside_page.render(*inside(200, models, (1, 2, 5), tokens))
    assert 500_000 < len(page.encode()) < 5_000_000


def test_neighbours_are_left_out_where_the_page_would_be_too_large(monkeypatch):
    systems = WHOLE["systems"]
    whole = json.loads(embedded.data_text(systems, QUESTIONS, CHAINS))
    assert len(whole["chains"][0][0]["t"][0][2]) == 2 * 10
    monkeypatch.setattr(embedded, "MOST_BYTES", 150_000)
    text = embedded.data_text(systems, QUESTIONS, CHAINS)
    assert len(text.encode()) <= 150_000
    thought = json.loads(text)["chains"][2][0]["t"][0]
    # A latent of c = 5 is shown as its five nearest: these stay.
    assert (thought[1], len(thought[2])) == (5, 2 * 5)


def test_nothing_in_the_data_ends_the_script():
    text = embedded.script_safe({"x": HOSTILE + "\u2028"})
    assert json.loads(text) == {"x": HOSTILE + "\u2028"}
    assert not re.search(r"[<>&\u2028]", text)


def test_names_are_as_short_as_they_can_be():
    row = {"model": "a", "compression_factor": 2, "variant": ""}
    assert figures.names_of([row, row | {"compression_factor": 1.5, "variant": "snap"}]) == [
        "c = 2",
        "c = 1.5 (snap)",
    ]
    other = {"model": "cot", "compression_factor": None, "variant": ""}
    assert figures.names_of([row, other]) == ["a, c = 2", "cot"]


def test_verdicts_say_what_the_control_says_and_no_more():
    system = copy.deepcopy(WHOLE["systems"][1])
    (said,) = cost.verdicts([system], ["c = 2"])
    own = system["cost"]["variants"]["own"]["accuracy"]["mean"]
    assert f"c = 2: {100 * own:.1f}% of 40 questions right" in said
    assert "says that its answers depend on what it thinks" in said
    system["cost"]["differences"]["shuffled"] = {"mean": 0.02, "interval": [-0.01, 0.05]}
    (said,) = cost.verdicts([system], ["c = 2"])
    assert "2.0 points [-1.0, 5.0], does not show that it uses its thoughts" in said
    # A chain of tokens has no latents to shuffle: its thoughts are left out.
    del system["cost"]["differences"]["shuffled"]
    system["cost"]["variants"]["own"]["n"] = 29
    said, few = cost.verdicts([system], ["c = 2"])
    assert "With its thoughts left out" in said
    assert "Fewer than 30" in few


def test_what_a_system_does_not_have_is_left_out():
    whole = copy.deepcopy(WHOLE)
    for system in whole["systems"]:
        for name in ("retrieval", "stop", "sigma", "norms", "lens", "attention", "causal", "cost"):
            system[name] = None
        system["probes"] = None
    page = inside_page.render(whole, QUESTIONS, CHAINS)
    assert re.findall(r'<section id="(\w+)"', page) == ["questions", "causes", "made"]
    # One of several has no sigma, as a sequential head.
    whole = copy.deepcopy(WHOLE)
    whole["systems"][0]["sigma"] = None
    section = inside_page.calibration_section(whole["systems"])
    assert [row[0] for row in section.tables[1].rows] == ["c = 2", "c = 5", "a Gaussian"]


def test_shares_of_causes_by_hand():
    system = {"model": "m", "compression_factor": 2, "variant": ""}
    system["answers"] = [{"cause": cause} for cause in ("right", "right", "misread", "wrong plan")]
    (figure,) = reading.causes_section([system]).figures
    assert figure.numbers.head == ["system", "right", "misread", "wrong plan"]
    assert figure.numbers.rows == [["c = 2", "50.0%", "25.0%", "25.0%"]]


def test_a_run_without_controls_shows_no_empty_columns():
    whole = copy.deepcopy(WHOLE)
    for system in whole["systems"]:
        system["cost"]["variants"] = {"own": system["cost"]["variants"]["own"]}
        system["cost"]["differences"] = {}
    (table,) = cost.cost_section(whole).tables
    assert table.head == ["system", "questions", "accuracy", "#L", "forward passes", "time"]
    assert table.rows[1][:4] == ["c = 2", "40", "65.0% [55.0, 75.0]", "10.0 [9.6, 10.4]"]


def test_points_lie_where_their_numbers_are():
    """A square of two axes from 0 to 1: corners are corners of the frame."""
    axis = charts.Axis("x", 0, 1)
    points = [charts.Point(0, 0), charts.Point(1, 1, y_interval=[0.5, 1])]
    chart = charts.lines([charts.Series("s", points)], axis, axis, "a chart")
    bottom, right = charts.HEIGHT - charts.BOTTOM, charts.WIDTH - charts.RIGHT
    assert f'<polyline points="{charts.LEFT}.0,{bottom}.0 {right}.0,{charts.TOP}.0"/>' in chart
    middle = (bottom + charts.TOP) / 2
    line = f'<line class="interval" x1="{right}.0" y1="{middle:.1f}" x2="{right}.0" y2="{charts.TOP}.0"/>'
    assert line in chart
    assert axis.ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert charts.Axis("x", -3, 27).ticks() == [0, 10, 20]
    tip = charts.Series("<b>", [charts.Point(0, 0)])
    assert "<b>" not in charts.lines([tip], axis, axis, '"><b>')
