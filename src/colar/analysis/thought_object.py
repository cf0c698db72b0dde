"""A thought as data: the object THOUGHT of docs/serve.md, which the chain viewer shows.

thought                              tokens
a token of a chain                   itself
a latent chosen token by token       these, in their order ("ordered": true)
any other latent                     its ceil(c) nearest, nearest first ("ordered": false)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from colar.prompts import Template

NEIGHBOURS = 10
"""Nearest tokens that a THOUGHT has."""


def chosen_tokens(
    token_id: int, info: Mapping[str, Tensor], separator_id: int
) -> tuple[list[int], list[float | None]]:
    """The tokens that a thought was chosen as, and their log-probs where they are known; none for other latents."""
    if token_id >= 0:
        logp = info.get("logp")
        return [token_id], [None if logp is None else float(logp)]
    if "group_ids" not in info:
        return [], []
    ids: list[int] = []
    logprobs: list[float | None] = []
    pairs = zip(info["group_ids"].tolist(), info["group_logps"].tolist(), strict=True)
    for chosen_id, logprob in pairs:
        # Nothing stands behind a group's last token, and the separator that ends one is no part of it.
        if chosen_id >= 0 and chosen_id != separator_id:
            ids.append(chosen_id)
            logprobs.append(logprob)
    return ids, logprobs


def token_object(template: Template, token_id: int, cosine: float | None) -> dict[str, Any]:
    return {"id": token_id, "text": template.token(token_id), "cosine": rounded(cosine)}


def thought_object(
    index: int,
    text: str,
    is_token: bool,
    ordered: bool,
    tokens: Sequence[Mapping[str, Any]],
    neighbours: Sequence[Mapping[str, Any]],
    info: Mapping[str, Tensor],
    compression_factor: float | None,
) -> dict[str, Any]:
    """The object, from what was read of the thought and what the method says of it."""
    return {
        "index": index,
        "text": text,
        "kind": "token" if is_token else "latent",
        "tokens": list(tokens),
        "ordered": ordered,
        "neighbours": list(neighbours),
        "sigma": _mean(info.get("sigma")),
        "stop_probability": _mean(info.get("stop_probability")),
        "compression_factor": compression_factor,
    }


def rounded(value: float | None) -> float | None:
    """Five digits are more than anybody looks at, and a third of what is sent otherwise."""
    return None if value is None else float(f"{value:.5g}")


def _mean(column: Tensor | None) -> float | None:
    return None if column is None else rounded(column.float().mean().item())
