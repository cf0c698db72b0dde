"""Thoughts of served answers, read as `look/thought.py` has them.

Shape suffix: D width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colar.engine.completion import Event
from colar.look.thought import Neighbour, ThoughtReader, vocabulary_of
from colar.model.latent_lm import LatentLM


class NearestTokens:
    """The tokens nearest to embeddings, for many callers at once.

    One embedding costs as much as an LM head. All thoughts of one step are therefore computed together. `run` computes
    in another thread; the model's embeddings must not change.
    """

    def __init__(self, lm: LatentLM, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.vocabulary = vocabulary_of(lm)
        self.run = run
        self._wanted: list[tuple[Tensor, int]] = []
        self._task: asyncio.Task[list[list[Neighbour]]] | None = None

    async def of(self, embed_D: Tensor, k: int) -> list[Neighbour]:
        """The `k` nearest tokens of an embedding."""
        # A task begins after all callers that are ready now, which are those of the same step.
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        task, place = self._task, len(self._wanted)
        self._wanted.append((embed_D, k))
        # Shielded: one caller may leave, the others still wait.
        return (await asyncio.shield(task))[place]

    async def _work(self) -> list[list[Neighbour]]:
        wanted, self._wanted, self._task = self._wanted, [], None
        embeds_KD = torch.stack([embed_D for embed_D, _ in wanted])
        most = max(k for _, k in wanted)
        neighbours = await self.run(partial(self.vocabulary.nearest, embeds_KD, most))
        return [near[:k] for near, (_, k) in zip(neighbours, wanted, strict=True)]

    async def read(self, reader: ThoughtReader, event: Event) -> dict[str, Any]:
        """The THOUGHT of an event, the next one of its answer."""
        n = reader.wanted(event.token_id, event.info)
        near: list[Neighbour] = []
        if n:
            assert event.embed is not None, "latents that are read are kept"
            near = await self.of(event.embed, n)
        return reader.read(event.token_id, event.info, near)
