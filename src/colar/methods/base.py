"""The one interface of all methods, and the rows that they learn from.

    learning    Example --encode--> Row --collate--> Batch --loss--> named terms, one value a row
    thinking    requests --begin--> columns;  then, step by step:  ThinkState --think--> Thought (`thinking.py`)

A `Row` is one example as ids; a `Batch` the same segments padded one by one on the right, with everything
that differs between rows as a column. Trainers, engine, server and evaluation ask no method's name; `recipe/auto_*`
chooses one by name, and two defaults are `cot`. docs/add_a_method.md adds one.

Shape suffixes: B rows, Q question, T reasoning tokens, A answer, S steps, X tokens of all latent texts, G of these
texts, D width, V vocabulary.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from colar import checks
from colar.data.example import Example
from colar.methods.thinking import RequestView, ThinkState, Thought, param_columns
from colar.model.latent_lm import LatentLM
from colar.ops.ragged import length_mask, pad
from colar.template.template import Template


@dataclass(frozen=True)
class NoParams:
    """Per-request values of a method that has none."""


@dataclass(frozen=True)
class Row:
    """One example as ids. `question` ends with the opening separator, `answer` is separator ... EOS."""

    question: list[int]
    steps: list[list[int]]
    answer: list[int]
    params: Any
    seed: int
    n_latents: int = 0
    """Thoughts of the model's own that come before the steps (Coconut, Distill, pause)."""
    latent_texts: list[list[int]] = field(default_factory=list)
    """Texts that these thoughts stand for, in order: labels of a decoder that only training has (SIM-CoT)."""

    @property
    def chain(self) -> list[int]:
        """The reasoning tokens, all steps end to end."""
        return list(itertools.chain.from_iterable(self.steps))

    def __len__(self) -> int:
        """Positions that training needs for the row, thoughts of the model's own included."""
        # By tokens, also for CoLaR, which groups them in its loss: for it this is an upper bound.
        n_chain = sum(map(len, self.steps))
        return len(self.question) + self.n_latents + n_chain + len(self.answer)


class Columns:
    """A dataclass of tensors with a row each, and a dict of them, `params`."""

    padded: ClassVar[Mapping[str, str]]
    """Columns that are as wide as their longest row, each with the column of its rows' lengths."""

    params: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """A flat dict, as data loaders and Trainer move it between devices: `params.compression_factor` is one key."""
        flat = dict(vars(self))
        params = flat.pop("params")
        return flat | {f"params.{name}": column for name, column in params.items()}

    @classmethod
    def from_tensors(cls, flat: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`; keys of neither kind are ignored."""
        names = [f.name for f in dataclasses.fields(cls) if f.name != "params"]  # type: ignore[arg-type]
        params = {key.removeprefix("params."): flat[key] for key in flat if key.startswith("params.")}
        columns: dict[str, Any] = {name: flat[name] for name in names} | {"params": params}
        return cls(**columns)


@dataclass(frozen=True)
class Batch(Columns):
    """Rows as tensors: ids (B, Q | T | A | X) padded on the right, lengths (B,), sizes (B, S | G), and columns (B,)."""

    question_ids: Tensor
    question_lengths: Tensor
    chain_ids: Tensor
    chain_lengths: Tensor
    step_sizes: Tensor
    answer_ids: Tensor
    answer_lengths: Tensor
    seeds: Tensor
    n_latents: Tensor
    text_ids: Tensor
    text_sizes: Tensor
    params: dict[str, Tensor] = field(default_factory=dict)

    padded: ClassVar[Mapping[str, str]] = {
        "question_ids": "question_lengths",
        "chain_ids": "chain_lengths",
        "answer_ids": "answer_lengths",
    }

    @classmethod
    def collate(cls, rows: Sequence[Row]) -> "Batch":
        """Padding is id 0 and never read: every use goes through the lengths."""
        question_ids, question_lengths = pad([row.question for row in rows])
        chain_ids, chain_lengths = pad([row.chain for row in rows])
        step_sizes, _ = pad([list(map(len, row.steps)) for row in rows])
        answer_ids, answer_lengths = pad([row.answer for row in rows])
        text_ids, _ = pad([list(itertools.chain.from_iterable(row.latent_texts)) for row in rows])
        text_sizes, _ = pad([list(map(len, row.latent_texts)) for row in rows])
        return cls(
            question_ids=question_ids,
            question_lengths=question_lengths,
            chain_ids=chain_ids,
            chain_lengths=chain_lengths,
            step_sizes=step_sizes,
            answer_ids=answer_ids,
            answer_lengths=answer_lengths,
            # `encode` draws seeds of 62 bits: an int64 holds them without a sign.
            seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64),
            n_latents=torch.tensor([row.n_latents for row in rows], dtype=torch.int64),
            text_ids=text_ids,
            text_sizes=text_sizes,
            params=param_columns([row.params for row in rows]),
        )

    @property
    def question(self) -> tuple[Tensor, Tensor]:
        """Ids and lengths, as `ragged.pack` takes them."""
        return self.question_ids, self.question_lengths

    @property
    def chain(self) -> tuple[Tensor, Tensor]:
        return self.chain_ids, self.chain_lengths

    @property
    def answer(self) -> tuple[Tensor, Tensor]:
        return self.answer_ids, self.answer_lengths

    def positions(self) -> Tensor:
        """Positions that training needs for each row, thoughts of the model's own included, (B,)."""
        written_B = self.question_lengths + self.chain_lengths + self.answer_lengths
        return written_B + self.n_latents

    def rows(self, at: Tensor) -> "Batch":
        """Some of the rows, by their indices (X,); as wide as the batch."""
        return Batch.from_tensors({name: column[at] for name, column in self.tensors().items()})


class Method(ABC):
    """A way to learn and to think: the one interface of all methods.

    Constructed from its frozen, self-validating `Config`. `loss` and `think` must be written. The rest has the defaults
    of a method that learns whole chains, adds no modules, has no curriculum and takes no per-request values.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    Params: ClassVar[type] = NoParams
    """Per-request values: a frozen dataclass that checks itself."""
    draws: ClassVar[bool] = False
    """True if `encode` draws params: rows of one example may have other ones."""
    thinks_in_latents: ClassVar[bool] = False
    """True if it thinks in embeddings of its own, not in tokens: what a control can replace."""
    filled_by_prepare: ClassVar[frozenset[str]] = frozenset()
    """Keys of the config that `prepare` fills in where they are null."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.default_params: Mapping[str, Any] = {}
        """Values of a request that names none: a checkpoint's own speed. {}: those of `Params`."""
        self.default_limits: Mapping[str, int] = {}
        """`max_latents` and `max_completion_length` that its training rows need. {}: those of `Decoding`."""

    def non_default_config(self) -> dict[str, Any]:
        """Its name and the keys of its config that are not as by default, without those in `filled_by_prepare`."""
        config = {"name": self.name}
        for key in dataclasses.fields(self.config):
            value = getattr(self.config, key.name)
            if value != key.default and key.name not in self.filled_by_prepare:
                config[key.name] = value
        return config

    # Learning

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        """The modules that it adds to the backbone, by name; `LatentLM` registers, trains and saves them.

        May read `lm` (its width, a copy of a layer), and must make the same shapes for any backbone of that config:
        a checkpoint's weights are loaded over them.
        """
        return {}

    def training_modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        """Modules that its loss needs and `think` does not: in a run's own checkpoints, from which it resumes, and left
        out of a published one, which is loaded without them."""
        return {}

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        """The rows to learn from; once, before training. May fix `self.config` (a measured scale) and freeze weights.

        Rows that take work are made when they are iterated: reinforcement needs the rest alone.
        """
        return examples

    def speed_text(self, params: Any) -> str:
        """The text of the template's speed slot, in training and at inference alike."""
        return ""

    @property
    def multiple_forwards(self) -> bool:
        """True if its loss feeds the model several times, the later times with what came out before."""
        return False

    def stage(self, epoch: float) -> int:
        """The curriculum's stage at a (fractional) epoch."""
        return 0

    def last_stage(self) -> int:
        """The stage that the curriculum ends with: the one whose behaviour `think` is."""
        return 0

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        """Draw the row's params from `rng`, apply the stage, tokenise. Pure in its arguments.

        By default the question, all steps and the answer, with the params' own defaults. An `epoch` of infinity is the
        end of training: `colar inspect` reads rows of the last stage.
        """
        return encode_row(template, example, self.Params(), "", rng.getrandbits(62))

    def encode_draws(
        self, template: Template, example: Example, rng: Random, epoch: float, n: int
    ) -> list[Row]:
        """n rows of one example, each with draws of its own; for n = 1 the one that `encode` gives."""
        return [self.encode(template, example, rng, epoch) for _ in range(n)]

    @abstractmethod
    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """Named terms, each (B,), averaged within the row and weighted: their sum is the row's loss.

        A name that starts with "_" is a quantity to log and no part of the loss.
        """

    def positions(self, batch: Batch) -> Tensor:
        """Positions that the loss feeds for each row, (B,), of all its forwards together: what memory is needed for."""
        return batch.positions()

    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The embeddings that training feeds in place of the chain, (B, K, D), and each row's number of them, (B,).

        `colar inspect` compares them with a model's thoughts. Rows with `n_latents` are never compared: these stand
        for no tokens, and the default then says nothing.
        """
        return lm.embed(batch.chain_ids), batch.chain_lengths

    def group_sizes(self, lm: LatentLM, batch: Batch) -> Tensor:
        """Tokens of the row's chain to each of the `training_thoughts`, (B, K); 0 behind a row's last one.

        One token each by default. Where that is wrong, `colar inspect` finds another number of thoughts than groups,
        and compares none.
        """
        return length_mask(batch.chain_lengths, batch.chain_ids.shape[1]).long()

    def thinks_whole_chain(self, params: Any) -> bool:
        """True if it learns to think all of the reference chain at these values: only then are the two compared."""
        return True

    # Thinking

    def begin(self, lm: LatentLM, requests: Sequence[RequestView]) -> dict[str, Tensor]:
        """State of its own for each request, before its first thought: columns (B, ...) on the model's device.

        They come back in `ThinkState.begun`, a row each, at every step. A row is a function of its request alone, and
        has the same shape and dtype in every call: rows that begin at different times share a batch.
        """
        return {}

    @abstractmethod
    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        """Inference, one step, behaviour of the final stage; a pure function of the state's columns."""

    def check_params(self, params: Any) -> str | None:
        """Raise ValueError for values that cannot work; return a warning for values that were not trained."""
        return None

    # Serving

    def choices(self) -> Mapping[str, Sequence[Any]]:
        """The trained values of its `Params`, by name: those that a user should be offered.

        Of the first name the value that thinks most comes first: reasoning efforts are values of it (`efforts_of`).
        """
        return {}


class ScaledMethod(Method):
    """A method with embeddings of its own on the backbone's scale: its config has a `sigma_e`, null until measured."""

    filled_by_prepare: ClassVar[frozenset[str]] = frozenset({"sigma_e"})

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        if self.config.sigma_e is None:
            self.config = dataclasses.replace(self.config, sigma_e=lm.embedding_std())
        return examples

    @property
    def sigma_e(self) -> float:
        """The scale of the embeddings, once `prepare` has measured it."""
        if self.config.sigma_e is None:
            raise ValueError("method.sigma_e is not known yet: call prepare, or give it in the config")
        return float(self.config.sigma_e)


def check_sigma_e(value: object) -> None:
    """Reject a scale that is neither null nor a number above 0."""
    right = value is None or (checks.is_number(value) and value > 0)
    checks.check_holds("method.sigma_e", right, value, "above 0 or null")


def listed(values: Iterable[float]) -> str:
    """The values as text, ascending and each once: "1, 1.5, 2"."""
    return ", ".join(f"{value:g}" for value in sorted(set(values)))


def warning_if_untrained(name: str, value: float, trained: Sequence[float]) -> str | None:
    """A warning for a per-request value that is none of the trained ones."""
    if value in trained:
        return None
    return f"{name} {value:g} was not trained (trained: {listed(trained)}): expect less"


def encode_row(template: Template, example: Example, params: Any, speed_text: str, seed: int) -> Row:
    """The plain layout: question with its speed text, all steps, answer. ValueError names the example."""
    # A text with tokens that the model lacks cannot be encoded: the error must name the example.
    try:
        return Row(
            template.question(example.question, speed_text, context=example.context),
            template.steps(example.steps),
            template.answer(example.answer),
            params,
            seed,
        )
    except ValueError as error:
        raise ValueError(f"{example.id}: {error}") from error


def keep_tokens(steps: list[list[int]], numbers: Container[int]) -> list[list[int]]:
    """The steps with the chain's tokens of these numbers, from 0, alone; a step that has lost all is gone."""
    counter = itertools.count()
    pruned = [[token for token in step if next(counter) in numbers] for step in steps]
    return [step for step in pruned if step]
