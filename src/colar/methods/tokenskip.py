"""TokenSkip: a chain of the tokens that matter (Xia et al. 2025, "TokenSkip: Controllable Chain-of-Thought Compression
in LLMs", sections 3 and 4).

    question (Tokens kept: 1)   ###  t1 t2 t3 t4 t5 t6   ###  answer EOS
    question (Tokens kept: 0.5) ###  t1       t4    t6   ###  answer EOS

Every token of a chain gets an importance once, before training: a number; the higher, the longer it stays. For a row a
ratio r is drawn from `ratios`, the ceil(r L_r) most important of its L_r tokens are kept in their order, the prompt
names r, and the row is trained as CoT is:

    L = mean over (kept tokens, ###, answer, EOS) of -log p(token)

At inference a request names its `ratio`, and the chain is thought in tokens.

Departures. The paper scores by LLMLingua-2 (`scorer: llmlingua2`); the default is the backbone's own surprisal, which
needs no other weights. It compresses chains that the model itself wrote and answered right; here they are the data
set's, as for every method. It writes the ratio between EOS tokens; here it is in the prompt's speed slot, at ratio 1
as well. Its threshold is a percentile of the scores; ours counts, earlier tokens first where scores are equal. Ratios
are drawn anew at each epoch. Rows that `prepare` has not seen (held-out ones) keep their whole chain and say so: their
ratio is 1.

Importance, by `scorer`:

    surprisal     -log p(token | question, tokens before) by the backbone itself, before it is trained
    llmlingua2    P(keep) by a token classifier trained for it (Pan et al. 2024, "LLMLingua-2"), laid over the chain's
                  characters and averaged over those of each token: the two tokenizers cut differently

Shape suffixes: B rows, N chain tokens, M positions, V vocabulary, W windows, T positions of the classifier.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer

from colar import checks, processes, progress
from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, NoParams, Row
from colar.methods.cot import Cot
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template

Scorer = Literal["surprisal", "llmlingua2"]
ROWS = 32
"""Rows that are scored at once. Processes divide batches, not rows: a score is the same to the last bit."""
KEEP = 1
"""LLMLingua-2's label of a token that stays."""

Scores = tuple[float, ...]
"""A number for each token of a chain."""


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
    scorer: Scorer = "surprisal"
    """"surprisal" of the backbone before training, or "llmlingua2" (the paper's), whose weights must be loadable."""
    scorer_model: str = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
    """Hub id or folder of llmlingua2's token classifier; unused by surprisal."""

    def __post_init__(self) -> None:
        if not isinstance(self.ratios, list | tuple) or not self.ratios:
            raise ValueError(f"method.ratios must be a list of numbers, got {self.ratios!r}")
        for ratio in self.ratios:
            TokenSkipParams(ratio)
        checks.check_choice("method.scorer", self.scorer, get_args(Scorer))


@dataclass(frozen=True)
class ScoredExample(Example):
    """An example whose chain has been scored, a number for each of its tokens."""

    importance: tuple[float, ...] = ()


class TokenSkip(Cot):
    name: ClassVar[str] = "tokenskip"
    draws: ClassVar[bool] = True
    Config: ClassVar[type] = TokenSkipConfig
    Params: ClassVar[type] = TokenSkipParams

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        rows = list(examples)
        # Before any update: the surprisal is that of the model to start from, in a resumed run as well.
        if self.config.scorer == "surprisal":
            scores = surprisal(lm, rows)
        else:
            scores = LLMLingua2(self.config.scorer_model, lm.device).scores(lm.template, rows)
        scored = []
        for row, values in zip(rows, scores, strict=True):
            scored.append(ScoredExample(**vars(row), importance=tuple(values)))
        return scored

    def prompt(self, params: TokenSkipParams) -> str:
        return f"(Tokens kept: {params.ratio:g})"

    def trained(self, params: TokenSkipParams) -> str | None:
        if params.ratio in self.config.ratios:
            return None
        known = ", ".join(f"{ratio:g}" for ratio in sorted(set(self.config.ratios)))
        return f"ratio {params.ratio:g} was not trained (trained: {known}): expect less"

    def says_chain(self, params: TokenSkipParams) -> bool:
        # Which tokens a smaller share would have kept is not known of a question that was not scored.
        return params.ratio == 1

    def choices(self) -> Mapping[str, Sequence[Any]]:
        return {"ratio": sorted(set(self.config.ratios))}

    def efforts(self) -> Mapping[str, Mapping[str, Any]]:
        # A high ratio keeps most of the chain.
        return base.efforts_over("ratio", sorted(set(self.config.ratios), reverse=True))

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        ratio = rng.choice(self.config.ratios)
        scored = isinstance(example, ScoredExample)
        params = TokenSkipParams(ratio if scored else 1.0)
        row = base.encode_row(template, example, params, self.prompt(params), rng.getrandbits(62))
        # Held-out rows were not scored: they keep their whole chain, and their prompt says so.
        if not isinstance(example, ScoredExample):
            return row
        return replace(row, steps=prune(row.steps, example.importance, ratio))


def prune(steps: list[list[int]], importance: tuple[float, ...], ratio: float) -> list[list[int]]:
    """The ceil(ratio * n) most important of a chain's n tokens, in order; a step that has lost all is gone."""
    n = len(importance)
    assert n == sum(map(len, steps)), "a score for each token"
    # 0.6 x 5 is a rounding error above 3: it must not keep a fourth token.
    count = math.ceil(ratio * n - 1e-9)
    by_importance = sorted(range(n), key=lambda i: (-importance[i], i))
    kept = set(by_importance[:count])
    pruned = []
    first = 0
    for step in steps:
        rest = [token for i, token in enumerate(step, first) if i in kept]
        first += len(step)
        if rest:
            pruned.append(rest)
    return pruned


# Importance


def in_batches(
    examples: Sequence[Example], score: Callable[[Sequence[Example]], Iterable[Scores]]
) -> list[Scores]:
    """The scores of all examples, by a function that scores a batch; processes divide the batches."""
    batches = [examples[start : start + ROWS] for start in range(0, len(examples), ROWS)]

    def work(share: Sequence[Sequence[Example]]) -> Iterator[list[Scores]]:
        for batch in progress.track(share, "score chains"):
            yield list(score(batch))

    scored: list[Scores] = []
    for found in processes.split(batches, work):
        scored += found
    return scored


@torch.no_grad()
def surprisal(lm: LatentLM, examples: Sequence[Example]) -> list[Scores]:
    """Surprisal in nats of each token of each example's chain."""
    # Dropout would make the scores a matter of chance.
    was_training = lm.training
    lm.eval()

    def score(part: Sequence[Example]) -> Iterator[Scores]:
        # No ratio in the prompt: one score serves all ratios.
        batch = Batch.collate([base.encode_row(lm.template, e, NoParams(), "", 0) for e in part])
        return _surprisal(lm, {k: v.to(lm.device) for k, v in batch.tensors().items()})

    scored = in_batches(examples, score)
    lm.train(was_training)
    return scored


def _surprisal(lm: LatentLM, tensors: dict[str, Tensor]) -> Iterator[Scores]:
    batch = Batch.from_tensors(tensors)
    question = (batch.question_ids, batch.question_lengths)
    ids_BT = ragged.pack(question, (batch.chain_ids, batch.chain_lengths), multiple=ragged.PAD_TO)
    hidden_BND = ragged.shift(lm.hidden(lm.embed(ids_BT)), question[1] - 1, batch.chain_ids.shape[1])
    mask_BN = ragged.length_mask(batch.chain_lengths, batch.chain_ids.shape[1])
    (logps_M,) = lm.reduce_logits(losses.chosen_logps, hidden_BND[mask_BN], batch.chain_ids[mask_BN])
    for row in torch.split(-logps_M, batch.chain_lengths.tolist()):
        yield tuple(row.tolist())


class LLMLingua2:
    """A token classifier, by Hub id or folder. ValueError says why where it cannot be loaded."""

    def __init__(self, name: str, device: torch.device) -> None:
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name)
            self.model: Any = AutoModelForTokenClassification.from_pretrained(name).to(device).eval()
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"method.scorer llmlingua2 cannot load {name!r} ({str(error).splitlines()[0]}); name a folder that "
                "holds it in method.scorer_model, or use scorer surprisal"
            ) from error
        if not self.tokenizer.is_fast or self.model.config.num_labels != 2:
            raise ValueError(
                f"method.scorer_model {name!r} must have a fast tokenizer and the two labels drop and keep"
            )

    def scores(self, template: Template, examples: Sequence[Example]) -> list[Scores]:
        """P(keep) of each token of each example's chain."""

        def score(part: Sequence[Example]) -> Iterator[Scores]:
            chains = [chain_spans(template, example) for example in part]
            # A chain without a token has no text to read.
            texts = [text for text, spans in chains if spans]
            keeps = iter(self.characters(texts) if texts else [])
            for _, spans in chains:
                keep = next(keeps) if spans else []
                yield tuple(_mean(keep[first:end]) for first, end in spans)

        return in_batches(examples, score)

    @torch.no_grad()
    def characters(self, texts: Sequence[str]) -> list[list[float | None]]:
        """P(keep) of each character of each text; None where no token of the classifier lies (white space)."""
        # A chain may be longer than the classifier's context: it is read in windows. XLM-RoBERTa keeps two positions.
        longest = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings - 2)
        encoded = self.tokenizer(
            list(texts), max_length=longest, truncation=True, return_overflowing_tokens=True,
            return_offsets_mapping=True, return_tensors="pt", padding=True,
        )  # fmt: skip
        ids_WT, mask_WT = (encoded[key].to(self.model.device) for key in ("input_ids", "attention_mask"))
        probs_WT = self.model(input_ids=ids_WT, attention_mask=mask_WT).logits.softmax(-1)[..., KEEP]
        found: list[list[float | None]] = [[None] * len(text) for text in texts]
        # A window belongs to one text; padding covers no characters.
        text_of_window = encoded["overflow_to_sample_mapping"].tolist()
        for i, window, offsets in zip(
            text_of_window, probs_WT.tolist(), encoded["offset_mapping"].tolist(), strict=True
        ):
            for prob, (first, end) in zip(window, offsets, strict=True):
                found[i][first:end] = [prob] * (end - first)
        return found


def chain_spans(template: Template, example: Example) -> tuple[str, list[tuple[int, int]]]:
    """The chain's text, and the characters [first, end) of it that each of our tokens covers."""
    text = ""
    spans: list[tuple[int, int]] = []
    for i, (step, ids) in enumerate(zip(example.steps, template.steps(example.steps), strict=True)):
        piece = (template.config.step_joiner if i else "") + step
        if not template.tokenizer.is_fast:
            raise ValueError("method.scorer llmlingua2 needs a backbone with a fast tokenizer; use surprisal")
        # Characters that each of our own tokens covers: the classifier's tokens are cut elsewhere.
        encoded = template.tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False)
        # A step that spells a control token has other ids, of which only the lengths are known.
        offsets = encoded.offsets if encoded.ids == ids else _offsets(template, ids, len(piece))
        spans += [(len(text) + first, len(text) + end) for first, end in offsets]
        text += piece
    return text, spans


def _offsets(template: Template, ids: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Characters [first, end) of each token of a text of this length, by the tokens' own texts."""
    ends = [0]
    for token_id in ids:
        ends.append(min(length, ends[-1] + len(template.token(token_id))))
    return list(itertools.pairwise(ends))


def _mean(values: Sequence[float | None]) -> float:
    # A token of white space alone has no score: at 0 it is the first to go.
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
