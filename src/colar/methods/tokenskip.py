"""TokenSkip: a chain of the tokens that matter (Xia et al. 2025, "TokenSkip: Controllable Chain-of-Thought Compression
in LLMs", sections 3 and 4).

    question (Tokens kept: 1)   ###  t1 t2 t3 t4 t5 t6   ###  answer EOS
    question (Tokens kept: 0.5) ###  t1       t4    t6   ###  answer EOS

Every token of a chain gets an importance once, before training: its surprisal -log p(token | question, tokens before)
by the backbone itself. For a row a ratio r is drawn from `ratios`, the ceil(r L_r) tokens of highest importance among
its L_r are kept in their order, the prompt names r, and the row is trained as CoT is:

    L = mean over (kept tokens, ###, answer, EOS) of -log p(token)

At inference a request names its `ratio`, and the chain is thought in tokens.

Departures. The paper scores by LLMLingua-2; the backbone's own surprisal needs no other weights. The paper compresses
chains that the model itself wrote and answered right; here they are the data set's, as for every method. The paper
writes the ratio between EOS tokens; here it is in the prompt's speed slot, at ratio 1 as well. The paper's threshold is
a percentile of the scores; ours is a count, with earlier tokens first among equal scores. Ratios are drawn anew at each
epoch. Rows without scores (held-out ones) keep their whole chain, and their prompt names ratio 1.

Shape suffixes: B rows, N chain tokens, T positions, M positions of all rows.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import torch

from colar import checks, processes, progress
from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, NoParams, Row
from colar.methods.cot import Cot
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged
from colar.template.template import Template

ROWS = 32
"""Rows scored at once. Processes divide batches, not rows, so that a score is the same to the last bit."""
POSITIONS = 2**15
"""Most positions, padding included, that are scored at once; a batch of longer rows is scored in parts."""


@dataclass(frozen=True)
class TokenSkipParams:
    """Per-request values."""

    ratio: float = 0.5
    """Share of the chain's tokens that is to be written, above 0 and at most 1."""

    def __post_init__(self) -> None:
        checks.check_number("ratio", self.ratio, 1e-6, 1)


@dataclass(frozen=True)
class TokenSkipConfig:
    """Values for pruning chains in training."""

    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Ratios drawn from in training, each above 0 and at most 1 (the paper's)."""

    def __post_init__(self) -> None:
        checks.check_holds("method.ratios", len(self.ratios) > 0, self.ratios, "a list of numbers")
        for ratio in self.ratios:
            checks.check_number("each of method.ratios", ratio, 1e-6, 1)


@dataclass(frozen=True)
class ScoredExample(Example):
    """An example whose chain has been scored, with a number for each of its tokens."""

    importance: tuple[float, ...] = ()


class TokenSkip(Cot):
    name: ClassVar[str] = "tokenskip"
    Config: ClassVar[type] = TokenSkipConfig
    Params: ClassVar[type] = TokenSkipParams

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        """Score the chains, when the rows are iterated. A chain whose whole row exceeds the context gets no scores: the
        row keeps its whole chain, and is left out as too long."""
        rows = list(examples)
        # Checked with the whole chain, because the ratio that is drawn at each epoch may be 1.
        fits = [len(self.encode(lm.template, row, Random(0), 0.0)) <= lm.context for row in rows]
        # Before any update, so that the surprisal is that of the model to start from, in a resumed run as well.
        scores = iter(surprisal(lm, list(itertools.compress(rows, fits))))
        for row, is_scored in zip(rows, fits, strict=True):
            yield ScoredExample(**vars(row), importance=next(scores)) if is_scored else row

    def speed_text(self, params: TokenSkipParams) -> str:
        return f"(Tokens kept: {params.ratio:g})"

    def check_params(self, params: TokenSkipParams) -> str | None:
        return base.warning_if_untrained("ratio", params.ratio, self.config.ratios)

    def thinks_whole_chain(self, params: TokenSkipParams) -> bool:
        # For a question that was not scored, the tokens that a smaller share would have kept are not known.
        return params.ratio == 1

    def choices(self) -> Mapping[str, Sequence[Any]]:
        # A high ratio keeps most of the chain, so it comes first.
        return {"ratio": sorted(set(self.config.ratios), reverse=True)}

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        ratio = rng.choice(self.config.ratios)
        # Held-out rows were not scored: they keep their whole chain, and their prompt says so.
        scored = example if isinstance(example, ScoredExample) else None
        params = TokenSkipParams(ratio if scored else 1.0)
        row = base.encode_row(template, example, params, self.speed_text(params), rng.getrandbits(62))
        return replace(row, steps=prune(row.steps, scored.importance, ratio)) if scored else row


def prune(steps: list[list[int]], importance: tuple[float, ...], ratio: float) -> list[list[int]]:
    """The ceil(ratio * n) most important of a chain's n tokens, in order; steps left empty are dropped."""
    n = len(importance)
    assert n == sum(map(len, steps)), "a score for each token"
    # 0.55 x 100 is a rounding error above 55, which must not keep a 56th token.
    count = math.ceil(ratio * n - 1e-9)
    by_importance = sorted(range(n), key=lambda i: (-importance[i], i))
    return base.keep_tokens(steps, set(by_importance[:count]))


# Importance


@torch.no_grad()
def surprisal(lm: LatentLM, examples: Sequence[Example]) -> list[tuple[float, ...]]:
    """Surprisal in nats of each token of each example's chain; processes divide the batches."""
    batches = [examples[start : start + ROWS] for start in range(0, len(examples), ROWS)]

    def work(share: Sequence[Sequence[Example]]) -> Iterator[list[tuple[float, ...]]]:
        for part in progress.track(share, "score chains"):
            # No ratio in the prompt: one score serves all ratios.
            rows = [base.encode_row(lm.template, example, NoParams(), "", 0) for example in part]
            at_once = max(1, POSITIONS // max(map(len, rows)))
            scores: list[tuple[float, ...]] = []
            for start in range(0, len(rows), at_once):
                scores += _surprisal(lm, Batch.collate(rows[start : start + at_once]))
            yield scores

    # Dropout would make the scores random.
    with lm.evaluating():
        return list(itertools.chain.from_iterable(processes.split_and_gather(batches, work)))


def _surprisal(lm: LatentLM, batch: Batch) -> list[tuple[float, ...]]:
    ids_BT = ragged.pack(batch.question, batch.chain, multiple=ragged.PAD_TO)
    hidden_BTD = lm.hidden(lm.embed(ids_BT))
    hidden_BND = ragged.take_from(hidden_BTD, batch.question_lengths - 1, batch.chain_ids.shape[1])
    mask_BN = ragged.length_mask(batch.chain_lengths, batch.chain_ids.shape[1])
    hidden_MD = ragged.take_masked(hidden_BND, mask_BN)
    ids_M = devices.beside(ragged.take_masked(batch.chain_ids, mask_BN), hidden_MD)
    (logps_M,) = lm.reduce_logits(losses.chosen_logps, hidden_MD, ids_M)
    return [tuple(row.tolist()) for row in torch.split(-logps_M, batch.chain_lengths.tolist())]
