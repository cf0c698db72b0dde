"""What a card holds at most in training, and what helps where that is too much.

                         each card has all                       training.fsdp, N cards
    weights              all                                     1/N
    AdamW's moments      of all that is trained                  1/N
    gradients            of all that is trained; where a batch   1/N
                         is the whole update, as they are made
    gathered             -                                       embeddings, LM head, final norm, the method's
                                                                 modules; and for a moment of two layers the weights
                                                                 (at work, ahead) and gradients (made, added up)
    the batch            `replay.py`                             the same; a layer's gradients leave when it is done

AdamW's moments come with the first update: they are there from the second batch on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.planning import hardware
from colar.planning.estimate import Estimate
from colar.planning.hardware import Gpu
from colar.planning.replay import Replayed
from colar.planning.trace import Work
from colar.recipe import Recipe
from colar.training import peak
from colar.training.compiled_layers import decoder_layers
from colar.training.room import gib, smaller_weights

TRUSTED = 0.85
"""Share of the free memory that an advised number of positions fills: a table is within 15% of what a run takes."""


@dataclass(frozen=True)
class Planned:
    """A recipe on some cards, and its model as shapes."""

    recipe: Recipe
    method: Method
    lm: LatentLM
    card: Gpu
    count: int

    @property
    def shares(self) -> int:
        """Cards that the weights are split between; 1 where each has all of them."""
        return self.count if self.recipe.training.fsdp else 1

    @property
    def leaving(self) -> list[nn.Parameter]:
        """Weights whose gradients are split and gone before the backward pass has ended: those of the layers."""
        if self.shares == 1:
            return []
        weights = [weight for layer in decoder_layers(self.lm) for weight in layer.parameters()]
        return [weight for weight in weights if weight.requires_grad]


@dataclass(frozen=True)
class Held:
    """Bytes on one card that are the same for every batch."""

    weights: int
    moments: int
    gradients: int
    gathered: int = 0
    """Whole weights and gradients beside a card's own share (training.fsdp)."""
    beside_layers: int = 0
    """Of these, weights that are in no layer."""

    @property
    def alone(self) -> int:
        """All of it, without a batch."""
        return self.weights + self.moments + self.gradients + self.gathered


def held(lm: LatentLM, shares: int) -> Held:
    """What each card holds; with `shares` above 1 weights are split between so many."""
    weights, trained = peak.held(lm), peak.trained(lm)
    moments = peak.ADAM_MOMENTS * trained
    if shares == 1:
        return Held(weights, moments, trained)
    layers = decoder_layers(lm)
    beside_layers = weights - sum(peak.held(layer) for layer in layers)
    of_two_layers = 2 * max(peak.held(layer) + peak.trained(layer) for layer in layers)
    gathered = beside_layers + of_two_layers
    return Held(weights // shares, moments // shares, trained // shares, gathered, beside_layers)


def sent_a_pass(lm: LatentLM) -> int:
    """Bytes that training.fsdp gathers or splits in a pass: weights, those of layers again backward, and gradients."""
    of_layers = sum(peak.held(layer) for layer in decoder_layers(lm))
    return peak.held(lm) + of_layers + peak.trained(lm)


def add_memory(estimate: Estimate, planned: Planned, work: Work, found: Replayed, accumulates: bool) -> None:
    """The lines of memory, and a problem where it does not suffice."""
    lm, shares = planned.lm, planned.shares
    own = held(lm, shares)
    parameters = sum(weight.numel() for weight in lm.parameters())
    rows = max(rows for rows, _ in work.passes)
    whole = f"{gib(peak.held(lm))}; trained {gib(peak.trained(lm))}"
    estimate.add("parameters", f"{parameters / 1e6:,.0f} M", whole)
    estimate.add(
        "longest batch", f"{rows} rows", f"{work.positions:,} positions, {sum(work.logits):,} labels"
    )
    if shares > 1:
        _add_shares(estimate, lm, own, shares)
        # A pass begins with the weights beside layers, and for a moment has them twice.
        batch = max(found.bytes, own.beside_layers)
        estimate.peak_bytes = own.alone + batch
        note = f"share, gathered, the batch {gib(batch)}"
    else:
        # Gradients that the batch makes itself are counted with it.
        batch = found.bytes + (own.gradients if accumulates else 0)
        estimate.peak_bytes = own.weights + own.moments + batch
        note = f"weights, moments {gib(own.moments)}, the batch {gib(batch)}"
    estimate.add_bytes("peak memory", estimate.peak_bytes, note)
    usable = hardware.USABLE * planned.card.memory_gib * hardware.GIB
    if estimate.peak_bytes > usable:
        advice = _advice(planned, own, work, found, usable)
        size = f"{gib(estimate.peak_bytes)} of {planned.card.memory_gib:.0f} GiB"
        estimate.problems.append(f"{size}: {advice}")


def _add_shares(estimate: Estimate, lm: LatentLM, own: Held, shares: int) -> None:
    """What lies where, with training.fsdp."""
    size = own.weights + own.moments + own.gradients
    parts = f"weights {gib(own.weights)}, moments {gib(own.moments)}, gradients {gib(own.gradients)}"
    estimate.add_bytes("a card's share", size, parts)
    estimate.add_bytes(
        "gathered", own.gathered, "embeddings, LM head, modules, two layers and their gradients"
    )
    # Each process reads all weights before it keeps its share of them.
    read = min(shares, hardware.PER_NODE) * peak.held(lm)
    estimate.add_bytes("at the start", read, "of a machine's own memory, not of its cards")


def _advice(planned: Planned, own: Held, work: Work, found: Replayed, usable: float) -> str:
    # In parts, the gradients of all weights wait for the last one.
    room = usable - own.alone
    fewer = _fewer_positions(planned.recipe, work, found, room)
    if fewer is not None:
        return fewer
    alone = f"weights, moments and gradients alone take {gib(own.alone)}"
    if room > 0:
        alone += ", which leaves too little for the longest row"
    # What training.fsdp rejects (training/sft.py, training/grpo/run.py).
    divisible = planned.recipe.grpo is None and not planned.method.unrolled
    cards = planned.shares if planned.shares > 1 else None
    return f"{alone}: {smaller_weights(planned.lm, usable, divisible, cards)}"


def _fewer_positions(recipe: Recipe, work: Work, found: Replayed, room: float) -> str | None:
    """What makes a batch fit into `room` bytes. None where nothing is left of them, or all of it is done already."""
    if room <= 0:
        return None
    # Distill has two sequences a row, one after the other. The longer one counts for training.tokens_per_batch.
    at_once = max(rows * length for rows, length in work.passes)
    longest = max(length for _, length in work.passes)
    most = int(TRUSTED * room / found.bytes * at_once)
    helps = []
    # A row that is longer is a part of its own: a limit below it changes nothing.
    if most >= longest:
        round_number = most // 1024 * 1024
        helps.append(f"training.tokens_per_batch {round_number if round_number >= longest else most}")
    if not recipe.training.gradient_checkpointing:
        helps.append("training.gradient_checkpointing true")
    return f"set {' or '.join(helps)}" if helps else None
