"""A judge of one's own: called in evaluation, in validation and as the reward `accuracy`, and tried before any work."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import colar
from colar import files, recipe
from colar.cli import main
from colar.data import sources, user_rows
from colar.data.example import Example
from colar.data.judge import Verdict, accepts, judge_name, judge_settings, judged_by, verdict
from colar.recipe import auto_recipe
from colar.recipe.facts import RowReader, facts_of
from colar.training.grpo import rewards

CODE = '''
def mirrored(question, gold, answer):
    """Right where the answer is the gold read backwards, or the gold."""
    return answer in (gold, gold[::-1])

def never(question, gold, answer):
    return False

def unsure(question, gold, answer):
    return None

def broken(question, gold, answer):
    return answer[99]

def lenient(question, gold, answer):
    return True

class Lenient:
    @staticmethod
    def same(question, gold, answer):
        return question + gold == question + answer

value = 3
'''


@pytest.fixture(autouse=True)
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The judges in the working directory, as a user's file."""
    (tmp_path / "judges_of_mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("judges_of_mine", None)


def test_a_judge_of_a_notebook_is_the_one_of_its_last_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in IPython: the module has no file, and linecache has the cells."""
    notebook = types.ModuleType("notebook_of_mine")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)

    def run(cell: str, code: str) -> None:
        monkeypatch.setitem(linecache.cache, cell, (len(code), None, code.splitlines(True), cell))
        exec(compile(code, cell, "exec"), vars(notebook))

    name = "notebook_of_mine:same"
    run("<cell-1>", "def same(question, gold, answer):\n    return False\n")
    example = Example("1", "1 + 1?", (), "2", judge=name)
    assert not accepts("2", example)
    before = judge_settings(name)
    run("<cell-2>", "def same(question, gold, answer):\n    return True\n")
    assert accepts("2", example)
    assert judge_settings(name) != before


def test_an_edited_judge_is_another_one(tmp_path: Path) -> None:
    """Its verdicts are on record: the same name would keep those of the old code."""
    before = judge_settings("judges_of_mine:mirrored")
    assert judge_settings("judges_of_mine:mirrored") == before
    assert judge_settings(None) == {}
    assert judge_settings("math:isclose")["judge"] == "math:isclose"  # compiled
    (tmp_path / "judges_of_mine.py").write_text(CODE.replace("[::-1]", "[::-2]"))
    sys.modules.pop("judges_of_mine")
    linecache.clearcache()
    after = judge_settings("judges_of_mine:mirrored")
    assert after["judge_source"] != before["judge_source"]
    assert after["judge"] == before["judge"]


def by_numpy(question: str, gold: str, answer: str) -> bool:
    return np.bool_(answer.strip("!") == gold)  # type: ignore[return-value]


ROWS = [Example("t/0", "ab backwards?", (), "ba", "text"), Example("t/1", "cd backwards?", (), "dc", "text")]


def test_verdicts_are_the_functions() -> None:
    rows = judged_by(ROWS, "judges_of_mine:mirrored")
    assert [verdict(text, rows[0]).correct for text in ("ba", " ab\n", "aa")] == [True, True, False]
    # Votes are counted on what was answered, in one spelling.
    assert verdict("  AB. ", rows[0]).parsed == "ab"
    assert rewards.accuracy(["ab", "cd", "x"], example=[*rows, rows[0]]) == [1, 1, 0]
    # Without it the answer's kind decides.
    assert verdict("ab", ROWS[0]).correct is False
    assert judged_by(ROWS, None) == ROWS
    assert judged_by(ROWS, "judges_of_mine:Lenient.same")[0].judge == "judges_of_mine:Lenient.same"


@pytest.mark.parametrize("text", ["", " \n", "**", "The answer is", "The final answer is:  ", ".", "#### "])
def test_an_empty_answer_is_wrong_to_a_lenient_judge(text: str) -> None:
    """`correct` without `parsed` would be a record that no report reads."""
    row = judged_by(ROWS, "judges_of_mine:lenient")[0]
    found = verdict(text, row)
    assert found.parsed is not None or not found.correct
    assert verdict("x", row) == Verdict(True, "x")


def test_a_function_is_given_by_itself_or_by_name() -> None:
    name = judge_name(by_numpy)
    assert name == f"{__name__}:by_numpy"
    assert verdict("ba!", judged_by(ROWS, name)[0]).correct is True
    assert judge_name("a:b") == "a:b"
    assert judge_name(None) is None
    for wrong in (lambda q, g, a: True, 3):
        with pytest.raises(ValueError, match="judge must be a function of a module, or module:function"):
            judge_name(wrong)  # type: ignore[arg-type]


WRONG = {
    "judges_of_mine": "give module:function, e.g. my_judge:same",
    ":mirrored": "give module:function",
    "no_such_module:same": "judge no_such_module:same: ModuleNotFoundError: No module named 'no_such_module'",
    "judges_of_mine:other": "AttributeError: module 'judges_of_mine' has no attribute 'other'",
    "judges_of_mine:value": "judge judges_of_mine:value is no function",
    "judges_of_mine:never": "judge judges_of_mine:never finds no gold answer right, e.g. 'ba' of t/0",
    "judges_of_mine:unsure": "on t/0 returned None, expected True or False",
    "judges_of_mine:broken": "on t/0: IndexError: string index out of range",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_judge_that_cannot_judge_is_an_error_before_any_work(name: str) -> None:
    with pytest.raises(ValueError, match="judge") as error:
        judged_by(ROWS, name)
    assert WRONG[name] in str(error.value)


def test_a_row_cannot_choose_code_that_runs(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "4", "judge": "judges_of_mine:mirrored"}
    files.write_jsonl(tmp_path / "rows.jsonl", [row] * 20)
    assert {row.judge for row in sources.load_examples(str(tmp_path / "rows.jsonl"), "train")} == {""}
    assert "judge" not in judged_by(ROWS, "judges_of_mine:mirrored")[0].as_row()
    files.write_jsonl(
        tmp_path / "typed.jsonl", [{"question": "a", "answer": "4", "answer_type": "os:system"}]
    )
    with pytest.raises(ValueError, match="answer_type"):
        sources.load_examples(str(tmp_path / "typed.jsonl"), "train")


def test_answers_of_any_kind_are_rows(tmp_path: Path) -> None:
    """Nearly all are numbers; with a judge of one's own those that are none stay."""
    rows = [{"question": f"Question {i}?", "answer": str(i)} for i in range(40)]
    rows.append({"question": "One more?", "answer": "twelve or thirteen"})
    path = files.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert len(user_rows.read(path).examples) == 40
    found = user_rows.read(path, judge="judges_of_mine:mirrored")
    assert len(found.examples) == 41
    assert found.summary()[0].endswith("answers are judged by judges_of_mine:mirrored")
    # Each way to such rows: evaluate and inspect, and a recipe.
    with pytest.raises(ValueError, match="rows.jsonl:41: answer cannot be read as answer_type 'number'"):
        sources.load_examples(str(path), "train")
    assert len(sources.load_examples(str(path), "train", judge="judges_of_mine:mirrored")) == 41
    data = recipe.DataConfig(source=str(path), validation_size=0, judge="judges_of_mine:mirrored")
    train, _ = recipe.load_example_sets(data)
    assert {row.judge for row in train} == {"judges_of_mine:mirrored"}
    assert len(train) == 41


def test_it_is_a_key_of_the_recipe_and_an_option_of_evaluate(tmp_path: Path) -> None:
    data = recipe.DataConfig(train_size=4, validation_size=2, judge="judges_of_mine:mirrored")
    assert {row.judge for rows in recipe.load_example_sets(data) for row in rows} == {
        "judges_of_mine:mirrored"
    }
    found = facts_of(RowReader.of("tiny"), ROWS, device="cpu")
    tree, _ = auto_recipe.make_recipe(found, "run", grpo=True, judge="judges_of_mine:mirrored")
    assert tree["data"]["judge"] == "judges_of_mine:mirrored"
    with pytest.raises(ValueError, match="--grpo needs answers that can be judged .* give --judge"):
        auto_recipe.make_recipe(found, "run", grpo=True)


def test_from_a_file_to_a_table_by_ones_own_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from colar.recipe import auto_speeds

    monkeypatch.setattr(auto_speeds, "TIMED_SINGLY", 1)
    short_chains = sources.load_examples("arithmetic", "train", limit=60, options={"steps": [1, 1]})
    rows = [row.as_row() for row in short_chains]
    path = files.write_jsonl(tmp_path / "my.jsonl", rows)
    (tmp_path / "always_mine.py").write_text("def yes(question, gold, answer):\n    return True\n")
    short = ["--training.max_steps", "1", "--training.report_to", "none", "--validation.page_size", "0"]
    # An untrained model seldom stops.
    short += ["--validation.limits.max_latents", "4", "--validation.limits.max_completion_length", "3"]
    run = colar.train("tiny", path, tmp_path / "run", judge="always_mine:yes", overrides=short)
    # An untrained model is right by this judge alone.
    assert all(row[1].startswith("100") for row in run.speeds_table.rows)
    words = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "run" / "data"), "--limit", "2"]
    words += ["--output", str(tmp_path / "results")]
    assert main([*words, "--judge", "always_mine:yes"]) == 0
    found = [record for _, record in files.read_jsonl(tmp_path / "results" / "records.jsonl")]
    assert [record["correct"] for record in found] == [True, True]
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "was judged by always_mine:yes, here by the kind of answer: give --judge always_mine:yes" in said
    assert "holds another run (judge was 'always_mine:yes'" in said
    assert main([*words, "--judge", "always_mine:no"]) == 2
    assert "judge always_mine:no: AttributeError" in capsys.readouterr().err
