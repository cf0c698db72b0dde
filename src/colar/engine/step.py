"""Choose the next input of every running row; say what happened as events: thoughts, stops, tokens.

Shape suffixes: N running, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colar.engine.request import Event, Request
from colar.engine.running import Running
from colar.methods.base import Method, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens, token_logps


def choose(lm: LatentLM, method: Method, running: Running) -> tuple[Tensor, list[tuple[int, Event]]]:
    """Choose the next input of every row, (N, D); also return each event with its row."""
    embeds_ND = torch.zeros_like(running.hidden_ND)
    broken_N = ~torch.isfinite(running.hidden_ND).all(-1)
    events = [(i, _failed(running.request(i))) for i in broken_N.nonzero()[:, 0].tolist()]
    thinking = (running.thinking_N & ~broken_N).nonzero()[:, 0]
    answering = (~running.thinking_N & ~broken_N).nonzero()[:, 0]
    logits = Logits(lm, running, together=bool(len(thinking) and len(answering)))
    if len(thinking):
        events += _think(method, running, thinking, logits, embeds_ND)
    if len(answering):
        events += _answer(running, answering, logits, embeds_ND)
    return embeds_ND, events


def _think(
    method: Method, running: Running, at: Tensor, logits: Logits, embeds_ND: Tensor
) -> list[tuple[int, Event]]:
    """Rows `at` take a thinking step; those that are done, or at their limit, get the separator."""
    cut_N = running.n_thoughts_N[at] >= running.max_latents_N[at]
    thought = method.think(logits.lm, running.think_state(at, lambda _: logits(at)))
    done_N = thought.done | cut_N
    separator_D = logits.lm.embed(torch.tensor(logits.lm.template.separator_id, device=at.device))
    embeds_ND[at] = torch.where(done_N[:, None], separator_D.to(embeds_ND), thought.embeds.to(embeds_ND))
    running.thinking_N[at] = ~done_N
    running.n_thoughts_N[at] += (~done_N).long()
    events = []
    ids = thought.token_ids.tolist()
    for j, (i, done, cut) in enumerate(zip(at.tolist(), done_N.tolist(), cut_N.tolist(), strict=True)):
        running.cut[i] = running.cut[i] or cut
        if not done:
            events.append((i, _thought(running.request(i), thought, j, ids[j])))
        elif not cut and running.request(i).keep_latents:
            events.append((i, Event(running.request(i), "stop", info=_row(thought, j))))
    return events


def _answer(running: Running, at: Tensor, logits: Logits, embeds_ND: Tensor) -> list[tuple[int, Event]]:
    """Rows `at` choose an answer token; EOS or the limit finishes them."""
    keys_N = noise.keys(running.seed_N[at], running.sample_N[at], running.step_N[at], noise.TOKEN)
    uniform_N = noise.uniform(keys_N, 1)[:, 0]
    logits_NV = logits(at)
    ids_N = sample_tokens(logits_NV, running.temperature_N[at], running.top_p_N[at], uniform_N)
    kept = any(running.request(i).keep_latents for i in at.tolist())
    logps_N = token_logps(logits_NV, running.temperature_N[at], ids_N) if kept else None
    embeds_ND[at] = logits.lm.embed(ids_N).to(embeds_ND)
    running.n_tokens_N[at] += 1
    ended_N = ids_N == logits.lm.template.eos_id
    full_N = running.n_tokens_N[at] >= running.max_tokens_N[at]
    events = []
    columns = zip(at.tolist(), ids_N.tolist(), ended_N.tolist(), full_N.tolist(), strict=True)
    for j, (i, token_id, ended, full) in enumerate(columns):
        request = running.request(i)
        info = {"logp": logps_N[j]} if logps_N is not None and request.keep_latents else {}
        events.append((i, Event(request, "token", token_id, info=info)))
        if ended or full:
            reason = "stop" if ended else "length"
            cut = running.cut[i] or not ended
            events.append((i, Event(request, "finished", reason=reason, truncated=cut)))
    return events


class Logits:
    """The LM head at some of the rows; once for all of them where both kinds of row ask for theirs."""

    def __init__(self, lm: LatentLM, running: Running, together: bool) -> None:
        self.lm, self.hidden_ND, self.together = lm, running.hidden_ND, together
        self.all_NV: Tensor | None = None

    def __call__(self, at: Tensor) -> Tensor:
        if self.together and self.all_NV is None:
            self.all_NV = self.lm.logits(self.hidden_ND)
        return self.lm.logits(self.hidden_ND[at]) if self.all_NV is None else self.all_NV[at]


def _thought(request: Request, thought: Thought, j: int, token_id: int) -> Event:
    if not request.keep_latents:
        return Event(request, "thought", token_id)
    return Event(request, "thought", token_id, thought.embeds[j], _row(thought, j))


def _row(thought: Thought, j: int) -> dict[str, Tensor]:
    """What a method says of one of its running."""
    return {name: column[j] for name, column in thought.info.items()}


def _failed(request: Request) -> Event:
    return Event(request, "finished", reason="error", truncated=True)
