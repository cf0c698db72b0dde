"""iCoT: the chain is internalised, its front first (Deng, Choi and Shieber 2024, "From Explicit CoT to Implicit CoT:
Learning to Internalize CoT Step by Step", section 3).

    stage 0    question ###  t1 t2 t3 t4 t5 t6   ###  answer EOS
    stage 2    question ###        t3 t4 t5 t6   ###  answer EOS
    last       question ###                      ###  answer EOS

In stage s the first s tokens of the chain are removed, and the rest is trained as CoT is:

    L = mean over (what is left of the chain, ###, answer, EOS) of -log p(token)

Removal smoothing: a row loses o tokens more than its stage says, P(o) = (1 - exp(-lambda)) exp(-lambda o) for o = 0,
1, ..., drawn anew for every row, so that the next stage comes as no surprise. A stage's tokens go one by one,
`removed_per_epoch` of them in an epoch; when `remove_all_at` are due the whole chain goes. Then the answer follows the
question at once: #L is 0.

Departures. Stage and row meet at the row's own place in the epoch, not at its batch's. The offset is drawn anew at
each epoch from (seed, epoch, row), and is not cut off at 100. Positions close up behind what was removed (the
published code's default; its `keep_position` is not here). Training forgets the optimiser's moments at each stage, as
the paper does.
"""

import math
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from colar import checks
from colar.data.example import Example
from colar.methods import base, thinking
from colar.methods.base import Row
from colar.methods.cot import Cot
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.template.template import Template


@dataclass(frozen=True)
class IcotConfig:
    """The curriculum; defaults are those of its paper's GSM8k runs."""

    removed_per_epoch: float = 8.0
    """Tokens removed in an epoch (the paper's Delta), above 0."""
    remove_all_at: int = 39
    """From this number of tokens on the whole chain is removed, however long; 1 or more."""
    smoothing_lambda: float | None = 4.0
    """lambda of the removal smoothing, above 0: a row loses a token more with probability exp(-lambda); null: never."""

    def __post_init__(self) -> None:
        checks.check_number("method.removed_per_epoch", self.removed_per_epoch, 1e-6)
        checks.check_number("method.remove_all_at", self.remove_all_at, 1, whole=True)
        if self.smoothing_lambda is not None:
            checks.check_number("method.smoothing_lambda", self.smoothing_lambda, 1e-6)


class Icot(Cot):
    name: ClassVar[str] = "icot"
    Config: ClassVar[type] = IcotConfig

    def stage(self, epoch: float) -> int:
        """Tokens to be removed, floor(removed_per_epoch * epoch), up to the last stage."""
        due = min(self.config.removed_per_epoch * epoch, self.last_stage())
        # A product that should be whole, and is a rounding error below, must not fall a stage short.
        return int(due + 1e-9)

    def last_stage(self) -> int:
        return int(self.config.remove_all_at)

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        stage = self.stage(epoch)
        if stage == self.last_stage():
            return replace(row, steps=[])
        # Removal smoothing: now and then a row is ahead of its stage.
        removed = stage + offset(rng.random(), self.config.smoothing_lambda)
        return replace(row, steps=base.keep_tokens(row.steps, range(removed, len(row.chain))))

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.no_thought(state)


def offset(uniform: float, smoothing_lambda: float | None) -> int:
    """The o of removal smoothing by inverse CDF, P(o >= n) = exp(-lambda n), from `uniform` in [0, 1)."""
    if smoothing_lambda is None:
        return 0
    # log(1 - u), not log(u): u may be 0, and is never 1.
    return math.floor(-math.log1p(-uniform) / smoothing_lambda)
