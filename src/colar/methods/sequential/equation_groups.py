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

All of this holds at inference as in training. `Extents` has the rules for one token more, as thinking needs them, and
`Equations.unit_sizes` and `most_tokens` for all places of given chains at once, as training does; a test holds the two
equal. A group goes on as long as its next token may join it. So the decoder also computes the token behind a number,
which says that the number ends; that token is then chosen anew, as the next group's first.

Columns of bools `numbers` (B,) say in which rows numbers are units: those of c = 2 and more.

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, X rows whose group may go on, S columns of
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

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

    # Of groups that are given

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

    # Of chains that are given

    def unit_sizes(self, chain_ids: Tensor, numbers_B: Tensor) -> Tensor:
        """(B, T): the tokens of the unit that starts at each token. What stands in a row's padding means nothing.

        Of numbers that begin no group a unit is one digit: `most_tokens` says so.
        """
        digit_BT = self.is_digit(chain_ids)
        size_BT = torch.ones_like(chain_ids)
        run_BT = digit_BT
        for step in range(1, LONGEST):
            # Whether `step` more tokens are digits, with none between that is not.
            later_BT = pad(digit_BT[:, step:], (0, min(step, chain_ids.shape[1])))
            run_BT = run_BT & later_BT
            size_BT = size_BT + run_BT.long()
        return torch.where(numbers_B[:, None], size_BT, 1)

    def most_tokens(self, chain_ids: Tensor, numbers_B: Tensor) -> Tensor:
        """(B, T): the most tokens of a group that starts at each token, for any c: it ends before a token that may not
        join it."""
        T = chain_ids.shape[1]
        at_T = torch.arange(T, device=chain_ids.device)
        # Which tokens no group that began before them has.
        digit_BT = self.is_digit(chain_ids) & numbers_B[:, None]
        refused_BT = self.is_start(chain_ids) | _shifted(self.is_end(chain_ids))
        refused_BT = refused_BT | (digit_BT & _shifted(digit_BT))
        # A group may begin with several digits: what is refused is looked for after them.
        first_BT = torch.where(digit_BT, self.unit_sizes(chain_ids, numbers_B), 1)
        place_BT = torch.where(refused_BT, at_T, T)
        # From each token on, the first that is refused: the least of the places that follow.
        next_BT = place_BT.flip(1).cummin(1).values.flip(1)
        next_BT = pad(next_BT, (0, LONGEST), value=T)
        behind_BT = (at_T + first_BT).clamp(max=next_BT.shape[1] - 1)
        return next_BT.gather(1, behind_BT) - at_T

    def numbers_open(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Groups of tokens (..., G) -> at which places a digit would go on the number before it, (..., G) bool.

        `numbers` (...,) says in which groups numbers are units.
        """
        tokens_NG = ids.flatten(end_dim=-2)
        all_N = torch.arange(len(tokens_NG), device=ids.device)
        first_N = tokens_NG[:, 0]
        # As while a group is chosen. The units that c lets in play no part.
        extents = Extents(first_N, torch.full_like(first_N, NUMBERS_FROM), self, numbers.flatten())
        open_at = [torch.zeros_like(all_N, dtype=torch.bool)]
        for token_N in tokens_NG[:, 1:].unbind(1):
            open_at.append(extents.takes_digit(all_N))
            extents.add(all_N, token_N)
        return torch.stack(open_at, dim=-1).view(ids.shape)

    def label_counts(
        self, chain_ids: Tensor, starts_BK: Tensor, sizes_BK: Tensor, most_BK: Tensor, numbers_B: Tensor
    ) -> Tensor:
        """The tokens that the decoder chooses at each group's position in thinking, (B, K): the group's own and, where
        another could still have joined it, the one behind. `most_BK` are the units that c lets in.
        """
        ends_BK = starts_BK + sizes_BK
        last_BK = (ends_BK - 1).clamp(min=0, max=chain_ids.shape[1] - 1)
        closed_BK = self.is_end(chain_ids.gather(1, last_BK))
        # Running counts: what a group has of something is their difference between its end and its start.
        digit_BT = self.is_digit(chain_ids) & numbers_B[:, None]
        inner_BK = _between(digit_BT & _shifted(digit_BT), starts_BK + 1, ends_BK)
        has_room_BK = sizes_BK - inner_BK < most_BK
        more_BK = has_room_BK & ~closed_BK
        return sizes_BK + more_BK.long()


class Extents:
    """State of the groups of a batch's rows while they are chosen, and tokens that may join them.

    Rows are named by their indices (X,), so that those whose group has ended cost nothing. Without `equations` a group
    has `units` tokens, of any kind.
    """

    def __init__(
        self, first_B: Tensor, units_B: Tensor, equations: Equations | None, numbers_B: Tensor
    ) -> None:
        self.equations = equations
        self.units_B = units_B
        self.numbers_B = numbers_B
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
        return (run_X > 0) & (run_X < LONGEST) & self.numbers_B[rows_X]

    def refuses_digit(self, rows_X: Tensor) -> Tensor:
        """True if no digit may join, be there room or not, (X,) bool."""
        return (self.run_B[rows_X] >= LONGEST) & self.numbers_B[rows_X]


def _any_of(ids: Tensor, some: tuple[int, ...]) -> Tensor:
    """True where an id is one of some, bool of the shape of `ids`."""
    # Not by `torch.isin`: of a few ids it makes them unique first, which waits for a GPU.
    return (ids[..., None] == devices.constant(some, ids.device)).any(-1)


def _shifted(what_BT: Tensor) -> Tensor:
    """Of each token what holds of the one before it, (B, T) bool."""
    return pad(what_BT, (1, 0))[:, : what_BT.shape[1]]


def _between(what_BT: Tensor, starts_BK: Tensor, ends_BK: Tensor) -> Tensor:
    """Number of such tokens from each start to before each end, (B, K); 0 where nothing lies between."""
    counts_BT1 = pad(what_BT.long().cumsum(1), (1, 0))
    most = counts_BT1.shape[1] - 1
    n_between_BK = counts_BT1.gather(1, ends_BK.clamp(max=most)) - counts_BT1.gather(
        1, starts_BK.clamp(max=most)
    )
    return n_between_BK.clamp(min=0)
