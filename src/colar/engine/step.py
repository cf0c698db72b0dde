"""Choose the next input of every running row, and report what happened: thoughts, stops, tokens.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

All of it is requested of the device first, and then read in one synchronisation: a GPU would wait at each. The rows
are changed after that, when nothing can fail any more, so a step that raises can be taken again.

Shape suffixes: N running rows, B those of one kind (thinking or answering), D width.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colar.engine.completion import Event, EventKind
from colar.engine.runner import Runner
from colar.engine.running import RunningRows
from colar.methods.thinking import ThinkState, Thought
from colar.ops import devices


@dataclass
class Chosen:
    """The result of a step."""

    embeds_ND: Tensor
    """The next embedding of every row."""
    events: list[Event] = field(default_factory=list)
    """In their order, "finished" left out."""
    ended: dict[int, str] = field(default_factory=dict)
    """The rows that end, each with its reason."""


def choose_inputs(runner: Runner, rows: RunningRows) -> Chosen:
    """Choose the next embedding of every row."""
    lm, device = runner.lm, rows.hidden_ND.device
    chosen = Chosen(torch.zeros_like(rows.hidden_ND))

    # Nothing can be thought or sampled from a NaN. Such a row ends; until Python knows of it, zeros take its place.
    finite_N = torch.isfinite(rows.hidden_ND).all(-1)
    hidden_ND = torch.where(finite_N[:, None], rows.hidden_ND, 0)
    thinking = [i for i, thinks in enumerate(rows.thinks) if thinks]
    answering = [i for i, thinks in enumerate(rows.thinks) if not thinks]
    # If rows of both kinds run, the head runs once for all of them: it reads all its weights each time.
    head = functools.cache(lm.logits)
    both = bool(thinking and answering)

    def state_of(rows_B: Tensor) -> ThinkState:
        def logits(own_BD: Tensor) -> Tensor:
            return head(hidden_ND)[rows_B] if both else lm.logits(own_BD)

        return rows.think_state(rows_B, hidden_ND, logits, runner.partial_head)

    # What Python needs to know of each row: is it finite, is it done, which token.
    told_3N = torch.zeros(3, len(rows), dtype=torch.int64, device=device)
    told_3N[0] = finite_N
    if thinking:
        rows_B = devices.numbers(thinking, device)
        thoughts = runner.think(state_of(rows_B))
        # While a row thinks, each of its steps has fed one thought. Rows at their limit think too: that tells whether
        # they are cut. A row that answers next feeds the separator, which is filled on the device: nothing is sent.
        ends_B = thoughts.done | (rows.step_N[rows_B] >= rows.max_latents_N[rows_B])
        separator_1D = lm.embed(rows_B.new_full((1,), lm.template.closing_id)).to(hidden_ND.dtype)
        fed_BD = torch.where(ends_B[:, None], separator_1D, thoughts.embeds.to(hidden_ND.dtype))
        chosen.embeds_ND[rows_B] = fed_BD
        told_3N[1:, rows_B] = torch.stack([thoughts.done.long(), thoughts.token_ids])
    if answering:
        rows_B = devices.numbers(answering, device)
        tokens = runner.answer(state_of(rows_B))
        chosen.embeds_ND[rows_B] = tokens.embeds.to(hidden_ND.dtype)
        told_3N[1:, rows_B] = torch.stack([tokens.done.long(), tokens.token_ids])

    # The one synchronisation.
    finite, done, token_ids = told_3N.tolist()
    chosen.ended = {i: "error" for i, is_finite in enumerate(finite) if not is_finite}
    for j, i in enumerate(thinking):
        _report_thought(rows, chosen, i, _details(rows, i, thoughts, j), bool(done[i]), token_ids[i])
    for j, i in enumerate(answering):
        _report_token(rows, chosen, i, _details(rows, i, tokens, j), bool(done[i]), token_ids[i])
    return chosen


def _details(rows: RunningRows, i: int, thoughts: Thought, j: int) -> dict[str, Any]:
    """Embedding and info of row i, row j of these, for its event; {} unless its request keeps them."""
    if not rows.entries[i].request.keep_latents:
        return {}
    return {"embed": thoughts.embeds[j], "info": {name: column[j] for name, column in thoughts.info.items()}}


def _report(rows: RunningRows, chosen: Chosen, i: int, kind: EventKind, **what: Any) -> None:
    """Note an event of row i, unless it was reported before the row was preempted."""
    entry = rows.entries[i]
    rows.reported[i] += 1
    if rows.reported[i] > entry.reported:
        chosen.events.append(Event(entry.request, kind, number=entry.number, **what))


def _report_thought(
    rows: RunningRows, chosen: Chosen, i: int, details: dict[str, Any], done: bool, token_id: int
) -> None:
    """Report what a row has thought, and note whether it stops thinking, or has met its limit."""
    if i in chosen.ended:
        return
    if done:
        rows.thinks[i] = False
        _report(rows, chosen, i, "stop", info=details.get("info", {}))
    elif rows.n_fed[i] >= rows.entries[i].request.decoding.max_latents:
        rows.thinks[i] = False
        rows.cut[i] = True
    else:
        _report(rows, chosen, i, "thought", token_id=token_id, **details)


def _report_token(
    rows: RunningRows, chosen: Chosen, i: int, details: dict[str, Any], done: bool, token_id: int
) -> None:
    """Report an answer token of a row: EOS or the limit ends it."""
    if i in chosen.ended:
        return
    rows.n_tokens[i] += 1
    _report(rows, chosen, i, "token", token_id=token_id, info=details.get("info", {}))
    if done:
        chosen.ended[i] = "stop"
    elif rows.n_tokens[i] >= rows.entries[i].request.decoding.max_completion_length:
        chosen.ended[i] = "length"
