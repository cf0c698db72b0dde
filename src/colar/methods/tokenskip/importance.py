"""How much each token of a chain matters: what TokenSkip prunes by. A number a token; the higher, the longer it stays.

    surprisal     -log p(token | question, tokens before) by the backbone itself, before it is trained
    llmlingua2    P(keep) by a token classifier trained for it (Pan et al. 2024, "LLMLingua-2"), laid over the chain's
                  characters and averaged over those of each token: the two tokenizers cut differently

Shape suffixes: B rows, N chain tokens, M positions, V vocabulary, W windows, T positions of the classifier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer

from colar import processes, progress
from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, NoParams
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template

ROWS = 32
"""Rows that are scored at once. Processes divide batches, not rows: a score is the same to the last bit."""
KEEP = 1
"""LLMLingua-2's label of a token that stays."""

Scores = tuple[float, ...]
"""A number for each token of a chain."""


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
