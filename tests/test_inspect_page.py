"""What the page of `colar inspect` is made of, without a browser: texts, tables, the data in it."""

from __future__ import annotations

import copy
import re

import pytest
from inspect_data import HOSTILE, data_of, inspected

from colar.look import page as inspect_page

WHOLE, QUESTIONS, CHAINS = inspected()
"""Three systems, 40 questions. Every third answer is wrong, and at c = 5 every second one, too."""


def test_the_page_is_one_file_that_may_fetch_nothing():
    page = inspect_page.render(WHOLE, QUESTIONS, CHAINS)
    assert len(re.findall(r"<script|<style", page)) == 3
    rest = re.sub(r'id="data">[^<]+', "", page)
    assert not re.search(r"""\s(src|href)=["']?(?!#)[^"' >]""", rest.replace("location.href", ""))
    assert "http" not in rest.replace("http-equiv", "")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy
    for path in inspect_page.SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert "</script" not in text
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
            assert word not in text, (path, word)


def test_the_data_are_those_that_were_given_and_cannot_end_the_script():
    questions = [{**QUESTIONS[0], "question": HOSTILE}, *QUESTIONS[1:]]
    page = inspect_page.render(WHOLE, questions, CHAINS)
    assert HOSTILE not in page
    data = data_of(page)
    assert (data["questions"], data["answers"]) == (questions, CHAINS)
    assert data["systems"] == ["c = 1", "c = 2", "c = 5"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        inspect_page.render(WHOLE, [{**QUESTIONS[0], "answer": float("nan")}], [])


def test_names_are_as_short_as_they_can_be():
    row = {"model": "a", "params": {"compression_factor": 2}}
    other = {"model": "a", "params": {"compression_factor": 1.5, "confidence_threshold": 0.8}}
    assert inspect_page.names_of([row, other]) == [
        "c = 2",
        "c = 1.5 (confidence_threshold=0.8)",
    ]
    other = {"model": "cot", "params": {}}
    assert inspect_page.names_of([row, other]) == ["a, c = 2", "cot"]


def test_a_table_of_some_systems_has_the_names_of_all():
    systems = [{"model": "a", "params": {"compression_factor": 2}, "cost": 1}, {"model": "cot", "params": {}}]
    assert inspect_page.with_names(systems, "cost") == [("a, c = 2", 1)]


def test_few_questions_are_said():
    system = copy.deepcopy(WHOLE["systems"][1])
    assert len(inspect_page.cost_table([system]).notes) == 1
    system["cost"]["outcomes"]["own"]["n"] = 29
    assert inspect_page.cost_table([system]).notes[1].startswith("Fewer than 30 questions")


def test_what_a_system_does_not_have_is_left_out():
    whole = copy.deepcopy(WHOLE)
    for system in whole["systems"]:
        for name in ("diagnosis", "cost"):
            system[name] = None
    page = inspect_page.render(whole, QUESTIONS, CHAINS)
    assert re.findall(r'<section id="(\w+)"', page) == ["questions", "causes", "made"]


def test_shares_of_causes_by_hand():
    system = {"model": "m", "params": {"compression_factor": 2}}
    system["answers"] = [{"cause": cause} for cause in ("right", "right", "misread", "wrong plan")]
    found = inspect_page.cause_table([system])
    assert found.head == ["system", "right", "misread", "wrong plan"]
    assert found.rows == [["c = 2", "50.0", "25.0", "25.0"]]


def test_a_run_without_controls_shows_no_table_of_them():
    whole = copy.deepcopy(WHOLE)
    for system in whole["systems"]:
        system["cost"]["outcomes"] = {"own": system["cost"]["outcomes"]["own"]}
        system["cost"]["differences"] = {}
    (table,), _ = inspect_page.tables_of(whole["systems"])
    assert table.head == ["system", "questions", "accuracy %", "#L", "passes", "ms"]
    assert table.rows[1] == ["c = 2", "40", "65.0 [55.0, 75.0]", "10.0", "14.0", "100.0"]


def test_the_terminal_has_accuracy_and_cost_first():
    cost, causes = inspect_page.tables_of(WHOLE["systems"])
    found = [*cost, *causes]
    assert [table.title for table in found[:2]] == ["Accuracy and cost", "Accuracy % with other thoughts"]
    assert found[1].rows[1] == ["c = 2", "65.0", "0.0", "0.0", "0.0", "65.0 [55.0, 75.0]"]
    assert len(found) == 4
