"""Evaluation: systems x datasets x params x decodings x seeds, as one record a question in a JSONL file.

Records are appended as requests finish, so a killed evaluation goes on where it was; the report is a fold
over them (`report.py`). The judge is `data/answers.py`, the same as for validation and rewards. A request's
seed is a function of (seed, question id): two systems see the same noise on the same question.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.data.answers import judge
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import DECODINGS, Completion, Decoding, Request, fold, prompt_ids
from colar.methods.base import Method, variant
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from


@dataclass(frozen=True)
class Limits:
    """Where generation is cut, and how many requests run at once."""

    max_latents: int = 128
    """Most embeddings between the two separators (a CoT's tokens too)."""
    max_completion_length: int = 64
    """Most tokens of the answer."""
    batch_size: int = 32
    """Requests that run at once."""
    compile: bool = False
    """Compile the decode step: takes a minute, pays from some thousand steps on."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {self.batch_size}")


@dataclass(frozen=True)
class System:
    """A model with its method under the names that its rows carry."""

    model: str
    lm: LatentLM
    method: Method
    label: str = ""
    train_seed: int | None = None


@dataclass(frozen=True)
class Cell:
    """One row of the report before its seeds are folded: a system on a dataset, asked in one way."""

    system: System
    dataset: str
    params: Any
    decoding: str
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        """The record keys that name this cell."""
        return {
            "model": self.system.model,
            "method": self.system.method.name,
            "label": ", ".join(part for part in (self.system.label, variant(self.params)) if part),
            "dataset": self.dataset,
            "compression_factor": getattr(self.params, "compression_factor", None),
            "decoding": self.decoding,
            "train_seed": self.system.train_seed,
            "seed": self.seed,
        }


def cells(
    system: System,
    datasets: Iterable[str],
    params: Iterable[Any],
    decodings: Iterable[str],
    seeds: Sequence[int],
) -> list[Cell]:
    """The grid of one system, each cell once. Greedy decoding draws nothing: it is asked with the first seed only."""
    grid = itertools.product(datasets, params, decodings)
    asked = [
        Cell(system, dataset, param, decoding, seed)
        for dataset, param, decoding in grid
        for seed in (seeds[:1] if is_greedy(DECODINGS[decoding]) else seeds)
    ]
    return list({record_key({**cell.key, "id": ""}): cell for cell in asked}.values())


def is_greedy(decoding: Decoding) -> bool:
    return decoding.temperature == 0 and decoding.latent_temperature == 0


def evaluate(
    grid: Sequence[Cell], datasets: Mapping[str, Sequence[Example]], records: Path, limits: Limits
) -> int:
    """Answer whatever of the grid `records` does not hold yet, appending to it. Returns how many were new.

    All questions are checked against the models' contexts before the first one is answered.
    """
    done = {record_key(record) for record in files.resume_jsonl(records)}
    asked: dict[int, tuple[System, list[Asked]]] = {}
    for cell in grid:
        examples = [e for e in datasets[cell.dataset] if record_key({**cell.key, "id": e.id}) not in done]
        _, mine = asked.setdefault(id(cell.system), (cell.system, []))
        mine += [Asked(cell, example, make_request(cell, example, limits)) for example in examples]
    for system, mine in asked.values():
        for each in mine:
            prompt_ids(system.lm, system.method, each.request)
    n_new = sum(len(mine) for _, mine in asked.values())
    if not n_new:
        return 0
    with files.append_jsonl(records) as write, progress.bar("evaluate", n_new) as bar:
        for system, mine in asked.values():
            for record in answer(system, mine, limits):
                write(record)
                bar.advance()
            bar.note(system.model)
    return n_new


@dataclass(frozen=True)
class Asked:
    """A question of a cell, as the engine gets it."""

    cell: Cell
    example: Example
    request: Request


def answer(system: System, asked: Sequence[Asked], limits: Limits) -> Iterator[dict[str, Any]]:
    """One record a request, in the order in which they finish. Cells follow one another without a gap."""
    by_request = {id(each.request): each for each in asked}
    engine = Engine(system.lm, system.method, limits.batch_size, compile=limits.compile)
    for completion in fold(system.lm, engine.stream([each.request for each in asked])):
        each = by_request[id(completion.request)]
        cell, example = each.cell, each.example
        yield {**cell.key, **grade(completion, example), **gold_length(cell, example)}


def grade(completion: Completion, example: Example) -> dict[str, Any]:
    """What a record says of one completion."""
    verdict = judge(completion.text, example.answer, example.answer_type)
    cluster = {"cluster": example.cluster} if example.cluster else {}
    return {
        "id": example.id,
        **cluster,
        "completion": completion.text,
        "parsed": verdict.parsed,
        "correct": verdict.correct,
        "truncated": completion.truncated,
        "length": completion.length,
        "forward_passes": completion.forward_passes,
        "seconds": round(completion.seconds, 6),
    }


def gold_length(cell: Cell, example: Example) -> dict[str, Any]:
    """L_r, the tokens of the reference chain (null where the source has none): what #L can be held against."""
    try:
        steps = cell.system.lm.template.steps(example.steps)
    except ValueError:  # the separator occurs in them: they could not be trained on, but may be tested on
        return {"gold_length": None}
    return {"gold_length": sum(map(len, steps)) or None}


def make_request(cell: Cell, example: Example, limits: Limits) -> Request:
    decoding = replace(
        DECODINGS[cell.decoding],
        max_latents=limits.max_latents,
        max_completion_length=limits.max_completion_length,
    )
    return Request(example.id, example.question, cell.params, decoding, seed_from(cell.seed, example.id))


def record_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a record one of a kind."""
    names = (
        "model",
        "method",
        "label",
        "dataset",
        "compression_factor",
        "decoding",
        "train_seed",
        "seed",
        "id",
    )
    return tuple(record[name] for name in names)


def require_fit(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Sequence[Any], limits: Limits
) -> None:
    """ValueError for the first question that does not fit the model's context within `limits`."""
    system = System("validation", lm, method)
    for param in params:
        cell = Cell(system, "validation", param, "greedy", 0)
        for example in examples:
            prompt_ids(lm, method, make_request(cell, example, limits))


def score(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Sequence[Any],
    decoding: str,
    limits: Limits,
) -> dict[str, float]:
    """Validation: mean accuracy and #L over all `params`, and each one's own (`accuracy/compression_factor=2`)."""
    system = System("validation", lm, method)
    out: dict[str, float] = {}
    for param in params:
        cell = Cell(system, "validation", param, decoding, 0)
        asked = [Asked(cell, example, make_request(cell, example, limits)) for example in examples]
        records = list(answer(system, asked, limits))
        factor = getattr(param, "compression_factor", None)
        suffix = "" if factor is None else f"/compression_factor={factor:g}"
        suffix += f"/{variant(param)}" if variant(param) else ""
        suffix = suffix or ("/default" if len(params) > 1 else "")
        out[f"accuracy{suffix}"] = sum(record["correct"] for record in records) / len(records)
        out[f"length{suffix}"] = sum(record["length"] for record in records) / len(records)
    for name in ("accuracy", "length"):
        values = [value for key, value in out.items() if key.split("/")[0] == name]
        out[name] = sum(values) / len(values)
    return out
