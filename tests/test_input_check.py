"""Backbones that cannot be fed latents are refused by name when they are loaded, and tokens without a row in texts."""

import re

import pytest
import torch
from families import backbone, build_tokenizer, of_config
from transformers import AutoConfig

from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Request
from colar.methods import pretrained, registry
from colar.model import checkpoint
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.template.template import TemplateConfig
from colar.training.rows import TrainingRows

TOKENIZER = build_tokenizer("llama")
BASE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BERT = {key: BASE[key] for key in BASE if key not in ("num_key_value_heads", "head_dim")} | {
    "is_decoder": True
}
GEMMA = BASE | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "vocab_size_per_layer_input": len(TOKENIZER),
    "hidden_size_per_layer_input": 8,
}
GEMMA4 = GEMMA | {"num_kv_shared_layers": 0, "global_head_dim": 8}
GEMMA3N = GEMMA | {
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "intermediate_size": [48] * 4,
}
OPT = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA4 = BASE | {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 16,
}  # fmt: skip

REFUSED = [
    ("gemma3n_text", GEMMA3N, "computes something else from the embeddings of tokens than from their ids"),
    ("gemma4_text", GEMMA4, "cannot compute from embeddings alone (RuntimeError: It seems like you tried"),
    ("llama4_text", LLAMA4, "cannot compute from embeddings alone (AttributeError: "),
    ("opt", OPT | {"word_embed_proj_dim": 16}, "has embeddings and hidden states of different widths (16 and 32)"),
    ("electra", BERT | {"embedding_size": 16}, "has embeddings and hidden states of different widths (16 and 32)"),
    ("rembert", BERT | {"input_embedding_size": 16}, "has embeddings and hidden states of different widths"),
    ("bert", BERT, "computes its logits from hidden states in a way that is not known here"),
]  # fmt: skip
ACCEPTED = [
    ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 0}),
    ("opt", OPT | {"word_embed_proj_dim": 32}),
    # Scales outside the embedding module, and after the head.
    ("granite", BASE | {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    ("cohere", BASE),
    ("gemma2", BASE),
    ("mixtral", BASE | {"num_local_experts": 4}),
]


def made(name, sizes, dtype=torch.float32):
    lm = of_config(AutoConfig.for_model(name, **sizes))
    return Backbone(name, lm.to(dtype), build_tokenizer("llama"))


@pytest.mark.parametrize(("name", "sizes", "words"), REFUSED, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_fed_latents_is_refused_at_load(name, sizes, words, dtype):
    loaded = made(name, sizes, dtype)
    # Of one line: "." matches no line break.
    said = (
        rf"^{type(loaded.lm).__name__} {re.escape(words)}.*: colar can neither train nor run this backbone$"
    )
    with pytest.raises(ValueError, match=said):
        LatentLM.from_backbone(loaded)


@pytest.mark.parametrize(("name", "sizes"), ACCEPTED, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_embeddings_give_the_logits_of_their_ids(name, sizes, dtype):
    lm = LatentLM.from_backbone(made(name, sizes, dtype)).eval()
    ids = torch.arange(10, 40)[None]
    ours, theirs = lm.logits(lm.hidden(lm.embed(ids))), lm.causal_lm(input_ids=ids).logits.float()
    # Gemma 2 rounds its logits to bfloat16 once more.
    rounding = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, theirs, **rounding)


# Tokens without a row

EXTRA = "<extra>"
WORDS = r"the token '<extra>' has id (\d+), and the model's embedding only \1 rows: the model cannot read it"


def short_of_rows(family):
    """A backbone whose tokenizer has one token more than its embedding rows."""
    loaded = backbone(family)
    loaded.tokenizer.add_tokens([EXTRA])
    return loaded


def test_a_token_without_a_row_is_named_in_questions_steps_and_answers(tmp_path):
    lm = LatentLM.from_backbone(short_of_rows("qwen2"), lora=LoraSettings(r=2)).eval()
    method = registry.build("cot", {})
    pretrained.attach(lm, method, 0)
    rows = [
        Example("a/1", f"Ann {EXTRA} has 3?", (), "3"),
        Example("a/2", "Ann has 3?", ("3", f"4{EXTRA}"), "3"),
        Example("a/3", "Ann has 3?", (), EXTRA),
    ]
    for row in rows:
        with pytest.raises(ValueError, match=f"^{row.id}: {WORDS}$"):
            TrainingRows(lm, method, [row], seed=0).lengths()
    with pytest.raises(ValueError, match=f"^request x: {WORDS}$"):
        Engine(lm, method).submit(Request("x", rows[0].question, method.Params()))
    assert TrainingRows(lm, method, [Example("a/4", "Ann has 3?", (), "3")], seed=0).lengths()

    # So it is once the checkpoint is loaded with a fresh backbone.
    template = lm.template.to_json()
    again = checkpoint.Template.from_json(template, lm.tokenizer)
    with pytest.raises(ValueError, match=WORDS):
        LatentLM(backbone("qwen2"), again).template.question(rows[0].question)


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_a_token_of_every_row_without_a_row_is_found_at_load(role):
    loaded = short_of_rows("llama")
    setattr(loaded.tokenizer, role, EXTRA)
    with pytest.raises(ValueError, match=WORDS):
        LatentLM.from_backbone(loaded)


def test_a_separator_of_the_tokenizer_without_a_row_is_found_at_load():
    with pytest.raises(ValueError, match=WORDS):
        LatentLM.from_backbone(short_of_rows("llama"), TemplateConfig(separator=EXTRA))
