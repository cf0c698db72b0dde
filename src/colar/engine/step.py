"""Choose the next input of every running row, and say what happened: thoughts, stops, tokens.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

Nothing is changed: what was chosen is a result of its own, with the rows as they are after it. A step that raises can
be taken again.

Shape suffixes: N running rows, B those of one kind (thinking or answering), D width, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colar.engine.failures import apart
from colar.engine.request import Event
from colar.engine.running import Running
from colar.methods.base import Method, Thought
from colar.model.head_rows import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens, token_logps, top_logps


@dataclass
class Chosen:
    """What a step has chosen, and the rows as they are then."""

    running: Running
    embeds_ND: Tensor
    """The next embedding of every row."""
    events: list[Event] = field(default_factory=list)
    """In their order, "finished" left out."""
    ended: dict[int, Ending] = field(default_factory=dict)
    """The rows that end."""

    def say(self, i: int, event: Event) -> None:
        """Note an event of row i, unless it was said before the row had to start anew."""
        self.running.said[i] += 1
        if self.running.said[i] > self.running.entries[i].said:
            self.events.append(event)

    def join(self, other: Chosen) -> Chosen:
        """These rows, then the others."""
        n = len(self.running)
        ended = {n + i: ending for i, ending in other.ended.items()}
        return Chosen(
            self.running.join(other.running),
            torch.cat([self.embeds_ND, other.embeds_ND]),
            self.events + other.events,
            self.ended | ended,
        )


@dataclass(frozen=True)
class Ending:
    """Why a row ends."""

    reason: str
    error: Exception | None = None


def choose_apart(lm: LatentLM, method: Method, running: Running, kept: KeptRows) -> Chosen:
    """As `choose`, where rows may fail: these end with their error, and all others are as if they had been alone.

    Raises where memory runs out.
    """
    n = len(running)

    def run(rows: range) -> Chosen:
        part = running if len(rows) == n else running.take(list(rows))
        return choose(lm, method, part, kept)

    parts = apart(range(n), run)
    if not parts.errors and len(parts.results) == 1:
        return parts.results[0][1]
    pieces = {rows[0]: chosen for rows, chosen in parts.results}
    for i, error in parts.errors.items():
        row = running.take([i])
        pieces[i] = Chosen(row.draft(), torch.zeros_like(row.hidden_ND), ended={0: Ending("error", error)})
    return functools.reduce(Chosen.join, [pieces[i] for i in sorted(pieces)])


def choose(lm: LatentLM, method: Method, running: Running, kept: KeptRows) -> Chosen:
    """Choose the next embedding of every row."""
    running = running.draft()
    chosen = Chosen(running, torch.zeros_like(running.hidden_ND))

    # Nothing can be thought or sampled from a NaN: such a row ends, and the others never see it.
    broken_N = ~torch.isfinite(running.hidden_ND).all(-1)
    for i in broken_N.nonzero()[:, 0].tolist():
        chosen.ended[i] = Ending("error")

    thinking_B = (running.thinking_N & ~broken_N).nonzero()[:, 0]
    answering_B = (~running.thinking_N & ~broken_N).nonzero()[:, 0]
    both = len(thinking_B) > 0 and len(answering_B) > 0
    logits = Logits(lm, running.hidden_ND, both)
    if len(thinking_B):
        chosen.embeds_ND[thinking_B] = _think(method, chosen, thinking_B, logits, kept)
    if len(answering_B):
        chosen.embeds_ND[answering_B] = _answer(chosen, answering_B, logits)
    return chosen


def _think(method: Method, chosen: Chosen, rows_B: Tensor, logits: Logits, kept: KeptRows) -> Tensor:
    """Let these rows think one step, (B, D): those that are done, or at their limit, feed the separator."""
    lm = logits.lm
    running = chosen.running
    state = running.think_state(rows_B, lambda _: logits(rows_B), kept)
    # While a row thinks, each of its steps has fed one thought. The method is asked for rows at their limit too:
    # its thought for them is dropped.
    cut_B = running.step_N[rows_B] >= running.max_latents_N[rows_B]
    thought = method.think(lm, state)
    done_B = thought.done | cut_B
    running.thinking_N = running.thinking_N.index_copy(0, rows_B, ~done_B)

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
            chosen.say(i, Event(entry.request, "stop", info=_info(thought, j), number=entry.number))
        elif not done[j]:
            event = Event(
                entry.request,
                "thought",
                token_ids[j],
                embed=thought.embeds[j] if keeps else None,
                info=_info(thought, j) if keeps else {},
                number=entry.number,
            )
            chosen.say(i, event)
    return embeds_BD


def _info(thought: Thought, j: int) -> dict[str, Tensor]:
    """The method's own quantities of one row."""
    return {name: column[j] for name, column in thought.info.items()}


def _answer(chosen: Chosen, rows_B: Tensor, logits: Logits) -> Tensor:
    """Let these rows choose an answer token, (B, D): EOS or the limit ends them."""
    lm = logits.lm
    running = chosen.running
    logits_BV = logits(rows_B)
    temperature_B = running.temperature_N[rows_B]
    # A draw is a function of (seed, sample, step): batch mates change nothing.
    keys_B = noise.keys(running.seed_N[rows_B], running.sample_N[rows_B], running.step_N[rows_B], noise.TOKEN)
    uniform_B = noise.uniform(keys_B, 1)[:, 0]
    ids_B = sample_tokens(logits_BV, temperature_B, running.top_p_N[rows_B], uniform_B)
    n_tokens_B = running.n_tokens_N[rows_B] + 1
    running.n_tokens_N = running.n_tokens_N.index_copy(0, rows_B, n_tokens_B)
    full_B = n_tokens_B >= running.max_completion_length_N[rows_B]

    # Over the whole vocabulary: only where somebody asked for it.
    rows = rows_B.tolist()
    logps_B: Tensor | None = None
    tops: dict[int, dict[str, Tensor]] = {}
    if any(running.entries[i].request.keep_latents for i in rows):
        logps_B = token_logps(logits_BV, temperature_B, ids_B)
        tops = _tops([running.entries[i].request.top_logprobs for i in rows], logits_BV, temperature_B)

    token_ids, full = ids_B.tolist(), full_B.tolist()
    for j, i in enumerate(rows):
        entry = running.entries[i]
        info: dict[str, Tensor] = {}
        if logps_B is not None and entry.request.keep_latents:
            info = {"logp": logps_B[j], **tops.get(j, {})}
        chosen.say(i, Event(entry.request, "token", token_ids[j], info=info, number=entry.number))
        if token_ids[j] == lm.template.eos_id:
            chosen.ended[i] = Ending("stop")
        elif full[j]:
            chosen.ended[i] = Ending("length")
    return lm.embed(ids_B).to(running.hidden_ND.dtype)


def _tops(asked: list[int], logits_BV: Tensor, temperature_B: Tensor) -> dict[int, dict[str, Tensor]]:
    """The likeliest tokens of the rows that ask for some: by row, as its event's info."""
    rows = [j for j, k in enumerate(asked) if k]
    if not rows:
        return {}
    ids_XK, logps_XK = top_logps(logits_BV[rows], temperature_B[rows], max(asked))
    found = {}
    for x, j in enumerate(rows):
        found[j] = {"top_ids": ids_XK[x, : asked[j]], "top_logps": logps_XK[x, : asked[j]]}
    return found


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
