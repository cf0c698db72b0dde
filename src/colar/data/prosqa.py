"""`prosqa-made`: ProsQA's task without end: which of two made-up nouns can be reached from a name.

    Bob is a yerpus. Every yerpus is a lorpus. Eva is a wumpus. ... Is Bob a hilpus or wumpus?
    Bob is a yerpus. Every yerpus is a lorpus. Every lorpus is a hilpus.                Bob is a hilpus.

The published rows are facebookresearch/coconut, data/; the code that made them is not published. "Training Large
Language Models to Reason in a Continuous Latent Space" (2412.06769) describes it in an appendix: a graph that grows
from two entities, so that one choice is reached from the first only, the other from the second only. The rules here
follow that idea; their numbers were fitted to the graphs that the published rows carry
(lab/scripts/logic_statistics.py compares them):

    two entities stand at the start; nodes are added one by one
    a new node gets Poisson(1.5) parents among the nodes before it, deeper ones more often (weight 1.5 * depth + 1)
        with 0.35  only among those that the first entity alone reaches (and itself)
        with 0.45  only among those that the second alone reaches
        else       among all nodes
    nodes without any edge are left out; nodes without a parent are entities, the others are nouns
    asked: the deepest leaf that only one of the two entities reaches; the wrong choice: a leaf only the other reaches

Departures: both choices are mentioned equally often, unless `balanced` is false; nouns and names come from longer
lists (`logic.py`). "a impus" is the published rows' own: they have no "an".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from colar.checks import check_holds, check_number, check_range
from colar.data import logic
from colar.data.example import Example
from colar.data.logic import Dice, Problem

SOURCE = "prosqa-made"
FIRST_ONLY = 0.35
"""Share of nodes whose parents are reached from the first entity alone."""
SECOND_ONLY = 0.45
DEPTH_WEIGHT = 1.5
"""Weight that a step of depth adds to a node's weight as a parent."""


@dataclass(frozen=True)
class ProsqaConfig:
    """The kind of problems that are made. The defaults are those of the published rows."""

    nodes: int = 28
    """Nodes drawn, the two entities among them; those that no edge touches are left out (5 of 28 on average)."""
    parents: float = 1.5
    """Mean number of parents that are drawn for a node."""
    hops: tuple[int, int] = (3, 6)
    """Fewest and most steps of a chain."""
    balanced: bool = True
    """True if both choices are mentioned equally often. In the published rows the right one is mentioned less often:
    who takes the rarer noun is right on 66% of them, without a graph."""

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes, 12, 60, whole=True)
        check_number("parents", self.parents, 0.5, 4)
        check_range("hops", self.hops)
        object.__setattr__(self, "hops", tuple(self.hops))  # YAML gives a list
        check_holds("balanced", isinstance(self.balanced, bool), self.balanced, "true or false")


def generate(
    config: ProsqaConfig, split: str, n: int, seed: int, avoid: frozenset[str] = frozenset()
) -> list[Example]:
    """Make the first `n` rows of that split and seed, none with a question in `avoid`. Errors: `logic.generate`'s."""
    return logic.generate(SOURCE, partial(draw, config), "text", split, n, seed, avoid)


def draw(config: ProsqaConfig, dice: Dice) -> Problem | None:
    """Draw a problem; None where the graph has no chain of the length asked for."""
    parents = _grow(config, dice)
    children = _children(parents)
    distances = [_distances(children, root) for root in (0, 1)]
    leaves = [_own_leaves(children, distances, side) for side in (0, 1)]
    if not leaves[0] or not leaves[1]:
        return None
    deepest = [max(distances[side][leaf] for leaf in leaves[side]) for side in (0, 1)]
    # The question is about the entity with the longer chain.
    asked = dice.pick((0, 1)) if deepest[0] == deepest[1] else deepest.index(max(deepest))
    fewest, most = config.hops
    if not fewest <= deepest[asked] <= most:
        return None
    goals = [leaf for leaf in leaves[asked] if distances[asked][leaf] == deepest[asked]]
    pairs = [(goal, wrong) for goal in goals for wrong in leaves[1 - asked]]
    if config.balanced:
        pairs = [(goal, wrong) for goal, wrong in pairs if len(parents[goal]) == len(parents[wrong])]
    words = _words(parents, children, dice)
    if not pairs or words is None:
        return None
    goal, wrong = dice.pick(pairs)
    path = _shortest_path(parents, distances[asked], goal, dice)
    return _tell(parents, words, path, wrong, dice)


# --- the graph -----------------------------------------------------------------------------------------

Parents = Sequence[Sequence[int]]
"""The parents of each node. Nodes 0 and 1 have none, and a parent stands before its children."""


def _grow(config: ProsqaConfig, dice: Dice) -> list[list[int]]:
    parents: list[list[int]] = [[], []]
    # Nodes from which only the first entity, or only the second, is found upwards.
    only: tuple[list[int], list[int]] = ([0], [1])
    reached_by = [{0}, {1}]
    depths = [0, 0]
    while len(parents) < config.nodes:
        wanted = _poisson(config.parents, dice)
        side = dice.chance()
        if side < FIRST_ONLY:
            candidates = only[0]
        elif side < FIRST_ONLY + SECOND_ONLY:
            candidates = only[1]
        else:
            candidates = list(range(len(parents)))
        chosen = _weighted_sample(candidates, depths, wanted, dice)
        node = len(parents)
        parents.append(chosen)
        reached_by.append(set().union(*(reached_by[parent] for parent in chosen)))
        # Below both entities, or below neither: such a node gets children by the third share alone.
        if len(reached_by[node]) == 1:
            only[min(reached_by[node])].append(node)
        # The shortest way down: the chain that will be asked for is a shortest path too.
        depths.append(min((depths[parent] + 1 for parent in chosen), default=0))
    return parents


def _weighted_sample(candidates: Sequence[int], depths: Sequence[int], n: int, dice: Dice) -> list[int]:
    """Up to `n` different candidates; a deep node is chosen more often, for longer chains."""
    rest = list(candidates)
    chosen: list[int] = []
    while rest and len(chosen) < n:
        weights = [DEPTH_WEIGHT * depths[node] + 1 for node in rest]
        chosen.append(rest.pop(dice.weighted(weights)))
    return chosen


def _poisson(mean: float, dice: Dice) -> int:
    """Draw from Poisson(mean): how many uniform factors keep the product above exp(-mean) (Knuth)."""
    count = 0
    product = dice.chance()
    while product > math.exp(-mean):
        count += 1
        product *= dice.chance()
    return count


def _children(parents: Parents) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        for parent in above:
            children[parent].append(node)
    return children


def _distances(children: Sequence[Sequence[int]], root: int) -> dict[int, int]:
    """Steps from `root` to every node that it reaches."""
    distances = {root: 0}
    queue = [root]
    for node in queue:  # grows while it is read
        for child in children[node]:
            if child not in distances:
                distances[child] = distances[node] + 1
                queue.append(child)
    return distances


def _own_leaves(
    children: Sequence[Sequence[int]], distances: Sequence[dict[int, int]], side: int
) -> list[int]:
    """The nodes without children that this entity reaches and the other does not."""
    other = distances[1 - side]
    # An entity reaches itself, and may have no children: it is no noun to choose.
    return [node for node in distances[side] if node > 1 and not children[node] and node not in other]


def _shortest_path(parents: Parents, distances: dict[int, int], goal: int, dice: Dice) -> list[int]:
    """A shortest path from the entity to `goal`, walked backwards; where there are several, a random one."""
    path = [goal]
    while distances[path[-1]] > 0:
        nearer = distances[path[-1]] - 1
        before = [parent for parent in parents[path[-1]] if distances.get(parent) == nearer]
        path.append(dice.pick(before))
    return path[::-1]


# --- words ---------------------------------------------------------------------------------------------


def _words(parents: Parents, children: Sequence[Sequence[int]], dice: Dice) -> dict[int, str] | None:
    """A word for every node with an edge: a name without parents, else a noun; None where there are too few names."""
    entities = [node for node in range(len(parents)) if children[node] and not parents[node]]
    concepts = [node for node in range(len(parents)) if parents[node]]
    if len(entities) > len(logic.NAMES):
        return None
    words = dict(zip(entities, dice.sample(logic.NAMES, len(entities)), strict=True))
    words.update(zip(concepts, dice.sample(logic.NOUNS, len(concepts)), strict=True))
    return words


def _tell(parents: Parents, words: dict[int, str], path: list[int], wrong: int, dice: Dice) -> Problem:
    facts = []
    sentences = []
    for node, above in enumerate(parents):
        for parent in above:
            facts.append(f"{words[parent]} > {words[node]}")
            sentences.append(_sentence(parents, words, parent, node))
    choices = dice.shuffled([words[path[-1]], words[wrong]])
    who = words[path[0]]
    asked = f"Is {who} a {choices[0]} or {choices[1]}?"
    # Sorted: the order in which the choices are named must not move a problem to another split.
    facts.append(f"{who}: " + " ".join(sorted(choices)))
    steps = [_sentence(parents, words, a, b) for a, b in pairwise(path)]
    answer = f"{who} is a {words[path[-1]]}."
    return Problem(" ".join([*dice.shuffled(sentences), asked]), tuple(steps), answer, tuple(facts))


def _sentence(parents: Parents, words: dict[int, str], parent: int, node: int) -> str:
    subject = f"Every {words[parent]}" if parents[parent] else words[parent]
    return f"{subject} is a {words[node]}."
