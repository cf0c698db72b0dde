"""The one interface of all methods, and the rows that they learn from.

    learning    Example --encode--> Row --collate--> Batch --loss--> named terms, one value a row
    thinking    requests --begin--> columns;  then, step by step:  ThinkState --think--> Thought (`thinking.py`)

A `Row` is one example as ids. A `Batch` holds the same segments, each padded on the right, and everything that
differs between rows as a column. Trainers, engine, server and evaluation never branch on a method's name;
`recipe/auto_*` chooses one by name, and two defaults are `cot`. docs/add_a_method.md shows how to add one.

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
    """Number of the model's own latents that are fed before the steps (Coconut, Distill, pause)."""
    latent_texts: list[list[int]] = field(default_factory=list)
    """Texts that these latents stand for, in order: labels of a decoder that exists in training only (SIM-CoT)."""

    @property
    def chain(self) -> list[int]:
        """The reasoning tokens, all steps end to end."""
        return list(itertools.chain.from_iterable(self.steps))

    def __len__(self) -> int:
        """Positions that training needs for the row, the model's own latents included."""
        # Counted in tokens: an upper bound for CoLaR, which groups them in its loss.
        n_chain = sum(map(len, self.steps))
        return len(self.question) + self.n_latents + n_chain + len(self.answer)


class Columns:
    """A dataclass of tensors with one entry per row, and a dict of such tensors, `params`."""

    padded: ClassVar[Mapping[str, str]]
    """Columns padded to their longest row -> the column with the rows' lengths."""

    params: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """A flat dict, as data loaders and Trainer move it between devices; `params.compression_factor` is one key."""
        flat = dict(vars(self))
        params = flat.pop("params")
        return flat | {f"params.{name}": column for name, column in params.items()}

    @classmethod
    def from_tensors(cls, flat: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`; other keys are ignored."""
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
        """Stack rows. Padding is id 0 and never read, because every use goes through the lengths."""
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
            # `encode` draws seeds of 62 bits, which fit into an int64 without a sign.
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
        """Positions that training needs for each row, the model's own latents included, (B,)."""
        written_B = self.question_lengths + self.chain_lengths + self.answer_lengths
        return written_B + self.n_latents

    def rows(self, at: Tensor) -> "Batch":
        """The rows at these indices (X,), still padded to the width of the batch."""
        return Batch.from_tensors({name: column[at] for name, column in self.tensors().items()})


class Method(ABC):
    """A way to learn and to think: the one interface of all methods.

    Constructed from its frozen, self-validating `Config`. Subclasses implement `loss` and `think`; the other defaults
    are those of a method that learns whole chains, adds no modules, has no curriculum and takes no per-request values.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    Params: ClassVar[type] = NoParams
    """Per-request values: a frozen dataclass that checks itself."""
    thinks_in_latents: ClassVar[bool] = False
    """True if it thinks in embeddings of its own, not in tokens; controls can replace these."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.default_params: Mapping[str, Any] = {}
        """Values for requests that name none: the checkpoint's own speed. {}: the defaults of `Params`."""
        self.default_limits: Mapping[str, int] = {}
        """`max_latents` and `max_completion_length` that its training rows need. {}: the defaults of `Decoding`."""

    def non_default_config(self) -> dict[str, Any]:
        """The method's name and the config keys that differ from their defaults. Keys that are null by default are left
        out, because `prepare` fills them in."""
        config = {"name": self.name}
        for key in dataclasses.fields(self.config):
            value = getattr(self.config, key.name)
            if key.default is not None and value != key.default:
                config[key.name] = value
        return config

    # Learning

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        """The modules that the method adds to the backbone, by name; `LatentLM` registers, trains and saves them.

        May read `lm` (its width, a copy of a layer). Shapes must be the same for any backbone of that config, because
        a checkpoint's weights are loaded into the modules.
        """
        return {}

    def training_modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        """Modules that the loss needs and `think` does not. A run's own checkpoints hold them, so that it can resume;
        a published checkpoint leaves them out and is loaded without them."""
        return {}

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        """The rows to learn from; called once, before training. May set values of `self.config` (a measured scale) and
        freeze weights.

        Rows that are costly to make are made on iteration, because reinforcement learning only needs the other effects.
        """
        return examples

    def speed_text(self, params: Any) -> str:
        """The text of the template's speed slot, in training and at inference alike."""
        return ""

    @property
    def multiple_forwards(self) -> bool:
        """True if the loss runs several forwards, the later ones fed with results of the earlier ones."""
        return False

    def stage(self, epoch: float) -> int:
        """The curriculum's stage at a (fractional) epoch."""
        return 0

    def last_stage(self) -> int:
        """The curriculum's final stage, whose behaviour `think` implements."""
        return 0

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        """Draw the row's params from `rng`, apply the stage, tokenise. Pure in its arguments.

        By default the row has the question, all steps and the answer, and the defaults of `Params`. An `epoch` of
        infinity is the end of training, by which `colar inspect` gets rows of the last stage.
        """
        return encode_row(template, example, self.Params(), "", rng.getrandbits(62))

    def encode_draws(
        self, template: Template, example: Example, rng: Random, epoch: float, n: int
    ) -> list[Row]:
        """n rows of one example, each with draws of its own; for n = 1 the row that `encode` returns."""
        return [self.encode(template, example, rng, epoch) for _ in range(n)]

    @abstractmethod
    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """Named terms, each (B,), averaged within the row and weighted: their sum is the row's loss.

        A term whose name starts with "_" is logged and is no part of the loss.
        """

    def positions(self, batch: Batch) -> Tensor:
        """Positions that the loss feeds for each row in all of its forwards, (B,), by which memory is planned."""
        return batch.positions()

    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The embeddings that training feeds in place of the chain, (B, K, D), and the number of chain tokens that
        each of them stands for, (B, K); 0 after a row's last one. By default the chain's tokens, one each.

        `colar inspect` compares them with a model's thoughts. Rows with `n_latents` are never compared, because these
        latents stand for no tokens; the default is then meaningless.
        """
        sizes_BT = length_mask(batch.chain_lengths, batch.chain_ids.shape[1]).long()
        return lm.embed(batch.chain_ids), sizes_BT

    def thinks_whole_chain(self, params: Any) -> bool:
        """True if the method learns to think the whole reference chain at these values; only then is it compared."""
        return True

    # Thinking

    def begin(self, lm: LatentLM, requests: Sequence[RequestView]) -> dict[str, Tensor]:
        """The method's own state of each request, before its first thought: columns (B, ...) on the model's device.

        Every step gets them in `ThinkState.begun`, a row each. A row must be a function of its request alone, of the
        same shape and dtype in every call, because rows that begin at different times share a batch.
        """
        return {}

    @abstractmethod
    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        """One step of inference, with the behaviour of the final stage; a pure function of the state's columns."""

    def check_params(self, params: Any) -> str | None:
        """Raise ValueError for values that cannot work; return a warning for values that were not trained."""
        return None

    # Serving

    def choices(self) -> Mapping[str, Sequence[Any]]:
        """The trained values of `Params` that a user should be offered, by name; `encode` draws among them.

        Reasoning efforts are values of the first name (`efforts_of`), which are ordered from most thinking to least.
        """
        return {}


class ScaledMethod(Method):
    """A method with embeddings of its own on the backbone's scale: its config has a `sigma_e`, null until measured."""

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
    """The values as text, ascending and without duplicates: "1, 1.5, 2"."""
    return ", ".join(f"{value:g}" for value in sorted(set(values)))


def warning_if_untrained(name: str, value: float, trained: Sequence[float]) -> str | None:
    """A warning if a per-request value is not among the trained ones."""
    if value in trained:
        return None
    return f"{name} {value:g} was not trained (trained: {listed(trained)}): expect less"


def encode_row(template: Template, example: Example, params: Any, speed_text: str, seed: int) -> Row:
    """The plain layout: question with its speed text, all steps, answer. ValueError names the example."""
    # Encoding fails for a text with tokens that the model lacks, and the error must name the example.
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
    """The steps with only the tokens at these positions of the chain, from 0; steps left empty are dropped."""
    counter = itertools.count()
    pruned = [[token for token in step if next(counter) in numbers] for step in steps]
    return [step for step in pruned if step]
