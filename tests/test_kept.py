"""What is computed once and kept: read again where nothing has changed, and divided over processes."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, tiny_lm
from launch import together

from colar import kept, processes
from colar.methods import pretrained, registry
from colar.methods.tokenskip import importance
from colar.model.latent_lm import LatentLM
from colar.recipe import rows as recipe_rows
from colar.recipe.schema import DataConfig
from colar.training.batches import TrainingRows

ROWS = [replace(EXAMPLES[i % len(EXAMPLES)], id=f"t/{i}") for i in range(2 * importance.ROWS + 3)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which everything is worth to be kept."""
    monkeypatch.setenv("COLAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "WORTH_S", 0.0)
    return tmp_path / "cache" / "computed"


def built(name: str, family: str = "llama", **config: Any) -> tuple[LatentLM, Any]:
    torch.manual_seed(0)
    lm, method = tiny_lm(family), registry.build(name, config)
    pretrained.attach(lm, method, 0)
    return lm, method


def refuse(*arguments: Any) -> Any:
    raise AssertionError("it is in the cache")


def test_a_result_is_computed_once_and_a_damaged_file_again(cache: Path) -> None:
    values = {"a": torch.arange(3), "b": torch.rand(2, dtype=torch.float64)}
    for again in (lambda: values, refuse):
        found = kept.kept("thing", kept.digest(1, "x"), again)
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], values[name]) for name in values)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert torch.equal(kept.kept("thing", kept.digest(1, "x"), lambda: values)["b"], values["b"])
    assert kept.digest("ab", "c") != kept.digest("a", "bc")
    assert kept.digest(1) != kept.digest("1")


def test_a_full_disk_costs_the_next_run_its_cache_and_this_one_nothing(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be longer: to whoever writes, the disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        found = kept.kept("thing", "key", lambda: {"a": torch.arange(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert torch.equal(found["a"], torch.arange(1000))
    assert "not kept for the next run" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


def test_what_is_quick_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "WORTH_S", 5.0)
    kept.kept("thing", kept.digest(1), lambda: {"a": torch.zeros(1)})
    assert not cache.exists()


def test_lengths_belong_to_rows_tokenizer_method_and_seed(cache: Path) -> None:
    lm, method = built("colar")
    rows = TrainingRows(lm, method, ROWS, 0)
    wanted = [len(rows[0.0, index, 0]) for index in range(len(ROWS))]
    assert rows.lengths() == wanted
    assert len(list(cache.iterdir())) == 1
    assert TrainingRows(lm, method, ROWS, 0).lengths() == wanted
    assert len(list(cache.iterdir())) == 1, "the same rows are read"
    other_lm, other_method = built("cot", "qwen2")
    longer = [replace(ROWS[0], question=ROWS[0].question + " Why?"), *ROWS[1:]]
    for made in (
        TrainingRows(lm, method, ROWS, 1),
        TrainingRows(lm, method, longer, 0),
        TrainingRows(other_lm, method, ROWS, 0),
        TrainingRows(lm, other_method, ROWS, 0),
    ):
        assert made.lengths() == [len(made[0.0, index, 0]) for index in range(len(ROWS))]
    assert len(list(cache.iterdir())) == 5


def test_scores_are_read_by_a_run_that_starts_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, method = built("tokenskip")
    first = list(method.prepare(lm, ROWS))
    monkeypatch.setattr(importance, "surprisal", refuse)
    assert list(method.prepare(lm, ROWS)) == first
    with torch.no_grad():
        lm.causal_lm.get_output_embeddings().weight[3] += 1
    with pytest.raises(AssertionError, match="in the cache"):
        method.prepare(lm, ROWS)


def divided(work: str, folder: Path) -> Any:
    """Lengths and scores by all processes together, then the first row that cannot be encoded."""
    processes.join(120)
    os.environ["COLAR_CACHE"] = str(folder / f"cache{processes.rank()}")
    lm, method = built("tokenskip")
    if work == "scores":
        return [scored.importance for scored in method.prepare(lm, ROWS)]
    if work == "lengths":
        return TrainingRows(lm, method, ROWS, 0).lengths()
    wrong = [
        replace(row, question=row.question * 50) if i in (4, 9, 30) else row for i, row in enumerate(ROWS)
    ]
    with pytest.raises((ValueError, processes.OtherProcessError)) as error:
        TrainingRows(lm, method, wrong, 0).lengths()
    return str(error.value)


@pytest.mark.parametrize("work", ["scores", "lengths", "errors"])
def test_divided_work_has_the_results_of_one_process(tmp_path: Path, work: str) -> None:
    (one,) = together(1, tmp_path / "one", divided, work, tmp_path)
    assert together(2, tmp_path / "two", divided, work, tmp_path) == [one, one]
    if work == "errors":
        assert one.startswith("t/4: the row has")


def test_a_classifier_reads_rows_together_as_alone(tmp_path: Path) -> None:
    """Padding, and rows cut into several windows, change no score."""
    from test_baselines import make_classifier

    lm, _ = built("cot")
    scorer = importance.LLMLingua2(str(make_classifier(tmp_path)), lm.device)
    together_ = scorer.scores(lm.template, ROWS)
    assert len(together_) == len(ROWS)
    assert len(max(together_, key=len)) > 16, "longer than a window"
    for i in range(len(EXAMPLES)):
        (alone,) = scorer.scores(lm.template, [ROWS[i]])
        assert together_[i] == pytest.approx(alone, abs=1e-6)
        assert together_[i + len(EXAMPLES)] == pytest.approx(alone, abs=1e-6)


def test_renumbered_rows_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    row = {
        "question": "Tom has 12 pens and buys 5. How many has he?",
        "steps": ["<<12+5=17>>"],
        "answer": "17",
    }
    path.write_text(json.dumps(row) + "\n")
    data = DataConfig(source=str(path), renumber=3, validation_size=0)
    first, _ = recipe_rows.load_examples(data)
    assert len(first) == 4
    monkeypatch.setattr(recipe_rows.renumber, "renumbered", refuse)
    again, _ = recipe_rows.load_examples(data)
    assert again == first
    with pytest.raises(AssertionError, match="it is in the cache"):
        recipe_rows.load_examples(replace(data, seed=1))
