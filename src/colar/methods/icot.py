"""iCoT: the chain is internalised, its front first (Deng, Choi and Shieber 2024, "From Explicit CoT to Implicit CoT:
Learning to Internalize CoT Step by Step", section 3).

    stage 0    question ###  t1 t2 t3 t4 t5 t6   ###  answer EOS
    stage 2    question ###        t3 t4 t5 t6   ###  answer EOS
    last       question ###                      ###  answer EOS

In stage s the first s tokens of the chain are removed, and the rest is trained as CoT is:

    L = mean over (rest of the chain, ###, answer, EOS) of -log p(token)

Removal smoothing: a row loses o more tokens than its stage removes, P(o) = (1 - exp(-lambda)) exp(-lambda o) for o = 0,
1, ..., drawn anew for every row, which prepares the model for the next stage. Tokens are removed one by one,
`removed_per_epoch` of them in an epoch; once `remove_all_at` are due, the whole chain is removed. The answer then
directly follows the question: #L is 0.

Departures. A row's stage is given by the row's own place in the epoch, not by its batch's. The offset is drawn anew
at each epoch from (seed, epoch, row), and is not cut off at 100. Positions close up after the removed tokens (the
published code's default; its `keep_position` is not implemented). The optimiser's moments are reset at each stage, as
in the paper.
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
        # A product that is a rounding error below a whole number must not yield the stage before it.
        return int(due + 1e-9)

    def last_stage(self) -> int:
        return int(self.config.remove_all_at)

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        stage = self.stage(epoch)
        if stage == self.last_stage():
            return replace(row, steps=[])
        # Removal smoothing: some rows are ahead of their stage.
        removed = stage + offset(rng.random(), self.config.smoothing_lambda)
        return replace(row, steps=base.keep_tokens(row.steps, range(removed, len(row.chain))))

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, state.hidden, 0)


def offset(uniform: float, smoothing_lambda: float | None) -> int:
    """The o of removal smoothing by inverse CDF, P(o >= n) = exp(-lambda n), from `uniform` in [0, 1)."""
    if smoothing_lambda is None:
        return 0
    # log(1 - u), not log(u): u may be 0, and is never 1.
    return math.floor(-math.log1p(-uniform) / smoothing_lambda)
