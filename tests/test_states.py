"""Hidden states between layers and their norms: by hand, then on tiny random models."""

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm

from colar.look import states
from colar.look.reference_chain import reference_passes
from colar.methods import pretrained, registry
from colar.methods.colar.method import ColarParams
from colar.model.latent_lm import LoraSettings

CHAINS = [example for example in EXAMPLES if example.steps]


def build(family="llama", lora=None):
    lm = tiny_lm(family, lora=lora)
    method = registry.build("colar", {})
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


def test_norms_by_hand():
    """Two positions through two layers, the first (3, 4) -> (6, 8) -> (0, 5)."""
    made = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[6.0, 8.0], [0.0, 1.0]], [[0.0, 5.0], [0.0, 3.0]]])
    found = states.layer_norms(made, [0, 1])
    assert found.n_thoughts == 2
    assert found.norms == [3.0, 5.5, 4.0]
    assert found.differences == [0.5, (-0.5 + 2) / 2]
    # Differences of the two positions: (1, 0) behind the first layer, (-0.5, 2) behind the second; sd / sqrt(2).
    assert found.differences_se == pytest.approx([0.5, 1.25])
    assert states.layer_norms(made, [0, 0]).differences_se is None


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4, target_modules="all-linear")])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_between_layers_are_the_models(family, lora):
    lm, method = build(family, lora=lora)
    one = list(reference_passes(lm, method, CHAINS, ColarParams(2)))[1]
    read = states.layer_states(lm, one.fed_TD)
    with torch.no_grad():
        theirs = lm.layers(one.fed_TD[None])
        assert len(read) == len(theirs) + 1
        for mine, layer in zip(read[1:-1], theirs, strict=False):
            torch.testing.assert_close(mine, layer[0])
        # Raw: through the norm a second time it would be another.
        assert not torch.allclose(read[-1], theirs[-1][0], atol=1e-2)
        if family != "gpt2":
            torch.testing.assert_close(read[0], one.fed_TD)
    norms = states.norms_of(lm, [one])
    by_hand = [read[layer, one.n_question :].norm(dim=-1).mean().item() for layer in range(len(theirs) + 1)]
    assert norms.norms == pytest.approx(by_hand, rel=1e-5)
    assert norms.n_thoughts == one.n_thoughts
