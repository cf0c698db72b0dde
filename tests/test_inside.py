"""What a model thinks, in numbers: each by hand first, then on tiny random models."""

import json
import math
from dataclasses import replace

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm

from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look import calibration, layer_states
from colar.look import retrieval_accuracy as accuracy
from colar.look.reference_chain import reference_passes
from colar.look.retrieval import directions, nearest_tokens
from colar.look.retrieval_accuracy import Shares, ThoughtRanks
from colar.methods import pretrained, registry
from colar.methods.colar.method import ColarParams
from colar.model.latent_lm import LoraSettings

LIMITS = Decoding(max_latents=8, max_completion_length=4)
CHAINS = [example for example in EXAMPLES if example.steps]
HEADS = ("gaussian", "deterministic", "sequential")


def build(family="llama", head="gaussian", lora=None, **config):
    lm = tiny_lm(family, lora=lora)
    method = registry.build("colar", {"head": head, **config})
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


def passes_of(lm, method, c=2):
    return list(reference_passes(lm, method, CHAINS, ColarParams(c)))


# Retrieval


def test_ranks_by_hand():
    """Four tokens: two axes, their opposite, and one between them."""
    vocabulary = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.6, 0.8]])
    latents = torch.tensor([[3.0, 0.3], [1.0, 1.0]])
    # The first latent's order: 0, 3, 1, 2. The second's: 3, then 0 and 1 alike, then 2.
    ranks = accuracy.rank_tokens(latents, [[0, 1, 2], [0, 1, 0]], vocabulary)
    assert ranks == [(0, 2, 3), (1, 1, 1)]
    # Zeros point nowhere: no token has been found.
    assert accuracy.rank_tokens(torch.zeros(1, 2), [[0, 1]], vocabulary) == [(4, 4)]


def test_shares_by_hand():
    thoughts = [
        ThoughtRanks("a", 0, (7, 8), ("bracket", "operand"), (0, 1)),
        ThoughtRanks("a", 1, (9, 9), ("result", "result"), (0, 0)),
        ThoughtRanks("b", 0, (7, 8), ("bracket", "operand"), (4, 9)),
    ]
    found = accuracy.retrieval_accuracy(thoughts)
    assert found.by_kind["bracket"] == Shares(2, 1 / 2, 1.0, 1 / 2, None)
    assert found.by_kind["operand"] == Shares(2, 0.0, 1 / 2, 1 / 2, None)
    assert found.by_kind["result"] == Shares(2, 1.0, 1.0, 1.0, None)
    assert found.by_kind["sign"] == Shares(0, None, None, None, None)
    assert found.tokens == Shares(6, 1 / 2, 5 / 6, 4 / 6, None)
    assert found.by_position == [Shares(2, 1 / 2, 1 / 2, 1 / 2, None), Shares(1, 1.0, 1.0, 1.0, None)]
    chosen = accuracy.retrieval_accuracy(
        [ThoughtRanks("a", 0, (7, 8), ("sign", "text"), (0, 1), (True, False))]
    )
    assert chosen.tokens.chosen == 1 / 2
    assert chosen.by_kind["sign"].chosen == 1.0
    assert chosen.by_kind["text"].chosen == 0.0
    assert chosen.by_position[0].chosen == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_references_latents_are_read_as_nearest_tokens_say(family):
    """Against the reader of people, one thought at a time."""
    lm, method = build(family)
    for each in passes_of(lm, method):
        ranked = accuracy.reference_ranks(each, directions(lm))
        assert [r.position for r in ranked] == list(range(each.n_thoughts))
        for k, neighbours in enumerate(nearest_tokens(lm, each.latents_KD, 5)):
            near = [n.token_id for n in neighbours]
            for token_id, rank in zip(ranked[k].token_ids, ranked[k].ranks, strict=True):
                assert (near.index(token_id) if token_id in near else None) == (rank if rank < 5 else None)
    ceiling = accuracy.retrieval_accuracy(
        [r for each in passes_of(lm, method, c=1) for r in accuracy.reference_ranks(each, directions(lm))]
    )
    assert ceiling.tokens.top1 == 1.0


@pytest.mark.parametrize("head", HEADS)
def test_written_and_own_thoughts_have_chosen_tokens_where_the_head_chooses(head):
    lm, method = build(head=head)
    rays = directions(lm)
    requests = [Request(e.id, e.question, ColarParams(2), LIMITS, keep_latents=True) for e in CHAINS]
    completions = Engine(lm, method, 4).generate(requests)
    written, own = [], []
    for each, completion in zip(passes_of(lm, method), completions, strict=True):
        written += accuracy.written_ranks(each, rays)
        own += accuracy.own_ranks(lm, each, completion, rays)
    assert len(written) == sum(each.n_thoughts for each in passes_of(lm, method))
    assert 0 < len(own) <= sum(completion.length for completion in completions)
    for ranked in (written, own):
        found = accuracy.retrieval_accuracy(ranked)
        assert (found.tokens.chosen is None) == (head != "sequential")
        assert found.tokens.n == sum(share.n for share in found.by_kind.values())
        assert json.loads(json.dumps(found.to_json()))["tokens"]["n"] == found.tokens.n


def test_a_question_that_is_asked_twice_is_one():
    lm, method = build()
    again = replace(CHAINS[0], id="again", cluster=CHAINS[0].id)
    found = set()
    for each in reference_passes(lm, method, [CHAINS[0], again], ColarParams(2)):
        request = Request(each.example.id, each.example.question, ColarParams(2), LIMITS, keep_latents=True)
        (completion,) = Engine(lm, method, 1).generate([request])
        rays = directions(lm)
        ranks = accuracy.written_ranks(each, rays) + accuracy.reference_ranks(each, rays)
        found |= {rank.question for rank in ranks + accuracy.own_ranks(lm, each, completion, rays)}
    assert found == {CHAINS[0].id}


# Calibration


def test_stops_by_hand():
    found = calibration.stop_calibration(
        torch.tensor([0.05, 0.05, 0.95, 1.0]), torch.tensor([False, True, True, True])
    )
    assert found.n == 4
    assert [b.n for b in found.bins] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found.bins[0].predicted == pytest.approx(0.05)
    assert found.bins[0].observed == 0.5
    assert found.bins[1].predicted is None
    assert found.bins[9].observed == 1.0
    assert found.error == pytest.approx((2 * 0.45 + 2 * 0.025) / 4)
    assert found.brier == pytest.approx((0.05**2 + 0.95**2 + 0.05**2) / 4)
    with pytest.raises(ValueError, match="at least one position"):
        calibration.stop_calibration(torch.zeros(0), torch.zeros(0, dtype=torch.bool))


def test_a_sigma_that_is_right_and_one_that_is_half():
    torch.manual_seed(0)
    mean, sigma = torch.randn(500, 8), torch.rand(500, 8) + 0.2
    true = mean + sigma * torch.randn(500, 8)
    right = calibration.sigma_calibration(mean, sigma, true)
    assert right.n_thoughts == 500
    assert right.n_values == sum(right.deciles) == sum(b.n for b in right.bins) == 4000
    assert right.z_mean == pytest.approx(0, abs=0.05)
    assert right.z_std == pytest.approx(1, abs=0.05)
    assert all(right.within[k] == pytest.approx(right.expected[k], abs=0.03) for k in "123")
    assert all(count == pytest.approx(400, abs=80) for count in right.deciles)
    assert all(b.observed == pytest.approx(b.predicted, rel=0.15) for b in right.bins)
    half = calibration.sigma_calibration(mean, sigma / 2, true)
    assert half.z_std == pytest.approx(2 * right.z_std)
    assert half.bins[0].observed == pytest.approx(2 * half.bins[0].predicted, rel=0.15)
    assert half.deciles[0] > 2 * half.deciles[4]


def test_z_by_hand():
    found = calibration.sigma_calibration(
        torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 2.0]]), torch.tensor([[2.0, 0.0]])
    )
    assert found.z_mean == pytest.approx((2 - 0.5) / 2)
    assert found.within == {"1": 0.5, "2": 0.5, "3": 1.0}
    assert found.expected["1"] == pytest.approx(math.erf(1 / math.sqrt(2)))
    assert [b.n for b in found.bins] == [1, 1]
    assert [b.observed for b in found.bins] == [1.0, 1.0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_what_a_head_does_not_have_is_null(family, head):
    lm, method = build(family, head)
    passes = passes_of(lm, method)
    stop = calibration.stop_of(passes)
    assert stop.n == sum(each.n_thoughts + 1 for each in passes)
    sigma = calibration.sigma_of(method, passes)
    assert (sigma is None) == (head != "gaussian")
    # What nothing has trained is not said.
    assert ("sigma" in passes[0].thought.info) == (head == "gaussian")
    if sigma:
        # By hand, of one dimension of one thought.
        one = passes[0]
        z = (one.latents_KD[0, 0] / method.config.sigma_e - one.thought.info["mu"][0, 0]) / one.thought.info[
            "sigma"
        ][0, 0]
        alone = calibration.sigma_calibration(
            one.thought.info["mu"][:1, :1],
            one.thought.info["sigma"][:1, :1],
            one.latents_KD[:1, :1] / method.config.sigma_e,
        )
        assert alone.z_mean == pytest.approx(z.item(), rel=1e-4)


def test_a_chain_of_tokens_has_neither():
    lm = tiny_lm("llama")
    method = registry.build("cot", {})
    passes = list(reference_passes(lm, method, CHAINS, method.Params()))
    assert calibration.stop_of(passes) is None
    assert calibration.sigma_of(method, passes) is None


# Layers


def test_norms_by_hand():
    """Two positions through two layers, the first (3, 4) -> (6, 8) -> (0, 5)."""
    states = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[6.0, 8.0], [0.0, 1.0]], [[0.0, 5.0], [0.0, 3.0]]])
    found = layer_states.layer_norms(states, [0, 1])
    assert found.n_thoughts == 2
    assert found.norms == [3.0, 5.5, 4.0]
    assert found.differences == [0.5, (-0.5 + 2) / 2]
    assert found.updates == pytest.approx([(1 + math.sqrt(2)) / 2, (math.sqrt(45) / 10 + 2) / 2])
    # Differences of the two positions: (1, 0) behind the first layer, (-0.5, 2) behind the second; sd / sqrt(2).
    assert found.differences_se == pytest.approx([0.5, 1.25])
    assert layer_states.layer_norms(states, [0, 0]).differences_se is None
    with pytest.raises(ValueError, match="at least one thought"):
        layer_states.layer_norms(states[:, :0], [])


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4, target_modules="all-linear")])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_between_layers_are_the_models(family, lora):
    lm, method = build(family, lora=lora)
    one = passes_of(lm, method)[1]
    read = layer_states.layer_states(lm, one.fed_TD)
    with torch.no_grad():
        theirs = lm.layers(one.fed_TD[None])
        assert len(read.states_LTD) == len(theirs) + 1
        for mine, layer in zip(read.states_LTD[1:-1], theirs, strict=False):
            torch.testing.assert_close(mine, layer[0])
        torch.testing.assert_close(read.through_final(read.states_LTD[-1]), theirs[-1][0])
        # Raw: through the norm a second time it would be another.
        assert not torch.allclose(read.states_LTD[-1], theirs[-1][0], atol=1e-2)
        if family != "gpt2":
            torch.testing.assert_close(read.states_LTD[0], one.fed_TD)
    norms = layer_states.norms_of(lm, [one])
    by_hand = [
        read.states_LTD[layer, one.n_question :].norm(dim=-1).mean().item()
        for layer in range(len(theirs) + 1)
    ]
    assert norms.norms == pytest.approx(by_hand, rel=1e-5)
    assert norms.n_thoughts == one.n_thoughts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_behind_the_last_layer_is_the_models_own_word(family):
    lm, method = build(family)
    passes = passes_of(lm, method)[:2]
    found = layer_states.lens_of(lm, passes)
    assert found.n_positions == sum(each.n_thoughts + 1 for each in passes)
    right, mass = 0, 0.0
    for each in passes:
        with torch.no_grad():
            probs = lm.logits(lm.hidden(each.fed_TD[None])[0, each.n_question - 1 :]).softmax(-1)
        for k, row in enumerate(probs):
            ids = (
                {token.token_id for token in each.groups[k]}
                if k < each.n_thoughts
                else {lm.template.separator_id}
            )
            right += int(row.argmax()) in ids
            mass += sum(row[token_id].item() for token_id in ids)
    assert found.layers[-1].top1 == right / found.n_positions
    assert found.layers[-1].mass == pytest.approx(mass / found.n_positions, rel=1e-4)
    reading = layer_states.lens_at(lm, passes[1].fed_TD, passes[1].n_question, 3)
    with torch.no_grad():
        last = lm.logits(lm.hidden(passes[1].fed_TD[None])[0, passes[1].n_question]).softmax(-1)
    assert len(reading.tokens) == len(found.layers)
    assert reading.tokens[-1][0] == (
        lm.template.token(int(last.argmax())),
        pytest.approx(last.max().item(), rel=1e-4),
    )


# Attention


def test_mass_by_hand():
    """Two question positions, two thoughts, two heads."""
    one = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]]
    two = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    sums = layer_states.thought_mass(torch.tensor([one, two]), 2).tolist()
    question = (0.5 + 0) / 2 + (0.3 + 0) / 2
    earlier = 0 + (0.3 + 1) / 2
    itself = (0.5 + 1) / 2 + (0.4 + 0) / 2
    first = 0.2 / 2 + 0.1 / 2
    assert sums == pytest.approx([question, earlier, itself, first])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thoughts_attention_is_all_there(family):
    lm, method = build(family)
    before = lm.causal_lm.config._attn_implementation
    passes = passes_of(lm, method)
    found = layer_states.attention_of(lm, passes)
    assert lm.causal_lm.config._attn_implementation == before
    assert len(found.layers) == lm.config.num_hidden_layers
    for layer in found.layers:
        assert layer.question + layer.earlier + layer.itself == pytest.approx(1, abs=1e-5)
        assert 0 <= layer.first <= layer.question
    # The first thought has none before it; later ones have.
    short = [each for each in passes_of(lm, method, c=100) if each.n_thoughts == 1]
    assert all(layer.earlier == 0 for layer in layer_states.attention_of(lm, short).layers)
    assert all(layer.earlier > 0 for layer in found.layers)
