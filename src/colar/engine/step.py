"""Choose the next input of every running row, and report what happened: thoughts, stops, tokens.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

All of it is requested of the device first, and then read in one synchronisation: a GPU would wait at each. The rows
are changed after that, when nothing can fail any more, so a step that raises can be taken again.

Shape suffixes: N running rows, B those of one kind (thinking or answering), D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colar.engine.completion import Event
from colar.engine.running import RunningRows
from colar.methods.base import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.model.vocabulary import PartialHead
from colar.ops import devices, noise
from colar.ops.sampling import sample_tokens, token_logps


@dataclass
class Chosen:
    """The result of a step."""

    embeds_ND: Tensor
    """The next embedding of every row."""
    events: list[Event] = field(default_factory=list)
    """In their order, "finished" left out."""
    ended: dict[int, str] = field(default_factory=dict)
    """The rows that end, each with its reason."""


def choose(
    lm: LatentLM, think: Callable[[ThinkState], Thought], rows: RunningRows, partial_head: CachedPartialHead
) -> Chosen:
    """Choose the next embedding of every row. `think` is the method's."""
    device = rows.hidden_ND.device
    chosen = Chosen(torch.zeros_like(rows.hidden_ND))

    # Nothing can be thought or sampled from a NaN. Such a row ends; until Python knows of it, zeros take its place.
    finite_N = torch.isfinite(rows.hidden_ND).all(-1)
    hidden_ND = torch.where(finite_N[:, None], rows.hidden_ND, 0)
    thinking = [i for i, thinks in enumerate(rows.thinks) if thinks]
    answering = [i for i, thinks in enumerate(rows.thinks) if not thinks]
    # If rows of both kinds run, the head runs once for all of them: it reads all its weights each time.
    head = functools.cache(lm.logits)
    both = bool(thinking and answering)

    def logits(rows_B: Tensor) -> Tensor:
        return head(hidden_ND)[rows_B] if both else lm.logits(hidden_ND[rows_B])

    # What Python needs to know of each row: is it finite, is its thinking done, which token.
    told_3N = torch.zeros(3, len(rows), dtype=torch.int64, device=device)
    told_3N[0] = finite_N
    thoughts: Thought | None = None
    logps_B: Tensor | None = None
    if thinking:
        rows_B = devices.numbers(thinking, device)
        state = rows.think_state(rows_B, hidden_ND, lambda _: logits(rows_B), partial_head)
        thoughts, done_B = _think(think, rows, rows_B, state, lm, chosen.embeds_ND)
        told_3N[1:, rows_B] = torch.stack([done_B.long(), thoughts.token_ids])
    if answering:
        rows_B = devices.numbers(answering, device)
        ids_B, logps_B = _answer(rows, answering, rows_B, logits(rows_B), lm, chosen.embeds_ND)
        told_3N[2, rows_B] = ids_B

    # The one synchronisation.
    finite, done, token_ids = told_3N.tolist()
    chosen.ended = {i: "error" for i, is_finite in enumerate(finite) if not is_finite}
    if thoughts is not None:
        _report_thoughts(rows, chosen, thinking, thoughts, done, token_ids)
    _report_tokens(rows, chosen, answering, logps_B, token_ids, lm.template.eos_id)
    return chosen


def _think(
    think: Callable[[ThinkState], Thought],
    rows: RunningRows,
    rows_B: Tensor,
    state: ThinkState,
    lm: LatentLM,
    embeds_ND: Tensor,
) -> tuple[Thought, Tensor]:
    """Let these rows think one step; those that are done, or at their limit, feed the separator.

    Writes what they feed into `embeds_ND`. Returns the thoughts, and which rows are done, (B,).
    """
    # While a row thinks, each of its steps has fed one thought. Rows at their limit think too, and their thought is
    # dropped.
    cut_B = rows.step_N[rows_B] >= rows.max_latents_N[rows_B]
    thought = think(state)
    done_B = thought.done | cut_B
    # Filled on the device: nothing is sent.
    separator_1D = lm.embed(rows_B.new_full((1,), lm.template.closing_id))
    dtype = embeds_ND.dtype
    embeds_ND[rows_B] = torch.where(done_B[:, None], separator_1D.to(dtype), thought.embeds.to(dtype))
    return thought, done_B


def _answer(
    rows: RunningRows,
    answering: list[int],
    rows_B: Tensor,
    logits_BV: Tensor,
    lm: LatentLM,
    embeds_ND: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Let these rows choose an answer token, (B,), and write what they feed into `embeds_ND`.

    Returns the tokens, and if a request keeps them, their log-probs.
    """
    temperature_B = rows.temperature_N[rows_B]
    # A draw is a function of (seed, sample, step): the other rows of the batch change nothing.
    keys_B = noise.keys(rows.seed_N[rows_B], rows.sample_N[rows_B], rows.step_N[rows_B], noise.TOKEN)
    uniform_B = noise.uniform(keys_B, 1)[:, 0]
    ids_B = sample_tokens(logits_BV, temperature_B, rows.top_p_N[rows_B], uniform_B, rows.branches.ways)
    embeds_ND[rows_B] = lm.embed(ids_B).to(embeds_ND.dtype)
    requests = [rows.entries[i].request for i in answering]
    # Over the whole vocabulary: only where they are requested.
    if not any(request.keep_latents for request in requests):
        return ids_B, None
    return ids_B, token_logps(logits_BV, temperature_B, ids_B)


def _report(rows: RunningRows, chosen: Chosen, i: int, event: Event) -> None:
    """Note an event of row i, unless it was reported before the row was preempted."""
    rows.reported[i] += 1
    if rows.reported[i] > rows.entries[i].reported:
        chosen.events.append(event)


def _report_thoughts(
    rows: RunningRows,
    chosen: Chosen,
    thinking: list[int],
    thought: Thought,
    done: list[int],
    token_ids: list[int],
) -> None:
    """Report what rows have thought, and note which stop thinking. `done` and `token_ids` are those of all rows."""
    for j, i in enumerate(thinking):
        if i in chosen.ended:
            continue
        entry = rows.entries[i]
        request = entry.request
        info: dict[str, Tensor] = {}
        if request.keep_latents:
            info = {name: column[j] for name, column in thought.info.items()}
        rows.thinks[i] = not done[i]
        if rows.steps[i] >= request.decoding.max_latents:
            rows.cut[i] = True
        elif not done[i]:
            embed = thought.embeds[j] if request.keep_latents else None
            _report(
                rows, chosen, i, Event(request, "thought", token_ids[i], embed, info, number=entry.number)
            )
        elif request.keep_latents:
            _report(rows, chosen, i, Event(request, "stop", info=info, number=entry.number))


def _report_tokens(
    rows: RunningRows,
    chosen: Chosen,
    answering: list[int],
    logps_B: Tensor | None,
    token_ids: list[int],
    eos_id: int,
) -> None:
    """Report the answer tokens of rows: EOS or the limit ends them. `token_ids` are those of all rows."""
    for j, i in enumerate(answering):
        if i in chosen.ended:
            continue
        entry = rows.entries[i]
        rows.n_tokens[i] += 1
        info: dict[str, Tensor] = {}
        if logps_B is not None and entry.request.keep_latents:
            info = {"logp": logps_B[j]}
        _report(rows, chosen, i, Event(entry.request, "token", token_ids[i], info=info, number=entry.number))
        if token_ids[i] == eos_id:
            chosen.ended[i] = "stop"
        elif rows.n_tokens[i] >= entry.request.decoding.max_completion_length:
            chosen.ended[i] = "length"


class CachedPartialHead:
    """The part of the LM head that was requested last, gathered once for all steps between two trainings."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.clear()

    def clear(self) -> None:
        """Gather anew at the next call: the weights may have been trained."""
        self.ids: tuple[int, ...] = ()
        self.part: PartialHead | None = None

    def __call__(self, ids: tuple[int, ...]) -> PartialHead:
        if self.part is None or self.ids != ids:
            self.part = self.lm.partial_head(ids)
            self.ids = ids
        return self.part
