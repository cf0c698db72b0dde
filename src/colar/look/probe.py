"""A linear probe for the running result of each step: can it be read off a hidden state, and before it is written?

    chain      << 3 + 4 = 7 >>                hidden states of the reference pass, one step at a time
    before     at the position from which the thought with the result's first token is predicted
    after      at the thought with the result's last token: it was fed, so some of it must be there
    question   at the question's last position: what is known before any thought (a control)
    shuffled   the labels of other questions on the same states (a control: 0 or below)

The label of a result v is sign(v) log(1 + |v|). A ridge regression in closed form predicts it. Questions are split in
five folds; rows of one question are never on both sides. Each fold is predicted from the others, the ridge chosen on
the next one. R2 compares the squared error over all folds with that of the mean label of the rows that were fitted: 0
is worth nothing, and 1 is exact. A probe that works as well on the question, or on an untrained model, has not found
a thought.

Shape suffixes: N rows, M rows predicted, D width, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from colar.data.judge.quantity import read_number
from colar.look.reference_chain import ReferencePass
from colar.look.states import layer_states
from colar.model.latent_lm import LatentLM

FEATURES = ("before", "after", "question")
FOLDS = 5
LEAST = 20
"""Questions below which nothing is fitted."""
RIDGES = tuple(10.0**power for power in range(-4, 5))
"""In units of the features' mean squared singular value."""
SHUFFLES = 5


@dataclass(frozen=True)
class ProbeScore:
    """Accuracy of reading one step's results off one kind of state; None below `LEAST` questions."""

    step: int
    """In the chain, from 0."""
    features: str
    n: int
    n_questions: int
    r2: float | None
    shuffled: float | None
    """The mean R2 of `SHUFFLES` shuffles of the labels."""


@dataclass(frozen=True)
class Probe:
    layer: int | None
    """As in `states.py`; None for the last hidden states, behind the final norm."""
    scores: list[ProbeScore]


@dataclass(frozen=True)
class StepResult:
    """One step's result in one chain, and the states that it is looked for in, by `FEATURES`."""

    question: str
    step: int
    label: float
    states: dict[str, Tensor]


def probe_of(lm: LatentLM, passes: Sequence[ReferencePass], layer: int | None = None, seed: int = 0) -> Probe:
    """Probe every step that some chain has. `seed` fixes folds and shuffles."""
    results = []
    for each in passes:
        results += results_of(lm, each, layer)
    scores = []
    for step in range(max((result.step + 1 for result in results), default=0)):
        here = [result for result in results if result.step == step]
        questions = [result.question for result in here]
        labels_N = torch.tensor([result.label for result in here], dtype=torch.float64)
        for name in FEATURES:
            states = [result.states[name] for result in here]
            # A step between others may have no result in any chain; its scores are then None.
            features_ND = torch.stack(states).double() if states else torch.zeros(0, lm.width)
            label_sets = [labels_N, *shuffles(labels_N, seed)]
            r2, *shuffled = held_out_r2s(features_ND, label_sets, questions, seed)
            scores.append(ProbeScore(step, name, len(here), len(set(questions)), r2, _mean(shuffled)))
    return Probe(layer, scores)


def results_of(lm: LatentLM, each: ReferencePass, layer: int | None = None) -> list[StepResult]:
    """The results of one chain. Steps without an "=", or whose result is no single number, have none."""
    states_TD = each.hidden_TD
    if layer is not None:
        states_TD = layer_states(lm, each.fed_TD)[layer]
    states_TD = states_TD.cpu()
    # Which thought stands for each token of the chain, and whether that is a result's.
    thought_of = []
    is_result = []
    for k, group in enumerate(each.groups):
        thought_of += [k] * len(group)
        is_result += [token.is_result for token in group]
    results = []
    start = 0
    for step, ids in enumerate(each.row.steps):
        places = [i for i in range(start, start + len(ids)) if is_result[i]]
        start += len(ids)
        value = read_number(lm.template.decode(ids))
        if not places or value is None:
            continue
        states = {
            # Thought k is predicted at position n_question - 1 + k, and fed at the one behind it.
            "before": states_TD[each.n_question - 1 + thought_of[places[0]]],
            "after": states_TD[each.n_question + thought_of[places[-1]]],
            "question": states_TD[each.n_question - 1],
        }
        results.append(StepResult(each.example.question, step, label_of(float(value)), states))
    return results


def label_of(value: float) -> float:
    """sign(v) log(1 + |v|): results differ by orders of magnitude."""
    return math.copysign(math.log1p(abs(value)), value)


# The regression


def held_out_r2s(
    features_ND: Tensor, label_sets: Sequence[Tensor], questions: Sequence[str], seed: int = 0
) -> list[float | None]:
    """R2 of labels predicted from the rows of other questions, for several sets of labels of the same rows.

    None for too few questions, or labels all alike.
    """
    if len(set(questions)) < LEAST:
        return [None] * len(label_sets)
    features_ND = features_ND.double()
    fold_N = torch.tensor(folds(questions, seed))
    squared_error = [0.0] * len(label_sets)
    squared_total = [0.0] * len(label_sets)
    for fold in range(FOLDS):
        held_N = fold_N == fold
        # A ridge chosen on the rows that are held out would flatter the probe.
        chosen_on_N = fold_N == (fold + 1) % FOLDS
        fit_N = ~held_N & ~chosen_on_N
        chooser = Ridge(features_ND[fit_N])
        # Fitted again with the rows that chose: in units of the singular values a ridge keeps its meaning.
        fitted = Ridge(features_ND[~held_N])
        for i, labels_N in enumerate(label_sets):
            ridge = _best_ridge(chooser, labels_N[fit_N], features_ND[chosen_on_N], labels_N[chosen_on_N])
            predicted_M = fitted.predict(labels_N[~held_N], features_ND[held_N], ridge)
            squared_error[i] += (predicted_M - labels_N[held_N]).square().sum().item()
            squared_total[i] += (labels_N[held_N] - labels_N[~held_N].mean()).square().sum().item()
    found: list[float | None] = []
    for error, total in zip(squared_error, squared_total, strict=True):
        found.append(1 - error / total if total > 0 else None)
    return found


def shuffles(labels_N: Tensor, seed: int = 0) -> list[Tensor]:
    """The labels dealt out anew to the same rows, `SHUFFLES` times."""
    dealt = []
    for shuffle in range(SHUFFLES):
        order = list(range(len(labels_N)))
        Random(f"{seed}/{shuffle}").shuffle(order)
        dealt.append(labels_N[order])
    return dealt


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def folds(questions: Sequence[str], seed: int = 0) -> list[int]:
    """The fold of each row: that of its question."""
    # Sorted before it is shuffled: a set of texts has another order in every process.
    distinct = sorted(set(questions))
    Random(seed).shuffle(distinct)
    fold_of = {question: i % FOLDS for i, question in enumerate(distinct)}
    return [fold_of[question] for question in questions]


class Ridge:
    """Ridge regression on standardised features: one singular value decomposition for all ridges and all labels."""

    def __init__(self, features_ND: Tensor) -> None:
        self.mean_D = features_ND.mean(0)
        spread_D = features_ND.std(0, correction=0)
        # A feature that never changes says nothing, and cannot be divided by its spread.
        self.spread_D = torch.where(spread_D > 1e-12, spread_D, 1.0)
        standard_ND = (features_ND - self.mean_D) / self.spread_D
        self.left_NP, self.singular_P, self.right_PD = torch.linalg.svd(standard_ND, full_matrices=False)

    def predict(self, labels_N: Tensor, features_MD: Tensor, ridge: float) -> Tensor:
        """Fit the labels of the decomposed rows, and predict those of other rows, (M,)."""
        squared_P = self.singular_P.square()
        # Features that are all constant have no singular value above 0.
        penalty = ridge * squared_P.mean().clamp(min=1e-12)
        # Labels are centred as features are: the ridge then shrinks the slopes and not the mean.
        along_P = self.left_NP.T @ (labels_N - labels_N.mean())
        weights_D = self.right_PD.T @ (self.singular_P / (squared_P + penalty) * along_P)
        labels_M: Tensor = (features_MD - self.mean_D) / self.spread_D @ weights_D + labels_N.mean()
        return labels_M


def _best_ridge(chooser: Ridge, labels_N: Tensor, features_MD: Tensor, labels_M: Tensor) -> float:
    """The ridge that predicts other rows best."""
    errors = []
    for ridge in RIDGES:
        missed_M = chooser.predict(labels_N, features_MD, ridge) - labels_M
        errors.append(missed_M.square().mean().item())
    return RIDGES[errors.index(min(errors))]
