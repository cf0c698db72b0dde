"""CoLaR's values: `ColarConfig` in a recipe, `ColarParams` in a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Literal, get_args

from colar.checks import check_choice, check_number, is_number
from colar.methods.colar.heads import Head, LatentLoss
from colar.methods.colar.merging import Merge
from colar.methods.colar.units import LONGEST, Unit

Stop = Literal["majority", "argmax"]
ChainLabel = Literal["expected", "sampled"]
ThresholdOn = Literal["token", "number"]


@dataclass(frozen=True)
class ColarParams:
    """Per-request values."""

    compression_factor: float = 2
    """c: how many reasoning tokens a latent stands for, 1 or more. It need not be whole: at 1.5 groups have 1 or 2."""

    snap: bool = False
    """Feed back the sum of c token embeddings that the LM head's distribution is nearest to, not the latent head's
    mean: what the model was trained to read, so that small errors do not compound."""

    confidence_threshold: float = 0
    """A group also ends before a token that is less likely than this: c is then the most tokens, not the number.
    From 0, where nothing ends a group before its c tokens, to 1. Of head: sequential."""

    def __post_init__(self) -> None:
        if self.snap not in (True, False):
            raise ValueError(f"snap must be true or false, got {self.snap!r}")
        check_number("compression_factor", self.compression_factor, 1)
        check_number("confidence_threshold", self.confidence_threshold, 0, 1)


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

    def draw(self, rng: Random) -> float:
        """One of them; in a list, a value that stands twice is drawn twice as often."""
        if not self.real:
            return rng.choice(self.values)
        return self._rounded(rng.uniform(self.least, self.most))

    def draw_several(self, rng: Random, n: int) -> list[float]:
        """n of them: of a list, each entry once before one comes again."""
        if self.real:
            return [self.draw(rng) for _ in range(n)]
        deck = Deck(self.values)
        return [deck.draw(rng) for _ in range(n)]

    def offered(self) -> list[float]:
        """The values, ascending and each once; of a range five, evenly spaced."""
        if not self.real:
            return sorted(set(self.values))
        step = (self.most - self.least) / 4
        return sorted({self._rounded(self.least + i * step) for i in range(5)})

    def _rounded(self, c: float) -> float:
        """Of a range: to two decimals, but never beyond its ends, which may have more."""
        # The model reads c in its prompt: two decimals are few enough to be read.
        return min(max(round(c, 2), self.least), self.most)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)

    def __contains__(self, c: object) -> bool:
        if self.real:
            return is_number(c) and self.least <= float(str(c)) <= self.most
        return c in self.values

    def __str__(self) -> str:
        if self.real:
            return f"{self.least:g} to {self.most:g}"
        return ", ".join(f"{value:g}" for value in sorted(set(self.values)))

    @classmethod
    def parse(cls, given: Sequence[float] | str) -> Factors:
        """A list; whole numbers, "1..5"; or a real range, "1.0..5.0". ValueError for anything else."""
        if isinstance(given, list | tuple):
            return cls(tuple(given))
        low, dots, high = str(given).partition("..")
        real = "." in low or "." in high
        ends: tuple[float, float]
        try:
            ends = (float(low), float(high)) if real else (int(low), int(high))
        except ValueError:
            ends = (1, 0)
        if not dots or ends[0] > ends[1]:
            raise ValueError(
                'method.compression_factors must be a list, a range of whole numbers such as "1..5", or a real '
                f'range such as "1.0..5.0", got {given!r}'
            )
        if real:
            return cls(ends, real=True)
        return cls(tuple(range(int(low), int(high) + 1)))


LATENT_OPTIONS = ("latent_loss", "alpha", "nll_beta", "chain_label", "stop")
"""Of heads that predict a latent; the sequential head chooses tokens, and knows its stop as one of them. Recipes lay
this head over others, whose latent_weight stays: the weight of a term that is not there."""


@dataclass(frozen=True)
class ColarConfig:
    """The paper's choices; its ablations are values of these."""

    compression_factors: tuple[float, ...] | str = "1..5"
    """Factors drawn from in training: a range of whole numbers such as "1..5" (the paper's), a real range such as
    "1.0..5.0", or a list, in which a factor that stands twice is drawn twice as often."""
    merge: Merge = "sqrt"
    """What a group is fed as: its sum over "sqrt" of its size, its "mean" (ablation MP), or "ordered" (ours, of head:
    sequential), a sum in which each place has a learnt map: a plain sum has lost the order of its tokens."""
    merge_rank: int | None = None
    """Rank of what these maps add to the identity; null: full matrices, of which a checkpoint has one for each place.
    Of merge: ordered."""
    unit: Unit = "token"
    """What c counts: "token"; or, for tokenizers with a token for each digit, "number": the digits of a number, up to
    three, are one; or "result": so are those of a number that begins a group, and other digits, which are computed
    with, never share a thought with the digit before. Of head: sequential."""
    numbers_from: float = 1
    """The least c at which a number is a unit (unit: number and result). With 2, thinking at c = 1 is CoT, digit by
    digit."""
    alone: tuple[str, ...] = ()
    """Tokens, as the vocabulary spells them, that always are a group of their own: ["="] for equations. What
    follows is computed there, and a group would have to be taken apart first. Of head: sequential."""
    starts: tuple[str, ...] = ()
    """Tokens that always start a group: the signs, where operands are to be behind them (unit: result). Of head:
    sequential."""
    head: Head = "gaussian"
    """"gaussian" predicts mean and spread; "deterministic" a point, trained by MSE (ablation DL); "anchored" is
    gaussian with a mean that starts from the LM head's expected embedding, to which the MLP learns a correction;
    "sequential" (ours) chooses the group's tokens one after another, by cross-entropy alone: no latent_loss, alpha,
    chain_label and stop."""
    latent_loss: LatentLoss = "soft_mse"
    """"soft_mse" for simple problems, "nll" for those that need exploration (the paper's MATH runs)."""
    alpha: float = 0.02
    """Weight of the entropy in soft-MSE; sigma settles at sqrt(alpha / 2) = 0.1 sigma_e, the exploration noise."""
    nll_beta: float = 0.0
    """Weighs the NLL by sigma^(2 nll_beta), 0 (the paper's) to 1 (beta-NLL, Seitzer et al. 2022): at 0 its gradient
    grows with 1 / sigma^2, until little else is left of a clipped one; 0.5 learns the mean as well as soft_mse."""
    supervise_chain: bool = True
    """Train the LM head on the tokens of each next group; false keeps only the stop and answer labels (OC). Of heads
    that predict a latent: head: sequential learns a chain by these labels alone."""
    chain_label: ChainLabel = "expected"
    """"sampled": one token of the group, drawn at random (the paper's); "expected": its expectation over the draw."""
    stop: Stop = "majority"
    """When greedy thinking ends: "majority", the separator is more likely than not; "argmax", likelier than any one
    token (the paper's), which ends early where c tokens share what is left."""
    comp_weight: float = 1.0
    """Weight of L_comp."""
    latent_weight: float = 1.0
    """Weight of L_latent ("we sum up L_comp and L_latent")."""
    lookahead_weight: float = 0.0
    """Weight of the labels behind a group, up to the largest trained factor; the group's own have 1. Of head:
    sequential."""
    confidence_thresholds: tuple[float, ...] = (0,)
    """Values of confidence_threshold drawn from in training, as factors are: groups then end where the model itself is
    less sure than that. Of head: sequential."""
    threshold_on: ThresholdOn = "token"
    """What confidence_threshold is asked of: each "token" that would join a group; or, where c counts numbers, only
    what stands behind a "number" that may go on: a digit of it, or its end. A result's digits are computed one from
    another; a sign and the digit behind it are not, and cost nothing in one thought. Of head: sequential."""
    shortlist: bool = False
    """Choose the tokens of a group behind its first among those of the training chains alone: their rows of the LM head
    are few, and a thought of c tokens costs little more than one. Of head: sequential."""
    shortlist_ids: tuple[int, ...] | None = None
    """The ids of that shortlist, ascending; null: counted in the training data at the start and kept here."""
    sigma_e: float | None = None
    """Scale of the embeddings; null: measured on the backbone at the start and kept here."""

    def __post_init__(self) -> None:
        check_choice("method.merge", self.merge, get_args(Merge))
        check_choice("method.unit", self.unit, get_args(Unit))
        for name in ("alone", "starts"):
            tokens = getattr(self, name)
            texts = isinstance(tokens, list | tuple) and all(isinstance(t, str) and t for t in tokens)
            if not texts:
                raise ValueError(f"method.{name} must be a list of tokens, got {tokens!r}")
        for token in self.starts:
            if token in self.alone:
                raise ValueError(
                    f"method.starts has {token!r}, which is in method.alone: it starts one anyway"
                )
        check_choice("method.head", self.head, get_args(Head))
        check_choice("method.latent_loss", self.latent_loss, get_args(LatentLoss))
        check_choice("method.chain_label", self.chain_label, get_args(ChainLabel))
        check_choice("method.threshold_on", self.threshold_on, get_args(ThresholdOn))
        if self.threshold_on == "number" and self.unit == "token":
            raise ValueError(
                "method.threshold_on number is a value of unit: number and unit: result; this one is token"
            )
        check_choice("method.stop", self.stop, get_args(Stop))
        check_number("method.nll_beta", self.nll_beta, 0, 1)
        if self.head == "deterministic" and self.latent_loss == "nll":
            raise ValueError("method.latent_loss nll needs a spread: use head gaussian, or soft_mse")
        if self.nll_beta and self.latent_loss != "nll":
            raise ValueError(f"method.nll_beta is a value of latent_loss nll; this one is {self.latent_loss}")
        for name in ("alpha", "comp_weight", "latent_weight", "lookahead_weight"):
            check_number(f"method.{name}", getattr(self, name), 0)
        if self.merge_rank is not None:
            check_number("method.merge_rank", self.merge_rank, 1, whole=True)
            if self.merge != "ordered":
                raise ValueError(f"method.merge_rank is a value of merge: ordered; this one is {self.merge}")
        check_number("method.numbers_from", self.numbers_from, 1)
        if self.numbers_from > 1 and self.unit == "token":
            raise ValueError(
                "method.numbers_from is a value of unit: number and unit: result; this one is token"
            )
        sigma_e = self.sigma_e
        if sigma_e is not None and not (is_number(sigma_e) and sigma_e > 0):
            raise ValueError(f"method.sigma_e must be above 0 or null, got {sigma_e!r}")
        if not self.factors.values:
            raise ValueError("method.compression_factors is empty")
        for c in self.factors.values:
            # Checks itself: what is trained must be what a request may ask for.
            ColarParams(c)
        if not isinstance(self.confidence_thresholds, list | tuple):
            raise ValueError(
                f"method.confidence_thresholds must be a list of numbers, got {self.confidence_thresholds!r}"
            )
        if not self.confidence_thresholds:
            raise ValueError("method.confidence_thresholds is empty: [0] trains without one")
        for threshold in self.confidence_thresholds:
            check_number("method.confidence_thresholds", threshold, 0, 1)
        if self.head != "sequential":
            self._check_without("confidence_thresholds", any(self.confidence_thresholds))
            self._check_without("lookahead_weight", self.lookahead_weight > 0)
            self._check_without("shortlist", self.shortlist)
            self._check_without("unit", self.unit != "token")
            self._check_without("alone", bool(self.alone))
            self._check_without("starts", bool(self.starts))
            # The other heads aim at latents: targets must not move.
            self._check_without("merge ordered", self.merge == "ordered")
        else:
            self._check_defaults_of(LATENT_OPTIONS)
            # Nothing else would teach it to think: thoughts would be whatever the start weights say.
            if not self.supervise_chain:
                raise ValueError(
                    "method.supervise_chain false is an option of heads that predict a latent; head: sequential learns "
                    "its chain by these labels alone"
                )
        self._check_shortlist()

    def _check_without(self, name: str, given: bool) -> None:
        """Reject an option of the sequential head for another one."""
        if given:
            raise ValueError(f"method.{name} is an option of head: sequential; this one is {self.head}")

    def _check_defaults_of(self, names: Iterable[str]) -> None:
        """Reject another value than the default of options that this head would ignore."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ValueError(
                    f"method.{field.name} is an option of heads that predict a latent; head: sequential would ignore "
                    f"{value!r}"
                )

    def _check_shortlist(self) -> None:
        if self.shortlist_ids is None:
            return
        if not self.shortlist:
            raise ValueError("method.shortlist_ids is given, but method.shortlist is false")
        ids = self.shortlist_ids
        whole = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
        if not whole or list(ids) != sorted(set(ids)) or not ids:
            raise ValueError("method.shortlist_ids must be token ids in ascending order, each once, or null")

    @property
    def factors(self) -> Factors:
        """The training factors, parsed."""
        return Factors.parse(self.compression_factors)

    @property
    def most_units(self) -> int:
        """The most units that a group may have."""
        # At c = 2.5 groups have 2 or 3.
        return math.ceil(self.factors.most)

    @property
    def widest(self) -> int:
        """The most tokens that a group may have."""
        return self.most_units * (1 if self.unit == "token" else LONGEST)
