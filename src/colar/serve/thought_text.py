"""Thoughts of served answers as text, read as `look/thought.py` has them.

Shape suffixes: K embeddings, V vocabulary, D width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colar.engine.request import Event
from colar.look.thought import MOST_TOKENS, NEIGHBOURS, chosen_tokens, group_size, thought_object
from colar.model.latent_lm import LatentLM
from colar.template.token_text import TokenText


@dataclass(frozen=True)
class Near:
    """One embedding's nearest tokens, best first, and its cosines with tokens that were requested."""

    ids: list[int]
    cosines: list[float]
    requested: list[float]


Wanted = tuple[Tensor, int, list[int]]
"""An embedding (D,), how many nearest tokens, and the tokens whose cosines are requested."""


class Nearest:
    """The tokens nearest to embeddings by cosine, as `look/thought.py` has them, for many callers at once.

    One embedding costs as much as an LM head. All thoughts of one step are therefore computed together. `run` computes
    in another thread; the model's embeddings must not change.
    """

    def __init__(self, lm: LatentLM, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.lm = lm
        self.run = run
        self._norms_V: Tensor | None = None
        self._wanted: list[Wanted] = []
        self._task: asyncio.Task[list[Near]] | None = None

    async def near(self, embed_D: Tensor, k: int, ids: list[int]) -> Near:
        """The `k` nearest tokens of an embedding, and its cosine with each of `ids`."""
        # A task begins after all callers that are ready now, which are those of the same step.
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        task, place = self._task, len(self._wanted)
        self._wanted.append((embed_D, k, ids))
        # Shielded: one caller may leave, the others still wait.
        return (await asyncio.shield(task))[place]

    async def _work(self) -> list[Near]:
        wanted, self._wanted, self._task = self._wanted, [], None
        found: list[Near] = await self.run(partial(self._find, wanted))
        return found

    @torch.no_grad()
    def _find(self, wanted: Sequence[Wanted]) -> list[Near]:
        vocabulary_VD = self.lm.embedding_table()
        if self._norms_V is None:
            norms_V = torch.linalg.vector_norm(vocabulary_VD, dim=-1, dtype=torch.float32)
            self._norms_V = norms_V.clamp(min=1e-12)
        latents_KD = torch.stack([embed_D.float() for embed_D, _, _ in wanted])
        latents_KD = torch.nn.functional.normalize(latents_KD, dim=-1)
        # Lengths are divided out afterwards: a normalised copy of the vocabulary would need as much memory again.
        cosines_KV = (latents_KD.to(vocabulary_VD.dtype) @ vocabulary_VD.T).float() / self._norms_V
        most = max(k for _, k, _ in wanted)
        best = cosines_KV.topk(min(most, cosines_KV.shape[1]), dim=-1)
        found = []
        for row, (_, k, ids) in enumerate(wanted):
            nearest, cosines = best.indices[row, :k].tolist(), best.values[row, :k].tolist()
            found.append(Near(nearest, cosines, cosines_KV[row, ids].tolist()))
        return found


class ThoughtReader:
    """Reads the thoughts of one answer, in their order. `detailed`: as THOUGHTs too, not as text alone."""

    def __init__(self, lm: LatentLM, nearest: Nearest, params: Any, detailed: bool) -> None:
        self.lm = lm
        self.nearest = nearest
        self.detailed = detailed
        self.size = min(group_size(params), MOST_TOKENS)
        self.count = 0
        self._text = TokenText(lm.template)

    async def read(self, event: Event) -> tuple[str, dict[str, Any] | None]:
        """The text of the next thought, and the THOUGHT if details are wanted."""
        template = self.lm.template
        ids, _ = chosen_tokens(event.token_id, event.info, template.closing_id)
        near = None
        # Chosen tokens are their own text: without details their cosines are not needed.
        if event.embed is not None and (self.detailed or not ids):
            k = max(NEIGHBOURS, self.size) if self.detailed else self.size
            near = await self.nearest.near(event.embed, k, ids)
        if ids:
            text = self._text.add(ids)
        else:
            assert near is not None, "latents that are read are kept"
            # One by one: nearest tokens have no order in which they could be decoded as a text.
            text = "".join(map(template.token, near.ids[: self.size]))
        index = self.count
        self.count += 1
        if not self.detailed or near is None:
            return text, None
        pairs = list(zip(near.ids, near.cosines, strict=True))
        cosines = dict(zip(ids, near.requested, strict=True))
        thought = thought_object(template, index, event.token_id, event.info, pairs, self.size, cosines)
        # A character may be several tokens, of several thoughts.
        return text, {**thought, "text": text}

    def end(self) -> str:
        """The rest of the last tokens: bytes that have become no character."""
        return self._text.end()
