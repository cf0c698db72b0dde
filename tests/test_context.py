"""The context of a backbone: by whatever name its config has it, and no further than where longrope changes."""

from types import SimpleNamespace

import pytest
import torch
from families import build_tokenizer, of_config
from transformers import AutoConfig

from colar.data.example import Example
from colar.engine import cache, reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request, TooLong
from colar.methods import registry
from colar.methods.base import NoParams
from colar.model import backbones
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM
from colar.ops.ragged import PAD_TO
from colar.training.rows import TrainingRows

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
GQA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SIZES = {
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "phi3": {
        **GQA,
        "original_max_position_embeddings": 64,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64},
    },
    # Factors and a scale of its own, and a class of its own for both.
    "phimoe": {
        **GQA,
        "num_local_experts": 2,
        "rope_parameters": {
            **LONGROPE,
            "short_mscale": 1.0,
            "long_mscale": 1.5,
            "original_max_position_embeddings": 64,
        },
    },
    "llama": {**GQA, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
}  # fmt: skip
SHORT = "A pen is 3. How many for 12?"


def model_of(name: str, **sizes: int) -> LatentLM:
    """A random model that ends neither its chain nor its answer by itself."""
    tokenizer = build_tokenizer("llama")
    config = AutoConfig.for_model(name, **SIZES[name] | sizes, vocab_size=len(tokenizer), pad_token_id=None)
    lm = LatentLM.from_backbone(Backbone(name, of_config(config, std=0.3), tokenizer)).eval()
    bias = torch.zeros(lm.vocabulary_size)
    bias[[lm.template.separator_id, lm.template.eos_id]] = -1e4
    lm.causal_lm.get_output_embeddings().bias = torch.nn.Parameter(bias, requires_grad=False)
    return lm


def asked(lm: LatentLM, question: str, positions: int) -> Request:
    """A request that needs that many positions in all."""
    n_latents = positions - len(lm.template.question(question)) - 1 - 4
    decoding = Decoding(max_latents=n_latents, max_completion_length=4)
    return Request(question, question, NoParams(), decoding)


def tokens(completion):
    return completion.thought_ids, completion.token_ids


CONFIGS = [
    ({"max_position_embeddings": 2048}, 2048),
    ({"max_seq_len": 2048}, 2048),
    ({"n_ctx": 512}, 512),
    ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
    # No room for padding beyond the end.
    ({"max_position_embeddings": 100}, 96),
    ({"max_position_embeddings": 5}, 5),
    ({}, backbones.UNLIMITED),
    ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, 4096),
    ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100}}, 96),
    ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100}}, 64),
    (
        {
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 128},
                "sliding_attention": {"rope_type": "default"},
            },
        },
        128,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "length"), CONFIGS)
def test_the_context_is_what_the_config_has(values, length):
    assert backbones.context_of(SimpleNamespace(**values)) == length


@pytest.mark.parametrize(("name", "key"), [("gptj", "n_positions"), ("mpt", "max_seq_len"), ("xglm", "max_position_embeddings")])  # fmt: skip
def test_names_that_transformers_maps_are_found_by_it(name, key):
    assert backbones.context_of(AutoConfig.for_model(name, **{key: 304})) == 304


def test_padding_stays_within_the_context():
    assert backbones.CONTEXT_MULTIPLE % PAD_TO == 0


@pytest.mark.parametrize(
    ("name", "sizes", "length"),
    [("mpt", {"max_seq_len": 72}, 64), ("phi3", {}, 64), ("phimoe", {}, 64), ("llama", {}, 64)],
)
def test_a_row_that_fills_the_context_is_the_same_alone_and_beside_others(name, sizes, length):
    lm = model_of(name, **sizes)
    method = registry.build("cot", {})
    assert lm.context == length
    # A short one that starts beside a long one, and two that go on to the last position.
    requests = [
        asked(lm, SHORT, 34),
        asked(lm, f"{SHORT} " * 2, length),
        asked(lm, f"{SHORT} {SHORT} Why?", length - 1),
    ]
    want = [tokens(reference.complete(lm, method, each)) for each in requests]
    for max_batch in (3, 2):
        engine = Engine(lm, method, max_batch)
        assert [tokens(found) for found in engine.generate(requests)] == want

    with pytest.raises(TooLong, match=f"needs {length + 1} positions; the model's context is {length}"):
        Engine(lm, method).submit(asked(lm, SHORT, length + 1))


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
@torch.no_grad()
def test_a_training_row_that_fills_the_context_does_not_depend_on_its_batch(name):
    lm = model_of(name)
    embeds = lm.embed(torch.randint(5, 60, (2, lm.context), generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(lm.hidden(embeds)[:1, :24], lm.hidden(embeds[:1, :24]))


def test_a_training_row_beyond_the_switch_is_refused():
    lm = model_of("phi3")
    example = Example("far/1", "Why? " * 40, (), "3")
    words = r"far/1: the row has \d+ tokens, the model's context is 64"
    rows = TrainingRows(lm, registry.build("cot", {}), [example], seed=0)
    with pytest.raises(ValueError, match=words):
        rows.fitting(rows.lengths(), "training rows")


def test_rotary_embeddings_that_follow_the_longest_row_are_refused_where_no_config_says_where_they_change():
    lm = model_of("phi3").causal_lm
    # The module has read its type already.
    lm.config.rope_parameters["rope_type"] = "default"
    assert backbones.context_of(lm.config) == 512
    with pytest.raises(
        ValueError, match=r"^Phi3ForCausalLM does not follow .* a row by itself\): the engine"
    ):
        cache.check_attention(lm)
