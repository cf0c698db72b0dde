"""Starts and ends of groups of equations, and the units of c in them: `grouping: equations`.

    tokens                     <<  4  8  /  2  =  2  4  >>           c = 2
    grouping: tokens          [<<  4][8  /][2  =][2  4][>>]
    grouping: equations       [<<  4][8][/  2][=][2  4  >>]          24 is one unit

Where each digit is a token, as in SmolLM2, Qwen and Gemma, groups of c tokens cut numbers in two, each time elsewhere.
A pretrained model computes with digits that stand at positions of their own; to compute with several in one latent it
has to learn anew. So the digits of operands stay in groups of their own, and what is hardly computed with is put
together: the digits, up to three, of a number that begins a group, as a result does after "=", are one unit. Otherwise
no digit may follow another digit in a group.

"=" is a group of its own. A result is computed there, and in the group [2 =] the model would have to take the latent
apart first, and then have no layers left for the result. Signs start a group: behind [8 /] the next operand would begin
one. (The later digits of a longer operand do: 1234 is fed as 1 and 234.)

Below c = 2 digits are tokens like all others. So a request at c = 1 thinks token by token, as CoT does, and keeps what
the model knows of digits.

All of this holds at inference as in training: `Extents` has the rules for one token more, and `chains.py` runs them
over given chains. A group goes on as long as its next token may join it. So the decoder also computes the token behind
a number, which says that the number ends; that token is then chosen anew, as the next group's first.

Shape suffixes: B rows, G places of a group, X rows whose group may go on, S columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colar.ops import devices
from colar.template.template import Template

DIGITS = tuple("0123456789")
SIGNS = ("+", "-", "*", "/")
LONGEST = 3
"""Digits of a unit, at most: those of a token of Llama's."""
NUMBERS_FROM = 2
"""The least c at which a number is a unit."""


@dataclass(frozen=True)
class Equations:
    """Digits, signs and "=", by the ids of a tokenizer."""

    digit_ids: tuple[int, ...]
    sign_ids: tuple[int, ...]
    """Tokens that start a group."""
    equals_id: int
    """The token that is a group of its own."""

    @classmethod
    def of(cls, template: Template) -> Equations:
        """ValueError where the tokenizer has no token for a digit, a sign or "="."""
        key = "method.grouping equations"
        ids = template.token_ids((*DIGITS, *SIGNS, "="), key)
        return cls(ids[: len(DIGITS)], ids[len(DIGITS) : -1], ids[-1])

    def is_digit(self, ids: Tensor) -> Tensor:
        """bool, of the shape of `ids`, which may hold -1."""
        return _any_of(ids, self.digit_ids)

    def is_start(self, ids: Tensor) -> Tensor:
        """Signs and "=": tokens that start a group."""
        return _any_of(ids, (*self.sign_ids, self.equals_id))

    def is_end(self, ids: Tensor) -> Tensor:
        """Tokens that nothing joins in their group."""
        return ids == self.equals_id

    def units_and_digits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of tokens (..., G), -1 behind them -> the place of each token's unit among those of its group, from 0,
        and the token's place in its number: 0 for ones, 1 for tens, 2 for hundreds. (..., G) each.

        Counted from the end, a digit's place says what it is worth. Transformers add and multiply better when they are
        told so ("abacus embeddings", 2405.17399).
        """
        digit = self.is_digit(ids)
        units = [torch.zeros_like(ids[..., 0])]
        digits = [torch.zeros_like(ids[..., 0])]
        for g in range(1, ids.shape[-1]):
            both = digit[..., g] & digit[..., g - 1]
            same = both & (digits[-1] < LONGEST - 1)
            digits.append(torch.where(same, digits[-1] + 1, 0))
            units.append(units[-1] + (~same).long())
        worth = [torch.zeros_like(ids[..., 0])]
        for g in reversed(range(ids.shape[-1] - 1)):
            worth.append(torch.where(units[g] == units[g + 1], worth[-1] + 1, 0))
        return torch.stack(units, dim=-1), torch.stack(worth[::-1], dim=-1)


def most_tokens(units: int, equations: Equations | None) -> int:
    """The most tokens that a group of `units` units may have."""
    # A number that begins a group is one unit; behind it a unit is one token.
    return units if equations is None else units + LONGEST - 1


class Extents:
    """State of the groups of a batch's rows while they are chosen, and tokens that may join them.

    Rows are named by their indices (X,), so that those whose group has ended cost nothing. Without `equations` a group
    has `units` tokens, of any kind. In rows of `unites_digits` (bool), those of c = 2 and more, numbers are units.
    """

    def __init__(
        self, first_B: Tensor, units_B: Tensor, equations: Equations | None, unites_digits_B: Tensor
    ) -> None:
        self.equations = equations
        self.units_B = units_B
        self.unites_digits_B = unites_digits_B
        self.last_B = first_B.clone()
        self.used_B = torch.ones_like(first_B)
        """Units so far, the last one included."""
        self.run_B = torch.zeros_like(first_B) if equations is None else equations.is_digit(first_B).long()
        """Digits of the last unit so far, 0 where it is no number; `LONGEST` where it takes no more."""

    def open(self, rows_X: Tensor) -> Tensor:
        """True if any token may join, (X,) bool."""
        room_X = self.has_room(rows_X)
        return room_X if self.equations is None else room_X & ~self.equations.is_end(self.last_B[rows_X])

    def has_room(self, rows_X: Tensor) -> Tensor:
        """True if c lets one more unit in, (X,) bool."""
        return self.used_B[rows_X] < self.units_B[rows_X]

    def admits(self, rows_X: Tensor, ids: Tensor) -> Tensor:
        """True if tokens may join each group, which is open: ids (X, 1), or (1, S) for all groups -> (X, 1 or S).

        A number that may go on is the group's first unit, and numbers are units from c = 2 on: c has room for its end.
        """
        assert self.equations is not None
        is_digit = self.equations.is_digit(ids)
        refused = self.equations.is_start(ids) | (self.refuses_digit(rows_X)[:, None] & is_digit)
        return self.has_room(rows_X)[:, None] & ~refused

    def add(self, rows_X: Tensor, ids_X: Tensor) -> None:
        """Let a token join each group. A group that has ended is not read any more."""
        if self.equations is None:
            self.used_B[rows_X] += 1
            return
        digit_X = self.equations.is_digit(ids_X)
        same_X = digit_X & self.takes_digit(rows_X)
        # A number that begins no group has one digit of it.
        self.run_B[rows_X] = torch.where(same_X, self.run_B[rows_X] + 1, LONGEST * digit_X.long())
        self.used_B[rows_X] += (~same_X).long()
        self.last_B[rows_X] = ids_X

    def takes_digit(self, rows_X: Tensor) -> Tensor:
        """True if a digit would belong to the last unit, (X,) bool."""
        run_X = self.run_B[rows_X]
        return (run_X > 0) & (run_X < LONGEST) & self.unites_digits_B[rows_X]

    def compares(self, rows_X: Tensor) -> Tensor:
        """True if a threshold applies to the next token, (X,) bool: of equations, only behind a number that may go on.

        There it is a digit of that number, or its end. A result's digits are computed one from another; a sign and the
        digit behind it cost nothing in one thought.
        """
        return (
            torch.ones_like(rows_X, dtype=torch.bool) if self.equations is None else self.takes_digit(rows_X)
        )

    def refuses_digit(self, rows_X: Tensor) -> Tensor:
        """True if no digit may join, be there room or not, (X,) bool."""
        return (self.run_B[rows_X] >= LONGEST) & self.unites_digits_B[rows_X]


def _any_of(ids: Tensor, some: tuple[int, ...]) -> Tensor:
    """True where an id is one of some, bool of the shape of `ids`."""
    # Not by `torch.isin`: of a few ids it makes them unique first, which waits for a GPU.
    return (ids[..., None] == devices.constant(some, ids.device)).any(-1)
