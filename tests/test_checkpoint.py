"""A checkpoint comes back as it went: logits and completions; and whatever is missing or broken in it is named."""

import dataclasses
import json
import re
import resource
import shutil
from random import Random

import pytest
import torch
import yaml
from families import EXAMPLES, backbone, of_config, tiny_lm
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config

import colar
from colar import files
from colar.cli import main
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.model import backbones, card, checkpoint, weights
from colar.model.latent_lm import LatentLM, LoraSettings

LORA = LoraSettings(r=2, target_modules=("q_proj", "v_proj"))
RUN = {"seed": 0, "steps": 3}
KINDS = {
    "full": ("llama", {}, None),
    "full-tied": ("gemma3", {}, None),
    "full-gpt2": ("gpt2", {}, None),
    "lora": ("llama", {}, LORA),
    "lora-tied": ("qwen2", {}, LORA),
    "lora-gemma3": ("gemma3", {}, LORA),
    "lora-gpt2": ("gpt2", {}, LoraSettings(r=2, target_modules="all-linear")),
}
"""name: family, how its backbone differs, adapter."""


def save_backbone(folder, family, **how):
    """A backbone as the Hub would have it. Returns its name: the folder."""
    made = backbone(family, **how)
    made.lm.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


def train(lm, method, steps=3):
    """A few steps that move all that is trained, biases included."""
    rows = [method.encode(lm.template, example, Random(i), 0) for i, example in enumerate(EXAMPLES)]
    optimiser = torch.optim.SGD([p for p in lm.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        terms = method.loss(lm, Batch.collate(rows))
        sum(value for name, value in terms.items() if not name.startswith("_")).mean().backward()
        optimiser.step()


def logits(lm):
    ids = torch.tensor([lm.template.question(EXAMPLES[3].question) + lm.template.answer("12")])
    with torch.no_grad():
        return lm.logits(lm.hidden(lm.embed(ids)))


def completions(lm, method):
    decoding = Decoding(1.0, 0.9, 1.0, max_latents=5, max_completion_length=5)
    requests = [Request(e.id, e.question, method.Params(), decoding, seed=7) for e in EXAMPLES]
    return [(c.token_ids, c.thought_ids, c.text) for c in Engine(lm, method).generate(requests)]


class Saved:
    """A trained model, and the folder that it was saved in."""

    def __init__(self, root, kind):
        # Training draws: the order of the tests would decide where two answers are nearly as likely.
        torch.manual_seed(0)
        family, how, lora = KINDS[kind]
        self.base = save_backbone(root / "base", family, **how)
        self.lm = LatentLM.from_backbone(backbones.load(self.base), lora=lora)
        self.method = registry.build("colar", {"compression_factors": [1, 2]})
        pretrained.attach(self.lm, self.method, seed=0)
        self.method.prepare(self.lm, EXAMPLES)
        self.before = logits(self.lm)
        train(self.lm, self.method)
        self.lm.eval()
        self.folder = pretrained.save(self.lm, self.method, root / "saved", RUN, "# A model\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = Saved(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get


# Round trips


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_what_was_saved(saved, kind):
    old = saved(kind)
    assert not torch.allclose(logits(old.lm), old.before, atol=1e-3)  # training did something
    lm, method = pretrained.load(old.folder)
    assert lm.name == old.base
    # All weights are a backbone of their own: what is trained on them next begins with these.
    assert lm.fingerprint == backbones.load(old.base if lm.has_adapter else str(old.folder)).fingerprint
    torch.testing.assert_close(logits(lm), logits(old.lm), rtol=1e-5, atol=1e-5)
    assert completions(lm, method) == completions(old.lm, old.method)
    assert method.config == old.method.config
    assert method.config.sigma_e is not None
    assert lm.template.to_json() == old.lm.template.to_json()
    assert not lm.training
    # The same is trained as before.
    method.prepare(lm, EXAMPLES)
    assert {n for n, p in lm.named_parameters() if p.requires_grad} == {
        n for n, p in old.lm.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("kind", ["full-tied", "lora", "lora-gemma3"])
def test_loaded_twice_and_saved_again(saved, kind, tmp_path):
    """Load, save, load: nothing drifts."""
    old = saved(kind)
    lm, method = pretrained.load(old.folder)
    again, method = pretrained.load(pretrained.save(lm, method, tmp_path / "again", RUN, "card"))
    torch.testing.assert_close(logits(again), logits(old.lm), rtol=1e-5, atol=1e-5)
    assert len(again.tokenizer) == len(old.lm.tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_the_folder_is_a_pickle(saved, kind):
    """And an adapter's folder holds no copy of the base, nor of its embeddings."""
    folder = saved(kind).folder
    for path in folder.rglob("*"):
        assert path.suffix in {".safetensors", ".json", ".txt", ".md", ".jinja"}, path.name
        if path.suffix == ".json":
            json.loads(path.read_text())
    base = sum(p.numel() for p in backbones.load(saved(kind).base).lm.parameters())
    for path in folder.glob("*.safetensors"):
        stored = sum(value.numel() for value in load_file(path).values())
        assert stored < base / 2 or KINDS[kind][2] is None
        assert stored > 0


@pytest.mark.parametrize("kind", ["full-tied", "full-gpt2"])
def test_tied_weights_are_stored_once(saved, kind):
    """PITFALLS 21."""
    old = saved(kind)
    state = load_file(old.folder / "model.safetensors")
    rows = old.lm.causal_lm.get_input_embeddings().weight.shape[0]
    assert sum(value.shape[0] == rows for value in state.values()) == 1
    lm, _ = pretrained.load(old.folder)
    assert lm.causal_lm.get_output_embeddings().weight is lm.causal_lm.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["full", "lora-gemma3"])
def test_bfloat16(saved, kind):
    old = saved(kind)
    lm, method = pretrained.load(old.folder, dtype="bfloat16")
    assert lm.causal_lm.get_input_embeddings().weight.dtype == torch.bfloat16
    assert logits(lm).dtype == torch.float32
    assert lm.extra["latent_head"].mean.weight.dtype == torch.float32
    difference = (logits(lm) - logits(old.lm)).abs().mean() / logits(old.lm).std()
    assert 0 < difference < 0.2
    assert len(completions(lm, method)) == len(EXAMPLES)
    terms = method.loss(lm, Batch.collate([method.encode(lm.template, EXAMPLES[0], Random(0), 0)]))
    assert all(torch.isfinite(value).all() for value in terms.values())


def test_a_tiny_backbones_adapter_is_loaded_from_its_seed(tmp_path):
    """`tiny` is drawn from its seed, which the run remembers."""
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=3), lora=LORA).eval()
    method = registry.build("cot")
    pretrained.attach(lm, method, 0)
    train(lm, method, steps=1)
    pretrained.save(lm, method, tmp_path / "saved", {"seed": 3}, "card")
    back, _ = pretrained.load(tmp_path / "saved")
    torch.testing.assert_close(logits(back), logits(lm), rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "saved" / "modules.safetensors").exists()


@pytest.mark.parametrize("kind", ["full-tied", "lora"])
def test_weights_are_put_back_in_place(saved, kind):
    """What Trainer needs for its best checkpoint (PITFALLS 22): an `lm` that has moved on is set back."""
    old = saved(kind)
    lm, _ = pretrained.load(old.folder)
    with torch.no_grad():
        for p in lm.parameters():
            if p.requires_grad:
                p.add_(0.1)
    assert not torch.allclose(logits(lm), logits(old.lm), atol=1e-2)
    weights.load_into(lm, old.folder)
    torch.testing.assert_close(logits(lm), logits(old.lm), rtol=1e-5, atol=1e-5)
    for name, p in lm.extra.named_parameters():
        torch.testing.assert_close(p, dict(old.lm.extra.named_parameters())[name], rtol=0, atol=0)


def test_an_adapter_names_its_backbone_not_a_place_on_this_machine(saved):
    old = saved("lora")
    config = json.loads((old.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == old.lm.name


# What can be wrong


def files_of(kind):
    shared = ["colar.json", "template.json", "modules.safetensors", "tokenizer.json", "tokenizer_config.json"]
    return shared + (
        ["adapter_config.json", "adapter_model.safetensors"]
        if kind == "lora"
        else ["config.json", "model.safetensors"]
    )


CASES = [(kind, name) for kind in ("full", "lora") for name in files_of(kind)]


@pytest.fixture
def copy(saved, tmp_path):
    return lambda kind: shutil.copytree(saved(kind).folder, tmp_path / "copy")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_missing_file_is_named(copy, kind, name):
    folder = copy(kind)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{folder} lacks {name}"):
        pretrained.load(folder)


@pytest.mark.parametrize("damage", ["empty", "half", "garbage"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_corrupt_file_is_named(copy, kind, name, damage):
    folder = copy(kind)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(
        {"empty": b"", "half": whole[: len(whole) // 2], "garbage": b"\xff\x00{["}[damage]
    )
    with pytest.raises(ValueError, match=name):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("name", "key"),
    [("colar.json", key) for key in ("weights", "method", "modules")]
    + [("template.json", key) for key in ("separator_id", "question")],
)
def test_a_key_that_is_missing_is_named(copy, name, key):
    folder = copy("full")
    content = files.read_json(folder / name)
    del content[key]
    files.write_json(folder / name, content)
    with pytest.raises(ValueError, match=rf"{name}.*{key}"):
        pretrained.load(folder)


def test_formats_from_the_future_are_refused(copy):
    folder = copy("full")
    for name, key in (("template.json", "version"), ("colar.json", "format")):
        content = files.read_json(folder / name)
        files.write_json(folder / name, content | {key: 99})
        with pytest.raises(ValueError, match=r"is not (1, the one|one of 2, 3, which) this colar reads"):
            pretrained.load(folder)


def test_modules_that_do_not_fit_are_named(saved, copy):
    folder = copy("full")
    shutil.copy(folder / "model.safetensors", folder / "modules.safetensors")
    with pytest.raises(ValueError, match=r"modules.safetensors does not fit the method's modules"):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("kind", "name"), [("full", "model.safetensors"), ("lora", "adapter_model.safetensors")]
)
def test_weights_that_do_not_fit_are_named(saved, copy, kind, name):
    """As much for an adapter as for full weights: neither is loaded by half."""
    lm, _ = pretrained.load(saved(kind).folder)
    folder = copy(kind)
    state = load_file(folder / name)
    lost = sorted(key for key in state if "q_proj" in key)[0]
    save_file({key: value for key, value in state.items() if key != lost}, folder / name)
    with pytest.raises(ValueError, match=r"weights do not fit: missing .*q_proj"):
        weights.load_into(lm, folder)
    message = (
        rf"{name}: weights do not fit: missing .*q_proj" if kind == "lora" else r"weights of .* lack .*q_proj"
    )
    with pytest.raises(ValueError, match=message):
        pretrained.load(folder)


def test_an_adapter_of_another_backbone_is_refused(saved, tmp_path):
    other = save_backbone(tmp_path / "other", "llama", seed=9)
    old = saved("lora")
    with pytest.raises(
        ValueError, match=r"was trained on .*base \(fingerprint .*\), but .*other is another model"
    ):
        pretrained.load(old.folder, backbone=other)
    moved = shutil.copytree(old.base, tmp_path / "moved")
    lm, _ = pretrained.load(old.folder, backbone=str(moved))
    torch.testing.assert_close(logits(lm), logits(old.lm), rtol=1e-5, atol=1e-5)


def test_an_adapter_may_leave_the_tokenizer_and_the_check_to_its_backbone(saved, tmp_path, capsys):
    old = saved("lora")
    other = save_backbone(tmp_path / "other", "llama", seed=9)
    folder = shutil.copytree(old.folder, tmp_path / "published")
    info = json.loads((folder / "colar.json").read_text())
    for name in info["tokenizer"]:
        (folder / name).unlink()
    (folder / "colar.json").write_text(json.dumps({**info, "tokenizer": [], "fingerprint": ""}))
    lm, method = pretrained.load(folder, backbone=other)
    assert f"{folder} has no fingerprint of its backbone: {other} is not checked" in capsys.readouterr().err
    assert lm.fingerprint == backbones.load(other).fingerprint
    assert lm.template.to_json() == old.lm.template.to_json()
    same, _ = pretrained.load(folder)
    torch.testing.assert_close(logits(same), logits(old.lm), rtol=1e-5, atol=1e-5)
    # Saved again it has both.
    again = pretrained.save(lm, method, tmp_path / "again", RUN, "")
    assert json.loads((again / "colar.json").read_text())["tokenizer"] == info["tokenizer"]
    torch.testing.assert_close(logits(pretrained.load(again)[0]), logits(lm), rtol=1e-5, atol=1e-5)
    (folder / "colar.json").write_text(json.dumps({**info, "tokenizer": [], "backbone": "me/gone"}))
    with pytest.raises(
        ValueError, match=r"the backbone of the adapter in .*--backbone.*: cannot load backbone 'me/gone'"
    ):
        pretrained.load(folder)


def test_an_adapter_without_a_tokenizer_takes_that_of_a_built_in_backbone(tmp_path):
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=LORA)
    folder = pretrained.save(lm, registry.build("cot"), tmp_path / "made", RUN, "")
    info = json.loads((folder / "colar.json").read_text())
    for name in info["tokenizer"]:
        (folder / name).unlink()
    (folder / "colar.json").write_text(json.dumps({**info, "tokenizer": []}))
    assert pretrained.load(folder)[0].template.to_json() == lm.template.to_json()


def test_named_chat_templates_come_back(tmp_path):
    """transformers saves all but the default one in a folder of their own."""
    made = backbone("qwen2")
    made.tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    made.lm.save_pretrained(tmp_path / "base")
    lm = LatentLM.from_backbone(made, lora=LORA)
    folder = pretrained.save(lm, registry.build("cot"), tmp_path / "made", RUN, "")
    names = json.loads((folder / "colar.json").read_text())["tokenizer"]
    assert "additional_chat_templates/tool_use.jinja" in names
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("")
    converted = checkpoint.convert(folder, tmp_path / "converted", "bfloat16")
    assert not (converted / ".git").exists()
    for copied in (folder, converted):
        again, _ = pretrained.load(copied, backbone=str(tmp_path / "base"))
        assert again.tokenizer.chat_template == made.tokenizer.chat_template
        (copied / "additional_chat_templates" / "tool_use.jinja").unlink()
        with pytest.raises(ValueError, match="lacks additional_chat_templates/tool_use.jinja"):
            pretrained.load(copied)


def test_a_quantised_backbone_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved("lora").base, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the weights of .*base are quantised: .*model.load_in_4bit"):
        backbones.load(str(folder))


def test_no_checkpoint_there(tmp_path, saved):
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere: there is no such folder"):
        pretrained.load(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"lacks colar.json: it is a Hugging Face model that colar has not trained"
    ):
        pretrained.load(saved("full").base)
    with pytest.raises(ValueError, match=r"has no config.json.*an adapter: give its own backbone"):
        backbones.load(str(saved("lora").folder))
    with pytest.raises(
        ValueError, match=r"model\.dtype must be one of float32, bfloat16, float16, got 'int4'"
    ):
        backbones.load("tiny", dtype="int4")


WRONG_PLACES = {
    # name: what is there (a path ending in / is a folder), what is given, the message; {} is the folder of the test
    "a typo": (
        ["made/cot/best/colar.json"],
        "made/cott/best",
        "no checkpoint at {}/made/cott/best: there is no such folder",
    ),
    "nothing": ([], "none/best", "no checkpoint at {}/none/best: there is no such folder"),
    "a file": (["a.json"], "a.json", "no checkpoint at {}/a.json: it is a file"),
    "a file of a checkpoint": (
        ["best/colar.json"],
        "best/colar.json",
        "no checkpoint at {}/best/colar.json: it is a file",
    ),
    "a run that has just begun": (
        ["run/recipe.json", "run/checkpoints/"],
        "run",
        "{}/run lacks colar.json: it is the folder of a run that has published no best/ yet: "
        "the same command resumes it",
    ),
    "a run's resume state": (
        ["run/best/colar.json", "run/checkpoints/checkpoint-8/trainer_state.json"],
        "run/checkpoints/checkpoint-8",
        "{}/run/checkpoints/checkpoint-8 lacks colar.json: a run resumes from it: give the folder of the run",
    ),
    "a model": (
        ["hf/config.json"],
        "hf",
        "{}/hf lacks colar.json: it is a Hugging Face model that colar has not trained "
        "(model.backbone of a recipe takes it)",
    ),
    "another folder": (["x/"], "x", "{}/x lacks colar.json: it is no colar checkpoint"),
}


def test_a_runs_folder_stands_for_its_checkpoint(tmp_path):
    files.write_json(tmp_path / "run" / "best" / "colar.json", {})
    assert checkpoint.resolve(tmp_path / "run") == checkpoint.resolve(tmp_path / "run" / "best")
    files.write_json(tmp_path / "run" / "colar.json", {})
    assert checkpoint.resolve(tmp_path / "run") == tmp_path / "run"


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_what_lies_at_a_wrong_path_is_named(tmp_path, case):
    there, given, message = WRONG_PLACES[case]
    for name in there:
        path = tmp_path / name
        folder = path if name.endswith("/") else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if folder != path:
            files.write_json(path, {})
    wanted = re.escape(message.format(*[tmp_path] * message.count("{}"))) + "$"
    for look in (pretrained.load, checkpoint.read_info, checkpoint.check_folder):
        with pytest.raises(ValueError, match=wanted):
            look(tmp_path / given)


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("me/mine", LocalEntryNotFoundError("Got: no address\nPlease check"), "Got: no address Please check"),
        ("runs/colr", OSError("404"), "404"),
        ("two words/x", HFValidationError("Repo id must use"), "Repo id must use"),
    ],
)
def test_a_hub_id_that_does_not_answer(monkeypatch, tmp_path, text, error, reason):
    monkeypatch.chdir(tmp_path)

    def snapshot_download(repo_id):
        assert repo_id == text
        raise error

    monkeypatch.setattr(checkpoint, "hf_hub_download", lambda repo_id, name: snapshot_download(repo_id))
    message = f"no checkpoint at {text}: there is no such folder, and the Hub does not give it: {reason}$"
    with pytest.raises(ValueError, match=message):
        pretrained.load(text)


class MissingEntry(EntryNotFoundError, OSError):
    """As that of the Hub's client, whose own takes a response."""


def test_a_model_of_the_hub_that_is_no_checkpoint_is_not_downloaded(monkeypatch, tmp_path):
    asked = []

    def hf_hub_download(repo_id, name):
        asked.append((repo_id, name))
        raise MissingEntry("404")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(checkpoint, "snapshot_download", None)
    with pytest.raises(ValueError, match="me/plain on the Hub lacks colar.json: colar has not trained it"):
        pretrained.load("me/plain")
    assert asked == [("me/plain", "colar.json")]


def test_a_path_below_a_folder_that_is_there_is_no_hub_id(monkeypatch, tmp_path):
    def hf_hub_download(repo_id, name):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(checkpoint, "hf_hub_download", hf_hub_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "toy-gsm").mkdir(parents=True)
    with pytest.raises(ValueError, match="no checkpoint at checkpoints/toy-gms: there is no such folder$"):
        pretrained.load("checkpoints/toy-gms")


# Killed in mid-save


def test_a_kill_in_mid_save_leaves_the_old_one(saved, copy):
    folder = copy("lora")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    old = saved("lora")
    with pytest.raises(ValueError, match="not JSON compliant"):
        pretrained.save(
            old.lm, old.method, folder, {"loss": float("nan")}, "another card"
        )  # fails at colar.json
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    pretrained.save(old.lm, old.method, folder, RUN, "another card")
    assert (folder / "README.md").read_text() == "another card"
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


# Backbones that are their own checkpoint


def test_full_weights_serve_as_a_backbone(saved):
    """CoT-SFT's result is CoLaR's start: the folder is a Hugging Face model."""
    old = saved("full-tied")
    made = LatentLM.from_backbone(backbones.load(str(old.folder)))
    assert made.template.separator_id == old.lm.template.separator_id
    torch.testing.assert_close(logits(made.eval()), logits(old.lm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny", "full", "lora-gemma3"])
def test_positions_are_those_of_float32_in_every_dtype(name, dtype, saved):
    """Rotary frequencies are buffers. Rounded, they turn distant tokens by other angles than float32's."""

    def buffers(dtype):
        lm = (
            backbones.load(name, dtype).lm
            if name == "tiny"
            else pretrained.load(saved(name).folder, dtype)[0].lm
        )
        assert {weight.dtype for weight in lm.parameters()} >= {backbones.DTYPES[dtype]}
        return dict(lm.named_buffers())

    expected = {key: value for key, value in buffers("float32").items() if value.is_floating_point()}
    assert any("inv_freq" in key for key in expected)
    found = buffers(dtype)
    for key in expected:
        if "inv_freq" in key:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


def test_fingerprints_tell_models_apart_and_not_dtypes(saved, tmp_path):
    base = saved("full").base
    prints = {dtype: backbones.load(base, dtype).fingerprint for dtype in ("float32", "bfloat16")}
    assert prints["float32"] == prints["bfloat16"]
    assert backbone("llama", seed=9).fingerprint != prints["float32"]
    assert backbones.load("tiny", seed=1).fingerprint != backbones.load("tiny").fingerprint


def test_a_model_that_an_adapter_was_merged_into_has_another_fingerprint(saved):
    """Its embedding is the base's, as that of all weights that were trained with frozen embeddings."""
    old = saved("lora")
    lm, _ = pretrained.load(old.folder)
    lm.merge()
    base = backbones.load(old.base)
    torch.testing.assert_close(
        lm.causal_lm.get_input_embeddings().weight, base.lm.get_input_embeddings().weight
    )
    assert backbones.fingerprint_of(lm.causal_lm) != base.fingerprint == old.lm.fingerprint


def test_a_backbone_beside_full_weights_is_refused(saved):
    old = saved("full")
    with pytest.raises(ValueError, match=r"holds all weights: give no backbone, got .*base"):
        pretrained.load(old.folder, backbone=old.base)


def small_backbone(folder, stored):
    """A backbone whose embeddings lie around 1e-6, below float16's normal range (6e-5), saved in a dtype."""
    made = backbone("llama")
    with torch.no_grad():
        made.lm.get_input_embeddings().weight.mul_(2e-6)
    made.lm.to(backbones.DTYPES[stored]).save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("stored", backbones.DTYPES)
def test_small_weights_have_one_fingerprint_in_every_dtype(tmp_path, stored):
    base = small_backbone(tmp_path, stored)
    loaded = {dtype: backbones.load(base, dtype) for dtype in backbones.DTYPES}
    assert {made.lm.dtype for made in loaded.values()} == set(backbones.DTYPES.values())
    assert len({made.fingerprint for made in loaded.values()}) == 1
    rounded = backbones.fingerprint_of(loaded["float16"].lm)
    assert (rounded == loaded["float16"].fingerprint) == (stored == "float16")


PAIRS = [
    (trained, loaded)
    for i, trained in enumerate(backbones.DTYPES)
    for j, loaded in enumerate(backbones.DTYPES)
    if i != j
]
"""Dtypes that a run trains in, and that its checkpoint is loaded in: another one."""


@pytest.mark.parametrize(
    ("name", "trained", "loaded"),
    [(name, *PAIRS[i % len(PAIRS)]) for i, name in enumerate(["small", "small-full", "tiny"] * 2)],
)
def test_an_adapter_knows_its_backbone_in_every_dtype(tmp_path, name, trained, loaded):
    """Of a folder, of a checkpoint with all weights that is adapted in a second stage, of a built-in one."""
    method = registry.build("cot")
    base = name if name == "tiny" else small_backbone(tmp_path / "base", "float32")
    if name == "small-full":
        full = LatentLM.from_backbone(backbones.load(base))
        full = pretrained.save(full, method, tmp_path / "full", RUN, "card")
        lm = pretrained.load_for_training(full, method, LORA, trained, 0)
    else:
        lm = LatentLM.from_backbone(backbones.load(base, trained), lora=LORA)
    folder = pretrained.save(lm, method, tmp_path / "adapter", RUN, "card")
    back, _ = pretrained.load(folder, loaded)
    assert back.causal_lm.dtype == backbones.DTYPES[loaded]
    assert back.fingerprint == lm.fingerprint == checkpoint.read_info(folder)["fingerprint"]


def test_push_to_hub_sends_a_whole_folder_and_refuses_a_broken_one(tmp_path, monkeypatch):
    """The Hub's client is replaced by one that notes its calls: what is asked of it, not what it does."""
    calls = []

    class Hub:
        def create_repo(self, repo_id, **options):
            calls.append(("create", repo_id, options))

        def upload_folder(self, **options):
            calls.append(("upload", options["repo_id"], options["folder_path"]))
            return "its address"

    monkeypatch.setattr(checkpoint, "HfApi", Hub)
    method = registry.build("colar")
    lm = LatentLM.from_backbone(backbone("llama"))
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    folder = pretrained.save(lm, method, tmp_path / "whole", RUN, "# card")
    assert checkpoint.push_to_hub(folder, "me/mine") == "its address"
    assert calls == [
        ("create", "me/mine", {"private": True, "exist_ok": True}),
        ("upload", "me/mine", str(folder)),
    ]
    calls.clear()
    checkpoint.push_to_hub(shutil.copytree(folder, tmp_path / "run" / "best").parent, "me/mine")
    assert calls[1] == ("upload", "me/mine", str(tmp_path / "run" / "best"))
    calls.clear()
    (folder / "modules.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks modules.safetensors"):
        checkpoint.push_to_hub(folder, "me/mine")
    assert calls == []


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_converted_weights_are_the_rounded_ones(saved, kind, tmp_path):
    """bfloat16 and back is rounding, once; the rest is copied, the method's modules too."""
    source = saved(kind).folder
    target = checkpoint.convert(source, tmp_path / "half", "bfloat16")
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()}
    for path in source.glob("*.safetensors"):
        whole, half = load_file(path), load_file(target / path.name)
        assert whole.keys() == half.keys()
        rounded = torch.float32 if path.name == weights.MODULES else torch.bfloat16
        for name, value in whole.items():
            assert half[name].dtype == rounded
            torch.testing.assert_close(half[name].float(), value.to(rounded).float(), rtol=0, atol=0)
    if kind == "lora":
        merged = pretrained.merge(source, tmp_path / "merged", "bfloat16")
        assert (merged / weights.MODULES).read_bytes() == (source / weights.MODULES).read_bytes()
    lm, _ = pretrained.load(target)
    assert all(torch.isfinite(p).all() for p in lm.parameters())
    with pytest.raises(ValueError, match="dtype must be one of"):
        checkpoint.convert(source, tmp_path / "x", "int8")


def test_a_runs_folder_is_converted_and_merged_as_its_checkpoint(saved, tmp_path):
    shutil.copytree(saved("lora").folder, tmp_path / "run" / "best")
    converted = checkpoint.convert(tmp_path / "run", tmp_path / "half", "bfloat16")
    assert checkpoint.read_info(converted)["weights"] == "adapter"
    merged = pretrained.merge(tmp_path / "run", tmp_path / "merged", "float32")
    assert checkpoint.read_info(merged)["weights"] == "full"


def test_weights_published_again_have_the_same_digest(saved, tmp_path):
    folder = shutil.copytree(saved("full").folder, tmp_path / "again")
    before = checkpoint.digest(saved("full").folder)
    info = files.read_json(folder / "colar.json")
    files.write_json(folder / "colar.json", info | {"run": info["run"] | {"metrics": {"seconds": 3.5}}})
    assert checkpoint.digest(folder) == before
    files.write_json(folder / "colar.json", info | {"method": info["method"] | {"params": {"x": 1}}})
    assert checkpoint.digest(folder) != before


def test_a_backbone_whose_weights_are_cut_off_is_named_as_a_folder(saved, tmp_path):
    folder = shutil.copytree(saved("full").folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=f"^the backbone '{folder}' cannot be loaded: .*header"):
        backbones.load(str(folder))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_disk_that_is_full_is_said_and_leaves_the_old_checkpoint(saved, kind, tmp_path):
    source = saved(kind).folder
    target = checkpoint.convert(source, tmp_path / "half", "bfloat16")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be as long as the weights: to whoever writes them, the disk is full.
    longest = min(path.stat().st_size for path in source.glob("*.safetensors")) - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, limit[1]))
    try:
        with pytest.raises(OSError, match=f"(?i)cannot write {target}: .*too large"):
            checkpoint.convert(source, target, "float32")
        with pytest.raises(OSError, match="(?i)too large"):
            pretrained.save(saved(kind).lm, saved(kind).method, target, RUN, "another card")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lora" in kind])
def test_a_merged_adapter_computes_the_same(saved, kind):
    lm, _ = pretrained.load(saved(kind).folder)
    ids = torch.tensor([[5, lm.template.separator_id, 7, 9]])
    with torch.no_grad():
        before = lm.logits(lm.hidden(lm.embed(ids)))
        lm.merge()
        after = lm.logits(lm.hidden(lm.embed(ids)))
    assert not lm.has_adapter
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_an_adapter_is_of_the_text_model_alone(targets):
    """Gemma 3's vision tower has projections of the same names, which no text goes through."""
    text = backbone("gemma3")
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14, **heads}
    config = Gemma3Config(text_config=text.lm.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    lora = LoraSettings(r=2, target_modules=targets)
    lm = LatentLM.from_backbone(backbones.Backbone("x", of_config(config), text.tokenizer), lora=lora)
    adapted = {name for name, weight in lm.named_parameters() if ".lora_" in name and weight.requires_grad}
    layers = text.lm.config.num_hidden_layers
    assert len(adapted) == layers * 2 * (7 if targets == "all-linear" else 2)
    assert all(".language_model.layers." in name for name in adapted)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_end_of_a_tied_weight_is_refused(target, tmp_path):
    """Merged, it would change the other end, too."""
    settings = LoraSettings(r=2, target_modules=("q_proj", target))
    with pytest.raises(
        ValueError, match=r"^model.lora.target_modules: the embedding and the LM head of Qwen2"
    ):
        tiny_lm("qwen2", lora=settings)
    untied = tiny_lm("qwen2", tied=False, lora=settings)
    untied.lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model.lora.target_modules: .* are one weight here"):
        weights.with_empty_adapter(backbone("qwen2").lm, tmp_path)


def test_a_merged_checkpoint_thinks_and_trains_as_the_adapter_did(saved, tmp_path):
    source = saved("lora").folder
    lm, method = pretrained.load(source)
    merged = pretrained.merge(source, tmp_path / "merged", "float32")
    assert checkpoint.read_info(merged)["weights"] == "full"
    again, _ = pretrained.load(merged)
    torch.testing.assert_close(logits(again), logits(lm), rtol=1e-4, atol=1e-4)
    assert completions(again, method) == completions(lm, method)
    full = pretrained.load_for_training(merged, method, None, "float32", 0)
    assert all(p.requires_grad for n, p in full.causal_lm.named_parameters() if "mlp" in n)
    with pytest.raises(ValueError, match="no adapter to merge"):
        pretrained.merge(merged, tmp_path / "again", "float32")


def test_latents_are_not_learnt_where_an_adapter_moves_their_targets():
    """Sums of input embeddings, which must stand still."""
    settings = LoraSettings(r=2, target_modules=("q_proj", "embed_tokens"))
    lm = tiny_lm("qwen2", tied=False, lora=settings)
    with pytest.raises(ValueError, match=r"^model.lora.target_modules: latents are learnt as sums of input"):
        registry.build("colar").prepare(lm, EXAMPLES)
    registry.build("sequential").prepare(lm, EXAMPLES)


def test_the_card_shows_what_a_user_recorded(tmp_path):
    lm, method = tiny_lm("llama"), registry.build("cot")
    run = {"metrics": {"note": "x", "accuracy": 0.5}, "epoch": 1.0, "training": 3}
    written = (pretrained.save_pretrained(lm, method, tmp_path / "model", run) / "README.md").read_text()
    assert "| note | x |" in written
    assert "| accuracy | 0.5 |" in written


def test_the_card_of_merged_weights_calls_them_no_adapter(tmp_path):
    """What else the card says stays, also what a user has written into it."""
    method = registry.build("cot")
    base = dataclasses.replace(backbones.load("tiny"), name="tiny")
    lm = LatentLM.from_backbone(base, lora=LORA)
    lm.name = "some-org/some-model"
    written = card.text(lm, method.non_default_config(), RUN) + "\n(LoRA adapter) of my own.\n"
    lm.name = "tiny"
    folder = pretrained.save(lm, method, tmp_path / "adapter", {"seed": 0}, written)
    text = (pretrained.merge(folder, tmp_path / "merged", "float32") / "README.md").read_text()
    before, after = (yaml.safe_load(each.split("---")[1]) for each in (written, text))
    assert (before["base_model_relation"], before["tags"][-1]) == ("adapter", "lora")
    assert (after.pop("base_model_relation"), after.pop("tags")) == ("finetune", before["tags"][:-1])
    assert after == {key: before[key] for key in after}
    assert "(a LoRA adapter, merged into all weights)." in text
    body, mine = written.split("---", 2)[2].split(" (LoRA adapter).")
    assert text.split("---", 2)[2] == f"{body} (a LoRA adapter, merged into all weights).{mine}"
    # A card without front matter is a text.
    for mine in ("# mine\n", "--- mine", "---\nmine"):
        assert card.merged(mine) == mine


@pytest.mark.parametrize(
    ("kind", "trained", "asked"),
    [
        ("lora", LORA, {"lora_dropout": 0.1}),
        ("lora", LORA, {"target_modules": "all-linear"}),
        ("lora", LORA, {"target_modules": ".*v_proj"}),
        ("lora-gpt2", KINDS["lora-gpt2"][2], {"target_modules": ("c_attn",)}),
    ],
)
def test_an_adapter_trains_on_with_the_settings_that_it_has(saved, kind, trained, asked):
    """Others would change nothing: they are an error that names both."""
    old = saved(kind)
    going_on = pretrained.load_for_training(old.folder, old.method, trained, "float32", 0)
    assert going_on.has_adapter
    other = dataclasses.replace(trained, **asked)
    with pytest.raises(ValueError, match="is not what the adapter in .* has") as error:
        pretrained.load_for_training(old.folder, old.method, other, "float32", 0)
    ((name, value),) = asked.items()
    assert f"'{name}': {value!r}" in str(error.value)


@pytest.mark.parametrize("name", backbones.TINY)
def test_an_adapter_knows_the_seed_of_its_backbone_under_any_seed_of_training(name, tmp_path):
    """Stage after stage: the weights of `tiny` are those of the seed that the first one drew them from."""
    method = registry.build("colar", {"compression_factors": [1, 2], "sigma_e": 1.0})
    lm = LatentLM.from_backbone(backbones.load(name, seed=4), lora=LORA)
    pretrained.attach(lm, method, seed=4)
    folder = tmp_path / "4"
    # A user's own run may have no seed, or another one.
    for run in ({}, {"seed": 7}, {"seed": 4}):
        pretrained.save(lm, method, folder, run, "")
        torch.testing.assert_close(logits(pretrained.load(folder)[0]), logits(lm))
    for seed in (5, 6):
        lm = pretrained.load_for_training(folder, method, LORA, "float32", seed)
        train(lm, method)
        folder = pretrained.save(lm.eval(), method, tmp_path / str(seed), {"seed": seed}, "")
        torch.testing.assert_close(logits(pretrained.load(folder)[0]), logits(lm))
    merged = pretrained.merge(folder, tmp_path / "merged", "float32")
    torch.testing.assert_close(logits(pretrained.load(merged)[0]), logits(lm), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [None, 0, 4])
def test_an_adapter_of_an_earlier_version_has_the_seed_of_its_run(seed, tmp_path):
    method = registry.build("cot", {})
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=seed or 0), lora=LORA)
    folder = pretrained.save(lm, method, tmp_path / "x", {} if seed is None else {"seed": seed}, "")
    digest, info = checkpoint.digest(folder), files.read_json(folder / "colar.json")
    assert info.pop("backbone_seed") == (seed or 0)
    files.write_json(folder / "colar.json", info)
    torch.testing.assert_close(logits(pretrained.load(folder)[0]), logits(lm))
    assert checkpoint.digest(folder) == digest


def test_saving_replaces_a_checkpoint_and_no_other_folder(saved, tmp_path):
    """All that lies there goes: a project's folder, which other libraries would write into, must not."""
    old = saved("lora")

    def save(folder):
        return colar.save_pretrained(old.lm, old.method, folder, RUN)

    project = tmp_path / "project"
    project.mkdir()
    for folder in (project, project, tmp_path / "new"):  # empty, a checkpoint, not there
        assert checkpoint.read_info(save(folder))["weights"] == "adapter"
    card = (project / "README.md").read_text()
    (project / "colar.json").unlink()
    with pytest.raises(ValueError, match="project exists and is not a checkpoint"):
        save(project)
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        save(project / "README.md")
    cloned = tmp_path / "new"
    (cloned / ".git").mkdir()
    with pytest.raises(ValueError, match="new is a git repository"):
        save(cloned)
    assert main(["export", str(old.folder), str(cloned)]) == 2
    assert (cloned / ".git").is_dir()
    assert (project / "README.md").read_text() == card


def test_a_model_card_is_made(saved, tmp_path):
    old = saved("lora")
    folder = colar.save_pretrained(old.lm, old.method, tmp_path / "new")
    card = (folder / "README.md").read_text()
    assert f"reason by the method `{old.method.name}`" in card
    speed = old.method.Params().compression_factor
    assert f"--compression_factor {speed:g}" in card
    assert pretrained.load(folder)[1].config == old.method.config


@pytest.mark.parametrize(
    ("name", "factors", "validated", "shown"),
    [
        ("colar", [1, 2], [{}], "--compression_factor 2\n"),
        ("colar", [3, 5], [{}], "--compression_factor 3\n"),
        (
            "colar",
            [1, 2, 5],
            [{"compression_factor": 1}, {"compression_factor": 5}],
            "--compression_factor 5\n",
        ),
        ("sequential", [1], [{}], "--compression_factor 1 --confidence_threshold 0\n"),
        # A run without validation rows: nothing was asked with its values.
        ("sequential", [1], [{"compression_factor": 9}], "--compression_factor 1 --confidence_threshold 0\n"),
    ],
)
def test_the_cards_command_asks_for_what_was_trained(name, factors, validated, shown):
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build(name, {"compression_factors": factors})
    run = {"recipe": {"validation": {"params": validated}}}
    assert shown in pretrained.card_of(lm, method, run)


def test_an_adapter_is_merged_into_a_backbone_that_lies_elsewhere(saved, tmp_path):
    old = saved("lora")
    folder = shutil.copytree(old.folder, tmp_path / "moved")
    info = json.loads((folder / "colar.json").read_text())
    (folder / "colar.json").write_text(json.dumps({**info, "backbone": "me/gone"}))
    words = ["export", str(folder), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]
    assert main(words) == 2
    assert main([*words, "--backbone", old.base]) == 0
    merged, _ = pretrained.load(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(old.lm), rtol=1e-4, atol=1e-4)


def test_an_adapter_above_a_checkpoint_of_the_hub_names_its_id(saved, monkeypatch):
    full = saved("full")
    monkeypatch.setattr(checkpoint, "resolve", lambda path_or_id: full.folder)
    assert pretrained.load_for_training("me/full", full.method, LORA, "float32", 0).name == "me/full"


def test_a_checkpoint_is_not_exported_onto_itself(saved, tmp_path, capsys):
    """It would be the one that is read and the one that is replaced; by another name, too."""
    folder = shutil.copytree(saved("lora").folder, tmp_path / "one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "other").symlink_to(folder)
    for target in (folder, tmp_path / "other"):
        assert main(["export", str(folder), str(target)]) == 2
        assert f"{target} is the checkpoint itself" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert main(["export", str(folder), str(tmp_path / "empty")]) == 0
