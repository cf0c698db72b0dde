"""Choose the next input of every running row, and say what happened: thoughts, stops, tokens.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

All of it is asked of the device, and then looked at once: a GPU would wait at each look.

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
from colar.methods.base import Method, ThinkState, Thought, known_decoding
from colar.model.head import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import devices, noise
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
    device = running.hidden_ND.device
    embeds_ND = torch.zeros_like(running.hidden_ND)
    chosen = Chosen(running, embeds_ND)

    # Nothing can be thought or sampled from a NaN. Such a row ends; until Python knows of it, zeros stand in its place.
    finite_N = torch.isfinite(running.hidden_ND).all(-1)
    hidden_ND = torch.where(finite_N[:, None], running.hidden_ND, 0)
    thinking = [i for i, thinks in enumerate(running.thinks) if thinks]
    answering = [i for i, thinks in enumerate(running.thinks) if not thinks]
    logits = Logits(lm, hidden_ND, both=bool(thinking and answering))

    # What Python wants to know of each row: is it finite, is its thinking done, which token.
    told_3N = torch.zeros(3, len(running), dtype=torch.int64, device=device)
    told_3N[0] = finite_N
    thoughts: Thought | None = None
    logps_B: Tensor | None = None
    tops: dict[int, dict[str, Tensor]] = {}
    if thinking:
        rows_B = devices.numbers(thinking, device)
        state = running.think_state(thinking, rows_B, hidden_ND, lambda _: logits(rows_B), kept)
        thoughts, done_B = _think(method, running, rows_B, state, lm, embeds_ND)
        told_3N[1:, rows_B] = torch.stack([done_B.long(), thoughts.token_ids])
    if answering:
        rows_B = devices.numbers(answering, device)
        ids_B, logps_B, tops = _answer(running, answering, rows_B, logits, embeds_ND)
        told_3N[2, rows_B] = ids_B

    # The one look.
    finite, done, token_ids = told_3N.tolist()
    for i in range(len(running)):
        if not finite[i]:
            chosen.ended[i] = Ending("error")
    if thoughts is not None:
        _say_thoughts(chosen, thinking, thoughts, done, token_ids)
    _say_tokens(chosen, answering, logps_B, tops, token_ids, lm.template.eos_id)
    return chosen


def _think(
    method: Method, running: Running, rows_B: Tensor, state: ThinkState, lm: LatentLM, embeds_ND: Tensor
) -> tuple[Thought, Tensor]:
    """Let these rows think one step; those that are done, or at their limit, feed the separator.

    Writes what they feed into `embeds_ND`. Returns the thoughts, and which rows are done, (B,).
    """
    # While a row thinks, each of its steps has fed one thought. The method is asked for rows at their limit too:
    # its thought for them is dropped.
    cut_B = running.step_N[rows_B] >= running.max_latents_N[rows_B]
    thought = method.think(lm, state)
    done_B = thought.done | cut_B
    # Filled on the device: nothing is sent.
    separator_1D = lm.embed(rows_B.new_full((1,), lm.template.separator_id))
    dtype = embeds_ND.dtype
    embeds_ND[rows_B] = torch.where(done_B[:, None], separator_1D.to(dtype), thought.embeds.to(dtype))
    return thought, done_B


def _answer(
    running: Running, rows: list[int], rows_B: Tensor, logits: Logits, embeds_ND: Tensor
) -> tuple[Tensor, Tensor | None, dict[int, dict[str, Tensor]]]:
    """Let these rows choose an answer token, (B,), and write what they feed into `embeds_ND`.

    Returns the tokens, and where a request keeps them: their log-probs, and the likeliest tokens of rows that ask.
    """
    lm = logits.lm
    logits_BV = logits(rows_B)
    temperature_B = running.temperature_N[rows_B]
    # A draw is a function of (seed, sample, step): batch mates change nothing.
    keys_B = noise.keys(running.seed_N[rows_B], running.sample_N[rows_B], running.step_N[rows_B], noise.TOKEN)
    uniform_B = noise.uniform(keys_B, 1)[:, 0]
    requests = [running.entries[i].request for i in rows]
    known = known_decoding(requests)
    ids_B = sample_tokens(logits_BV, temperature_B, running.top_p_N[rows_B], uniform_B, known)
    embeds_ND[rows_B] = lm.embed(ids_B).to(embeds_ND.dtype)
    # Over the whole vocabulary: only where somebody asked for it.
    if not any(request.keep_latents for request in requests):
        return ids_B, None, {}
    tops = _tops([request.top_logprobs for request in requests], logits_BV, temperature_B)
    return ids_B, token_logps(logits_BV, temperature_B, ids_B), tops


def _say_thoughts(
    chosen: Chosen, rows: list[int], thought: Thought, done: list[int], token_ids: list[int]
) -> None:
    """Note what rows have thought, and which of them think no more. `done` and `token_ids` are those of all rows."""
    running = chosen.running
    for j, i in enumerate(rows):
        if i in chosen.ended:
            continue
        entry = running.entries[i]
        keeps = entry.request.keep_latents
        cut = running.steps[i] >= entry.request.decoding.max_latents
        running.thinks[i] = not done[i]
        if cut:
            running.cut[i] = True
        elif done[i] and keeps:
            chosen.say(i, Event(entry.request, "stop", info=_info(thought, j), number=entry.number))
        elif not done[i]:
            event = Event(
                entry.request,
                "thought",
                token_ids[i],
                embed=thought.embeds[j] if keeps else None,
                info=_info(thought, j) if keeps else {},
                number=entry.number,
            )
            chosen.say(i, event)


def _info(thought: Thought, j: int) -> dict[str, Tensor]:
    """The method's own quantities of one row."""
    return {name: column[j] for name, column in thought.info.items()}


def _say_tokens(
    chosen: Chosen,
    rows: list[int],
    logps_B: Tensor | None,
    tops: dict[int, dict[str, Tensor]],
    token_ids: list[int],
    eos_id: int,
) -> None:
    """Note the answer tokens of rows: EOS or the limit ends them. `token_ids` are those of all rows."""
    running = chosen.running
    for j, i in enumerate(rows):
        if i in chosen.ended:
            continue
        entry = running.entries[i]
        running.n_tokens[i] += 1
        info: dict[str, Tensor] = {}
        if logps_B is not None and entry.request.keep_latents:
            info = {"logp": logps_B[j], **tops.get(j, {})}
        chosen.say(i, Event(entry.request, "token", token_ids[i], info=info, number=entry.number))
        if token_ids[i] == eos_id:
            chosen.ended[i] = Ending("stop")
        elif running.n_tokens[i] >= entry.request.decoding.max_completion_length:
            chosen.ended[i] = Ending("length")


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
