"""The question and the reference chain's latents in one forward: what a method says after each right prefix.

    fed        q  q ###  l1   l2   l3        positions 0 .. Q - 1 are the question, the others its K thoughts
    hidden           |    |    |    |
    asked           l1   l2   l3  stop       the method, at each of these K + 1 positions by itself

No error is carried from one thought to the next: each is judged after a chain that is right so far. Group k of the
chain is what thought k should say.

Shape suffixes: Q question positions, K thoughts, T = Q + K positions, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.analysis.reference_chain import Token, reference_groups, reference_rows
from colar.data.example import Example
from colar.engine.request import NonFiniteError, Request
from colar.methods import base
from colar.methods.base import Batch, Method, Row, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


@dataclass(frozen=True)
class ReferencePass:
    """One example's pass: what was fed, the last hidden states, and the method's reply at its K + 1 positions."""

    example: Example
    row: Row
    groups: list[list[Token]]
    fed_TD: Tensor
    hidden_TD: Tensor
    thought: Thought
    """K + 1 rows: the last one is asked behind the last thought, where the method should stop."""

    @property
    def n_question(self) -> int:
        return len(self.row.question)

    @property
    def n_thoughts(self) -> int:
        return self.fed_TD.shape[0] - self.n_question

    @property
    def latents_KD(self) -> Tensor:
        """The reference's thoughts."""
        return self.fed_TD[self.n_question :]


@torch.no_grad()
def reference_passes(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any
) -> Iterator[ReferencePass]:
    """The passes of examples whose thoughts stand for the chain's tokens (`require_groups` says whether they do).

    NonFiniteError where the model's numbers are NaN or infinite: nothing could be said of such thoughts.
    """
    for example, row in zip(examples, reference_rows(lm, method, examples, params), strict=True):
        # A row at a time: without padding, positions are those of its own question and thoughts.
        batch = Batch.collate([row])
        embeds_1KD, counts_1 = method.thoughts(lm, batch)
        question_1QD = lm.embed(batch.question_ids)
        fed_1TD = ragged.pack((question_1QD, batch.question_lengths), (embeds_1KD, counts_1))
        hidden_TD = lm.hidden(fed_1TD)[0]
        begun = method.begin(lm, [Request(example.id, example.question, params, seed=row.seed)])
        # K + 1 rows: the question's last position, and that of each thought.
        asked_KD = hidden_TD[len(row.question) - 1 :]
        thought = method.think(lm, _state(lm, asked_KD, row, begun))
        if not bool(hidden_TD.isfinite().all() & thought.embeds.isfinite().all()):
            raise NonFiniteError(f"the model's numbers for {example.id} are not finite")
        groups = reference_groups(lm, method, row)
        yield ReferencePass(example, row, groups, fed_1TD[0], hidden_TD, thought)


def _state(lm: LatentLM, hidden_KD: Tensor, row: Row, begun: Mapping[str, Tensor]) -> ThinkState:
    """Every position of a chain as the step of one request that it is, greedy."""
    n = hidden_KD.shape[0]
    device = hidden_KD.device
    # Temperature 0 draws nothing. Step and seed say how many tokens a group has where c is not whole.
    zeros_K = torch.zeros(n, dtype=devices.widest(device), device=device)
    params_K = base.param_columns([row.params] * n)
    return ThinkState(
        hidden=hidden_KD,
        step=torch.arange(n, device=device),
        params={name: devices.send(column, device) for name, column in params_K.items()},
        temperature=zeros_K,
        top_p=zeros_K + 1,
        latent_temperature=zeros_K,
        seed=torch.full((n,), row.seed, dtype=torch.int64, device=device),
        sample=torch.zeros(n, dtype=torch.int64, device=device),
        make_logits=lm.logits,
        # There is one request behind all positions: its columns are repeated.
        begun={name: column.expand(n, *column.shape[1:]) for name, column in begun.items()},
    )
