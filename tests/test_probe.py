"""Linear probes on made-up states, where what can be read is known; then on random models."""

import pytest
import torch
from families import FAMILIES, tiny_lm

from colar.data.example import Example
from colar.look import probe
from colar.look.reference_chain import reference_passes
from colar.look.states import layer_states
from colar.methods import pretrained, registry


def names(n):
    return [f"question {i}" for i in range(n)]


def held_out_r2(features, labels, questions):
    return probe.held_out_r2s(features, [labels], questions)[0]


def shuffled_r2(features, labels, questions):
    found = probe.held_out_r2s(features, probe.shuffles(labels), questions)
    return sum(found) / len(found)


def test_what_is_linear_is_read_and_shuffled_labels_are_not():
    torch.manual_seed(0)
    features = torch.randn(200, 12)
    labels = (features @ torch.randn(12) + 5).double()
    assert held_out_r2(features, labels, names(200)) > 0.999
    assert shuffled_r2(features, labels, names(200)) < 0.1
    # Several sets at once are each one's own.
    sets = [labels, *probe.shuffles(labels)]
    alone = [held_out_r2(features, each, names(200)) for each in sets]
    assert probe.held_out_r2s(features, sets, names(200)) == alone
    assert all(sorted(each.tolist()) == sorted(labels.tolist()) for each in sets)
    noise = held_out_r2(torch.randn(200, 12), labels, names(200))
    assert -0.3 < noise < 0.1


def test_more_features_than_rows():
    torch.manual_seed(0)
    features = torch.randn(150, 300)
    features[:, 0] *= 40
    labels = features[:, 0].double()
    assert held_out_r2(features, labels, names(150)) > 0.2
    assert shuffled_r2(features, labels, names(150)) < 0.1


def test_rows_of_one_question_never_help_each_other():
    """Four rows each, alike but for a little; labels are the question's own, and random: by token they are known."""
    torch.manual_seed(0)
    own = torch.randn(40, 60)
    features = own.repeat_interleave(4, 0) + 0.01 * torch.randn(160, 60)
    labels = torch.randn(40).double().repeat_interleave(4)
    questions = [name for name in names(40) for _ in range(4)]
    assert held_out_r2(features, labels, questions) < 0.2
    # The same rows as if each were a question of its own: what a split by token would report.
    assert held_out_r2(features, labels, names(160)) > 0.8
    fold_of = {}
    for question, fold in zip(questions, probe.folds(questions), strict=True):
        assert fold_of.setdefault(question, fold) == fold
    assert [list(fold_of.values()).count(fold) for fold in range(5)] == [8] * 5


def test_ridge_by_the_normal_equations():
    torch.manual_seed(0)
    x, y, other = torch.randn(30, 4).double(), torch.randn(30).double(), torch.randn(3, 4).double()
    fitted = probe.Ridge(x)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    penalty = 0.5 * torch.linalg.svdvals(z).square().mean()
    weights = torch.linalg.solve(z.T @ z + penalty * torch.eye(4), z.T @ (y - y.mean()))
    expected = (other - x.mean(0)) / x.std(0, correction=0) @ weights + y.mean()
    torch.testing.assert_close(fitted.predict(y, other, 0.5), expected)


def test_what_cannot_be_measured_is_none():
    features, labels = torch.randn(19, 3), torch.randn(19).double()
    assert held_out_r2(features, labels, names(19)) is None
    assert probe.held_out_r2s(features, probe.shuffles(labels), names(19)) == [None] * probe.SHUFFLES
    # Labels all alike have no spread; states all alike say nothing, which is 0.
    assert held_out_r2(torch.randn(30, 3), torch.ones(30).double(), names(30)) is None
    blind = held_out_r2(torch.ones(30, 3), torch.randn(30).double(), names(30))
    assert blind == pytest.approx(0, abs=1e-9)


def test_labels_by_hand():
    assert probe.label_of(0) == 0
    assert probe.label_of(-9) == -probe.label_of(9) == pytest.approx(-2.302585)


EXAMPLES = [
    Example(f"s/{i}", f"{i} and {i + 4}, times {i % 5}?", (f"<<{i}+{i + 4}={2 * i + 4}>>", f"<<{2 * i + 4}*{i % 5}={(2 * i + 4) * (i % 5)}>>"), "0")
    for i in range(24)
]  # fmt: skip


def build(family, name="colar"):
    lm = tiny_lm(family)
    method = registry.build(name)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_looked_for_where_they_stand(family):
    lm, method = build(family)
    for c in (1, 2, 5):
        for each in reference_passes(lm, method, EXAMPLES[:3], method.Params(c)):
            results = probe.results_of(lm, each)
            values = [float(step.split("=")[1].strip(">")) for step in each.example.steps]
            assert [result.label for result in results] == [probe.label_of(value) for value in values]
            assert [result.step for result in results] == [0, 1]
            # Counted anew, over the chain's token texts.
            texts = [lm.template.token(token.token_id) for group in each.groups for token in group]
            n_first = len(each.row.steps[0])
            equals = max(i for i in range(n_first) if "=" in texts[i])
            after_equals = [i for i in range(equals + 1, n_first) if texts[i].strip(" <>")]
            first, last = after_equals[0], after_equals[-1]
            question = each.n_question
            states = results[0].states
            assert states["before"].equal(each.hidden_TD[question - 1 + first // c])
            assert states["after"].equal(each.hidden_TD[question + last // c])
            assert states["question"].equal(each.hidden_TD[question - 1])
            middle = probe.results_of(lm, each, layer=1)[0].states["after"]
            assert middle.equal(layer_states(lm, each.fed_TD)[1, question + last // c])


@pytest.mark.parametrize("name", ["colar", "sequential"])
def test_a_probe_of_a_random_model(name):
    lm, method = build("llama", name)
    passes = list(reference_passes(lm, method, EXAMPLES, method.Params(2)))
    found = probe.probe_of(lm, passes)
    assert [(score.step, score.features) for score in found.scores] == [
        (step, name) for step in range(2) for name in probe.FEATURES
    ]
    for score in found.scores:
        assert (score.n, score.n_questions) == (24, 24)
        assert score.r2 <= 1
        assert score.shuffled < 0.5
    few = probe.probe_of(lm, passes[:5])
    assert all(score.r2 is None and score.shuffled is None and score.n == 5 for score in few.scores)
    assert probe.probe_of(lm, []).scores == []
