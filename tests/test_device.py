"""The device lane: engine, SFT, GRPO and checkpoints on COLAR_TEST_DEVICE, in float32 and bfloat16 (device.py).

What a device computes is compared with the CPU in float32, or with itself computed in another way. The rest of the
suite has the cases; here is what a device, or a dtype, could get wrong.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from device import DEVICE, TOLERANCES, Tolerance
from families import EXAMPLES, backbone, liven
from torch import Tensor

from colar.engine import reference
from colar.engine.completion import Completion
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Method
from colar.model import backbones
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.ops import noise, trees
from colar.ops.sampling import sample_tokens
from colar.training import sft
from colar.training.config import TrainingConfig
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GrpoConfig
from colar.training.objective import Objective
from colar.training.resumable_run import TrainResult

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]

LORA = LoraSettings(r=4, lora_alpha=8)
# What the rest of the suite has on a CPU, or what would be the CPU compared with itself.
ELSEWHERE = pytest.mark.skipif(DEVICE == "cpu", reason="needs another device: COLAR_TEST_DEVICE")
WEIGHTS = pytest.mark.parametrize(
    "lora", [LORA] if DEVICE == "cpu" else [None, LORA], ids=lambda lora: "adapter" if lora else "full"
)
GREEDY = Decoding(max_latents=6, max_completion_length=5)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cot": ("cot", {}),
    "colar": ("colar", {"stop": "argmax"}),
    "sequential": ("sequential", {}),
    "coconut": ("coconut", {}),
}


def build(
    family: str,
    name: str,
    device: str,
    dtype: str = "float32",
    lora: LoraSettings | None = None,
    scale: float = 0.1,
) -> tuple[LatentLM, Method]:
    """A random model on the device, its weights drawn in float32 and rounded to `dtype`; adapters stay float32."""
    made = backbone(family, scale=scale)
    torch.manual_seed(0)  # peft draws the adapter
    weights = made.lm.to(backbones.DTYPES[dtype])
    lm = LatentLM.from_backbone(Backbone(made.name, weights, made.tokenizer, made.fingerprint), lora=lora)
    kind, config = METHODS[name]
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    return lm.to(device).eval(), method


# Draws


@ELSEWHERE
def test_draws_are_those_of_the_cpu(device: str) -> None:
    keys = noise.keys(torch.arange(64) * 12345 - 7, 3, torch.arange(64), noise.LATENT)
    assert torch.equal(noise.uniform(keys.to(device), 33).cpu(), noise.uniform(keys, 33))
    torch.testing.assert_close(
        noise.normal(keys.to(device), 33).cpu(), noise.normal(keys, 33), rtol=1e-5, atol=1e-6
    )


@ELSEWHERE
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_tokens_are_those_of_the_cpu(device: str, vocabulary: int) -> None:
    """Greedy, drawn and nucleus rows in one batch, flat rows among them whose nucleus no window holds."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(48, vocabulary, generator=generator)
    logits[::2] *= 4
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0]).repeat(12).double()
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5]).repeat(12).double()
    uniform = torch.rand(48, generator=generator, dtype=torch.float64)
    columns = (logits, temperature, top_p, uniform)
    found = sample_tokens(*(column.to(device) for column in columns)).cpu()
    assert torch.equal(found, sample_tokens(*columns))


# Engine


def requests(method: Method) -> list[Request]:
    made = []
    for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for i, example in enumerate(EXAMPLES):
            name = f"{i}/{mode}"
            made.append(
                Request(name, example.question, method.Params(), decoding, i, sample=i % 3, keep_latents=True)
            )
    return made


SYSTEMS = [("gemma3", "colar"), ("llama", "cot"), ("llama", "sequential")]


# test_engine.py compares them all on a CPU.
@pytest.mark.parametrize(("family", "name"), SYSTEMS[:1] if DEVICE == "cpu" else SYSTEMS)
def test_the_engine_thinks_as_the_reference(family: str, name: str, device: str) -> None:
    """In float32 token for token. Rounding to 8 bits decides between tokens: the next test is for that."""
    # Large weights: no two tokens are nearly as likely as each other.
    lm, method = build(family, name, device, scale=0.5)
    liven(lm.to("cpu")).to(device)
    asked = requests(method)
    found = Engine(lm, method, 4).generate(asked)
    for request, mine in zip(asked, found, strict=True):
        wanted = reference.complete(lm, method, request)
        assert (mine.text, mine.thought_ids, mine.token_ids) == (
            wanted.text,
            wanted.thought_ids,
            wanted.token_ids,
        )
        if wanted.latents is not None and mine.latents is not None:
            TOLERANCES["float32"].close(mine.latents, wanted.latents, request.id)


@torch.no_grad()
def refed(lm: LatentLM, method: Method, done: Completion, thinks: bool = True) -> Tensor:
    """Log-probs of the answer's tokens where all that a request was fed, or all but thoughts, is fed at once."""
    template = lm.template
    ids = template.question(done.request.question, method.speed_text(done.request.params))
    question = lm.embed(torch.tensor([ids], device=lm.device))
    token_ids = list(done.token_ids)
    if done.reason == "stop":
        token_ids.append(template.eos_id)
    answer = lm.embed(torch.tensor([[template.separator_id, *token_ids]], device=lm.device))
    parts = [question, answer]
    if thinks and done.latents is not None:
        parts.insert(1, done.latents[None].to(question.dtype))
    hidden = lm.hidden(torch.cat(parts, 1))[0, -len(token_ids) - 1 : -1]
    logps = lm.logits(hidden).log_softmax(-1)
    return logps[torch.arange(len(token_ids)), torch.tensor(token_ids, device=lm.device)]


@pytest.mark.parametrize(
    ("family", "name"), [*(("llama", name) for name in METHODS), ("gemma3", "colar"), ("gpt2", "colar")]
)
def test_cached_steps_equal_one_forward(
    family: str, name: str, device: str, dtype: str, tolerance: Tolerance
) -> None:
    """Whatever was chosen: its log-probs are those of one pass over question, thoughts and answer."""
    lm, method = build(family, name, device, dtype, scale=0.2)
    found = Engine(lm, method, 4).generate(requests(method))
    without_thoughts = 0.0
    for done in found:
        logps = torch.tensor(done.token_logps)
        tolerance.close(logps, refed(lm, method, done), done.request.id)
        without_thoughts = max(without_thoughts, distance(logps, refed(lm, method, done, thinks=False)))
    # What is compared would show it if thoughts were lost.
    assert without_thoughts > 3 * tolerance.atol


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other.cpu()).abs().max())


def test_neither_order_nor_batch_mates_matter(device: str, dtype: str, tolerance: Tolerance) -> None:
    """The first choice of a request, whose log-prob rounding moves a little, is made from the same logits."""
    lm, method = build("llama", "colar", device, dtype)
    asked = requests(method)
    alone = {done.request.id: done for done in Engine(lm, method, 1).generate(asked)}
    together = Engine(lm, method, 64).generate(asked[::-1])
    compared = 0
    for done in together:
        other = alone[done.request.id]
        alike = {"mu", "sigma", "stop_probability"}
        # Of a draw that fell elsewhere the log-prob is another.
        if done.thought_ids[:1] == other.thought_ids[:1]:
            alike.add("logp")
        for key in alike & done.info.keys():
            tolerance.close(done.info[key][0], other.info[key][0], f"{done.request.id} {key}")
            compared += 1
    # Rounding moves few draws.
    assert compared >= len(together) // 2


@pytest.mark.parametrize("recorded", [True, False])
def test_a_recorded_step_is_the_same_step(
    recorded: bool, device: str, dtype: str, tolerance: Tolerance
) -> None:
    """CUDA graphs where there is CUDA, elsewhere what is copied for them; and steps without them (`--eager`)."""
    lm, method = build("llama", "colar", device, dtype)
    engine = Engine(lm, method, 4, cuda_graphs=recorded)
    for _ in range(1 + recorded):
        for done in engine.generate(requests(method)):
            tolerance.close(torch.tensor(done.token_logps), refed(lm, method, done), done.request.id)


# SFT


def gradients(
    name: str, family: str, device: str, lora: LoraSettings | None, bf16: bool
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradients, computed in bfloat16 or not."""
    lm, method = build(family, name, device, lora=lora)
    lm.train()
    rows = [
        method.encode(lm.template, example, Random(i), 100.0)
        for i, example in enumerate(EXAMPLES)
        if example.steps
    ]
    tensors = {key: column.to(device) for key, column in Batch.collate(rows).tensors().items()}
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
        loss = Objective(lm, method)(**tensors)["loss"]
    loss.backward()
    found = {
        key: weight.grad.detach().cpu() for key, weight in lm.named_parameters() if weight.grad is not None
    }
    return float(loss), found


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, None) for name in METHODS), ("colar", LORA), ("coconut", LORA)]
)
def test_loss_and_gradients_are_those_of_the_cpu_in_float32(
    name: str, lora: LoraSettings | None, device: str, dtype: str, tolerance: Tolerance
) -> None:
    wanted_loss, wanted = gradients(name, "llama", "cpu", lora, False)
    loss, found = gradients(name, "llama", device, lora, dtype == "bfloat16")
    assert loss == pytest.approx(wanted_loss, rel=tolerance.rtol)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        # Against the largest of the weight's gradients: small ones are sums that nearly cancel.
        unit = wanted[key].abs().max().clamp(min=1e-6)
        tolerance.close(gradient / unit, wanted[key] / unit, key)


QUICK: dict[str, Any] = {
    "report_to": "none",
    "logging_steps": 1,
    "save_steps": 2,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
}


def train(folder: Path, device: str, dtype: str, lora: LoraSettings | None, **config: Any) -> Any:
    """SFT of CoLaR: an adapter on weights of this dtype, or all weights in float32, computed in this dtype."""
    half = dtype == "bfloat16"
    lm, method = build("llama", "colar", device, dtype if lora else "float32", lora)
    settings = TrainingConfig(**{**QUICK, "device": device, "bf16": half, **config})
    return lm, method, sft.train(lm, method, EXAMPLES, settings, folder)


def losses(result: TrainResult) -> list[float]:
    return [row["loss"] for row in result.history if "loss" in row]


@WEIGHTS
def test_a_run_that_resumes_is_the_run_of_one_go(
    tmp_path: Path, lora: LoraSettings | None, device: str, dtype: str, tolerance: Tolerance
) -> None:
    lm, _, whole = train(tmp_path / "whole", device, dtype, lora, max_steps=4)
    train(tmp_path / "parts", device, dtype, lora, max_steps=2)
    resumed, _, result = train(tmp_path / "parts", device, dtype, lora, max_steps=4)
    assert whole.steps == result.steps == 4
    assert lm.device.type == device
    assert len(losses(whole)) == 4
    assert losses(result) == pytest.approx(losses(whole), rel=tolerance.rtol)
    others = dict(resumed.named_parameters())
    for name, weight in lm.named_parameters():
        tolerance.close(others[name], weight, name)


def test_batches_in_parts_are_the_same_updates(
    tmp_path: Path, device: str, dtype: str, tolerance: Tolerance
) -> None:
    _, _, whole = train(tmp_path / "whole", device, dtype, LORA, max_steps=3)
    _, _, parts = train(tmp_path / "parts", device, dtype, LORA, max_steps=3, tokens_per_batch=150)
    assert losses(parts) == pytest.approx(losses(whole), rel=tolerance.rtol)


def test_rows_that_share_a_beginning_learn_what_rows_by_themselves_do(
    device: str, dtype: str, tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, method = build("llama", "colar", device, dtype, LORA)
    rows = [
        row
        for i, example in enumerate(EXAMPLES)
        for row in method.encode_draws(lm.template, example, Random(i), 0.0, 3)
    ]
    tensors = {key: column.to(device) for key, column in Batch.collate(rows).tensors().items()}
    fed: list[int] = []
    assert lm.why_no_trees() is None
    lm.causal_lm.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    found = []
    for plan in (trees.plan, lambda *_: None):
        monkeypatch.setattr(trees, "plan", plan)
        lm.zero_grad()
        loss = Objective(lm, method)(**tensors)["loss"]
        loss.backward()
        gradient = torch.cat([w.grad.flatten() for w in lm.parameters() if w.grad is not None])
        found.append((loss.detach(), gradient / gradient.abs().max()))
    assert fed == [len(EXAMPLES), len(rows)]
    for mine, theirs in zip(*found, strict=True):
        tolerance.close(mine, theirs)


def test_logits_in_chunks_are_those_of_one_piece(device: str, dtype: str, tolerance: Tolerance) -> None:
    lm, method = build("llama", "cot", device, dtype, LORA)
    rows = [method.encode(lm.template, example, Random(i), 0.0) for i, example in enumerate(EXAMPLES)]
    tensors = {key: column.to(device) for key, column in Batch.collate(rows).tensors().items()}
    found = []
    for chunk_bytes in (2**28, 40 * lm.vocabulary_size):
        lm.chunk_bytes = chunk_bytes
        lm.zero_grad()
        loss = Objective(lm, method)(**tensors)["loss"]
        loss.backward()
        gradient = torch.cat([w.grad.flatten() for w in lm.parameters() if w.grad is not None])
        found.append((loss, gradient / gradient.abs().max()))
    for mine, theirs in zip(*found, strict=True):
        tolerance.close(mine, theirs)


# Checkpoints


@WEIGHTS
def test_what_a_device_publishes_loads_there_and_on_the_cpu(
    tmp_path: Path, lora: LoraSettings | None, device: str, dtype: str, tolerance: Tolerance
) -> None:
    """Also with the adapter merged. `best/` knows its backbone by the folder that it was read from."""
    made = backbone("llama", scale=0.1)
    made.lm.save_pretrained(tmp_path / "base")
    made.tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    loaded = backbones.load(str(tmp_path / "base"), dtype if lora else "float32")
    lm = LatentLM.from_backbone(loaded, lora=lora)
    method = registry.build("colar", {})
    pretrained.attach(lm, method, 0)
    settings = TrainingConfig(**QUICK, device=device, bf16=dtype == "bfloat16", max_steps=4)
    best = sft.train(lm, method, EXAMPLES, settings, tmp_path / "run").best
    wanted = logits(lm)
    for place in (device, "cpu"):
        again, _ = pretrained.load(best, dtype)
        again.to(place).eval()
        tolerance.close(logits(again), wanted, place)
        again.merge()
        tolerance.close(logits(again), wanted, f"{place}, merged")


@torch.no_grad()
def logits(lm: LatentLM) -> Tensor:
    ids = lm.template.question(EXAMPLES[3].question) + lm.template.answer("12")
    return lm.logits(lm.hidden(lm.embed(torch.tensor([ids], device=lm.device))))


# GRPO


def by_tokens(completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs between the outputs of any random model."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def reinforce(folder: Path, device: str, dtype: str, **config: Any) -> tuple[LatentLM, TrainResult]:
    """GRPO of CoLaR: two updates with each generation, an adapter on weights of this dtype."""
    lm, method = build("llama", "colar", device, dtype, LORA)
    settings = {**QUICK, "per_device_train_batch_size": 8, "bf16": dtype == "bfloat16", **config}
    rules = GrpoConfig(
        num_generations=4,
        max_latents=5,
        max_completion_length=4,
        compression_factors=(2.0, 3.0),
        num_iterations=2,
    )
    result = grpo_train.train(
        lm,
        method,
        EXAMPLES,
        TrainingConfig(**settings, device=device),
        rules,
        folder,
        reward_funcs={"own": by_tokens},
    )
    return lm, result


def test_reinforcement_scores_what_it_sampled(
    tmp_path: Path, device: str, dtype: str, tolerance: Tolerance
) -> None:
    """The engine's log-probs and the trainer's, and the second update with a generation has a ratio other than 1."""
    _, result = reinforce(tmp_path, device, dtype, max_steps=4)
    rows = [row for row in result.history if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert row["grad_norm"] > 0
        sampled = [value for name, value in row.items() if name.startswith("sampling/")]
        assert all(abs(value) < tolerance.ratio for value in sampled), row


@ELSEWHERE
def test_reinforcement_that_resumes_in_a_generation_is_that_of_one_go(
    tmp_path: Path, device: str, dtype: str, tolerance: Tolerance
) -> None:
    """Stopped between the two updates of a generation. In bfloat16 a rounded weight may sample another output."""
    whole, first = reinforce(tmp_path / "whole", device, dtype, max_steps=3, save_steps=1)
    reinforce(tmp_path / "parts", device, dtype, max_steps=1, save_steps=1)
    resumed, result = reinforce(tmp_path / "parts", device, dtype, max_steps=3, save_steps=1)
    assert result.steps == first.steps == 3
    assert losses(result)[:2] == pytest.approx(losses(first)[:2], rel=tolerance.rtol, abs=tolerance.atol)
    if dtype == "float32":
        others = dict(resumed.named_parameters())
        for name, weight in whole.named_parameters():
            tolerance.close(others[name], weight, name)
