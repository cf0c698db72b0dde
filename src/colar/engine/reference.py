"""The oracle: one request, no cache, no batch, every step a full forward over all that was fed so far.

Read this first: it is what thinking means. `engine.py` must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from colar.engine.request import Completion, Event, Request, fold, prompt_ids
from colar.methods.base import Method, ThinkState, param_columns
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens, token_logps


def complete(lm: LatentLM, method: Method, request: Request) -> Completion:
    """Answer one request."""
    (completion,) = fold(lm, stream(lm, method, request))
    return completion


@torch.no_grad()
def stream(lm: LatentLM, method: Method, request: Request) -> Iterator[Event]:
    """The events of one request, in order."""
    decoding = request.decoding
    fed = lm.embed(torch.tensor([prompt_ids(lm, method, request)], device=lm.device))
    begun = method.begin(lm, [request])
    n_thoughts = 0

    thinking_cut = True
    while n_thoughts < decoding.max_latents:
        last = lm.hidden(fed)[:, -1]
        thought = method.think(lm, think_state(lm, request, last, n_thoughts, begun))
        kept = request.keep_latents
        info = {name: column[0] for name, column in thought.info.items()} if kept else {}
        if thought.done.item():
            thinking_cut = False
            if kept:
                yield Event(request, "stop", info=info)
            break
        fed = torch.cat([fed, thought.embeds[:, None]], dim=1)
        n_thoughts += 1
        yield Event(request, "thought", int(thought.token_ids), thought.embeds[0] if kept else None, info)

    token_id, n_tokens = lm.template.separator_id, 0
    while n_tokens < decoding.max_completion_length and token_id != lm.template.eos_id:
        fed = torch.cat([fed, lm.embed(torch.tensor([[token_id]], device=lm.device))], dim=1)
        logits = lm.logits(lm.hidden(fed)[:, -1])
        chosen = sample(logits, request, n_thoughts + 1 + n_tokens)
        token_id, n_tokens = int(chosen), n_tokens + 1
        logps = token_logps(logits, torch.tensor([request.decoding.temperature], device=lm.device), chosen)
        yield Event(request, "token", token_id, info={"logp": logps[0]} if request.keep_latents else {})

    reason = "stop" if token_id == lm.template.eos_id else "length"
    yield Event(request, "finished", reason=reason, truncated=thinking_cut or reason == "length")


def think_state(
    lm: LatentLM, request: Request, last: Tensor, step: int, begun: dict[str, Tensor] | None = None
) -> ThinkState:
    """The one-row state after `step` forward passes beyond the question's; `begun` is the method's own."""

    def real(value: float) -> Tensor:
        return torch.tensor([value], device=lm.device, dtype=torch.float64)

    def whole(value: int) -> Tensor:
        return torch.tensor([value], device=lm.device)

    decoding = request.decoding
    columns = param_columns([request.params])
    return ThinkState(
        hidden=last,
        step=whole(step),
        params={name: column.to(lm.device) for name, column in columns.items()},
        temperature=real(decoding.temperature),
        top_p=real(decoding.top_p),
        latent_temperature=real(decoding.latent_temperature),
        seed=whole(request.seed),
        sample=whole(request.sample),
        make_logits=lm.logits,
        begun=begun or {},
    )


def sample(logits: Tensor, request: Request, step: int) -> Tensor:
    """An answer token by the request's own temperature, top-p and noise."""
    seed = torch.tensor([request.seed], device=logits.device)
    uniform = noise.uniform(noise.keys(seed, request.sample, step, noise.TOKEN), 1)[:, 0]
    decoding = request.decoding
    temperature = torch.tensor([decoding.temperature], device=logits.device, dtype=torch.float64)
    top_p = torch.tensor([decoding.top_p], device=logits.device, dtype=torch.float64)
    return sample_tokens(logits, temperature, top_p, uniform)
