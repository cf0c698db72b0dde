"""Boundaries of groups, both while their tokens are chosen and in chains that are given.

If c counts tokens, a group has c of them. In `grouping: equations` c counts units:

    tokens                     <<  4  8  /  2  =  2  4  >>           c = 2
    grouping: tokens          [<<  4][8  /][2  =][2  4][>>]
    grouping: equations       [<<  4][8][/  2][=][2  4  >>]          24 is one unit

A sign starts a group, and "=" is a group of its own. From c = 2 on, up to three digits of a number that begins a group
are one unit, as a result's are after "="; otherwise no digit follows another digit in a group. Below c = 2 digits are
tokens like all others, so that c = 1 is CoT. docs/method.md has the reasons.

`OpenGroups` has the rules for adding one token, and `Windows` runs them over given chains. A group continues as long as
its next token may join it. So the decoder also predicts the token after a number, which shows that the number has
ended; that token is then chosen again, as the next group's first.

In given chains the rules are run from each token on, because a group's start depends on where the one before it ended:

    chain       4  8  /  2  =  2  4          grouping: equations
    from 4      1  1  .                      the units of a group up to each token; ".": no group has it
    from 8         1  .
    from /            1  2  .
    from 2               1  .
    from =                  1  .
    from 2                     1  1

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, X rows whose group may go on, N windows of
all rows, S columns of logits.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from colar.methods import grouping
from colar.ops import devices, ragged
from colar.template.template import Template

DIGITS = tuple("0123456789")
SIGNS = ("+", "-", "*", "/")
MOST_DIGITS = 3
"""Most digits of a unit, as in a token of Llama's."""
NUMBERS_FROM = 2
"""The least c at which a number is a unit."""
SAMPLE = 1000
"""Number of chains that are searched for signs."""
NOTHING = -1
"""Id at a place of a group that has no token."""
NEVER = torch.iinfo(torch.int64).max
"""More units than any group has."""


@dataclass(frozen=True)
class Equations:
    """Token ids of digits, signs and "=" in a tokenizer."""

    digit_ids: tuple[int, ...]
    sign_ids: tuple[int, ...]
    """Tokens that start a group."""
    equals_id: int
    """The token that is a group of its own."""

    @classmethod
    def of(cls, template: Template) -> "Equations":
        """Look the ids up. ValueError if the tokenizer has no token for a digit, a sign or "="."""
        ids = template.token_ids((*DIGITS, *SIGNS, "="), "method.grouping equations")
        return cls(ids[: len(DIGITS)], ids[len(DIGITS) : -1], ids[-1])

    def are_seen(self, template: Template, chains: Sequence[tuple[str, ...]]) -> bool:
        """True if each sign and "=" is a token by itself in nine of ten chains, of the first thousand.

        In "4 / 2 = 2" most tokenizers join a sign to its space, so that no group would start there.
        """
        starts = {*self.sign_ids, self.equals_id}
        seen = []
        for steps in chains[:SAMPLE]:
            written = sum(step.count(sign) for step in steps for sign in (*SIGNS, "="))
            seen.append(written == sum(token in starts for ids in template.steps(steps) for token in ids))
        return sum(seen) >= 0.9 * len(seen)

    def is_digit(self, ids: Tensor) -> Tensor:
        """bool, of the shape of `ids`, which may hold -1."""
        return _any_of(ids, self.digit_ids)

    def is_start(self, ids: Tensor) -> Tensor:
        """True for signs and "=", the tokens that start a group."""
        return _any_of(ids, (*self.sign_ids, self.equals_id))

    def units_and_digits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of tokens (..., G), -1 behind them -> the place of each token's unit among those of its group, from 0,
        and the token's place in its number: 0 for ones, 1 for tens, 2 for hundreds. (..., G) each.

        Counted from the end, a digit's place gives its value. Transformers add and multiply better with such places
        ("abacus embeddings", 2405.17399).
        """
        digit = self.is_digit(ids)
        units = [torch.zeros_like(ids[..., 0])]
        digits = [torch.zeros_like(ids[..., 0])]
        for g in range(1, ids.shape[-1]):
            both = digit[..., g] & digit[..., g - 1]
            same = both & (digits[-1] < MOST_DIGITS - 1)
            digits.append(torch.where(same, digits[-1] + 1, 0))
            units.append(units[-1] + (~same).long())
        worth = [torch.zeros_like(ids[..., 0])]
        for g in reversed(range(ids.shape[-1] - 1)):
            worth.append(torch.where(units[g] == units[g + 1], worth[-1] + 1, 0))
        return torch.stack(units, dim=-1), torch.stack(worth[::-1], dim=-1)


def most_tokens(units: int, equations: Equations | None) -> int:
    """The most tokens that a group of `units` units may have."""
    # A number that begins a group is one unit; behind it a unit is one token.
    return units if equations is None or units < NUMBERS_FROM else units + MOST_DIGITS - 1


class OpenGroups:
    """State of the groups of a batch's rows while they are chosen, and rules for the tokens that may join them.

    Rows are given by their indices (X,), so that those whose group has ended cost nothing. Without `equations` a group
    has `units` tokens, of any kind. In rows with `unites_digits` (bool), those of c = 2 and more, numbers are units.
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
        """Digits of the last unit so far, 0 if it is no number; `MOST_DIGITS` if it takes no more."""

    def open(self, rows_X: Tensor) -> Tensor:
        """True if any token may join, (X,) bool.

        A digit that continues a number adds no unit, so the room required here is always there: such a number is the
        group's first unit, and numbers are units only from c = 2 on.
        """
        room_X = self.used_B[rows_X] < self.units_B[rows_X]
        if self.equations is None:
            return room_X
        return room_X & (self.last_B[rows_X] != self.equations.equals_id)

    def admits(self, rows_X: Tensor, ids: Tensor) -> Tensor:
        """True if tokens may join each group, given that it is open: ids (X, 1), or (1, S) for all -> (X, 1 or S)."""
        assert self.equations is not None
        is_refused_digit = self.refuses_digit(rows_X)[:, None] & self.equations.is_digit(ids)
        return ~(self.equations.is_start(ids) | is_refused_digit)

    def add(self, rows_X: Tensor, ids_X: Tensor) -> None:
        """Add a token to each group. The state of a group that has ended is not used any more."""
        if self.equations is None:
            self.used_B[rows_X] += 1
            return
        digit_X = self.equations.is_digit(ids_X)
        same_X = digit_X & self.takes_digit(rows_X)
        # From c = 2 on, a number that does not begin a group gets one digit in it: its unit takes no more.
        self.run_B[rows_X] = torch.where(same_X, self.run_B[rows_X] + 1, MOST_DIGITS * digit_X.long())
        self.used_B[rows_X] += (~same_X).long()
        self.last_B[rows_X] = ids_X

    def takes_digit(self, rows_X: Tensor) -> Tensor:
        """True if a digit would belong to the last unit, (X,) bool."""
        run_X = self.run_B[rows_X]
        return (run_X > 0) & (run_X < MOST_DIGITS) & self.unites_digits_B[rows_X]

    def threshold_applies(self, rows_X: Tensor) -> Tensor:
        """True if a threshold applies to the next token, (X,) bool: of equations, only behind a number that may go on,
        where it is a digit of the number or its end, and behind a sign, where an operand begins."""
        if self.equations is None:
            return torch.ones_like(rows_X, dtype=torch.bool)
        return self.takes_digit(rows_X) | _any_of(self.last_B[rows_X], self.equations.sign_ids)

    def refuses_digit(self, rows_X: Tensor) -> Tensor:
        """True if no digit may join, (X,) bool."""
        return (self.run_B[rows_X] >= MOST_DIGITS) & self.unites_digits_B[rows_X]


def _any_of(ids: Tensor, some: tuple[int, ...]) -> Tensor:
    """True where an id is in `some`, bool of the shape of `ids`."""
    # Not by `torch.isin`: for a few ids it makes them unique first, which synchronises with a GPU.
    return (ids[..., None] == devices.constant(some, ids.device)).any(-1)


# Chains that are given


@dataclass(frozen=True)
class Windows:
    """The tokens, from each token of the chains on, that a group starting there may have: (B, T, G)."""

    ids_BTG: Tensor
    units_BTG: Tensor
    """The units of a group that ends with the token; `NEVER` if no group has the token."""
    tested_BTG: Tensor
    """bool: tokens of a group to which a threshold, if there is one, applies."""
    equations: Equations | None

    @classmethod
    def of(
        cls,
        chain: tuple[Tensor, Tensor],
        most_units: int,
        equations: Equations | None,
        unites_digits_B: Tensor,
    ) -> "Windows":
        """The windows of groups of at most `most_units`; `chain` is ids (B, T) and lengths (B,)."""
        ids_BT, lengths_B = chain
        T, G = ids_BT.shape[1], most_tokens(most_units, equations)
        ids_BTG = pad(ids_BT, (0, G)).unfold(1, G, 1)[:, :T]
        start_T1 = torch.arange(T, device=ids_BT.device)[:, None]
        position_TG = start_T1 + torch.arange(G, device=ids_BT.device)
        in_chain_BTG = position_TG < lengths_B[:, None, None]
        if equations is None:
            # Every token is a unit, and each but the first is tested.
            place_G = torch.arange(G, device=ids_BT.device)
            return cls(
                ids_BTG, torch.where(in_chain_BTG, place_G + 1, NEVER), in_chain_BTG & (place_G > 0), None
            )
        in_chain_NG = in_chain_BTG.flatten(0, 1)
        ids_NG = ids_BTG.flatten(0, 1)

        all_N = torch.arange(len(ids_NG), device=ids_BT.device)
        units_N = torch.full_like(all_N, most_units)
        open_groups = OpenGroups(ids_NG[:, 0], units_N, equations, unites_digits_B.repeat_interleave(T))
        joins_N = in_chain_NG[:, 0]
        units = [torch.where(joins_N, open_groups.used_B, NEVER)]
        # The first token is never tested.
        tested = [torch.zeros_like(joins_N)]
        for place in range(1, G):
            token_N = ids_NG[:, place]
            joins_N = joins_N & in_chain_NG[:, place] & open_groups.open(all_N)
            joins_N = joins_N & open_groups.admits(all_N, token_N[:, None])[:, 0]
            tested.append(joins_N & open_groups.threshold_applies(all_N))
            open_groups.add(all_N, token_N)
            units.append(torch.where(joins_N, open_groups.used_B, NEVER))
        units_NG, tested_NG = torch.stack(units, dim=-1), torch.stack(tested, dim=-1)
        return cls(ids_BTG, units_NG.view(ids_BTG.shape), tested_NG.view(ids_BTG.shape), equations)

    def cut_before(self, low_confidence_BTG: Tensor) -> "Windows":
        """The windows of groups that end before these tokens (bool)."""
        is_cut_BTG = low_confidence_BTG.long().cumsum(-1) > 0
        return dataclasses.replace(self, units_BTG=torch.where(is_cut_BTG, NEVER, self.units_BTG))

    def sizes(self, lengths_B: Tensor, c_B: Tensor, phase_B: Tensor) -> Tensor:
        """The number of tokens of each group, (B, K); 0 after a row's last one.

        A group starts where the one before it ended, and c allows it as many units as if none had been cut.
        """
        most_units_BK = grouping.units_of_groups(self.ids_BTG.shape[1], c_B, phase_B)
        # Sizes from every token on, in lists: a group's start depends on where the one before it ended, and a step of
        # that in Python costs a hundredth of one in tensors.
        sizes_by_units = {
            units: (self.units_BTG <= units).sum(-1).tolist()
            for units in set(most_units_BK.flatten().tolist())
        }
        rows = []
        for b, (most_units_K, length) in enumerate(
            zip(most_units_BK.tolist(), lengths_B.tolist(), strict=True)
        ):
            start = 0
            sizes: list[int] = []
            while start < length:
                sizes.append(sizes_by_units[most_units_K[len(sizes)]][b][start])
                start += sizes[-1]
            rows.append(sizes)
        return devices.beside(ragged.pad(rows)[0], lengths_B)

    def label_counts(self, starts_BK: Tensor, most_units_BK: Tensor) -> Tensor:
        """The number of tokens that the decoder would choose in thinking for groups with these starts and most units,
        (B, K): a group's own and, if another could still have joined it, the one after it."""
        row_B1 = torch.arange(len(starts_BK), device=starts_BK.device)[:, None]
        # After a row's last group the starts are the chain's length; no label is real there.
        at = (row_B1, starts_BK.clamp(max=self.ids_BTG.shape[1] - 1))
        units_BKG = self.units_BTG[at]
        sizes_BK = (units_BKG <= most_units_BK[..., None]).sum(-1)
        last_BK1 = (sizes_BK - 1).clamp(min=0)[..., None]
        is_open_BK = units_BKG.gather(-1, last_BK1)[..., 0] < most_units_BK
        if self.equations is not None:
            last_id_BK = self.ids_BTG[at].gather(-1, last_BK1)[..., 0]
            is_open_BK = is_open_BK & (last_id_BK != self.equations.equals_id)
        return sizes_BK + is_open_BK.long()
