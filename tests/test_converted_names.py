"""Families whose weights have other names in a file than in the model: transformers converts them when it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_training as supervised
import torch
from families import EXAMPLES, build_tokenizer, of_config
from safetensors.torch import load_file
from test_checkpoint import RUN, completions, logits, train
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from colar.methods import pretrained, registry
from colar.model import backbones, checkpoint, weights
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.config import TrainingConfig
from colar.training.sft import train as run

LINEAR = ("linear_attention", "full_attention")
LATENT_ATTENTION = {"qk_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT_ATTENTION,
    "ernie4_5_moe": {},
    "gemma3": {},
    "gpt_neox": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "mixtral": {},
    "phimoe": {},
    "qwen3_5_moe_text": {"layer_types": list(LINEAR)},
}
"""Model type: what its tiny config has besides `SIZES`."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
}
TOKENIZER = build_tokenizer("llama")
TOKENS = {
    "vocab_size": len(TOKENIZER),
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": None,
}
LORA = LoraSettings(r=2, target_modules="all-linear")
FEW = ("phimoe",)
"""Families of which some linear layers cannot have an adapter."""
MIXTURES = ("mixtral", "deepseek_v3")
"""Their experts are stacked in parameters: peft's adapter lies on these, not on layers."""


def sizes(default: PreTrainedConfig) -> dict[str, Any]:
    """The entries of `SIZES` that a config has, and those of the configs inside it."""
    names = set(default.to_dict()) | set(default.attribute_map)
    found = {
        name: value for name, value in SIZES.items() if name in names and getattr(default, name) is not None
    }
    for name in default.sub_configs:
        inside = getattr(default, name, None)
        if inside is not None:
            found[name] = sizes(inside) | {"model_type": inside.model_type}
    return found | TOKENS


def tiny(model_type: str) -> PreTrainedModel:
    default = AutoConfig.for_model(model_type)
    config = type(default)(**sizes(default) | FAMILIES.get(model_type, {}))
    return of_config(config)


def save_backbone(model_type: str, folder: Path) -> str:
    tiny(model_type).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def state(lm: LatentLM) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in lm.state_dict().items()}


def move(lm: LatentLM) -> None:
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.01)


def assert_same(lm: LatentLM, wanted: dict[str, Tensor]) -> None:
    found = lm.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_conversion_come_back(tmp_path: Path, family: str) -> None:
    """All of them, and an adapter: into the model in place, as a resume needs it, and from the folder alone."""
    base = save_backbone(family, tmp_path / "base")
    for name, lora in (("full", None), ("adapter", LORA if family not in FEW else LoraSettings(r=2))):
        lm = LatentLM.from_backbone(backbones.load(base), lora=lora).eval()
        move(lm)
        wanted, folder = state(lm), tmp_path / name
        before = [id(weight) for weight in lm.parameters()]
        checkpoint.save(lm, folder, {"name": "cot", "config": {}}, RUN, "card")
        move(lm)
        weights.load_into(lm, folder)
        assert_same(lm, wanted)
        # An optimiser knows them.
        assert before == [id(weight) for weight in lm.parameters()]
        back, _ = checkpoint.load(folder)
        assert_same(back, wanted)


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox", "mixtral"])
def test_weights_that_were_gathered_come_back(tmp_path: Path, family: str) -> None:
    """As `weights.gathered` gives them: copies by the model's names, a tied weight under both of its own."""
    lm = LatentLM.from_backbone(backbones.load(save_backbone(family, tmp_path / "base")))
    wanted = state(lm)
    move(lm)
    checkpoint.save(lm, tmp_path / "saved", {"name": "cot", "config": {}}, RUN, "card", gathered=wanted)
    weights.load_into(lm, tmp_path / "saved")
    assert_same(lm, wanted)
    back, _ = checkpoint.load(tmp_path / "saved")
    assert_same(back, wanted)
    for each in (lm, back):
        tied = each.causal_lm.get_input_embeddings().weight is each.causal_lm.get_output_embeddings().weight
        assert tied == (family == "gemma3")


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_a_run_of_all_weights_ends_and_resumes(tmp_path: Path, family: str) -> None:
    base = save_backbone(family, tmp_path / "base")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    quick = {**supervised.QUICK, "save_steps": 1}

    def go(folder: Path, steps: int) -> LatentLM:
        method = registry.build("cot", {})
        lm = LatentLM.from_backbone(backbones.load(base))
        pretrained.attach(lm, method, 0)
        run(lm, method, EXAMPLES, TrainingConfig(**quick | {"max_steps": steps}), folder)
        return lm

    lm = go(whole, 2)
    names = load_file(whole / "best" / "model.safetensors").keys()
    assert not names <= lm.causal_lm.state_dict().keys()
    go(parts, 1)
    assert_same(go(parts, 2), state(lm))
    back, _ = pretrained.load(parts / "best")
    assert_same(back, state(lm))


@pytest.mark.parametrize("family", MIXTURES)
def test_an_adapter_on_parameters_is_trained_answers_and_is_merged(tmp_path: Path, family: str) -> None:
    base = save_backbone(family, tmp_path / "base")
    method = registry.build("cot", {})
    lm = LatentLM.from_backbone(backbones.load(base), lora=LORA)
    pretrained.attach(lm, method, 0)
    before = logits(lm)
    train(lm, method)
    lm.eval()
    assert not torch.allclose(logits(lm), before, atol=1e-3)
    wanted = logits(lm)
    untouched = state(lm)
    with lm.merged():
        torch.testing.assert_close(logits(lm), wanted, rtol=1e-3, atol=1e-3)
    assert_same(lm, untouched)

    folder = pretrained.save(lm, method, tmp_path / "saved", RUN, "# A model\n")
    back, method = pretrained.load(folder)
    torch.testing.assert_close(logits(back), wanted)
    back.merge()
    torch.testing.assert_close(logits(back), wanted, rtol=1e-3, atol=1e-3)
    merged, method = pretrained.load(pretrained.merge(folder, tmp_path / "merged", "float32"))
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-3, atol=1e-3)
    assert completions(merged, method) == completions(back, method)

    # Another stage trains the same adapter on, by the settings that it was made with.
    go_on = pretrained.load_for_training(folder, registry.build("cot", {}), LORA, "float32", 0)
    torch.testing.assert_close(logits(go_on.eval()), wanted)
