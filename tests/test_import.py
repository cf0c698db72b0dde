"""`colar import`: files in the published layouts give, in our engine, what their authors' loops compute.

The loops are written here after the public evaluation code, over the same tensors, with transformers, peft and torch.
"""

import sys
import types
from collections import OrderedDict
from random import Random

import pytest
import torch
from families import EXAMPLES, backbone, liven, publishable, tiny_lm
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from colar import files
from colar.cli import main
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch

QUESTIONS = [example.question for example in EXAMPLES]
MOST = 8
ANSWER = 10
MARKERS = ("<|start-latent|>", "<|end-latent|>", "<|latent|>")
SIGMA_E = 0.3


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders of tiny backbones as the Hub has them, by family, made once."""
    made = {}

    def of(family, lively=False, seed=0):
        key = (family, lively, seed)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            one = backbone(family, seed=seed, scale=0.2)
            if lively:
                lm = publishable(liven(tiny_lm(family, seed=seed, scale=0.2), stop=0.4))
                lm.causal_lm.save_pretrained(made[key])
            else:
                one.lm.save_pretrained(made[key])
            one.tokenizer.save_pretrained(made[key])
        return made[key]

    return of


def perturbed(lm, seed=1):
    """The model with other weights, as training leaves them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return lm.eval()


def imported(*words):
    assert main(["import", *map(str, words)]) == 0
    lm, method = pretrained.load(words[words.index("--output") + 1])
    return lm, method


def ours(lm, method, most=MOST, params=None):
    """(latents, answer) of each question, of the reference and of the engine in one batch."""
    decoding = Decoding(max_latents=most, max_completion_length=ANSWER)
    asked = registry.make_params(method, params or {})
    requests = [Request(str(i), q, asked, decoding, keep_latents=True) for i, q in enumerate(QUESTIONS)]
    alone = [reference.complete(lm, method, request) for request in requests]
    together = Engine(lm, method, len(requests)).generate(requests)
    return [[(each.latents, each.token_ids) for each in found] for found in (alone, together)]


def check(found, wanted):
    for completions in found:
        for (latents, token_ids), (own_latents, own_ids) in zip(completions, wanted, strict=True):
            torch.testing.assert_close(latents, torch.stack(own_latents), rtol=1e-3, atol=1e-3)
            assert token_ids == own_ids


def answer(lm, embed, fed, eos_id, vocabulary=None):
    """Greedy tokens behind what was fed, without EOS."""
    ids = []
    for _ in range(ANSWER):
        chosen = int(lm(inputs_embeds=fed).logits[0, -1, :vocabulary].argmax())
        if chosen == eos_id:
            break
        ids.append(chosen)
        fed = torch.cat([fed, embed(torch.tensor([[chosen]]))], dim=1)
    return ids


@torch.no_grad()
def feed_back(lm, embed, opening_ids, closing_id, project, n, eos_id, vocabulary=None):
    """Coconut's and CODI's evaluation: n hidden states are fed back, then the closing token and the answer follow."""
    fed = embed(torch.tensor([opening_ids]))
    latents = []
    for _ in range(n):
        hidden = lm(inputs_embeds=fed, output_hidden_states=True).hidden_states[-1][:, -1:]
        latents.append(project(hidden)[0, 0])
        fed = torch.cat([fed, project(hidden)], dim=1)
    fed = torch.cat([fed, embed(torch.tensor([[closing_id]]))], dim=1)
    return latents, answer(lm, embed, fed, eos_id, vocabulary)


def codi_answers(lm, prj, tokenizer, before, n, vocabulary=None):
    """What CODI's evaluation gives for each question, after n latents; its tokens follow the tokenizer's `before`."""
    embed, eos_id = lm.get_input_embeddings(), tokenizer.eos_token_id
    found = []
    for question in QUESTIONS:
        opening_ids = [*tokenizer.encode(question), before + 1]
        found.append(feed_back(lm, embed, opening_ids, before + 2, prj, n, eos_id, vocabulary))
    return found


def coconut(folder, simcot=False):
    """A model with Coconut's tokens, its tokenizer, and the state dict that its code saves."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    before = len(tokenizer)
    tokenizer.add_tokens(list(MARKERS))
    assert len(tokenizer) == before + 3
    lm.resize_token_embeddings(len(tokenizer))
    perturbed(lm)
    state = OrderedDict((f"base_causallm.{name}", value) for name, value in lm.state_dict().items())
    state["embedding.weight"] = lm.get_input_embeddings().weight.data
    if simcot:
        state |= {f"expainable_llm.{name}": value + 1 for name, value in lm.state_dict().items()}
    return lm, tokenizer, state


@pytest.mark.parametrize(
    ("family", "simcot", "n"), [("gpt2", False, 6), ("llama", True, 10), ("qwen2", True, 10)]
)
def test_coconut(stored, tmp_path, capsys, family, simcot, n):
    folder = stored(family)
    lm, tokenizer, state = coconut(folder, simcot)
    torch.save(state, tmp_path / "checkpoint_33")
    made = imported(tmp_path / "checkpoint_33", "--backbone", folder, "--output", tmp_path / "out")
    said = capsys.readouterr().err
    assert "left out: embedding.* (the model's embedding once more; tensors: 1)" in said
    assert "warning" not in said
    assert (
        f"expainable_llm.* (SIM-CoT's decoder, for training only; tensors: {len(lm.state_dict())})" in said
    ) == simcot
    assert ("format simcot" in said) == simcot

    start, end = tokenizer.convert_tokens_to_ids(list(MARKERS[:2]))
    wanted = [
        feed_back(
            lm,
            lm.get_input_embeddings(),
            [*tokenizer.encode(question + "\n"), start],
            end,
            lambda hidden: hidden,
            n,
            tokenizer.eos_token_id,
        )
        for question in QUESTIONS
    ]
    check(ours(*made, most=n), wanted)
    # The rows that the others are read by: with its BOS where the tokenizer writes it, and the line's end.
    ids = made[0].template.question(QUESTIONS[0])
    assert ids == [*tokenizer.encode(QUESTIONS[0] + "\n"), start]
    assert (ids[0] == tokenizer.bos_token_id) == (family == "llama")


def codi(folder, alpha, family, simcot=False):
    """A model as CODI's code makes it, its projection, and the state dict that its Trainer saves."""
    lm = AutoModelForCausalLM.from_pretrained(folder)
    before = lm.config.vocab_size
    lm.resize_token_embeddings(before + 3)
    targets = (
        ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else ["q_proj", "v_proj", "up_proj", "down_proj"]
    )
    lm = perturbed(get_peft_model(lm, LoraConfig(r=16, lora_alpha=alpha, target_modules=targets)))
    width = lm.config.hidden_size
    prj = nn.Sequential(nn.Dropout(0.0), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    prj.add_module("ln", nn.LayerNorm(width))
    perturbed(prj)
    state = {f"codi.{name}": value for name, value in lm.state_dict().items()}
    state |= {f"prj.{name}": value for name, value in prj.state_dict().items()}
    if simcot:
        state |= {"decoder.model.norm.weight": torch.ones(width), "pj_in.weight": torch.ones(width, width)}
    return lm, prj, state, before


@pytest.mark.parametrize(("family", "simcot"), [("gpt2", True), ("llama", False), ("qwen2", True)])
def test_codi(stored, tmp_path, capsys, family, simcot):
    folder = stored(family)
    lm, prj, state, before = codi(folder, 16, family, simcot)
    (tmp_path / "codi").mkdir()
    torch.save(state, tmp_path / "codi" / "pytorch_model.bin")
    made = imported(tmp_path / "codi", "--backbone", folder, "--output", tmp_path / "out", "--lora_alpha", 16)
    assert ("left out: decoder.* (SIM-CoT" in capsys.readouterr().err) == simcot

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Its evaluation leaves the last id out.
    check(ours(*made, most=6), codi_answers(lm, prj, tokenizer, before, 6, vocabulary=before + 2))
    assert files.read_json(tmp_path / "out" / "colar.json")["weights"] == "full"


def test_codi_in_shards_with_tied_weights_once_and_a_vocabulary_of_spare_rows(stored, tmp_path):
    """Safetensors hold a tied weight once; a padded vocabulary has rows that no token has."""
    folder = tmp_path / "padded"
    one = backbone("qwen2", scale=0.2)
    one.lm.resize_token_embeddings(len(one.tokenizer) + 7)
    one.lm.save_pretrained(folder)
    one.tokenizer.save_pretrained(folder)
    lm, prj, state, before = codi(folder, 32, "qwen2")
    del state["codi.base_model.model.lm_head.weight"]
    (tmp_path / "codi").mkdir()
    for i in range(2):
        shard = {name: value.clone() for name, value in list(state.items())[i::2]}
        save_file(shard, tmp_path / "codi" / f"model-0000{i}-of-00002.safetensors")
    made = imported(tmp_path / "codi", "--backbone", folder, "--output", tmp_path / "out", "--latents", 3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check(ours(*made), codi_answers(lm, prj, tokenizer, before, 3))


class LatentPolicy(nn.Module):
    """The head of CoLaR's authors: a body that ends in a LayerNorm, of a width of its own."""

    def __init__(self, width, inner, deterministic):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, inner), nn.LayerNorm(inner)
        )
        self.mean = nn.Linear(inner, width)
        if not deterministic:
            self.log_std = nn.Linear(inner, width)


def colar(folder, deterministic=False):
    """A model with LoRA, its policy, and the state dict of what is trained."""
    lm = AutoModelForCausalLM.from_pretrained(folder)
    lm = get_peft_model(lm, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    policy = perturbed(LatentPolicy(lm.config.hidden_size, 24, deterministic))
    state = OrderedDict((f"llm.{name}", value) for name, value in lm.state_dict().items() if "lora_" in name)
    state |= {f"latent_policy.{name}": value for name, value in policy.state_dict().items()}
    return lm.eval(), policy, state


@torch.no_grad()
def latent_generate(lm, policy, tokenizer, question, speed, sigma_e):
    """CoLaR's evaluation with the mean for a draw and the likeliest token for a drawn one."""
    text = f"Question: {question} Let's think step by step:(Thinking speed: {speed})###"
    separator_id = tokenizer.convert_tokens_to_ids("###")
    embed = lm.get_input_embeddings()
    fed = embed(torch.tensor([tokenizer.encode(text, add_special_tokens=False)]))
    output = lm(inputs_embeds=fed, output_hidden_states=True)
    latents, stops_at_once = [], int(output.logits[0, -1].argmax()) == separator_id
    for _ in range(MOST):
        hidden = output.hidden_states[-1][:, -1:]
        latents.append(policy.mean(policy.fc(hidden))[0, 0] * sigma_e)
        fed = torch.cat([fed, latents[-1][None, None]], dim=1)
        output = lm(inputs_embeds=fed, output_hidden_states=True)
        if int(output.logits[0, -1].argmax()) == separator_id:
            break
    fed = torch.cat([fed, embed(torch.tensor([[separator_id]]))], dim=1)
    return latents, answer(lm, embed, fed, tokenizer.eos_token_id), stops_at_once


def omegaconf(monkeypatch):
    """omegaconf's names, with classes that pickle as its own do: state in `_content` and `_val`."""
    for name in ("omegaconf", "omegaconf.dictconfig", "omegaconf.listconfig", "omegaconf.nodes"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    made = {}
    for module, name in (("dictconfig", "DictConfig"), ("listconfig", "ListConfig"), ("nodes", "AnyNode")):
        made[name] = type(name, (), {"__module__": f"omegaconf.{module}"})
        setattr(sys.modules[f"omegaconf.{module}"], name, made[name])

    def wrapped(value):
        kind = {dict: "DictConfig", list: "ListConfig"}.get(type(value), "AnyNode")
        one = made[kind]()
        if isinstance(value, dict):
            one._content = {key: wrapped(each) for key, each in value.items()}
        elif isinstance(value, list):
            one._content = [wrapped(each) for each in value]
        else:
            one._val = value
        return one

    return wrapped


SETTINGS = {
    "model_id": "Llama-3.2-1B-Instruct",
    "sft_method": "colar",
    "lora_config": {"r": 4, "lora_alpha": 8},
    "latent_cot_config": {
        "max_compression_factor": 4,
        "sqrt_mean": True,
        "embed_modeling_loss": "mse",
    },
    "latent_generation_config": {"max_n_latent_forward": MOST, "compression_factor": 3},
    "answer_generation_config": {"max_new_tokens": 24},
}


@pytest.mark.parametrize(("c", "deterministic"), [(1, False), (3, True), (5, False)])
def test_colar(stored, tmp_path, capsys, monkeypatch, c, deterministic):
    folder = stored("llama", lively=True)
    lm, policy, state = colar(folder, deterministic)
    lightning = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state,
        "hyper_parameters": {"model_kwargs": omegaconf(monkeypatch)(SETTINGS)},
    }
    torch.save(lightning, tmp_path / "epoch3.ckpt")
    made = imported(tmp_path / "epoch3.ckpt", "--backbone", folder, "--output", tmp_path / "out")
    assert "warning" not in capsys.readouterr().err

    method = made[1]
    assert method.config.sigma_e == 0.018
    assert str(method.config.factors) == "1, 2, 3, 4"
    assert method.config.head == ("deterministic" if deterministic else "gaussian")
    assert method.default_params == {"compression_factor": 3}
    assert method.default_limits == {"max_latents": MOST, "max_completion_length": 24}
    assert files.read_json(tmp_path / "out" / "colar.json")["weights"] == "adapter"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loop = [latent_generate(lm, policy, tokenizer, question, c, 0.018) for question in QUESTIONS]
    found = ours(*made, params={"compression_factor": c})
    # The loop makes a latent before it asks whether to stop; the engine asks first.
    same = [i for i, (_, _, at_once) in enumerate(loop) if not at_once]
    assert len(same) >= 3
    lengths = {len(loop[i][0]) for i in same}
    assert len(lengths) > 2
    assert min(lengths) < MOST
    check([[each[i] for i in same] for each in found], [loop[i][:2] for i in same])
    for each in found:
        assert all(latents is None for i, (latents, _) in enumerate(each) if i not in same)


def test_colar_without_settings_has_those_of_its_authors_and_asks_for_sigma_e(stored, tmp_path, capsys):
    folder = stored("llama", lively=True)
    lm, policy, state = colar(folder)
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    words = [
        "import",
        str(tmp_path / "last.ckpt"),
        "--backbone",
        str(folder),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 2
    assert "give --sigma_e" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    _, method = imported(*words[1:], "--sigma_e", SIGMA_E)
    assert method.config.sigma_e == SIGMA_E
    assert method.default_params == {"compression_factor": 5}
    assert files.read_json(tmp_path / "out" / "adapter_config.json")["lora_alpha"] == 32


def test_a_tokenizer_that_merges_the_separator_is_warned_of(stored, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(stored("llama", lively=True))
    lm, _, state = colar(stored("llama", lively=True))
    tokenizer.add_tokens([")###"])
    tokenizer.save_pretrained(tmp_path / "merging")
    lm.unload().save_pretrained(tmp_path / "merging")
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    imported(
        *(tmp_path / "last.ckpt", "--backbone", tmp_path / "merging", "--output", tmp_path / "out"),
        *("--sigma_e", SIGMA_E),
    )
    assert "warning: this tokenizer merges '###' with what stands before it" in capsys.readouterr().err


def test_an_imported_checkpoint_trains_on(stored, tmp_path):
    """Its layout and its modules are those of any checkpoint: a row is encoded, and has a loss."""
    folder = stored("gpt2")
    _, _, state, before = codi(folder, 32, "gpt2")
    torch.save(state, tmp_path / "pytorch_model.bin")
    lm, method = imported(tmp_path / "pytorch_model.bin", "--backbone", folder, "--output", tmp_path / "out")
    row = method.encode(lm.template, EXAMPLES[1], Random(0), 0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # bot, eot: the last two rows.
    assert row.question == [*tokenizer.encode(EXAMPLES[1].question), before + 1]
    assert row.answer == [before + 2, *tokenizer.encode("The answer is: 7"), tokenizer.eos_token_id]
    losses = method.loss(lm, Batch.collate([row]))
    assert all(torch.isfinite(value).all() for value in losses.values())


# Mistakes


class Evil:
    def __reduce__(self):
        # Not `print`, which Ray replaces for the whole process.
        return eval, ("1",)


def mistaken(tmp_path, capsys, path, folder, *words):
    code = main(["import", str(path), "--backbone", str(folder), "--output", str(tmp_path / "out"), *words])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()
    return captured.err


def test_mistakes_before_the_backbone_is_loaded(tmp_path, capsys):
    """Each in one line; the backbone that is named is not there."""

    def said(content, *words, name="checkpoint_1"):
        path = tmp_path / name
        if content is not None:
            torch.save(content, path)
        return mistaken(tmp_path, capsys, path, tmp_path / "no-backbone", *words)

    assert "no published checkpoint at" in said(None)
    assert "--format must be one of colar, coconut, codi, simcot, got 'cococo'" in said(
        None, "--format", "cococo"
    )
    assert "--latents must be a whole number, 1 or more, got 0" in said(None, "--latents", "0")

    refused = said({"state_dict": {"a": Evil()}})
    assert "holds pickled code (eval), which colar does not run" in refused
    assert "state_dict() alone" in refused
    assert "holds other things than tensors by name" in said({"base_causallm.x": 1})
    assert "holds other things than tensors by name" in said([torch.ones(1)])
    assert "is in none of the formats (colar, coconut, codi, simcot)" in said({"model.x": torch.ones(1)})
    assert "its tensors are model.x" in said({"model.x": torch.ones(1)})
    policy = {"llm.x": torch.ones(1), "latent_policy.fc.0.weight": torch.ones(1)}
    assert "is not in the format codi" in said(policy, "--format", "codi")
    assert "lacks latent_policy.fc.0.bias, latent_policy.fc.2.weight" in said(policy)
    assert "lacks prj.1.weight, prj.1.bias, prj.3.weight and 3 more" in said({"codi.x": torch.ones(1)})
    assert "--latents is no option of the format colar" in said(policy, "--latents", "3")

    (tmp_path / "damaged.bin").write_bytes(b"PK\x03\x04 no zip")
    assert "or it is damaged" in said(None, name="damaged.bin")
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    assert "cannot be read" in said(None, name="damaged.safetensors")
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors" in said(None, name="empty")
    for i in (1, 2):
        torch.save({}, tmp_path / "empty" / f"checkpoint_{i}")
    assert "holds checkpoint_1, checkpoint_2: give one of these files" in said(None, name="empty")
    assert "cannot load backbone" in said({"base_causallm.x": torch.ones(1)})


def test_tensors_that_do_not_fit_the_backbone_are_named(stored, tmp_path, capsys):
    folder = stored("gpt2")
    path = tmp_path / "checkpoint_1"
    _, _, state = coconut(folder)

    def said(changed, backbone=folder):
        torch.save(changed, path)
        return mistaken(tmp_path, capsys, path, backbone).removeprefix(f"colar import: error: {path}")

    lacking = {name: value for name, value in state.items() if "h.1.mlp.c_fc" not in name}
    assert "lacks base_causallm.transformer.h.1.mlp.c_fc.weight, base_causallm" in said(lacking)
    wte = "base_causallm.transformer.wte.weight"
    assert f"lacks {wte}" in said({name: value for name, value in state.items() if name != wte})
    assert f"{wte} has 8 rows, and {folder} with 3 added tokens" in said(state | {wte: torch.ones(8, 32)})
    narrow = state | {"base_causallm.transformer.ln_f.weight": torch.ones(16)}
    assert "base_causallm.transformer.ln_f.weight has shape (16,), and here (32,)" in said(narrow)
    more = state | {"base_causallm.transformer.h.2.ln_1.weight": torch.ones(32)}
    assert "has base_causallm.transformer.h.2.ln_1.weight, which the backbone has not" in said(more)
    assert "lacks base_causallm.model.embed_tokens.weight" in said(state, stored("llama"))

    _, _, state = colar(stored("llama", lively=True))
    state["llm.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.ones(4, 16)
    torch.save({"state_dict": state}, path)
    error = mistaken(tmp_path, capsys, path, stored("llama", lively=True), "--sigma_e", "0.1")
    assert "q_proj.lora_A.default.weight has shape (4, 16), and here (4, 32)" in error


def test_what_nothing_computes_with_is_named_and_buffers_of_earlier_versions_are_not(
    stored, tmp_path, capsys
):
    folder = stored("gpt2")
    _, _, state = coconut(folder)
    state |= {"projector2.weight": torch.ones(1), "base_causallm.transformer.h.0.attn.bias": torch.ones(1, 1)}
    torch.save(state, tmp_path / "checkpoint_1")
    imported(tmp_path / "checkpoint_1", "--backbone", folder, "--output", tmp_path / "out")
    assert (
        "warning: not imported, as nothing here computes with them: projector2.weight\n"
        in capsys.readouterr().err
    )


def test_an_output_of_other_things_is_not_replaced(stored, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    words = ["import", "missing", "--backbone", "b", "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert "exists and is not a checkpoint" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
