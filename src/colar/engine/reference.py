"""The reference: one request, no cache, no batch. Every step is a full forward over all embeddings fed so far.

Read this first: it defines what thinking means here. The engine (`engine.py`) must give the same tokens for any
batch; tests/test_engine.py compares the two.

    fed       q  q  q ###   l1   l2  ###   a1   a2           embeddings, one a position
                       |     |    |    |    |    |
    chosen            l1    l2  stop  a1   a2   EOS          from the hidden state of the last position

The method chooses the thoughts (l: latents, or tokens of a chain) and when to stop. Then the separator ### is fed,
and the LM head chooses the answer (a).

Shape suffixes: T positions fed, D width; 1 is the only row.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from colar.engine.completion import Completion, Event, completions_of
from colar.engine.request import Request, prompt_ids
from colar.methods.base import Method
from colar.methods.thinking import ThinkState
from colar.model.latent_lm import LatentLM
from colar.ops.sampling import sample_tokens, token_logps


def complete(lm: LatentLM, method: Method, request: Request) -> Completion:
    """Answer one request."""
    (completion,) = completions_of(lm, stream(lm, method, request))
    return completion


@torch.no_grad()
def stream(lm: LatentLM, method: Method, request: Request) -> Iterator[Event]:
    """The events of one request, in order."""
    question_ids = prompt_ids(lm, method, request)
    begun = method.begin(lm, [request])
    fed_1TD = embed(lm, question_ids)

    # Thinking: each thought is fed back until the method stops. Thinking that would continue at the limit is cut.
    cut = False
    for step in itertools.count():
        state = think_state(lm, request, begun, fed_1TD, step)
        thought = method.think(lm, state)
        info = {name: column[0] for name, column in thought.info.items()} if request.keep_latents else {}
        if thought.done.item():
            yield Event(request, "stop", info=info)
            break
        if step == request.decoding.max_latents:
            cut = True
            break
        # A latent may have a wider dtype than the model.
        fed_1TD = torch.cat([fed_1TD, thought.embeds[:, None].to(fed_1TD.dtype)], dim=1)
        embed_D = thought.embeds[0] if request.keep_latents else None
        yield Event(request, "thought", int(thought.token_ids), embed=embed_D, info=info)

    # Answering: the separator is fed, whether the method or the limit ended the thinking, then each chosen token.
    token_id = lm.template.separator_id
    reason = "length"
    for _ in range(request.decoding.max_completion_length):
        fed_1TD = torch.cat([fed_1TD, embed(lm, [token_id])], dim=1)
        step = fed_1TD.shape[1] - len(question_ids)
        state = think_state(lm, request, begun, fed_1TD, step)
        token_1 = sample_tokens(state.logits(), state.temperature, state.top_p, state.uniform())
        logp_1 = token_logps(state.logits(), state.temperature, token_1)
        token_id = int(token_1)
        yield Event(request, "token", token_id, info={"logp": logp_1[0]} if request.keep_latents else {})
        if token_id == lm.template.eos_id:
            reason = "stop"
            break

    yield Event(request, "finished", reason=reason, truncated=cut or reason == "length")


def embed(lm: LatentLM, ids: list[int]) -> Tensor:
    """Ids as embeddings, (1, T, D)."""
    return lm.embed(torch.tensor([ids], device=lm.device))


def think_state(
    lm: LatentLM, request: Request, begun: dict[str, Tensor], fed_1TD: Tensor, step: int
) -> ThinkState:
    """Run the model over all embeddings fed. Returns the state of the row, `step` embeddings after the question."""
    step_1 = torch.tensor([step], device=fed_1TD.device)
    return ThinkState.of([request], lm.hidden(fed_1TD)[:, -1], step_1, lm.logits, begun)
