"""Everything that is known of systems on the same questions: what `colar inspect` writes as JSON and as a page.

A system is a model at one value of its params. Its part of the JSON holds

    model compression_factor variant        its name
    n n_looked retrieval ... causal         `inside.py`; null for a method whose thoughts stand for no tokens
    cost                                    `cost.py`
    answers                                 of each question: the answer, and what went wrong

The chains themselves are for the page alone: they are longer than all numbers together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from colar import files
from colar.checks import check_holds
from colar.data.example import Example
from colar.engine.request import GREEDY, Decoding
from colar.look import page as inside_page
from colar.look.chains import Chain, answer_all, chains_of, requests_of
from colar.look.cost import CONTROLS, cost_of, difference
from colar.look.inside import Inside, look_inside
from colar.look.reference_chain import require_groups
from colar.methods import registry
from colar.methods.base import Method
from colar.methods.params import given, options, speed, texts
from colar.model.latent_lm import LatentLM

FACTORS = (1, 2, 5)
"""Compression factors that `inspect` asks for, where a method has any: those of them that it can work with."""


@dataclass(frozen=True)
class System:
    """One system's numbers and its chains."""

    numbers: dict[str, Any]
    chains: list[Chain]


def key_of(model: str, params: Any) -> dict[str, Any]:
    """The fields that name a system."""
    # Only some methods have a speed; the row shows null for the others.
    values = given(params)
    variant = ", ".join(texts(options(values)))
    return {"model": model, "compression_factor": speed(values), "variant": variant}


def system_of(
    key: Mapping[str, Any],
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    limits: Decoding = GREEDY,
    *,
    look: int = 32,
    numbers: bool = True,
    controls: bool = True,
    causal: bool = True,
) -> System:
    """Let one system answer, and measure it. The model thinks once for all of it, controls apart.

    Without `numbers` only the chains are read; without `controls` its own cost is measured alone.
    """
    # The first batch of a process is slow, and no question should pay for it.
    requests = requests_of(examples, params, limits)
    answer_all(lm, method, requests[:1], "warm up")
    completions = answer_all(lm, method, requests)
    compared = compares(lm, method, examples, params)
    chains = chains_of(lm, method, examples, params, completions, compared)
    found: dict[str, Any] = {each.name: None for each in fields(Inside)}
    if compared and numbers:
        inside = look_inside(
            lm, method, examples, params, limits, look=look, completions=completions, causal=causal
        )
        found = inside.to_json()
    cost = None
    if numbers:
        kinds = CONTROLS if controls else ()
        cost = cost_of(lm, method, examples, requests, completions, kinds).to_json()
    answers = [chain.summary() for chain in chains]
    return System({**key, **found, "cost": cost, "answers": answers}, chains)


def compares(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> bool:
    """Whether thoughts can be compared with reference chains."""
    # `require_groups` raises for an empty list too: without a reference chain nothing is compared.
    with_steps = [example for example in examples if example.steps]
    try:
        require_groups(lm, method, with_steps, params)
    except ValueError:
        return False
    return True


def whole(systems: Sequence[System], examples: Sequence[Example], **more: Any) -> dict[str, Any]:
    """The JSON: all systems, and how those of one speed differ; `more` are further keys, which come first."""
    numbers = [system.numbers for system in systems]
    return {
        **more,
        "provenance": files.provenance(),
        "systems": numbers,
        "comparisons": comparisons(numbers, examples),
    }


def comparisons(systems: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Each system's accuracy minus that of the first model at the same params, paired by question.

    Of questions that have an answer: of others nobody knows who is right, and without any there is no comparison.
    """
    found = []
    first_of: dict[tuple[Any, str], Mapping[str, Any]] = {}
    for system in systems:
        speed = (system["compression_factor"], system["variant"])
        baseline = first_of.setdefault(speed, system)
        if baseline is not system:
            asked: list[Example] = []
            ours: list[bool] = []
            theirs: list[bool] = []
            for example, own, other in zip(examples, system["answers"], baseline["answers"], strict=True):
                if own["right"] is not None and other["right"] is not None:
                    asked.append(example)
                    ours.append(own["right"])
                    theirs.append(other["right"])
            if not asked:
                continue
            mean = difference(asked, ours, theirs)
            found.append(
                {
                    "model": system["model"],
                    "baseline": baseline["model"],
                    "compression_factor": speed[0],
                    "variant": speed[1],
                    "n": len(ours),
                    "difference": mean.mean,
                    "interval": mean.interval,
                }
            )
    return found


@dataclass(frozen=True)
class Inspection:
    """Systems on the same questions. A notebook shows it as the page; `save` writes that page."""

    examples: list[Example]
    systems: list[System]
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the JSON, which come first."""
    without_answer: frozenset[str] = frozenset()
    """Ids of questions that nobody gave an answer to: the page judges none of theirs."""

    def to_json(self) -> dict[str, Any]:
        """The numbers."""
        return whole(self.systems, self.examples, **self.more)

    def page(self) -> str:
        """The page, as one HTML text that needs nothing else."""
        questions = []
        for example in self.examples:
            answer = None if example.id in self.without_answer else example.answer
            questions.append({**example.as_row(), "answer": answer})
        chains = [[chain.to_json() for chain in system.chains] for system in self.systems]
        return inside_page.render(self.to_json(), questions, chains)

    def save(self, path: str | Path) -> Path:
        """Write the page."""
        return files.write_text(Path(path), self.page())

    def _repr_html_(self) -> str:
        return inside_page.framed(self.page())


def inspect(
    lm: LatentLM,
    method: Method,
    questions: Sequence[str | Example],
    *,
    compression_factors: Sequence[float] | None = None,
    limits: Decoding = GREEDY,
    numbers: bool = False,
    name: str = "model",
) -> Inspection:
    """Let a model think about questions, and show its chains.

    Questions are texts, or examples with a reference chain to compare with. A method without a speed is asked once;
    `compression_factors` are by default those of `FACTORS` that it can work with. `numbers` measures what `colar
    inspect` does, which takes longer. ValueError without any question.
    """
    for what, values in (("questions", questions), ("compression_factors", compression_factors or [])):
        check_holds(what, isinstance(values, list | tuple), values, "a list")
    examples = []
    without_answer = set()
    for i, question in enumerate(questions):
        if isinstance(question, str):
            # An example must have an answer; this one is looked at by nobody.
            question = Example(f"question {i + 1}", question, (), "unknown", "text")
            without_answer.add(question.id)
        check_holds("questions", isinstance(question, Example), question, "texts or examples")
        examples.append(question)
    if not examples:
        raise ValueError("questions must hold at least one question, got none")
    # The engine switches dropout off by itself, the reference passes do not.
    lm.eval()
    has_speed = any(each.name == "compression_factor" for each in fields(method.Params))
    asked = [method.Params()]
    if has_speed:
        factors = _possible(method) if compression_factors is None else compression_factors
        asked = [registry.make_params(method, {"compression_factor": c}) for c in factors]
    systems = []
    for params in asked:
        key = key_of(name, params)
        system = system_of(key, lm, method, examples, params, limits, numbers=numbers)
        _unjudge(system, without_answer)
        systems.append(system)
    return Inspection(examples, systems, without_answer=frozenset(without_answer))


def _possible(method: Method) -> list[float]:
    """Those of `FACTORS` that the method can work with: a sequential head says no more tokens than it was taught."""
    found: list[float] = []
    for c in FACTORS:
        try:
            method.trained(registry.make_params(method, {"compression_factor": c}))
        except ValueError:
            continue
        found.append(c)
    return found


def _unjudge(system: System, without_answer: Set[str]) -> None:
    """Take back what was said of answers that nothing is known about."""
    for answer in system.numbers["answers"]:
        if answer["id"] in without_answer:
            answer["right"] = answer["cause"] = None
    # Its accuracies count answers that were compared with the placeholder.
    if without_answer:
        system.numbers["cost"] = None
