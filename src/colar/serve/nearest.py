"""The tokens nearest to embeddings, for many callers at once.

As `look/retrieval.py` finds them, by cosine over the whole vocabulary. That costs as much as a step's LM head, so
what several callers ask for while one question is computed is computed together, beside the event loop.

Shape suffixes: K embeddings, V vocabulary, D width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colar.model.latent_lm import LatentLM

CHUNK = 8192
"""Rows of the vocabulary whose lengths are measured at once."""
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Has another thread do something, and waits for its result."""


@dataclass(frozen=True)
class Near:
    """One embedding's nearest tokens, best first, and its cosines with tokens that were asked for."""

    ids: list[int]
    cosines: list[float]
    asked: list[float]


@dataclass(frozen=True)
class _Question:
    embed_D: Tensor
    k: int
    ids: list[int]
    answer: asyncio.Future[Near]


class Nearest:
    """Answers `near` for one model, whose embeddings stay as they are. `run` computes in another thread."""

    def __init__(self, lm: LatentLM, run: Run) -> None:
        self.lm = lm
        self.run = run
        self._norms_V: Tensor | None = None
        self._questions: list[_Question] = []
        self._task: asyncio.Task[None] | None = None

    async def near(self, embed_D: Tensor, k: int, ids: list[int]) -> Near:
        """The `k` nearest tokens of an embedding, and its cosine with each of `ids`."""
        answer: asyncio.Future[Near] = asyncio.get_running_loop().create_future()
        self._questions.append(_Question(embed_D, k, ids, answer))
        # One task at a time: questions that come while it computes are its next batch.
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Answer all that is there, until nothing is."""
        try:
            while self._questions:
                questions, self._questions = self._questions, []
                try:
                    found = await self.run(partial(self._find, questions))
                except Exception as error:
                    _tell(questions, error)
                    continue
                for question, near in zip(questions, found, strict=True):
                    # A caller who was cancelled waits no more.
                    if not question.answer.done():
                        question.answer.set_result(near)
        finally:
            # Nothing is awaited between the last look at the questions and here, so none is left behind.
            self._task = None

    @torch.no_grad()
    def _find(self, questions: list[_Question]) -> list[Near]:
        vocabulary_VD = self.lm.vocabulary()
        norms_V = self._norms(vocabulary_VD)
        latents_KD = torch.stack([question.embed_D.float() for question in questions])
        latents_KD = torch.nn.functional.normalize(latents_KD, dim=-1)
        # Lengths are divided out afterwards: a normalised copy of the vocabulary would need as much memory again.
        products_KV = (latents_KD.to(vocabulary_VD.dtype) @ vocabulary_VD.T).float()
        cosines_KV = products_KV / norms_V
        most = max(question.k for question in questions)
        best = cosines_KV.topk(min(most, cosines_KV.shape[1]), dim=-1)
        ids, cosines = best.indices.tolist(), best.values.tolist()
        found = []
        for row, question in enumerate(questions):
            asked = cosines_KV[row, question.ids].tolist()
            found.append(Near(ids[row][: question.k], cosines[row][: question.k], asked))
        return found

    def _norms(self, vocabulary_VD: Tensor) -> Tensor:
        """The length of every embedding, measured once."""
        if self._norms_V is None:
            parts = [chunk.float().norm(dim=-1) for chunk in torch.split(vocabulary_VD, CHUNK)]
            self._norms_V = torch.cat(parts).clamp(min=1e-12)
        return self._norms_V


def _tell(questions: list[_Question], error: Exception) -> None:
    """Hand an error to all who wait."""
    for question in questions:
        if not question.answer.done():
            question.answer.set_exception(error)
