"""Thoughts of served answers as text, read as `look/thought.py` has them.

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
from colar.look.thought import (
    NEIGHBOURS,
    Neighbour,
    chosen_tokens,
    shown_size,
    thought_object,
    vocabulary_of,
)
from colar.model.latent_lm import LatentLM
from colar.template.token_text import TokenText


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


class ThoughtReader:
    """Reads the thoughts of one answer, in their order. `detailed`: as THOUGHTs too, not as text alone."""

    def __init__(self, lm: LatentLM, nearest: NearestTokens, params: Any, detailed: bool) -> None:
        self.lm = lm
        self.nearest = nearest
        self.detailed = detailed
        self.size = shown_size(params)
        self.count = 0
        self._text = TokenText(lm.template)

    async def read(self, event: Event) -> tuple[str, dict[str, Any] | None]:
        """The text of the next thought, and the THOUGHT if details are wanted."""
        template = self.lm.template
        ids, _ = chosen_tokens(event.token_id, event.info, template.closing_id)
        near = None
        # Chosen tokens are their own text: without details their neighbours are not needed.
        if event.embed is not None and (self.detailed or not ids):
            k = max(NEIGHBOURS, self.size) if self.detailed else self.size
            near = await self.nearest.of(event.embed, k)
        if ids:
            text = self._text.add(ids)
        else:
            assert near is not None, "latents that are read are kept"
            # One by one: nearest tokens have no order in which they could be decoded as a text.
            text = "".join(template.token(each.token_id) for each in near[: self.size])
        index = self.count
        self.count += 1
        if not self.detailed or near is None:
            return text, None
        thought = thought_object(template, index, event.token_id, event.info, near, self.size)
        # A character may be several tokens, of several thoughts.
        return text, {**thought, "text": text}

    def end(self) -> str:
        """The rest of the last tokens: bytes that have become no character."""
        return self._text.end()
