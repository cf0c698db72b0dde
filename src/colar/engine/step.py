"""Choose the next input of every running row, and say what happened: thoughts, stops, tokens.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

Shape suffixes: N running rows, B those of one kind (thinking or answering), D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colar.engine.request import Event
from colar.engine.running import Running
from colar.methods.base import Method, Thought
from colar.model.head_rows import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens, token_logps


def choose(
    lm: LatentLM, method: Method, running: Running, kept: KeptRows
) -> tuple[Tensor, list[Event], dict[int, str]]:
    """Choose the next embedding of every row, (N, D).

    Also returns the events of this step, "finished" left out, and the reason of each row that ends with it.
    """
    embeds_ND = torch.zeros_like(running.hidden_ND)
    events: list[Event] = []
    ended: dict[int, str] = {}

    # Nothing can be thought or sampled from a NaN: such a row ends, and the others never see it.
    broken_N = ~torch.isfinite(running.hidden_ND).all(-1)
    for i in broken_N.nonzero()[:, 0].tolist():
        ended[i] = "error"

    thinking_B = (running.thinking_N & ~broken_N).nonzero()[:, 0]
    answering_B = (~running.thinking_N & ~broken_N).nonzero()[:, 0]
    both = len(thinking_B) > 0 and len(answering_B) > 0
    logits = Logits(lm, running.hidden_ND, both)
    if len(thinking_B):
        embeds_ND[thinking_B] = _think(method, running, thinking_B, logits, kept, events)
    if len(answering_B):
        embeds_ND[answering_B] = _answer(running, answering_B, logits, events, ended)
    return embeds_ND, events, ended


def _think(
    method: Method, running: Running, rows_B: Tensor, logits: Logits, kept: KeptRows, events: list[Event]
) -> Tensor:
    """Let these rows think one step, (B, D): those that are done, or at their limit, feed the separator."""
    lm = logits.lm
    state = running.think_state(rows_B, lambda _: logits(rows_B), kept)
    # While a row thinks, each of its steps has fed one thought. The method is asked for rows at their limit too:
    # its thought for them is dropped.
    cut_B = running.step_N[rows_B] >= running.max_latents_N[rows_B]
    thought = method.think(lm, state)
    done_B = thought.done | cut_B
    running.thinking_N[rows_B] = ~done_B

    separator_D = lm.embed(torch.tensor(lm.template.separator_id, device=rows_B.device))
    dtype = running.hidden_ND.dtype
    embeds_BD = torch.where(done_B[:, None], separator_D.to(dtype), thought.embeds.to(dtype))

    # One transfer for each column: rows are told apart in Python from here on.
    done, cut, token_ids = done_B.tolist(), cut_B.tolist(), thought.token_ids.tolist()
    for j, i in enumerate(rows_B.tolist()):
        entry = running.entries[i]
        keeps = entry.request.keep_latents
        if cut[j]:
            running.cut[i] = True
        elif done[j] and keeps:
            events.append(Event(entry.request, "stop", info=_info(thought, j), number=entry.number))
        elif not done[j]:
            event = Event(
                entry.request,
                "thought",
                token_ids[j],
                embed=thought.embeds[j] if keeps else None,
                info=_info(thought, j) if keeps else {},
                number=entry.number,
            )
            events.append(event)
    return embeds_BD


def _info(thought: Thought, j: int) -> dict[str, Tensor]:
    """The method's own quantities of one row."""
    return {name: column[j] for name, column in thought.info.items()}


def _answer(
    running: Running, rows_B: Tensor, logits: Logits, events: list[Event], ended: dict[int, str]
) -> Tensor:
    """Let these rows choose an answer token, (B, D): EOS or the limit ends them."""
    lm = logits.lm
    logits_BV = logits(rows_B)
    temperature_B = running.temperature_N[rows_B]
    # A draw is a function of (seed, sample, step): batch mates change nothing.
    keys_B = noise.keys(running.seed_N[rows_B], running.sample_N[rows_B], running.step_N[rows_B], noise.TOKEN)
    uniform_B = noise.uniform(keys_B, 1)[:, 0]
    ids_B = sample_tokens(logits_BV, temperature_B, running.top_p_N[rows_B], uniform_B)
    running.n_tokens_N[rows_B] += 1
    full_B = running.n_tokens_N[rows_B] >= running.max_completion_length_N[rows_B]

    # Over the whole vocabulary: only where somebody asked for it.
    rows = rows_B.tolist()
    logps_B: Tensor | None = None
    if any(running.entries[i].request.keep_latents for i in rows):
        logps_B = token_logps(logits_BV, temperature_B, ids_B)

    token_ids, full = ids_B.tolist(), full_B.tolist()
    for j, i in enumerate(rows):
        entry = running.entries[i]
        info: dict[str, Tensor] = {}
        if logps_B is not None and entry.request.keep_latents:
            info = {"logp": logps_B[j]}
        events.append(Event(entry.request, "token", token_ids[j], info=info, number=entry.number))
        if token_ids[j] == lm.template.eos_id:
            ended[i] = "stop"
        elif full[j]:
            ended[i] = "length"
    return lm.embed(ids_B).to(running.hidden_ND.dtype)


class Logits:
    """The LM head at some of the rows.

    Where `both` thinking and answering rows run, the head runs once for all rows when the first of them ask: it
    reads all its weights each time.
    """

    def __init__(self, lm: LatentLM, hidden_ND: Tensor, both: bool) -> None:
        self.lm = lm
        self.hidden_ND = hidden_ND
        self.both = both
        self.all_NV: Tensor | None = None

    def __call__(self, rows_B: Tensor) -> Tensor:
        if not self.both:
            return self.lm.logits(self.hidden_ND[rows_B])
        if self.all_NV is None:
            self.all_NV = self.lm.logits(self.hidden_ND)
        return self.all_NV[rows_B]


class KeptRows:
    """The rows of the LM head that were asked for last, gathered once for all steps between two trainings."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.forget()

    def forget(self) -> None:
        """Gather anew at the next call: the weights may have been trained."""
        self.ids: tuple[int, ...] = ()
        self.rows: HeadRows | None = None

    def __call__(self, ids: tuple[int, ...]) -> HeadRows:
        if self.rows is None or self.ids != ids:
            self.rows = self.lm.head_rows(ids)
            self.ids = ids
        return self.rows
