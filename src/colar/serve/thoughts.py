"""A thought as clients see it: its text, and the object THOUGHT of docs/serve.md.

thought                              text                     tokens
a token of a chain                   the token                itself
a latent chosen token by token       these tokens             these, in their order ("ordered": true)
any other latent                     its ceil(c) nearest      its nearest, nearest first ("ordered": false)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from colar.analysis.reference_chain import group_size
from colar.engine.request import Event
from colar.model.latent_lm import LatentLM
from colar.serve.nearest import Near, Nearest
from colar.serve.text import TokenText

NEIGHBOURS = 10
"""Nearest tokens that a THOUGHT has."""


class ThoughtReader:
    """Reads the thoughts of one answer, in their order. `detailed`: as THOUGHTs too, not as text alone."""

    def __init__(self, lm: LatentLM, nearest: Nearest, params: Any, detailed: bool) -> None:
        self.lm = lm
        self.nearest = nearest
        self.params = params
        self.detailed = detailed
        self.count = 0
        self._text = TokenText(lm.template)

    async def read(self, events: Sequence[Event]) -> list[tuple[str, dict[str, Any] | None]]:
        """Text of the next thoughts, and the THOUGHTs where details are wanted. Latents are read all at once."""
        chosen = [_chosen(event, self.lm.template.separator_id) for event in events]
        reading = [self._near(event, ids) for event, (ids, _) in zip(events, chosen, strict=True)]
        found = []
        for event, each, near in zip(events, chosen, await asyncio.gather(*reading), strict=True):
            found.append(self._thought(event, each, near))
        return found

    async def _near(self, event: Event, ids: list[int]) -> Near | None:
        """What a thought is near to; None where that is not looked at."""
        if event.embed is None or (ids and not self.detailed):
            return None
        size = group_size(self.params)
        return await self.nearest.near(event.embed, max(NEIGHBOURS, size) if self.detailed else size, ids)

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
            ids = near.ids[: group_size(self.params)]
            cosines, logprobs = list(near.cosines[: len(ids)]), [None] * len(ids)
            text = "".join(map(self.lm.template.token, ids))

        index = self.count
        self.count += 1
        if not self.detailed or near is None:
            return text, None
        tokens = []
        for token_id, cosine, logprob in zip(ids, cosines, logprobs, strict=True):
            tokens.append({**self._token(token_id, cosine), "logprob": _rounded(logprob)})
        neighbours = [
            self._token(*each) for each in zip(near.ids[:NEIGHBOURS], near.cosines[:NEIGHBOURS], strict=True)
        ]
        return text, {
            "index": index,
            "text": text,
            "kind": "token" if event.token_id >= 0 else "latent",
            "tokens": tokens,
            "ordered": ordered,
            "neighbours": neighbours,
            "sigma": _mean(event.info.get("sigma")),
            "stop_probability": _mean(event.info.get("stop_probability")),
            "compression_factor": getattr(self.params, "compression_factor", None),
        }

    def end(self) -> str:
        """What was kept back of the last tokens: bytes that have become no character."""
        return self._text.end()

    def _token(self, token_id: int, cosine: float | None) -> dict[str, Any]:
        return {"id": token_id, "text": self.lm.template.token(token_id), "cosine": _rounded(cosine)}


def _chosen(event: Event, separator_id: int) -> tuple[list[int], list[float | None]]:
    """The tokens that a thought was chosen as, and their log-probs where they are known; none for other latents."""
    if event.token_id >= 0:
        logp = event.info.get("logp")
        return [event.token_id], [None if logp is None else float(logp)]
    if "group_ids" not in event.info:
        return [], []
    ids: list[int] = []
    logprobs: list[float | None] = []
    pairs = zip(event.info["group_ids"].tolist(), event.info["group_logps"].tolist(), strict=True)
    for token_id, logprob in pairs:
        # Nothing stands behind a group's last token, and the separator that ends one is no part of it.
        if token_id >= 0 and token_id != separator_id:
            ids.append(token_id)
            logprobs.append(logprob)
    return ids, logprobs


def _mean(column: Tensor | None) -> float | None:
    return None if column is None else _rounded(column.float().mean().item())


def _rounded(value: float | None) -> float | None:
    """Five digits are more than anybody looks at, and a third of what is sent otherwise."""
    return None if value is None else float(f"{value:.5g}")
