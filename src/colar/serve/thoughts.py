"""A thought as clients see it: its text, and the object THOUGHT of docs/serve.md.

thought                              text                     tokens
a token of a chain                   the token                itself
a latent chosen token by token       these tokens             these, in their order ("ordered": true)
any other latent                     its ceil(c) nearest      its nearest, nearest first ("ordered": false)

Of the nearest no more than `MOST_NEAREST` are shown: their texts are made between the requests of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from colar.engine.request import Event
from colar.look.chains import (
    NEIGHBOURS,
    chosen_tokens,
    rounded,
    thought_object,
    token_object,
)
from colar.look.reference_chain import group_size
from colar.model.latent_lm import LatentLM
from colar.serve.nearest import Near, Nearest
from colar.serve.text import TokenText

MOST_NEAREST = 32
"""Nearest tokens that a latent is read as, at most."""


class ThoughtReader:
    """Reads the thoughts of one answer, in their order. `detailed`: as THOUGHTs too, not as text alone."""

    def __init__(self, lm: LatentLM, nearest: Nearest, params: Any, detailed: bool) -> None:
        self.lm = lm
        self.nearest = nearest
        self.params = params
        self.detailed = detailed
        self.size = min(group_size(params), MOST_NEAREST)
        self.count = 0
        self._text = TokenText(lm.template)

    async def read(self, events: Sequence[Event]) -> list[tuple[str, dict[str, Any] | None]]:
        """Text of the next thoughts, and the THOUGHTs where details are wanted. Latents are read all at once."""
        separator_id = self.lm.template.separator_id
        chosen = [chosen_tokens(event.token_id, event.info, separator_id) for event in events]
        reading = [self._near(event, ids) for event, (ids, _) in zip(events, chosen, strict=True)]
        found = []
        for event, each, near in zip(events, chosen, await asyncio.gather(*reading), strict=True):
            found.append(self._thought(event, each, near))
        return found

    async def _near(self, event: Event, ids: list[int]) -> Near | None:
        """What a thought is near to; None where that is not looked at."""
        # Chosen tokens are their own text: without details nobody looks at their cosines.
        if event.embed is None or (ids and not self.detailed):
            return None
        k = max(NEIGHBOURS, self.size) if self.detailed else self.size
        return await self.nearest.near(event.embed, k, ids)

    def _thought(
        self, event: Event, chosen: tuple[list[int], list[float | None]], near: Near | None
    ) -> tuple[str, dict[str, Any] | None]:
        ids, logprobs = chosen
        ordered = bool(ids)
        if ordered:
            cosines: list[float | None] = list(near.asked) if near else [None] * len(ids)
            text = self._text.add(ids)
        else:
            assert near is not None, "latents are kept where they are to be read"
            ids = near.ids[: self.size]
            cosines, logprobs = list(near.cosines[: len(ids)]), [None] * len(ids)
            # One by one: nearest tokens have no order in which they could be decoded as a text.
            text = "".join(map(self.lm.template.token, ids))

        index = self.count
        self.count += 1
        if not self.detailed or near is None:
            return text, None
        template = self.lm.template
        tokens = []
        for token_id, cosine, logprob in zip(ids, cosines, logprobs, strict=True):
            tokens.append({**token_object(template, token_id, cosine), "logprob": rounded(logprob)})
        neighbours = []
        for token_id, cosine in zip(near.ids[:NEIGHBOURS], near.cosines[:NEIGHBOURS], strict=True):
            neighbours.append(token_object(template, token_id, cosine))
        is_token = event.token_id >= 0
        factor = getattr(self.params, "compression_factor", None)
        return text, thought_object(index, text, is_token, ordered, tokens, neighbours, event.info, factor)

    def end(self) -> str:
        """What was kept back of the last tokens: bytes that have become no character."""
        return self._text.end()
