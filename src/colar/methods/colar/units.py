"""What c counts, and which tokens are always a group of their own: `method.unit` and `method.alone`.

    tokens                     <<  4  8  /  2  =  2  4  >>           c = 2
    unit: token               [<<  4][8  /][2  =][2  4][>>]
    unit: number              [<<  4  8][/  2][=  2  4][>>]          48 and 24 are one unit each
    and alone: ["="]          [<<  4  8][/  2][=][2  4  >>]
    unit: term, and alone     [<<  4  8  /  2][=][2][4  >>]          <<48 and /2 are one unit each

Where each digit is a token, as in SmolLM2, Qwen and Gemma, groups of c tokens cut numbers in two, each time elsewhere.
Llama's tokenizer, which the paper has, cuts a number into pieces of up to three digits; `number` counts those.

A token behind which something is to be computed should have nothing beside it: in the group [2 =] the model must first
take the latent apart, and then has no layers left for the result. What such a token is depends on the task: "=" in
equations. It starts a group, and ends it.

`term` tells numbers that are copied from numbers that are computed. A number belongs to the token before it, so that
<<48, /2 and >> are one unit each: the model has the number before it, and has only to say it. A result is behind a
token that is alone, so that it begins a group, and there its digits come one a thought: each may need the one before
it. So no digit may follow the digit that a group begins with, and none may follow the third of a number: a longer one
goes on digit by digit.

A number is a unit only where c is `numbers_from` or more. With 2, a request at c = 1 thinks token by token, as CoT
does: what a model knows of digits it keeps there, and numbers are put together where c asks for larger groups.

All of this holds at inference as in training. A group goes on as long as its next token may join it. So the decoder is
also asked for the token behind a number, which says that the number ends; it is then asked for anew, as the next
group's first.

Columns of bools `numbers` (B,) say in which rows numbers are units; None: in all.

Shape suffixes: B rows, T reasoning tokens, K groups, X rows whose group may go on, S columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from colar.ops import groups
from colar.prompts import Template

Unit = Literal["token", "number", "term"]

DIGITS = tuple("0123456789")
LONGEST = 3
"""Digits of a unit, at most: those of a token of Llama's."""


@dataclass(frozen=True)
class Units:
    """By the ids of a tokenizer. Without any, each token is a unit, and none is alone."""

    digit_ids: tuple[int, ...] = ()
    alone_ids: tuple[int, ...] = ()
    terms: bool = False
    """Whether a number is a part of the unit that the token before it begins."""

    @classmethod
    def of(cls, template: Template, unit: Unit, alone: tuple[str, ...]) -> Units:
        """ValueError where the tokenizer has no token for a digit, or for one of `alone`."""
        digits = () if unit == "token" else template.token_ids(DIGITS, f"method.unit {unit}")
        return cls(digits, template.token_ids(alone, "method.alone"), terms=unit == "term")

    @property
    def plain(self) -> bool:
        """Whether a group simply has c tokens."""
        return not (self.digit_ids or self.alone_ids)

    def tokens(self, units_B: Tensor, numbers_B: Tensor | None = None) -> Tensor:
        """The most tokens that so many units may have, (B,)."""
        if not self.digit_ids:
            return units_B
        longest_B = units_B * longest(self.terms)
        return longest_B if numbers_B is None else torch.where(numbers_B, longest_B, units_B)

    def is_digit(self, ids: Tensor) -> Tensor:
        """bool, of the shape of `ids`, which may hold -1."""
        return _among(ids, self.digit_ids)

    def is_no_digit(self, ids: Tensor) -> Tensor:
        return ~self.is_digit(ids)

    def is_alone(self, ids: Tensor) -> Tensor:
        return _among(ids, self.alone_ids)

    def is_digit_or_alone(self, ids: Tensor) -> Tensor:
        return self.is_digit(ids) | self.is_alone(ids)

    # Of groups that are given

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of tokens (..., G), -1 behind them -> the place of each number or other token among those of its group,
        from 0, and the token's place in its number: 0 for ones, 1 for tens, 2 for hundreds. (..., G) each.

        The sign and the number of a term have a place each: what is summed is the same for both units. Counted from the end, a digit's place says what it is worth. Transformers add and multiply better when they are
        told so ("abacus embeddings", 2405.17399).
        """
        column_G = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        if not self.digit_ids:
            return column_G, torch.zeros_like(ids)
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

    # Of chains that are given

    def lengths(self, chain_ids: Tensor, numbers_B: Tensor | None = None) -> Tensor:
        """(B, T): the tokens of the unit that starts at each token. What stands in a row's padding means nothing."""
        digit_BT = self.is_digit(chain_ids)
        length_BT = torch.ones_like(chain_ids)
        run_BT = digit_BT
        for step in range(1, LONGEST):
            # Whether `step` more tokens are digits, with none between that is not.
            later_BT = torch.nn.functional.pad(digit_BT[:, step:], (0, min(step, chain_ids.shape[1])))
            run_BT = run_BT & later_BT
            length_BT = length_BT + run_BT.long()
        if self.terms:
            # A sign with the number behind it; a digit that begins a group has none.
            behind_BT = torch.nn.functional.pad(length_BT * digit_BT.long(), (0, 1))[:, 1:]
            length_BT = torch.where(digit_BT, 1, 1 + behind_BT)
        return length_BT if numbers_B is None else torch.where(numbers_B[:, None], length_BT, 1)

    def bounds(self, chain_ids: Tensor, numbers_B: Tensor | None = None) -> Tensor:
        """(B, T): the most tokens of a group that starts at each token, whatever c: it ends before a token that may not
        join it."""
        T = chain_ids.shape[1]
        alone_BT = self.is_alone(chain_ids)
        joins_none_BT = alone_BT
        single_BT = alone_BT
        if self.terms:
            digit_BT = self.is_digit(chain_ids)
            if numbers_B is not None:
                digit_BT = digit_BT & numbers_B[:, None]
            joins_none_BT = alone_BT | _beyond_the_longest(digit_BT)
            digit_behind_BT = torch.nn.functional.pad(digit_BT[:, 1:], (0, min(1, T)))
            single_BT = alone_BT | (digit_BT & digit_behind_BT)
        at_T = torch.arange(T, device=chain_ids.device)
        place_BT = torch.where(joins_none_BT, at_T, T)
        # Behind each token, the first that may not join: the least of the places that follow.
        from_BT = place_BT.flip(1).cummin(1).values.flip(1)
        next_BT = torch.nn.functional.pad(from_BT[:, 1:], (0, min(1, T)), value=T)
        return torch.where(single_BT, 1, next_BT - at_T)

    def asked(
        self, chain_ids: Tensor, sizes_BK: Tensor, most_BK: Tensor, numbers_B: Tensor | None = None
    ) -> Tensor:
        """The tokens that inference asks the decoder for at each group's position, (B, K): the group's own and, where
        another could still have joined it, the one behind. `most_BK` are the units that c lets in.

        Behind a number of three digits, too: whether they are one unit is not looked at. And behind every term: what
        begins with a sign may have another digit.
        """
        if self.plain:
            return torch.minimum(most_BK, sizes_BK + 1)
        starts_BK = groups.starts(sizes_BK)
        last_BK = (starts_BK + sizes_BK - 1).clamp(min=0, max=chain_ids.shape[1] - 1)
        last_ids_BK = chain_ids.gather(1, last_BK)
        room_BK = sizes_BK < groups.reach(self.lengths(chain_ids, numbers_B), starts_BK, most_BK)
        number_BK = torch.ones_like(room_BK) if self.terms else self.is_digit(last_ids_BK)
        if numbers_B is not None:
            number_BK = number_BK & numbers_B[:, None]
        more_BK = (room_BK | number_BK) & ~self.is_alone(last_ids_BK)
        return sizes_BK + more_BK.long()


PLAIN = Units()
"""A group has c tokens."""


class Extents:
    """How far the groups of a batch's rows have come while they are chosen, and what may join them.

    Rows are named by their indices (X,), so that those whose group has ended cost nothing.
    """

    def __init__(
        self, units: Units, first_B: Tensor, most_B: Tensor, numbers_B: Tensor | None = None
    ) -> None:
        self.units = units
        self.most_B = most_B
        self.numbers_B = numbers_B
        self.last_B = first_B.clone()
        self.used_B = torch.ones_like(first_B)
        """Units so far, the last one included."""
        self.run_B = units.is_digit(first_B).long() * (LONGEST if units.terms else 1)
        """Digits of the last number so far; 0 behind another token. No term begins with a digit: it counts as full."""

    def open(self, rows_X: Tensor) -> Tensor:
        """Whether any token may join, (X,) bool."""
        room_X = self.has_room(rows_X)
        if self.units.plain:
            return room_X
        return (room_X | self.takes_digit(rows_X)) & ~self.units.is_alone(self.last_B[rows_X])

    def has_room(self, rows_X: Tensor) -> Tensor:
        """Whether c lets one more unit in, (X,) bool."""
        return self.used_B[rows_X] < self.most_B[rows_X]

    def admits(self, rows_X: Tensor, ids_X: Tensor) -> Tensor:
        """Whether a token may join each group, (X,) bool; the groups are open."""
        return self._admits(rows_X, ids_X[:, None])[:, 0]

    def admits_of(self, rows_X: Tensor, ids_S: Tensor) -> Tensor:
        """Which of some tokens may join each group, (X, S) bool; the groups are open."""
        return self._admits(rows_X, ids_S[None, :])

    def _admits(self, rows_X: Tensor, ids: Tensor) -> Tensor:
        room_X1 = self.has_room(rows_X)[:, None]
        takes_X1 = self.takes_digit(rows_X)[:, None]
        units = self.units
        unit_begins = ~units.is_alone(ids)
        if units.terms:
            unit_begins = unit_begins & ~(units.is_digit(ids) & self._numbers(rows_X)[:, None])
        return (room_X1 & unit_begins) | (takes_X1 & units.is_digit(ids))

    def add(self, rows_X: Tensor, ids_X: Tensor) -> None:
        """Let a token join each group. Of a group that has ended nobody asks any more."""
        if self.units.plain:
            self.used_B[rows_X] += 1
            return
        digit_X = self.units.is_digit(ids_X)
        same_X = digit_X & self.takes_digit(rows_X)
        self.run_B[rows_X] = torch.where(same_X, self.run_B[rows_X] + 1, digit_X.long())
        self.used_B[rows_X] += (~same_X).long()
        self.last_B[rows_X] = ids_X

    def takes_digit(self, rows_X: Tensor) -> Tensor:
        """Whether a digit would belong to the last unit, (X,) bool."""
        run_X = self.run_B[rows_X]
        takes_X = run_X < LONGEST
        if not self.units.terms:
            takes_X = takes_X & (run_X > 0)
        return takes_X & self._numbers(rows_X)

    def refuses_digit(self, rows_X: Tensor) -> Tensor:
        """Whether no digit may join, be there room or not, (X,) bool."""
        if not self.units.terms:
            return torch.zeros_like(rows_X, dtype=torch.bool)
        return ~self.takes_digit(rows_X) & self._numbers(rows_X)

    def _numbers(self, rows_X: Tensor) -> Tensor:
        """Whether numbers are units, (X,) bool."""
        if self.numbers_B is None:
            return torch.full_like(rows_X, bool(self.units.digit_ids), dtype=torch.bool)
        return self.numbers_B[rows_X]


def longest(terms: bool) -> int:
    """The most tokens of a unit that may have digits."""
    return LONGEST + 1 if terms else LONGEST


def _beyond_the_longest(digit_BT: Tensor) -> Tensor:
    """Which digits are behind the third of their number, (B, T) bool."""
    beyond_BT = digit_BT
    for step in range(1, LONGEST + 1):
        # `step` tokens before, with none between that is no digit.
        before_BT = torch.nn.functional.pad(digit_BT, (step, 0))[:, : digit_BT.shape[1]]
        beyond_BT = beyond_BT & before_BT
    return beyond_BT


def _among(ids: Tensor, chosen: tuple[int, ...]) -> Tensor:
    if not chosen:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(chosen, device=ids.device))
