"""Rows with a model's own chains: what is kept, how chains become steps, and that a run resumes."""

import json
from dataclasses import replace
from random import Random

import pytest
import torch

from colar import cli, files
from colar.data import sources
from colar.data.example import Example
from colar.data.synthetic import ArithmeticConfig, generate
from colar.engine.engine import Engine
from colar.engine.request import SAMPLED
from colar.evaluation import own_chains
from colar.evaluation.evaluate import Limits
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM

LIMITS = Limits(max_latents=60, max_completion_length=20, batch_size=8)
QUESTIONS = generate(ArithmeticConfig(), "train", 24, seed=0)


def make(name):
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build(name)
    pretrained.attach(lm, method, 0)
    return lm, method


@pytest.fixture(scope="module")
def cot():
    """A model that has learnt to end its chains and answers, and little more."""
    lm, method = make("cot")
    rows = [method.encode(lm.template, row, Random(0), 0.0) for row in QUESTIONS]
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for _ in range(25):
        method.loss(lm, Batch.collate(rows))["ce"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return lm, method


@pytest.fixture(scope="module")
def examples(cot):
    """Questions of which every second one has for its answer what the model says."""
    lm, method = cot
    requests = [own_chains._request(method, row, SAMPLED, LIMITS, 0) for row in QUESTIONS]
    said = {completion.request.id: completion for completion in Engine(lm, method, 8).generate(requests)}
    made = []
    for index, row in enumerate(QUESTIONS):
        answer = said[row.id].text or "nothing"
        made.append(replace(row, answer=answer if index % 2 else answer + "x", answer_type="text"))
    ended = [row for index, row in enumerate(made) if index % 2 and not said[row.id].truncated]
    assert len(ended) > 2, "the test needs rows that end by themselves"
    return made


def write(cot, examples, output, **changes):
    lm, method = cot
    return own_chains.write(lm, method, examples, output, SAMPLED, LIMITS, **changes)


def test_right_and_ended_chains_are_kept_as_the_model_wrote_them(cot, examples, tmp_path):
    lm, method = cot
    counts = write(cot, examples, tmp_path)
    attempts = {row["id"]: row for row in files.resume_jsonl(tmp_path / "attempts.jsonl")}
    kept = sources.load(str(tmp_path / "train.jsonl"), "train")
    for index, example in enumerate(examples):
        attempt = attempts[example.id]
        assert attempt["correct"] == (index % 2 == 1 and not attempt["truncated"])
    assert [row.id for row in kept] == [row.id for row in examples if attempts[row.id]["correct"]]
    for row in kept:
        assert lm.template.config.step_joiner.join(row.steps) == attempts[row.id]["chain"].strip()
    control = sources.load(str(tmp_path / "control" / "train.jsonl"), "train")
    assert control == [row for row in examples if attempts[row.id]["correct"]]
    same = [row for row in examples if " ".join(row.steps) == attempts[row.id]["chain"]]
    assert counts == {
        "questions": len(examples),
        "right": len(kept),
        "as_in_the_data": sum(attempts[row.id]["correct"] for row in same),
        "truncated": sum(attempt["truncated"] for attempt in attempts.values()),
    }


def test_a_run_that_was_stopped_goes_on_to_the_same_rows(cot, examples, tmp_path):
    write(cot, examples, tmp_path / "whole")
    write(cot, examples, tmp_path / "part")
    attempts = (tmp_path / "part" / "attempts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part" / "attempts.jsonl").write_text("".join(attempts[:9]) + attempts[9][:20])
    (tmp_path / "part" / "train.jsonl").unlink()
    write(cot, examples, tmp_path / "part")
    assert (tmp_path / "part" / "train.jsonl").read_text() == (tmp_path / "whole" / "train.jsonl").read_text()


def test_another_run_is_kept_out_of_the_folder(cot, examples, tmp_path):
    write(cot, examples, tmp_path)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        write(cot, examples, tmp_path, seed=1)
    with pytest.raises(ValueError, match="questions was .*; give these chains their own --output"):
        write(cot, examples[:-1], tmp_path)
    with pytest.raises(ValueError, match="checkpoint was None, now 'a'"):
        write(cot, examples, tmp_path, asked={"checkpoint": "a"})


ROWS = [
    Example("a", "?", ("<<1+2=3>>", "<<3*4=12>>"), "12"),
    Example("b", "?", ("<<5-1=4>>",), "4"),
]
ATTEMPTS = {
    "a": {"chain": "<<2+1=3>> <<3*4=12>>", "correct": True, "truncated": False},
    "b": {"chain": "<<5-2=3>>", "correct": False, "truncated": False},
}


def test_a_chain_is_cut_into_steps_where_no_step_holds_the_joiner(cot):
    lm, _ = cot
    (row,) = own_chains.right_rows(lm.template, ROWS, ATTEMPTS)
    assert row == replace(ROWS[0], steps=("<<2+1=3>>", "<<3*4=12>>"))
    # Steps that are sentences hold spaces: cut at them, every word would be a step.
    words = [replace(ROWS[0], steps=("one and two", "is three")), ROWS[1]]
    (row,) = own_chains.right_rows(lm.template, words, ATTEMPTS)
    assert row.steps == ("<<2+1=3>> <<3*4=12>>",)


def test_a_chain_that_is_not_cut_is_still_seen_to_be_the_datas_own(cot, tmp_path):
    rows = [replace(row, steps=("First we add.", "Then we stop.")) for row in ROWS]
    chains = ["First we add. Then we stop.", "First we add. Then we go on."]
    attempts = []
    for row, chain in zip(rows, chains, strict=True):
        attempts.append(
            {"id": row.id, "chain": chain, "answer": row.answer, "correct": True, "truncated": False}
        )
    files.write_jsonl(tmp_path / "attempts.jsonl", attempts)
    counts = write(cot, rows, tmp_path)
    assert (counts["right"], counts["as_in_the_data"]) == (2, 1)


def test_latents_have_no_text(examples, tmp_path):
    lm, method = make("colar")
    method.prepare(lm, QUESTIONS)
    with pytest.raises(ValueError, match=r"thinks in latents.*\(cot\)"):
        own_chains.write(lm, method, examples, tmp_path, SAMPLED, LIMITS)


def test_no_right_answer_is_an_error(cot, examples, tmp_path):
    wrong = [row for index, row in enumerate(examples) if index % 2 == 0]
    with pytest.raises(ValueError, match="none of 12 answers is right"):
        write(cot, wrong, tmp_path)
    assert not (tmp_path / "train.jsonl").exists()


def test_the_command_takes_the_rows_of_a_recipe(cot, tmp_path, capsys):
    """Rows of a recipe with an override; a random model's chains are all wrong, and said to be."""
    lm, method = cot
    checkpoint.save(lm, tmp_path / "cot", {"name": "cot", "config": {}}, {}, "card")
    words = ["data", "chains", str(tmp_path / "cot"), "tiny/cot", "--output", str(tmp_path / "out")]
    words += ["--data.train_size", "3", "--data.validation_size", "0", "--max_latents", "4"]
    assert cli.main(words) == 2
    assert "none of 3 answers is right" in capsys.readouterr().err
    attempts = files.resume_jsonl(tmp_path / "out" / "attempts.jsonl")
    assert len(attempts) == 3
    settings = json.loads((tmp_path / "out" / "chains.json").read_text())["settings"]
    assert settings["keys"] == ["--data.train_size", "3", "--data.validation_size", "0"]
