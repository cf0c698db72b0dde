"""Compression factors: those that training draws from, and the part of a method that `colar` and `sequential` share.

A factor c is the number of reasoning tokens that a latent stands for. `grouping.py` makes groups of c tokens.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from torch import Tensor

from colar.checks import check_holds, check_number, is_number
from colar.data.example import Example
from colar.methods import base
from colar.methods.base import Batch, Row
from colar.methods.efforts import efforts_over
from colar.methods.grouping import MergedChains
from colar.model.latent_lm import LatentLM
from colar.template.template import Template


class Deck:
    """Values that are each drawn once before one is drawn again: two equal rows of an example teach little."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.left: list[float] = []

    def draw(self, rng: Random) -> float:
        """The next one; of values that stand twice there are two."""
        self.left = self.left or list(self.values)
        value = rng.choice(self.left)
        self.left.remove(value)
        return value


@dataclass(frozen=True)
class Factors:
    """The factors that training draws from: some values, or all of a real range, to two decimals."""

    values: tuple[float, ...]
    """The values, or the two ends of the range."""
    real: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("method.compression_factors is empty")
        for c in self.values:
            check_number("each of method.compression_factors", c, 1)

    def draw(self, rng: Random, n: int) -> list[float]:
        """n of them: of a list, each entry once before one comes again; one that stands twice, twice as often."""
        if self.real:
            return [self._rounded(rng.uniform(self.low, self.high)) for _ in range(n)]
        deck = Deck(self.values)
        return [deck.draw(rng) for _ in range(n)]

    def offered(self) -> list[float]:
        """The values, ascending and each once; of a range five, evenly spaced."""
        if not self.real:
            return sorted(set(self.values))
        step = (self.high - self.low) / 4
        return sorted({self._rounded(self.low + i * step) for i in range(5)})

    def _rounded(self, c: float) -> float:
        """Of a range: to two decimals, but never beyond its ends, which may have more."""
        # The model reads c in its prompt: two decimals are few enough to be read.
        return min(max(round(c, 2), self.low), self.high)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def __contains__(self, c: object) -> bool:
        if self.real:
            return is_number(c) and self.low <= c <= self.high
        return c in self.values

    def __str__(self) -> str:
        if self.real:
            return f"{self.low:g} to {self.high:g}"
        return ", ".join(f"{value:g}" for value in sorted(set(self.values)))

    @classmethod
    def parse(cls, value: Sequence[float] | str) -> Factors:
        """A list; whole numbers, "1..5"; or a real range, "1.0..5.0". ValueError for anything else."""
        if isinstance(value, list | tuple):
            return cls(tuple(value))
        low, dots, high = str(value).partition("..")
        real = "." in low or "." in high
        try:
            first, last = (float(low), float(high)) if real else (int(low), int(high))
            holds = bool(dots) and first <= last
        except ValueError:
            holds = False
        allowed = 'a list, a range of whole numbers such as "1..5", or a real range such as "1.0..5.0"'
        check_holds("method.compression_factors", holds, value, allowed)
        if real:
            return cls((first, last), real=True)
        return cls(tuple(range(int(first), int(last) + 1)))


class GroupMethod(base.Method):
    """A method that thinks in latents of c tokens each: `Params` have a `compression_factor`, the config `factors`."""

    draws: ClassVar[bool] = True
    thinks_in_latents: ClassVar[bool] = True

    @abstractmethod
    def merge_chains(self, lm: LatentLM, batch: Batch) -> MergedChains:
        """The rows' chains in groups of c tokens, each merged into the latent that training feeds for it."""

    def speed_text(self, params: Any) -> str:
        return f"(Thinking speed: {params.compression_factor:g})"

    def check_params(self, params: Any) -> str | None:
        # A pretrained model's chains interpolate between its factors, a small model's do not (results/toy).
        c, factors = params.compression_factor, self.config.factors
        if c in factors:
            return None
        return f"compression_factor {c:g} was not trained (trained: {factors}): expect less"

    def choices(self) -> Mapping[str, Sequence[Any]]:
        return {"compression_factor": self.config.factors.offered()}

    def efforts(self) -> Mapping[str, Mapping[str, Any]]:
        return efforts_over("compression_factor", self.config.factors.offered())

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        (row,) = self.encode_draws(template, example, rng, epoch, 1)
        return row

    def encode_draws(
        self, template: Template, example: Example, rng: Random, epoch: float, n: int
    ) -> list[Row]:
        rows = []
        others = self.other_values(rng)
        for c in self.config.factors.draw(rng, n):
            # Drawn in this order: a row without other values stays what it was when there were none.
            seed = rng.getrandbits(62)
            params = self.Params(c, **next(others))
            rows.append(base.encode_row(template, example, params, self.speed_text(params), seed))
        return rows

    def other_values(self, rng: Random) -> Iterator[dict[str, float]]:
        """The values of `Params` beside the factor, for one row of an example after another."""
        return itertools.repeat({})

    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        merged = self.merge_chains(lm, batch)
        return merged.latents_BKD, merged.counts_B

    def group_sizes(self, lm: LatentLM, batch: Batch) -> Tensor:
        return self.merge_chains(lm, batch).sizes_BK
