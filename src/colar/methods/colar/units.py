"""What c counts, and where groups start and end whatever c: `method.unit`, `method.alone` and `method.starts`.

    tokens                     <<  4  8  /  2  =  2  4  >>           c = 2
    unit: token               [<<  4][8  /][2  =][2  4][>>]
    unit: number              [<<  4  8][/  2][=  2  4][>>]          48 and 24 are one unit each
    and alone: ["="]          [<<  4  8][/  2][=][2  4  >>]
    unit: result, alone: ["="], starts: ["/"]
                              [<<  4][8][/  2][=][2  4  >>]          24 is one unit

Where each digit is a token, as in SmolLM2, Qwen and Gemma, groups of c tokens cut numbers in two, each time elsewhere.
Llama's tokenizer, which the paper has, cuts a number into pieces of up to three digits; `number` counts those.

A token behind which something is to be computed should have nothing beside it: in the group [2 =] the model must first
take the latent apart, and then has no layers left for the result. What such a token is depends on the task: "=" in
equations. It starts a group, and ends it. A token of `starts` may have others behind it in its group.

A pretrained model computes with digits that stand at positions of their own; to compute with several in one latent it
has to learn anew. So `result` keeps the digits of operands apart, and puts together what is hardly computed with: the
digits of a number that begins a group, as a result does behind "=", are one unit. No digit joins a group behind another
digit else. Signs should start a group: behind [8 /] the next operand would begin one. (The later digits of a longer
operand do: 1234 is fed as 1 and 234.)

A number is a unit only where c is `numbers_from` or more. With 2, a request at c = 1 thinks token by token, as CoT
does: what a model knows of digits it keeps there, and numbers are put together where c asks for larger groups.

All of this holds at inference as in training. A group goes on as long as its next token may join it. So the decoder is
also asked for the token behind a number, which says that the number ends; it is then asked for anew, as the next
group's first.

Columns of bools `numbers` (B,) say in which rows numbers are units; None: in all.

Shape suffixes: B rows, T reasoning tokens, K groups, X rows whose group may go on, S columns of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from colar.ops import groups
from colar.template.template import Template

Unit = Literal["token", "number", "result"]

DIGITS = tuple("0123456789")
LONGEST = 3
"""Digits of a unit, at most: those of a token of Llama's."""


@dataclass(frozen=True)
class Units:
    """By the ids of a tokenizer. Without any, each token is a unit, and may stand anywhere in a group."""

    digit_ids: tuple[int, ...] = ()
    start_ids: tuple[int, ...] = ()
    """Tokens that join no group."""
    end_ids: tuple[int, ...] = ()
    """Tokens that nothing joins. What is among both is a group of its own."""
    results: bool = False
    """Whether only a number that begins a group is a unit, and other digits are never behind one another."""

    @classmethod
    def of(
        cls,
        template: Template,
        unit: Unit,
        alone: Sequence[str] = (),
        starts: Sequence[str] = (),
    ) -> Units:
        """ValueError where the tokenizer has no token for a digit, or for one that is named."""
        digits = () if unit == "token" else template.token_ids(DIGITS, f"method.unit {unit}")
        alone_ids = template.token_ids(tuple(alone), "method.alone")
        return cls(
            digits,
            alone_ids + template.token_ids(tuple(starts), "method.starts"),
            alone_ids,
            results=unit == "result",
        )

    @property
    def plain(self) -> bool:
        """Whether a group simply has c tokens."""
        return not (self.digit_ids or self.start_ids or self.end_ids)

    def tokens(self, units_B: Tensor, numbers_B: Tensor | None = None) -> Tensor:
        """The most tokens that so many units may have, (B,)."""
        if not self.digit_ids:
            return units_B
        longest_B = units_B * LONGEST
        return longest_B if numbers_B is None else torch.where(numbers_B, longest_B, units_B)

    def is_digit(self, ids: Tensor) -> Tensor:
        """bool, of the shape of `ids`, which may hold -1."""
        return _among(ids, self.digit_ids)

    def is_no_digit(self, ids: Tensor) -> Tensor:
        return ~self.is_digit(ids)

    def is_start(self, ids: Tensor) -> Tensor:
        return _among(ids, self.start_ids)

    def is_digit_or_start(self, ids: Tensor) -> Tensor:
        return self.is_digit(ids) | self.is_start(ids)

    def is_end(self, ids: Tensor) -> Tensor:
        return _among(ids, self.end_ids)

    # Of groups that are given

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of tokens (..., G), -1 behind them -> the place of each token's unit among those of its group, from 0,
        and the token's place in its number: 0 for ones, 1 for tens, 2 for hundreds. (..., G) each.

        Counted from the end, a digit's place says what it is worth. Transformers add and multiply better when they are
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
        """(B, T): the tokens of the unit that starts at each token. What stands in a row's padding means nothing.

        Of numbers that begin no group, `results` takes one digit: `bounds` says so.
        """
        digit_BT = self.is_digit(chain_ids)
        length_BT = torch.ones_like(chain_ids)
        run_BT = digit_BT
        for step in range(1, LONGEST):
            # Whether `step` more tokens are digits, with none between that is not.
            later_BT = torch.nn.functional.pad(digit_BT[:, step:], (0, min(step, chain_ids.shape[1])))
            run_BT = run_BT & later_BT
            length_BT = length_BT + run_BT.long()
        return length_BT if numbers_B is None else torch.where(numbers_B[:, None], length_BT, 1)

    def bounds(self, chain_ids: Tensor, numbers_B: Tensor | None = None) -> Tensor:
        """(B, T): the most tokens of a group that starts at each token, whatever c: it ends before a token that may not
        join it."""
        T = chain_ids.shape[1]
        at_T = torch.arange(T, device=chain_ids.device)
        # Which tokens no group that began before them has.
        refused_BT = self.is_start(chain_ids) | _shifted(self.is_end(chain_ids), 1)
        first_BT = torch.ones_like(chain_ids)
        if self.results:
            digit_BT = self.is_digit(chain_ids)
            if numbers_B is not None:
                digit_BT = digit_BT & numbers_B[:, None]
            refused_BT = refused_BT | (digit_BT & _shifted(digit_BT, 1))
            # The digits that a group begins with are not behind one another: look only behind these.
            first_BT = torch.where(digit_BT, self.lengths(chain_ids, numbers_B), 1)
        place_BT = torch.where(refused_BT, at_T, T)
        # From each token on, the first that is refused: the least of the places that follow.
        next_BT = place_BT.flip(1).cummin(1).values.flip(1)
        next_BT = torch.nn.functional.pad(next_BT, (0, LONGEST), value=T)
        behind_BT = (at_T + first_BT).clamp(max=next_BT.shape[1] - 1)
        return next_BT.gather(1, behind_BT) - at_T

    def numbers_open(self, ids: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Groups of tokens (..., G) -> at which places a digit would go on the number before it, (..., G) bool.

        `numbers` (...,) says in which groups numbers are units; None: in all.
        """
        tokens_NG = ids.flatten(end_dim=-2)
        all_N = torch.arange(len(tokens_NG), device=ids.device)
        first_N = tokens_NG[:, 0]
        # As while a group is chosen. How many units c lets in plays no part.
        extents = Extents(self, first_N, first_N, None if numbers is None else numbers.flatten())
        open_at = [torch.zeros_like(all_N, dtype=torch.bool)]
        for token_N in tokens_NG[:, 1:].unbind(1):
            open_at.append(extents.takes_digit(all_N))
            extents.add(all_N, token_N)
        return torch.stack(open_at, dim=-1).view(ids.shape)

    def asked(
        self,
        chain_ids: Tensor,
        sizes_BK: Tensor,
        most_BK: Tensor,
        numbers_B: Tensor | None = None,
        starts_BK: Tensor | None = None,
    ) -> Tensor:
        """The tokens that inference asks the decoder for at each group's position, (B, K): the group's own and, where
        another could still have joined it, the one behind. `most_BK` are the units that c lets in. Groups follow one
        another, unless `starts_BK` says where each begins.

        Behind a number of three digits, too: whether they are one unit is not looked at.
        """
        if self.plain:
            return torch.minimum(most_BK, sizes_BK + 1)
        if starts_BK is None:
            starts_BK = groups.starts(sizes_BK)
        last_BK = (starts_BK + sizes_BK - 1).clamp(min=0, max=chain_ids.shape[1] - 1)
        last_ids_BK = chain_ids.gather(1, last_BK)
        if self.results:
            room_BK, number_BK = self._room(chain_ids, starts_BK, sizes_BK, most_BK, numbers_B)
        else:
            room_BK = sizes_BK < groups.reach(self.lengths(chain_ids, numbers_B), starts_BK, most_BK)
            number_BK = self.is_digit(last_ids_BK)
        if numbers_B is not None:
            number_BK = number_BK & numbers_B[:, None]
        more_BK = (room_BK | number_BK) & ~self.is_end(last_ids_BK)
        return sizes_BK + more_BK.long()

    def _room(
        self,
        chain_ids: Tensor,
        starts_BK: Tensor,
        sizes_BK: Tensor,
        most_BK: Tensor,
        numbers_B: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Whether c lets one more unit into each group, and whether the group is a number and nothing else, (B, K)."""
        digit_BT = self.is_digit(chain_ids)
        if numbers_B is not None:
            digit_BT = digit_BT & numbers_B[:, None]
        # Running counts: what a group has of something is their difference between its end and its start.
        ends_BK = starts_BK + sizes_BK
        digits_BK = _between(digit_BT, starts_BK, ends_BK)
        inner_BK = _between(digit_BT & _shifted(digit_BT, 1), starts_BK + 1, ends_BK)
        used_BK = sizes_BK - inner_BK
        return used_BK < most_BK, digits_BK == sizes_BK


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
        self.run_B = units.is_digit(first_B).long()
        """Digits of the last unit so far, 0 where it is no number; `LONGEST` where it takes no more."""

    def open(self, rows_X: Tensor) -> Tensor:
        """Whether any token may join, (X,) bool."""
        room_X = self.has_room(rows_X)
        if self.units.plain:
            return room_X
        return (room_X | self.takes_digit(rows_X)) & ~self.units.is_end(self.last_B[rows_X])

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
        begins = ~units.is_start(ids)
        if units.results:
            begins = begins & ~(self.refuses_digit(rows_X)[:, None] & units.is_digit(ids))
        return (room_X1 & begins) | (takes_X1 & units.is_digit(ids))

    def add(self, rows_X: Tensor, ids_X: Tensor) -> None:
        """Let a token join each group. Of a group that has ended nobody asks any more."""
        if self.units.plain:
            self.used_B[rows_X] += 1
            return
        digit_X = self.units.is_digit(ids_X)
        same_X = digit_X & self.takes_digit(rows_X)
        # A number that begins no group has one digit of it.
        begun = LONGEST if self.units.results else 1
        self.run_B[rows_X] = torch.where(same_X, self.run_B[rows_X] + 1, begun * digit_X.long())
        self.used_B[rows_X] += (~same_X).long()
        self.last_B[rows_X] = ids_X

    def takes_digit(self, rows_X: Tensor) -> Tensor:
        """Whether a digit would belong to the last unit, (X,) bool."""
        run_X = self.run_B[rows_X]
        return (run_X > 0) & (run_X < LONGEST) & self._numbers(rows_X)

    def refuses_digit(self, rows_X: Tensor) -> Tensor:
        """Whether no digit may join, be there room or not, (X,) bool."""
        if not self.units.results:
            return torch.zeros_like(rows_X, dtype=torch.bool)
        return (self.run_B[rows_X] >= LONGEST) & self._numbers(rows_X)

    def _numbers(self, rows_X: Tensor) -> Tensor:
        """Whether numbers are units, (X,) bool."""
        if self.numbers_B is None:
            return torch.full_like(rows_X, bool(self.units.digit_ids), dtype=torch.bool)
        return self.numbers_B[rows_X]


def _shifted(what_BT: Tensor, n: int) -> Tensor:
    """Of each token what holds of the n-th before it, (B, T) bool."""
    return torch.nn.functional.pad(what_BT, (n, 0))[:, : what_BT.shape[1]]


def _between(what_BT: Tensor, starts_BK: Tensor, ends_BK: Tensor) -> Tensor:
    """How many tokens from each start to before each end are so, (B, K); 0 where nothing lies between."""
    counts_BT1 = torch.nn.functional.pad(what_BT.long().cumsum(1), (1, 0))
    most = counts_BT1.shape[1] - 1
    found_BK = counts_BT1.gather(1, ends_BK.clamp(max=most)) - counts_BT1.gather(1, starts_BK.clamp(max=most))
    return found_BK.clamp(min=0)


def _among(ids: Tensor, chosen: tuple[int, ...]) -> Tensor:
    if not chosen:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(chosen, device=ids.device))
