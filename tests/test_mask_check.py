"""Backbones that do not follow our masks or positions: the engine refuses them, training computes each row by itself."""

import pytest
import torch
from families import FAMILIES, build_tokenizer, of_config, tiny_lm
from transformers import AutoConfig

from colar.engine import cache
from colar.engine.engine import Engine
from colar.methods import pretrained, registry
from colar.model import probes
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM

SIZES = {
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "gpt_neo": {
        "hidden_size": 32,
        "num_heads": 4,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
    },
}
GQA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(name: str, **sizes: int) -> LatentLM:
    """A random model of an architecture that is not one of `families`."""
    tokenizer = build_tokenizer("llama")
    config = AutoConfig.for_model(
        name, **(SIZES.get(name) or GQA) | sizes, vocab_size=len(tokenizer), pad_token_id=None
    )
    return LatentLM.from_backbone(Backbone(name, of_config(config, std=0.3), tokenizer)).eval()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bart", "does not follow the masks and positions that it is given"),
        ("bloom", r"cannot compute under a mask of ours \(ValueError"),
        ("gpt_neo", "has layers of local attention"),
    ],
)
def test_the_engine_refuses_what_it_would_run_wrongly(name, words):
    lm = model_of(name)
    method = registry.build("cot", {})
    pretrained.attach(lm, method, seed=0)
    with pytest.raises(
        ValueError, match=f"^{type(lm.causal_lm).__name__} {words}.*: the engine cannot run it$"
    ):
        Engine(lm, method)


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_rows_that_share_a_beginning_are_what_they_are_alone(name):
    lm = model_of(name)
    ids = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    ids[1, :16] = ids[0, :16]
    embeds = lm.embed(ids)
    starts = (ids[:, :16], torch.tensor([16, 16]))
    together = lm.hidden_of_rows(embeds, starts, torch.tensor([24, 24]))
    torch.testing.assert_close(together, lm.hidden(embeds))


def test_a_bias_that_follows_columns_runs_in_the_engine_and_not_in_a_tree():
    """ALiBi (MPT): a row's own columns are its positions, those of a branch are not."""
    lm = model_of("mpt").causal_lm
    cache.check_attention(lm)
    assert "does not follow" in probes.why_no_trees(lm)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_families_pass(family, dtype):
    lm = tiny_lm(family).causal_lm.to(dtype)
    cache.check_attention(lm)
    assert probes.why_no_trees(lm) is None


@pytest.mark.parametrize(
    ("name", "window", "refused"),
    [("starcoder2", 4096, False), ("mistral", 4096, False), ("mistral", 4, False), ("moshi", 3000, True)],
)
def test_a_window_is_probed_however_long_it_is(name, window, refused):
    """Moshi's config has a window that none of its layers follows; ours would follow it."""
    lm = model_of(name, sliding_window=window).causal_lm
    if refused:
        with pytest.raises(ValueError, match="does not follow the masks"):
            cache.check_attention(lm)
    else:
        cache.check_attention(lm)
    assert (probes.why_no_trees(lm) is not None) == refused
    assert lm.config.sliding_window == window


def test_autocast_is_off_while_it_is_asked():
    """Its rounding is no difference, and would be remembered for the whole process."""
    lm = tiny_lm("qwen2", seed=3).causal_lm
    # A config of its own, so that it is asked anew.
    lm.config.max_position_embeddings = 50
    seen = []
    lm.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    lm.base_model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        probes.check_inputs(lm)
        cache.check_attention(lm)
        assert probes.why_no_trees(lm) is None
    assert len(seen) >= 6
    assert not any(seen)


def test_dropout_is_off_while_it_is_asked_and_a_context_may_be_short():
    lm = tiny_lm("gpt2", seed=3).causal_lm
    # A config of its own, so that it is asked anew.
    lm.config.max_position_embeddings = 16
    lm.train()
    cache.check_attention(lm)
    assert probes.embeds_of_rows(lm, 2).shape[1] == 16
    assert lm.training
