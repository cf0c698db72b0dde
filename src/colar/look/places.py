"""What a group says at each of its places, compared with the reference chain: for heads that choose tokens.

Place j counts the groups whose tokens before it are right.

    t1    t2 | t1    t3 | t1 t2   ...          shares of the groups that come so far
    joint                                      the groups without any wrong token, order included

What a place should hold is the reference chain's token, or the separator behind the chain's last one. A group that
ends before an unsure token (`confidence_threshold`) is judged by the tokens that it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from colar.look.reference_chain import Kind, Token
from colar.model.latent_lm import LatentLM

KINDS: tuple[Kind, ...] = get_args(Kind)
NUMBERS = ("operand", "result")


@dataclass(frozen=True)
class Place:
    """A token that was chosen after a right prefix: its place in its group, from 0."""

    place: int
    kind: Kind
    right: bool
    behind_number: bool = False
    """Whether the group before it has several tokens of numbers: a plain sum has lost their order."""
    behind: int = 0
    """The tokens of the group before it; 0 at the start of a chain."""


def places(
    lm: LatentLM, rest: Sequence[Token], ids: Sequence[int], before: Sequence[Token] = ()
) -> list[Place]:
    """The tokens of a group up to its first wrong one, compared with the `rest` of the chain from its start on.

    `before` is the group before it.
    """
    behind_number = sum(token.kind in NUMBERS for token in before) > 1
    judged: list[Place] = []
    for place, token_id in enumerate(ids):
        kind: Kind = "end"
        label = lm.template.separator_id
        if place < len(rest):
            kind = rest[place].kind
            label = rest[place].token_id
        judged.append(Place(place, kind, token_id == label, behind_number, len(before)))
        # What comes after a wrong token is conditional on it.
        if token_id != label:
            break
    return judged


def write_shares(groups: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """Shares of right tokens by place and by kind, None for a kind that no place has; and of groups all right.

    `write_first` are those of first places alone, by what came before: a group with several tokens of numbers, or
    anything else; and those of results alone, behind one token or several: there it counts whether a group was read.
    Without any group, as of a latent head, all are None.
    """
    if not groups:
        return {"write_by_place": None, "write_by_kind": None, "write_first": None, "write_joint": None}
    by_place: defaultdict[int, list[bool]] = defaultdict(list)
    by_kind: defaultdict[str, list[bool]] = defaultdict(list)
    first: dict[str, list[bool]] = {
        "behind_number": [],
        "else": [],
        "result_behind_one": [],
        "result_behind_several": [],
    }
    joint: list[bool] = []
    for group in groups:
        for each in group:
            by_place[each.place].append(each.right)
            by_kind[each.kind].append(each.right)
        # A group is never empty: its first token, or the separator in its place, is always judged.
        behind = "behind_number" if group[0].behind_number else "else"
        first[behind].append(group[0].right)
        if group[0].kind == "result":
            read_from = "result_behind_several" if group[0].behind > 1 else "result_behind_one"
            first[read_from].append(group[0].right)
        joint.append(all(each.right for each in group))
    return {
        "write_by_place": [_share(by_place[place]) for place in sorted(by_place)],
        "write_by_kind": {kind: _share(by_kind[kind]) for kind in KINDS},
        "write_first": {name: _share(right) for name, right in first.items()},
        "write_joint": _share(joint),
    }


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None
