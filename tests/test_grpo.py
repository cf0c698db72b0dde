"""GRPO: the loss by hand, log-probs against torch.distributions, rollouts, and runs that stop and go on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, liven, publishable, tiny_lm
from launch import alone
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from colar import files
from colar.checks import NonFiniteError
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.methods import pretrained, registry, tokenskip
from colar.methods.base import Method
from colar.methods.colar import Colar, ColarConfig
from colar.methods.cot import Cot, CotConfig
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training import preflight
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards, rollout
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GenerationPlan, GrpoConfig
from colar.training.grpo.generation import QuestionSchedule, RolloutSampler, reward_metrics
from colar.training.grpo.loss import (
    GrpoObjective,
    advantages,
    kl_estimate,
    output_weights,
    policy_loss,
)
from colar.training.grpo.rollout import Output
from colar.training.grpo.train import EarlyStopping, zero_dropout
from colar.training.grpo.trainer import GrpoTrainer, ReferenceWeights
from colar.training.objective import take
from colar.training.resumable_run import TrainResult, arguments
from colar.training.rows import digest_of
from colar.training.run_folder import RunFolder

SMALL = {
    "num_generations": 4,
    "max_latents": 5,
    "max_completion_length": 4,
    "compression_factors": (2.0, 3.0),
}
QUICK = {"report_to": "none", "logging_steps": 1, "save_steps": 1000, "learning_rate": 1e-3}
LORA = LoraSettings(r=4, lora_alpha=8, lora_dropout=0.2, target_modules="all-linear")
CLIP = GrpoConfig(epsilon=0.2, epsilon_high=0.3)

pytestmark = pytest.mark.usefixtures("one_thread")


def model(family: str = "llama", lora: LoraSettings | None = None, **config: Any) -> tuple[LatentLM, Colar]:
    """A random model whose rows think 0, 1 or several times."""
    torch.manual_seed(0)  # peft draws the adapter
    lm, method = tiny_lm(family, lora=lora), Colar(ColarConfig(**config))
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    liven(lm).causal_lm.get_output_embeddings().bias.requires_grad_(
        False
    )  # no checkpoint of an adapter has it
    if lora is None:
        publishable(lm)
    return lm, method


def grpo(**values: Any) -> GrpoConfig:
    return GrpoConfig(**{**SMALL, **values})


def by_tokens(completions: Sequence[str], completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
    """A reward that differs between the outputs of any random model."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def trainer(
    folder: Path,
    lm: LatentLM,
    method: Colar,
    config: GrpoConfig,
    objective: type[GrpoObjective] = GrpoObjective,
    **training: Any,
) -> GrpoTrainer:
    settings = TrainingConfig(**{**QUICK, "per_device_train_batch_size": 8, **training})
    schedule = QuestionSchedule(EXAMPLES, settings.seed, config.plan(settings))
    sampler = RolloutSampler(lm, method, config, schedule, {"own": by_tokens})
    made = RunFolder(folder)
    args = arguments(settings, made)
    return GrpoTrainer(objective(lm, method, config), args, settings, sampler, made.completions)


def run(
    folder: Path,
    config: GrpoConfig | None = None,
    reward: rewards.Reward = by_tokens,
    lora: LoraSettings | None = None,
    family: str = "llama",
    validate: Any = None,
    resume: bool = True,
    held_out: Sequence[Example] = (),
    **training: Any,
) -> tuple[LatentLM, TrainResult]:
    lm, method = model(family, lora)
    settings = TrainingConfig(**{**QUICK, "per_device_train_batch_size": 8, "max_steps": 4, **training})
    result = grpo_train.train(
        lm,
        method,
        EXAMPLES,
        settings,
        config or grpo(),
        folder,
        reward_funcs={"own": reward},
        validate=validate,
        held_out=held_out,
        resume=resume,
    )
    return lm, result


def curve(result: TrainResult) -> list[dict[str, Any]]:
    """Everything logged at the steps, bit for bit; timing left out."""
    return [
        {name: value for name, value in row.items() if "second" not in name and "runtime" not in name}
        for row in result.history
        if "loss" in row
    ]


# --- advantages and the loss, by hand ------------------------------------------------------------------


def test_advantages_by_hand() -> None:
    """Groups (1, 1, 0, 0) and (3, 1, 1, 1): means 0.5 and 1.5, deviations with G - 1 of sqrt(1/3) and 1."""
    given = torch.tensor([1.0, 1, 0, 0, 3, 1, 1, 1])
    first, second = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1 / (1 + 1e-4)
    wanted = [first, first, -first, -first, 1.5 * second, *[-0.5 * second] * 3]
    assert advantages(given, 4).tolist() == pytest.approx(wanted, abs=1e-12)


def test_equal_rewards_have_advantage_exactly_zero() -> None:
    """The mean of seven times 0.1 is not 0.1 in binary, and 1e-17 over 1e-4 is no zero."""
    given = torch.tensor([0.1] * 7 + [0.0, 1, 0, 1, 0, 1, 0], dtype=torch.float64)
    assert (given[:7].mean() != 0.1).item()
    found = advantages(given, 7)
    assert found[:7].tolist() == [0.0] * 7
    assert (found[7:] != 0).all()
    rounded = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert rounded[0] != rounded[1]
    assert advantages(rounded, 2).tolist() == [0, 0]


def masked(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


WEIGHTED = [
    # Two updates of two batches of one output each; lengths 1 3 | 2 2, advantages 1 -2 | 0.5 4, all ratios 1. An
    # output's loss is -A |o| c / N with N = 2:
    ("grpo", [-(1 - 2) / 2, -(0.5 + 4) / 2]),
    ("dr_grpo", [-(1 * 1 - 2 * 3) / 5 / 2, -(0.5 * 2 + 4 * 2) / 5 / 2]),  # the constant is 5
    ("dapo", [-(1 * 1 - 2 * 3) / 4, -(0.5 * 2 + 4 * 2) / 4]),
]


@pytest.mark.parametrize(("loss_type", "wanted"), WEIGHTED)
def test_loss_types_by_hand(loss_type: Any, wanted: list[float]) -> None:
    lengths, gains = torch.tensor([1, 3, 2, 2]), torch.tensor([1.0, -2, 0.5, 4])
    plan = GenerationPlan(batch=1, accumulate=2, steps=4, iterations=1, group=2)
    weights = output_weights(loss_type, lengths, plan, constant=5.0)
    mask = masked(1, 3, 2, 2)
    logps = torch.full(mask.shape, -0.7)
    loss, _ = policy_loss(logps, logps, mask, gains, CLIP)
    found = (weights * loss.sum(-1)).view(2, 2).sum(-1) / plan.outputs_per_update
    assert found.tolist() == pytest.approx(wanted)


def test_clipping_by_hand() -> None:
    """Ratios 0.5, 1.1 and 2 with advantage 1, then -1: clipped at 0.8 and 1.3, the smaller gain counts."""
    ratio = torch.tensor([[0.5, 1.1, 2.0]] * 2, requires_grad=True)
    gains, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool)
    loss, shares = policy_loss(ratio.log(), torch.zeros(2, 3), mask, gains, CLIP)
    assert loss.flatten().tolist() == pytest.approx([-0.5, -1.1, -1.3, 0.8, 1.1, 2.0])
    loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.flatten().tolist() == pytest.approx([-1, -1, 0, 0, 1, 1])
    assert {name.split("/")[1]: round(float(share), 6) for name, share in shares.items()} == {
        "low_mean": pytest.approx(1 / 6, abs=1e-6),
        "high_mean": pytest.approx(1 / 6, abs=1e-6),
        "region_mean": pytest.approx(2 / 6, abs=1e-6),
    }


def test_the_sequence_level_has_one_ratio_an_output() -> None:
    """Log ratios 0.3 and -0.1 of an output's two actions: exp(0.1) for both; the other has one, exp(0.4) clipped."""
    old = torch.zeros(2, 3)
    logps = torch.tensor([[0.3, -0.1, 9.0], [0.4, 9.0, 9.0]], requires_grad=True)
    loss, _ = policy_loss(
        logps,
        old,
        masked(2, 1, 3)[:2],
        torch.tensor([1.0, 1.0]),
        dataclasses.replace(CLIP, importance_sampling_level="sequence"),
    )
    assert loss.tolist() == [
        pytest.approx([-math.exp(0.1), -math.exp(0.1), 0]),
        pytest.approx([-1.3, 0, 0]),
    ]
    loss.sum().backward()
    assert logps.grad is not None
    assert logps.grad[0].tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0])
    assert logps.grad[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_beyond_the_exponentials_range_are_finite(level: Any) -> None:
    """A log-ratio of 200 or -200: clipped where it is clipped, exactly nothing where the advantage is 0."""
    for far in (200.0, -200.0):
        logps = torch.full((3, 2), far, requires_grad=True)
        mask, gains = torch.ones(3, 2, dtype=torch.bool), torch.tensor([1.0, 0.0, -1.0])
        loss, _ = policy_loss(
            logps, torch.zeros(3, 2), mask, gains, dataclasses.replace(CLIP, importance_sampling_level=level)
        )
        loss.sum().backward()
        assert logps.grad is not None
        assert bool(torch.isfinite(loss).all())
        assert bool(torch.isfinite(logps.grad).all())
        assert (loss[1].tolist(), logps.grad[1].tolist()) == ([0, 0], [0, 0])
        clipped = 0 if far > 0 else 2  # the better one, more probable than it may be; the worse one, less
        bound = {0: -1.3, 2: 0.8}[clipped]
        assert loss[clipped].tolist() == pytest.approx([bound, bound])
        assert logps.grad[clipped].tolist() == [0, 0]
    kl = kl_estimate(torch.full((1, 1), -200.0), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert bool(torch.isfinite(kl).all())


def test_kl_by_hand() -> None:
    found = kl_estimate(
        torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.5, -2.0, -math.inf]]), masked(2, 3)[:1]
    )
    assert found.flatten().tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0, 0])


def test_reward_metrics_by_hand() -> None:
    each = torch.tensor([[1.0, 0.5], [0, 0.5], [1, -0.5], [1, -0.5]], dtype=torch.float64)
    found = reward_metrics(each, ["a", "b"], each.sum(1).view(2, 2))
    assert found == {
        "reward": pytest.approx((1.5 + 0.5 + 0.5 + 0.5) / 4),
        "reward_std": pytest.approx(math.sqrt(0.5) / 2),
        "frac_reward_zero_std": 0.5,
        "rewards/a/mean": 0.75,
        "rewards/a/std": pytest.approx(0.5),
        "rewards/b/mean": 0.0,
        "rewards/b/std": pytest.approx(math.sqrt(1 / 3)),
    }


# --- log-probs -----------------------------------------------------------------------------------------


def sample(
    lm: LatentLM, method: Colar, config: GrpoConfig, examples: Sequence[Example] = EXAMPLES
) -> list[Output]:
    return rollout.roll_out(lm, method, config, examples, seed=3, generation=1)


@torch.no_grad()
def naive(lm: LatentLM, method: Colar, each: Output) -> list[float]:
    """One output's log-probs, by a forward over it alone and torch.distributions."""
    completion = each.completion
    decoding = completion.request.decoding
    separator = lm.template.separator_id
    latents = [] if completion.latents is None else list(completion.latents)
    answer = [separator, *each.sampled_ids]
    fed = [*lm.embed(torch.tensor(each.question_ids)), *latents, *lm.embed(torch.tensor(answer))]
    states = lm.hidden(torch.stack(fed)[None])[0, len(each.question_ids) - 1 :]
    choices = Categorical(logits=lm.logits(states) / decoding.temperature)
    found = []
    for k, latent in enumerate(latents):
        logp = Bernoulli(probs=choices.probs[k, separator]).log_prob(torch.tensor(0.0))
        if method.has_density and decoding.latent_temperature > 0:
            mean, log_std = lm.extra["latent_head"](states[k])
            drawn = Normal(mean, decoding.latent_temperature * log_std.exp()).log_prob(
                latent / method.sigma_e
            )
            logp = logp + drawn.mean()
        found.append(float(logp))
    of_tokens = choices.logits[range(len(latents), len(states) - 1), answer].tolist()
    # A stop that was forced was no choice.
    return found + (of_tokens if each.stop_chosen else of_tokens[1:])


CASES = [
    ("gemma3", {}, {}),
    ("gpt2", {}, {}),
    ("llama", {}, {}),
    ("llama", {}, {"temperature": 0.7, "latent_temperature": 1.6}),
    ("qwen2", {"head": "deterministic"}, {}),
    ("gpt2", {}, {"latent_temperature": 0.0}),
]


@pytest.mark.parametrize(("family", "head", "decoding"), CASES)
def test_log_probs_are_those_of_torch_distributions(
    family: str, head: dict[str, Any], decoding: dict[str, float]
) -> None:
    lm, method = model(family, **head)
    outputs = sample(lm, method, grpo(**decoding))
    rollouts = rollout.collate(outputs, lm.width)
    scores = method.logps(lm, rollouts)
    engine = rollout.engine_logps(method, outputs, rollouts)
    lengths = {each.completion.length for each in outputs}
    assert 5 in lengths  # forced stops are there,
    assert len(lengths) > 2  # and others
    for row, each in enumerate(outputs):
        wanted = naive(lm, method, each)
        mask = scores.mask[row]
        assert scores.logps[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert engine[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert (
            scores.logps[row][~mask].tolist()
            == engine[row][: mask.shape[0]][~mask].tolist()
            == [0.0] * int((~mask).sum())
        )
        assert int(mask.sum()) == len(wanted) == int(rollouts.n_actions()[row])
        K = each.completion.length
        assert bool(mask[K]) == (K < 5)  # a stop that was forced was no choice


@torch.no_grad()
def naive_cot(lm: LatentLM, each: Output) -> list[float]:
    """One CoT output's log-probs, token by token: the chain, the separator where it was chosen, the answer."""
    temperature = each.completion.request.decoding.temperature
    tokens = [*each.completion.thought_ids, lm.template.separator_id, *each.sampled_ids]
    fed = lm.embed(torch.tensor([[*each.question_ids, *tokens]]))
    states = lm.hidden(fed)[0, len(each.question_ids) - 1 : -1]
    chosen = Categorical(logits=lm.logits(states) / temperature).log_prob(torch.tensor(tokens))
    found: list[float] = chosen.tolist()
    if not each.stop_chosen:
        del found[each.completion.length]
    return found


@pytest.mark.parametrize(
    ("name", "family", "temperature"),
    [
        ("cot", "llama", 1.0),
        ("cot", "gemma3", 0.7),
        ("tokenskip", "gpt2", 0.7),
        ("no_cot", "qwen2", 1.0),
    ],
)
def test_tokens_of_a_chain_are_actions_like_those_of_the_answer(
    family: str, name: str, temperature: float
) -> None:
    lm, method = liven(tiny_lm(family)), registry.build(name)
    outputs = sample(lm, method, grpo(compression_factors=None, temperature=temperature))
    tensors = rollout.collate(outputs, lm.width)
    if bool(tensors.thought_counts.any()):
        assert tensors.latents.shape[-1] == 0  # tokens are embedded again: their embeddings may be trained
    scores = method.logps(lm, tensors)
    engine = rollout.engine_logps(method, outputs, tensors)
    lengths = {each.completion.length for each in outputs}
    if name == "no_cot":
        assert lengths == {0}
    if family in ("llama", "gpt2") and name != "no_cot":
        assert len(lengths) > 1  # stops of its own are there
        assert 5 in lengths  # and forced ones
    for row, each in enumerate(outputs):
        mask, wanted = scores.mask[row], naive_cot(lm, each)
        assert scores.logps[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert engine[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert bool(mask[each.completion.length]) == (name != "no_cot" and each.completion.length < 5)
    assert scores.logged == {}


def test_gradients_reach_what_a_chain_of_tokens_was_embedded_by() -> None:
    lm, method = tiny_lm("llama"), Cot(CotConfig())
    tensors = rollout.collate(sample(lm, method, grpo(compression_factors=None)), lm.width)
    method.logps(lm, tensors).logps.sum().backward()
    thought = {int(i) for i in tensors.thought_ids[0, : tensors.thought_counts[0]]}
    asked = {int(i) for i in tensors.question_ids.flatten()}
    only_thought = sorted(thought - asked)
    assert only_thought
    gradient = lm.causal_lm.get_input_embeddings().weight.grad
    assert (gradient[only_thought] != 0).any(-1).all()


def test_entropies_and_sigma_are_means_over_an_outputs_own_actions() -> None:
    lm, method = model()
    rollouts = rollout.collate(sample(lm, method, grpo(latent_temperature=2.0)), lm.width)
    scores = method.logps(lm, rollouts)
    none = rollouts.thought_counts == 0
    assert none.any()
    assert scores.logged["latents/sigma"].isnan().tolist() == none.tolist()
    # sigma is nearly the same in all dimensions of an untrained head: the entropy follows from it
    gaussian = (2 * scores.logged["latents/sigma"]).log() + 0.5 * math.log(2 * math.pi * math.e)
    torch.testing.assert_close(scores.logged["latents/entropy"][~none], gaussian[~none], rtol=0.1, atol=0.1)
    assert ((scores.entropy > 0) & (scores.entropy < math.log(lm.config.vocab_size))).all()


def test_gradients_reach_adapter_and_head_and_none_goes_through_latents() -> None:
    lm, method = model("qwen2", LoraSettings(r=4))
    rollouts = rollout.collate(sample(lm, method, grpo()), lm.width)
    rollouts.latents.requires_grad_(True)
    scores = method.logps(lm, rollouts)
    scores.logps.sum().backward()
    assert rollouts.latents.grad is None
    moved = {name for name, p in lm.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    assert any("lora_B" in name for name in moved)
    assert {"extra.latent_head.mean.weight", "extra.latent_head.log_std.bias"} <= moved
    assert all(p.grad is None for name, p in lm.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("grpo", "token"), ("dr_grpo", "sequence"), ("dapo", "token")],
)
def test_the_objective_is_the_formula_over_naive_log_probs(
    tmp_path: Path, loss_type: Any, level: Any
) -> None:
    """With old and reference log-probs that differ: -min(w A, clip(w) A) + beta (e^d - d - 1), each output's own sum
    and weight, over N."""
    lm, method = model()
    settings = {"epsilon": 0.1, "epsilon_high": 0.4, "beta": 0.3, "importance_sampling_level": level}
    made = trainer(tmp_path, lm, method, grpo(loss_type=loss_type, **settings))
    outputs = sample(lm, method, made.sampler.config, EXAMPLES[:2])
    rollouts = rollout.collate(outputs, lm.width)
    torch.manual_seed(1)
    N = int(rollouts.action_positions().max())
    old, ref, gains = -2 * torch.rand(8, N), -2 * torch.rand(8, N), torch.randn(8)
    lengths = [int(n) for n in rollouts.n_actions()]
    total, wanted = sum(lengths), 0.0
    masks = method.logps(lm, rollouts).mask
    for row, each in enumerate(outputs):
        mask = masks[row]
        now = naive(lm, method, each)
        logs = [n - then for n, then in zip(now, old[row][mask].tolist(), strict=True)]
        if level == "sequence":
            logs = [sum(logs) / len(logs)] * len(logs)
        away = [there - n for n, there in zip(now, ref[row][mask].tolist(), strict=True)]
        A = float(gains[row])
        sum_ = -sum(min(w * A, min(max(w, 0.9), 1.4) * A) for w in map(math.exp, logs))
        sum_ += 0.3 * sum(math.exp(d) - d - 1 for d in away)
        divisor = {"grpo": 8 * lengths[row], "dr_grpo": 8 * 3.5, "dapo": total}[loss_type]
        wanted += sum_ / divisor
    weights = output_weights(loss_type, rollouts.n_actions(), made.plan, 3.5)
    columns = {"advantages": gains, "weights": weights, "kept": torch.ones(8, dtype=torch.bool)}
    before = {"old_logps": old, "ref_logps": ref, "engine_logps": old}
    found = made.objective(**rollouts.tensors(), **columns, **before)
    assert found["loss"].item() == pytest.approx(wanted, rel=1e-3)
    half = made.objective(torch.tensor(16), **rollouts.tensors(), **columns, **before)
    assert float(half["loss"]) == pytest.approx(wanted / 2, rel=1e-3)


def test_zero_spread_gives_zero_gradient(tmp_path: Path) -> None:
    lm, method = model(lora=LORA)
    made = trainer(tmp_path, lm, method, grpo())
    made.sampler.reward_funcs = {"own": lambda completions, **columns: [0.1] * len(completions)}
    inputs = take(made._tensors_of(0), torch.arange(8))
    made.objective(**inputs)["loss"].backward()
    found = [p.grad for p in lm.parameters() if p.grad is not None]
    assert len(found) > 4
    assert all(bool((grad == 0).all()) for grad in found)
    made.sampler.reward_funcs, made.generation = {"own": by_tokens}, None  # and with spread it is none
    inputs = take(made._tensors_of(0), torch.arange(8))
    made.objective(**inputs)["loss"].backward()
    assert any(bool((p.grad != 0).any()) for p in lm.parameters() if p.grad is not None)


@pytest.mark.parametrize("masks", [False, True])
def test_outputs_without_a_gradient_are_not_computed(tmp_path: Path, masks: bool) -> None:
    """The first question has no spread, and one output of the second may be left out: the sum over the others is the same."""
    lm, method = model(lora=dataclasses.replace(LORA, lora_dropout=0.0))
    made = trainer(tmp_path, lm, method, grpo(num_iterations=2))
    first = EXAMPLES[made.sampler.schedule.questions(0)[0]].id

    def picky(completions: Sequence[str], id: Sequence[str], **columns: Any) -> list[float]:
        return [0.0 if name == first else float(i % 2) for i, name in enumerate(id)]

    made.sampler.reward_funcs = {"own": picky}
    batches, count = made.get_batch_samples(iter(made.get_train_dataloader()), 1, torch.device("cpu"))
    every = made._tensors_of(0)
    every["kept"][5] = not masks
    learnt = [place for place in range(4, 8) if not (masks and place == 5)]
    assert made._learnt(every, torch.arange(8)).tolist() == learnt
    assert count == 8
    assert len(batches[0]["advantages"]) == 4
    # The log-probs of the updates before are those of the same rows.
    assert (every["old_logps"] != 0).any(1).tolist() == [False] * 4 + [True] * 4

    def gradients(rows: Tensor) -> list[Tensor]:
        lm.zero_grad()
        made.objective(torch.tensor(8), **take(every, rows))["loss"].backward()
        return [p.grad.clone() for p in lm.parameters() if p.grad is not None]

    theirs = gradients(torch.arange(8))
    mine = gradients(torch.tensor(learnt))
    assert any(bool((each != 0).any()) for each in mine)
    # Rounding is that of a weight's largest gradients, not of each of its own.
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(other.norm())


def test_a_batch_without_any_gradient_has_one_output(tmp_path: Path) -> None:
    """With several processes the others wait for its backward pass. The KL divergence has a gradient everywhere."""
    for beta, wanted in ((0.0, [2]), (0.1, [2, 3, 4])):
        lm, method = model()
        made = trainer(tmp_path, lm, method, grpo(beta=beta))
        made.sampler.reward_funcs = {"own": lambda completions, **columns: [0.5] * len(completions)}
        assert made._learnt(made._tensors_of(0), torch.tensor([2, 3, 4])).tolist() == wanted


class Watched(GrpoObjective):
    """Notes how far ratios are from 1, and the engine from the trainer, in the very forward that is learnt from."""

    def forward(
        self,
        num_items_in_batch: Tensor | int | None = None,
        batch: Mapping[str, Tensor] | None = None,
        **tensors: Tensor,
    ) -> dict[str, Any]:
        tensors = {**(batch or {}), **tensors}
        scores = self.score_actions(tensors)
        old = tensors["old_logps"][:, : scores.logps.shape[1]]
        ratio = (scores.logps.detach() - old).exp()[scores.mask]
        found = super().forward(num_items_in_batch, **tensors)
        self.seen = [
            *getattr(self, "seen", []),
            (float((ratio - 1).abs().max()), float(found["sampling/logp_difference"])),
        ]
        return found


@pytest.mark.parametrize(("family", "bf16"), [("gemma3", False), ("llama", True), ("gpt2", True)])
def test_the_first_ratio_is_one_in_the_trainers_precision(tmp_path: Path, family: str, bf16: bool) -> None:
    """Dropout in backbone and adapter, autocast, padding: what is scored first is what is learnt from first."""
    lm, method = model(family, LORA)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "bf16": bf16,
        "learning_rate": 1e-2,
    }
    made = trainer(tmp_path, lm, method, grpo(num_iterations=2), Watched, **settings)
    zero_dropout(lm)
    made.train()
    assert isinstance(made.objective, Watched)
    (first, second), moved = made.objective.seen[:2], made.objective.seen[2:]
    assert max(first[0], second[0]) <= 1e-6
    assert min(ratio for ratio, _ in moved) > 1e-3  # the second time the weights are others
    # The engine samples in the weights' own precision; autocast rounds to 8 bits.
    for _, difference in (first, second):
        assert 1e-4 < difference < 0.1 if bf16 else difference < 1e-5


def trained(lm: LatentLM) -> LatentLM:
    """An adapter that does something: as peft makes it, it adds nothing."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return lm


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gemma3", torch.bfloat16), ("gpt2", torch.bfloat16)],
)
def test_merged_rollouts_are_those_of_the_merged_model(family: str, dtype: torch.dtype) -> None:
    """The same bits; afterwards the adapter is apart again and no weight has moved, however often."""
    lm, method = model(family, LORA)
    trained(lm).causal_lm.to(dtype)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    lm.train()
    for _ in range(2):
        found = sample(lm, method, grpo(merge_adapter=True))
    assert lm.training
    assert lm.has_adapter
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    apart = sample(lm, method, grpo())
    lm.merge()
    wanted = sample(lm.eval(), method, grpo())
    assert len(wanted) == len(found)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.completion.token_ids == theirs.completion.token_ids
        assert mine.completion.token_logps == theirs.completion.token_logps
    assert [each.completion.token_logps for each in apart] != [each.completion.token_logps for each in found]


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [
        ("gpt2", "float32", 1e-5),
        ("gemma3", "bfloat16", 0.1),
        ("qwen2", "bfloat16", 0.1),
    ],
)
def test_merged_rollouts_have_a_tolerance_of_their_own(
    tmp_path: Path, family: str, dtype: str, bound: float
) -> None:
    """What docs/grpo.md states of `sampling/logp_difference` where the adapter is merged for sampling."""
    lm, method = model(family, LORA)
    trained(lm).causal_lm.to(getattr(torch, dtype))
    made = trainer(tmp_path, lm, method, grpo(merge_adapter=True), bf16=dtype == "bfloat16", max_steps=1)
    zero_dropout(lm)
    made.train()
    (row,) = [row for row in made.state.log_history if "sampling/logp_difference" in row]
    assert row["sampling/logp_difference"] < bound
    assert (row["sampling/logp_difference"] > 2e-3) == (dtype == "bfloat16")


def test_dropout_is_off_in_train_mode_too() -> None:
    lm, _ = model("gpt2", LORA)
    drops = [m for m in lm.modules() if isinstance(m, torch.nn.Dropout)]
    assert max(m.p for m in drops) == 0.2
    rates = ("attn_pdrop", "residual_dropout", "router_jitter_noise")
    for name in rates:
        setattr(lm.causal_lm.get_input_embeddings(), name, 0.1)
    zero_dropout(lm)
    assert {m.p for m in drops} == {0.0}
    assert {getattr(lm.causal_lm.get_input_embeddings(), name) for name in rates} == {0.0}


def test_outputs_drawn_from_a_nucleus_are_not_scored() -> None:
    """What is scored is the whole softmax: the same distribution must have been drawn from."""
    lm, method = model()
    config = grpo()
    asked = rollout.requests(method, config, EXAMPLES[:1], 0, 0)
    for top_p, refused in ((1.0, False), (0.9, True)):
        decoding = dataclasses.replace(config.decoding, top_p=top_p)
        requests = [dataclasses.replace(request, decoding=decoding) for request in asked]
        completions = Engine(lm.eval(), method).generate(requests)
        outputs = [Output(EXAMPLES[0], [1], completion, lm.template.eos_id) for completion in completions]
        with pytest.raises(ValueError, match="top_p must be 1") if refused else contextlib.nullcontext():
            rollout.collate(outputs, lm.width)


# --- rollouts ------------------------------------------------------------------------------------------


def what(each: Output) -> tuple[Any, ...]:
    completion = each.completion
    return (
        completion.request,
        each.question_ids,
        each.sampled_ids,
        completion.length,
        completion.truncated,
        each.stop_chosen,
    )


def test_a_rollout_does_not_depend_on_what_is_sampled_beside_it() -> None:
    """That the engine keeps rows of every family apart: tests/test_engine.py."""
    lm, method = model()
    all_ = sample(lm, method, grpo(max_batch=64))
    alone = [each for e in EXAMPLES for each in sample(lm, method, grpo(max_batch=2), [e])]
    backwards = sample(lm, method, grpo(max_batch=5), EXAMPLES[::-1])
    place = {(each.example.id, each.completion.request.sample): each for each in backwards}
    for mine, theirs in zip(all_, alone, strict=True):
        other = place[mine.example.id, mine.completion.request.sample]
        assert what(mine) == what(theirs) == what(other)
        for found in (theirs, other):
            if mine.completion.latents is not None and found.completion.latents is not None:
                torch.testing.assert_close(
                    mine.completion.latents, found.completion.latents, rtol=1e-3, atol=1e-4
                )
    assert len({tuple(each.sampled_ids) for each in all_}) > 6  # and they differ from each other
    # Processes send each other an output's latents, and no other vector of each thought.
    numbers = {name for each in all_ for name in each.completion.info}
    assert numbers == {"stop_probability", "stop_logp", "latent_logp"}


def test_draws_are_functions_of_seed_generation_example_and_sample() -> None:
    _, method = model()
    seeds = {
        (seed, generation, r.id): r.seed
        for seed in (0, 1)
        for generation in (0, 1)
        for r in rollout.requests(method, grpo(), EXAMPLES, seed, generation)
    }
    assert len(set(seeds.values())) == len(seeds) == 4 * len(EXAMPLES)
    made = rollout.requests(method, grpo(), EXAMPLES, 0, 0)
    assert [r.sample for r in made] == [0, 1, 2, 3] * len(EXAMPLES)
    assert all(r.keep_latents and r.decoding == grpo().decoding for r in made)


def test_a_questions_outputs_share_a_factor_and_a_threshold() -> None:
    """Each has a draw of its own: neither decides the other."""
    method = registry.build("sequential")
    many = [Example(f"m/{i}", "Bo is 9.", (), "9") for i in range(40)]
    thresholds = (0, 0.8, 0.9)
    made = rollout.requests(method, grpo(confidence_thresholds=thresholds), many, 0, 0)
    groups = [{r.params for r in made[i : i + 4]} for i in range(0, len(made), 4)]
    assert {len(group) for group in groups} == {1}
    drawn = {(params.compression_factor, params.confidence_threshold) for params in set.union(*groups)}
    assert drawn == {(factor, threshold) for factor in (2, 3) for threshold in thresholds}
    without = rollout.requests(method, grpo(), many, 0, 0)
    assert [r.params.compression_factor for r in made] == [r.params.compression_factor for r in without]
    default = rollout.requests(method, grpo(compression_factors=None), many, 0, 0)
    assert {r.params for r in default} == {method.Params()}


# --- rewards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cot", {}),
        ("colar", {}),
        ("sequential", {"lookahead_weight": 0.2}),
        ("sequential", {"grouping": "equations", "merge": "ordered"}),
    ],
)
def test_outputs_are_taken_with_their_own_padding_and_scored_alike(name: str, config: dict[str, Any]) -> None:
    """Some of them have no thought at all."""
    torch.manual_seed(0)
    lm, method = tiny_lm("llama", digits=True), registry.build(name, config)
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    outputs = sample(liven(lm), method, grpo(compression_factors=None, num_generations=8))
    rollouts = rollout.collate(outputs, lm.width)
    longest = rollouts.thought_counts.max()
    whole = method.logps(lm, rollouts).logps
    for n_thoughts in (0, 1, int(longest)):
        (places,) = torch.where(rollouts.thought_counts == n_thoughts)
        assert len(places)
        taken = Rollouts.from_tensors(take(rollouts.tensors(), places))
        assert taken.latents.shape[1] == taken.thought_ids.shape[1] == taken.endings.shape[1] == n_thoughts
        scores = method.logps(lm, taken).logps
        torch.testing.assert_close(scores, whole[places, : scores.shape[1]], atol=1e-4, rtol=1e-4)
    assert longest > 1


def rewarded(func: Any) -> Tensor:
    lm, method = model()
    return rewards.apply({"f": func}, sample(lm, method, grpo(), EXAMPLES[:1]))


def test_rewards_see_columns() -> None:
    seen: dict[str, Any] = {}

    def half(completions: Sequence[str], **columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0, 1.0, -1.0, 2.0]

    lm, method = model()
    outputs = sample(lm, method, grpo(), EXAMPLES[:1])
    found = rewards.apply({"half": half, "length": rewards.length_penalty}, outputs)
    lengths = [each.completion.length for each in outputs]
    assert seen["length"] == lengths
    assert (seen["answer"], seen["answer_type"], seen["max_latents"]) == (["7"] * 4, ["number"] * 4, [5] * 4)
    assert found[:, 0].tolist() == [0, 1, -1, 2]
    assert found[:, 1].tolist() == pytest.approx([-n / 5 for n in lengths])


def test_accuracy_is_the_evaluations_judge() -> None:
    texts, answers = ["7", " 7.0", "8", "", "so the answer is 7", "(1,2)"], ["7"] * 5 + ["12"]
    rows = [dataclasses.replace(EXAMPLES[0], answer=answer) for answer in answers]
    assert rewards.accuracy(texts, example=rows) == [1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (lambda completions, **c: [1.0], "reward f returned 1 values for 4 completions"),
        (
            lambda completions, **c: [math.nan] * 4,
            "reward f returned nan for t/0: it must return a finite number",
        ),
        (
            lambda completions, **c: [1.0, None, 0.0, 1.0],
            "reward f returned None for t/0: it must return a finite number",
        ),
    ],
)
def test_rewards_that_cannot_be_used_are_named(func: Any, words: str) -> None:
    with pytest.raises(ValueError, match="reward") as error:
        rewarded(func)
    assert words in str(error.value)


# --- generations ---------------------------------------------------------------------------------------


def test_an_epoch_asks_each_question_once_in_the_order_of_updates() -> None:
    many = [Example(f"m/{i}", "Bo is 9.", (), "9") for i in range(11)]
    plan = GenerationPlan(batch=4, accumulate=1, steps=3, iterations=2, group=4)
    schedule = QuestionSchedule(many, 0, plan)
    # What a resumed run is known by: any other question, in whatever order they stand.
    assert digest_of(many) == digest_of(many[::-1])
    assert digest_of(many) != digest_of([*many[:-1], dataclasses.replace(many[-1], question="?")])
    assert (
        plan.questions,
        plan.outputs,
        plan.outputs_per_update,
        plan.updates_per_generation,
        schedule.generations_per_epoch,
    ) == (
        3,
        12,
        4,
        6,
        3,
    )
    for epoch in (0, 1):
        schedule.epoch = epoch
        keys = list(schedule)
        assert len(keys) == len(schedule) == 3 * 12 * 2
        assert keys[:24] == list(range(36 * epoch, 36 * epoch + 12)) * 2
        asked = [index for number in range(3 * epoch, 3 * epoch + 3) for index in schedule.questions(number)]
        assert len(set(asked)) == 9
    assert schedule.questions(0) != schedule.questions(3)
    with pytest.raises(ValueError, match="2 questions do not fill a generation of 3"):
        QuestionSchedule(many[:2], 0, plan)


def test_dynamic_sampling_replaces_groups_without_spread(tmp_path: Path) -> None:
    """Only t/1 and t/4 have any: one of two questions is asked for until they are found."""
    lm, method = model()

    def picky(completions: Sequence[str], id: Sequence[str], **columns: Any) -> list[float]:
        return [float(i % 2) if name in ("t/1", "t/4") else 0.0 for i, name in enumerate(id)]

    found = {}
    for rounds in (0, 5):
        made = trainer(tmp_path, lm, method, grpo(dynamic_sampling=rounds))
        made.sampler.reward_funcs = {"own": picky}
        for number in range(3):
            generation = made.sampler.generate(number)
            assert generation.tensors["advantages"].shape == (8,)
            spread = (generation.tensors["advantages"].view(2, 4) != 0).all(-1).tolist()
            found[rounds, number] = sum(spread)
    assert sum(found[0, n] for n in range(3)) == 2  # each question once an epoch
    assert [found[5, n] for n in range(3)] == [2, 2, 2]


def test_a_group_with_spread_takes_the_place_of_one_without(tmp_path: Path) -> None:
    """A generation of three updates, a question each: the first and the last of those asked have no spread."""
    lm, method = model()
    made = trainer(tmp_path, lm, method, grpo(steps_per_generation=3, dynamic_sampling=1),
                   per_device_train_batch_size=4)  # fmt: skip
    asked = [EXAMPLES[i].id for i in made.sampler.schedule.questions(0)]
    flat = {asked[0], asked[2]}

    def picky(completions: Sequence[str], id: Sequence[str], **columns: Any) -> list[float]:
        return [0.0 if name in flat else float(i % 2) for i, name in enumerate(id)]

    made.sampler.reward_funcs = {"own": picky}
    groups, sampled = made.sampler._groups(0)
    assert [each.example.id for g in sampled for each in g.outputs][: 3 * 4 : 4] == asked
    assert len(sampled) == 5
    assert groups == [sampled[3], sampled[1], sampled[4]]
    advantages_R = made.sampler.generate(0).tensors["advantages"]
    assert bool((advantages_R != 0).all())


def test_rewards_are_added_and_scaled(tmp_path: Path) -> None:
    lm, method = model()
    made = trainer(tmp_path, lm, method, grpo(reward_funcs=("accuracy", "length_penalty")))
    made.sampler.reward_funcs = {
        "one": lambda completions, **columns: [float(i % 3) for i in range(len(completions))],
        "other": lambda completions, **columns: [float(i > 4) for i in range(len(completions))],
    }
    total = torch.tensor([float(i % 3 + (i > 4)) for i in range(8)]).view(2, 4)
    centred = total - total.mean(1, keepdim=True)
    spread = total.std(1, keepdim=True) + 1e-4
    found = made.sampler.generate(0).tensors["advantages"]
    assert found.tolist() == pytest.approx((centred / spread).flatten().tolist(), rel=1e-5)


def test_dr_grpos_constant_is_the_mean_number_of_actions_at_the_start(tmp_path: Path) -> None:
    lm, method = model()
    made = trainer(tmp_path, lm, method, grpo(loss_type="dr_grpo"))
    generations = [made.sampler.generate(number).tensors for number in range(3)]
    lengths = [Rollouts.from_tensors(tensors).n_actions().double().mean().item() for tensors in generations]
    assert len(set(lengths)) > 1
    for tensors in generations:
        assert tensors["weights"].tolist() == pytest.approx([1 / lengths[0]] * 8)


def test_truncated_outputs_can_be_left_out(tmp_path: Path) -> None:
    lm, method = model()
    for mask in (False, True):
        # With this seed no output stops by itself at its limit.
        made = trainer(tmp_path, lm, method, grpo(mask_truncated_completions=mask, loss_type="dapo"), seed=2)
        generation = made.sampler.generate(0)
        inputs = generation.tensors
        rollouts = Rollouts.from_tensors(inputs)
        cut = ~rollouts.stopped | (
            rollouts.token_ids.gather(1, rollouts.token_lengths[:, None] - 1)[:, 0] != lm.template.eos_id
        )
        assert cut.any()
        assert (~cut).any()
        assert inputs["kept"].tolist() == ((~cut) | (not mask)).tolist()
        total = float(rollouts.n_actions()[inputs["kept"]].sum())
        assert inputs["weights"].tolist() == pytest.approx([8 / total] * 8)
        logps = method.logps(lm, rollouts)
        kept = logps.mask & inputs["kept"][:, None]
        wanted = -(inputs["advantages"][:, None] * kept).sum() / total  # every ratio is 1
        assert float(made.objective(**inputs)["loss"]) == pytest.approx(float(wanted), abs=1e-6)


def test_the_reference_is_what_the_model_was() -> None:
    lm, _ = model(lora=LORA)
    kept = ReferenceWeights(lm)
    weight = next(p for name, p in lm.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        weight += 1
    with kept.in_model():
        assert bool((weight == 0).all())
    assert bool((weight == 1).all())
    with kept.in_model():
        assert bool((weight == 0).all())


# --- runs ----------------------------------------------------------------------------------------------


def test_a_run_learns_what_is_rewarded(tmp_path: Path) -> None:
    """Thinking costs: it gets shorter. And with the sign turned, longer."""
    for sign in (1.0, -1.0):

        def reward(
            completions: Sequence[str], length: Sequence[int], sign: float = sign, **columns: Any
        ) -> list[float]:
            return [-sign * n for n in length]

        _, result = run(
            tmp_path / str(sign),
            reward=reward,
            max_steps=8,
            per_device_train_batch_size=24,
            learning_rate=3e-2,
        )
        lengths = [row["latents/mean_length"] for row in curve(result)]
        first, last = sum(lengths[:2]) / 2, sum(lengths[-2:]) / 2
        assert sign * (first - last) > 0.5


def test_a_chain_of_tokens_learns_what_is_rewarded(tmp_path: Path) -> None:
    """CoT under the same GRPO: its tokens and its stop are actions. What it says can be read."""

    def shorter(completions: Sequence[str], length: Sequence[int], **columns: Any) -> list[float]:
        return [-n for n in length]

    lm, method = publishable(liven(tiny_lm("llama"))), Cot(CotConfig())
    training = {**QUICK, "max_steps": 8, "per_device_train_batch_size": 24, "learning_rate": 3e-2}
    config, funcs = grpo(compression_factors=None), {"own": shorter}
    result = grpo_train.train(
        lm, method, EXAMPLES, TrainingConfig(**training), config, tmp_path, reward_funcs=funcs
    )
    lengths = [row["latents/mean_length"] for row in curve(result)]
    assert sum(lengths[:2]) / 2 - sum(lengths[-2:]) / 2 > 0.5
    differences = [row["sampling/logp_difference"] for row in curve(result)]
    assert max(differences) < 1e-3  # the engine and the trainer agree on every action
    _, record = next(files.read_jsonl(tmp_path / "completions.jsonl"))
    assert all(isinstance(thought, str) for thought in record["thoughts"])


def test_batches_and_parts_give_the_same_run(tmp_path: Path) -> None:
    """Accumulated, or one by one; with two iterations they are scored before, too.

    Of dapo, whose divisor is the actions of the update, and not of its batches or parts.
    """
    config, curves = grpo(loss_type="dapo", num_iterations=2), []
    for size, accumulate, tokens in ((8, 1, None), (2, 4, None), (8, 1, 1)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        folder = tmp_path / f"{size}-{tokens}"
        curves.append(curve(run(folder, config, tokens_per_batch=tokens, max_steps=3, **sizes)[1]))
    for other in curves[1:]:
        for mine, theirs in zip(other, curves[0], strict=True):
            assert mine.keys() == theirs.keys()
            for name in ("loss", "grad_norm", "reward", "entropy"):
                if name in theirs:
                    assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


LONG = {"max_steps": 9, "save_steps": 3, "eval_steps": 4}
LONG_GRPO = {
    "steps_per_generation": 2,
    "num_iterations": 2,
    "loss_type": "dr_grpo",
    "beta": 0.05,
    "num_generations": 4,
    "dynamic_sampling": 1,
}
"""Four updates a generation, so that most checkpoints lie in the middle of one; an epoch has one generation."""


def judge_by_weight(lm: LatentLM, method: Method) -> dict[str, float]:
    """Moves with the weights, as an accuracy does."""
    return {"accuracy": float(lm.extra["latent_head"].mean.bias.sum().sigmoid())}


def test_another_processs_outputs_are_not_dropped(tmp_path: Path, taken: Callable[[Path], Any]) -> None:
    samples = RunFolder(tmp_path).completions
    samples.write_text('{"step": 5}\n')
    with taken(tmp_path), pytest.raises(ValueError, match="another process is writing to"):
        run(tmp_path)
    assert samples.read_text() == '{"step": 5}\n'


def killed_run(folder: Path, at_reward: int = 0, at_forward: int = 0) -> None:
    """A run of LONG_GRPO whose process is killed when it rewards for the N-th time, or in the N-th forward."""
    torch.set_num_threads(1)
    counts = {"rewards": 0, "forwards": 0}

    def kill_at(n: int, what: str) -> None:
        counts[what] += 1
        if counts[what] == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        kill_at(at_reward, "rewards")
        return by_tokens(completions, **columns)

    forward = GrpoObjective.forward

    def killed(self: GrpoObjective, *arguments: Any, **named: Any) -> Any:
        kill_at(at_forward, "forwards")
        return forward(self, *arguments, **named)

    GrpoObjective.forward = killed  # type: ignore[method-assign]  # this process ends here
    # Its forwards are not those of updates.
    preflight.before_training = lambda *_: None
    run(folder, grpo(**LONG_GRPO), reward, **RESUMABLE)


RESUMABLE: dict[str, Any] = {"lora": LORA, "validate": judge_by_weight, **LONG}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentLM, TrainResult, Path]:
    """A run of LONG_GRPO that nothing stops."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    return *run(folder, grpo(**LONG_GRPO), **RESUMABLE), folder


@pytest.mark.parametrize(("kill", "last"), [({"at_reward": 3}, 6), ({"at_forward": 6}, 3)])
def test_killed_and_resumed_is_uninterrupted(
    tmp_path: Path,
    kill: dict[str, int],
    last: int,
    uninterrupted: tuple[LatentLM, TrainResult, Path],
) -> None:
    """Killed while the third generation is rewarded, and in the second, whose outputs were already written down."""
    child = alone(tmp_path / "child", partial(killed_run, tmp_path / "killed", **kill))
    assert child.code == -signal.SIGKILL, child.stderr
    folder = RunFolder(tmp_path / "killed")
    saved = folder.checkpoints / f"checkpoint-{last}"
    assert folder.last_resume_state() == saved
    lm, resumed = run(folder.path, grpo(**LONG_GRPO), **RESUMABLE)
    whole_lm, whole, whole_folder = uninterrupted
    assert curve(resumed) == curve(whole)
    assert [row["step"] for row in curve(whole)] == list(range(1, 10))
    assert len({row["reward"] for row in curve(whole) if "reward" in row}) == 3
    assert (
        abs(curve(whole)[0]["kl"]) < 1e-9 < curve(whole)[-1]["kl"]
    )  # from the start, and not from the last generation
    assert curve(whole)[4]["kl"] > 1e-6
    theirs = whole_lm.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in lm.state_dict().items())
    samples = [p.read_text() for p in (folder.completions, RunFolder(whole_folder).completions)]
    assert samples[0] == samples[1]
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize(
    ("fitted", "then", "wanted"), [(64, None, 64), (64, 32, 32), (64, 99, 64), (None, 99, 99)]
)
def test_what_fits_into_memory_is_known_at_a_resume(
    tmp_path: Path, fitted: int | None, then: int | None, wanted: int
) -> None:
    """The longest batch of a generation is not sampled again."""
    first = trainer(tmp_path, *model(), grpo())
    first.tokens_per_batch = fitted
    first.save_model(str(tmp_path / "checkpoint-1"))
    resumed = trainer(tmp_path, *model(), grpo(), tokens_per_batch=then)
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert resumed.tokens_per_batch == wanted


def test_a_chain_of_tokens_resumes_in_the_middle_of_a_generation(tmp_path: Path) -> None:
    """Its thoughts are ids, and its latents have no width: a checkpoint holds both, and nothing is sampled again."""
    config = grpo(compression_factors=None, num_iterations=2, steps_per_generation=2)
    settings = TrainingConfig(
        **{**QUICK, "per_device_train_batch_size": 8, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-2}
    )

    def train(folder: Path, generations: int) -> tuple[LatentLM, TrainResult, int]:
        """A run that is stopped when it rewards more generations than these; the number that it rewarded."""
        lm, method = publishable(liven(tiny_lm("llama"))), Cot(CotConfig())
        rewarded = 0

        def reward(completions: Sequence[str], **columns: Any) -> list[float]:
            nonlocal rewarded
            if rewarded == generations:
                raise KeyboardInterrupt
            rewarded += 1
            return by_tokens(completions, **columns)

        funcs = {"own": reward}
        result = grpo_train.train(lm, method, EXAMPLES, settings, config, folder, reward_funcs=funcs)
        return lm, result, rewarded

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", generations=1)
    saved = load_file(tmp_path / "a" / "checkpoints" / "checkpoint-3" / "rollouts.safetensors")
    assert saved["latents"].shape[-1] == 0
    assert bool((saved["thought_ids"] > 0).any())
    lm, resumed, sampled = train(tmp_path / "a", generations=2)
    whole_lm, whole, sampled_by_whole = train(tmp_path / "b", generations=2)
    assert (sampled, sampled_by_whole) == (1, 2)
    assert curve(resumed) == curve(whole)
    assert [row["step"] for row in curve(whole)] == [1, 2, 3, 4, 5, 6]
    theirs = whole_lm.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in lm.state_dict().items())


def test_chains_are_not_scored_for_questions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Any] = []
    monkeypatch.setattr(tokenskip, "surprisal", lambda lm, examples: scored.append(examples))
    lm, method = tiny_lm("llama"), registry.build("tokenskip", {})
    config = grpo(compression_factors=None)
    settings = TrainingConfig(**{**QUICK, "per_device_train_batch_size": 8})
    made = grpo_train.make_trainer(lm, method, EXAMPLES, settings, config, RunFolder(tmp_path))
    assert scored == []
    assert made.sampler.schedule.examples == list(EXAMPLES)


def test_a_row_of_the_log_covers_the_same_updates_after_a_stop(tmp_path: Path) -> None:
    """A checkpoint between two logs: the row after it is a mean over what came after it, resumed or not."""
    budget = {"max_steps": 4, "logging_steps": 2, "save_steps": 3}

    def stops(completions: Sequence[str], **columns: Any) -> list[float]:
        if (tmp_path / "a" / "checkpoints" / "checkpoint-3").exists():
            raise KeyboardInterrupt
        return by_tokens(completions, **columns)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", reward=stops, **budget)
    _, resumed = run(tmp_path / "a", **budget)
    _, whole = run(tmp_path / "b", **budget)
    assert curve(resumed) == curve(whole)
    assert [row["step"] for row in curve(whole)] == [2, 3, 4]


def test_a_run_with_other_generations_is_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    with pytest.raises(
        ValueError,
        match=r"checkpoint-1 holds another run \(iterations was 1, now 2\); .*grpo.num_iterations.* must stay the same",
    ):
        run(tmp_path, grpo(num_iterations=2), max_steps=2)


def test_a_resumed_run_is_told_its_questions_and_saves_anew(tmp_path: Path) -> None:
    validate = {"validate": lambda lm, method: {"accuracy": 0.25}, "lora": LORA}
    run(tmp_path, max_steps=1, held_out=EXAMPLES[:2], **validate)
    with pytest.raises(ValueError, match="digest of the validation rows was"):
        run(tmp_path, max_steps=2, held_out=EXAMPLES[:1], **validate)
    with pytest.raises(ValueError, match="fingerprint of the frozen backbone was"):
        run(tmp_path, max_steps=2, held_out=EXAMPLES[:2], family="qwen2", **validate)
    run(tmp_path, max_steps=4, held_out=EXAMPLES[:2], save_steps=2, **validate)
    assert [path.name for path in RunFolder(tmp_path).resume_states()] == ["checkpoint-4", "checkpoint-2"]


def test_rates_are_computed_from_the_outputs_of_an_epoch(tmp_path: Path) -> None:
    """transformers divides the number of examples by the time; the outputs' numbers have no end."""
    made = trainer(tmp_path, *model(), grpo())
    generations = len(EXAMPLES) // made.plan.questions
    assert made.num_examples(made.get_train_dataloader()) == generations * made.plan.outputs


def test_a_run_leaves_metrics_and_outputs_to_read(tmp_path: Path) -> None:
    _, result = run(tmp_path, grpo(), lora=LORA, validate=lambda lm, method: {"accuracy": 0.25})
    first = curve(result)[0]
    assert (
        max(row["sampling/logp_difference"] for row in curve(result)) < 2e-5
    )  # no dropout, though LORA has some
    assert {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/own/mean", "completions/mean_length",
        "completions/clipped_ratio", "clip_ratio/region_mean", "entropy", "latents/mean_length", "latents/min_length",
        "latents/max_length", "latents/clipped_ratio", "latents/sigma", "latents/entropy", "sampling/logp_difference",
    } <= set(first)  # fmt: skip
    assert first["clip_ratio/region_mean"] == 0  # used once: every ratio is 1
    evaluated = [row["step"] for row in result.history if "eval_accuracy" in row]
    assert evaluated[0] == 0  # what training starts from can be the best
    assert files.read_json(result.best / "colar.json")["run"]["step"] == 0
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 4
    assert [record["step"] for record in records[::2]] == [0, 1, 2, 3]
    for record in records:
        assert len(record["thoughts"]) == record["length"]
        assert all(record["thoughts"])
    assert {"question", "answer", "completion", "reward", "rewards", "advantage", "truncated"} <= set(
        records[0]
    )


def test_validation_that_stops_getting_better_stops_the_run_for_good(tmp_path: Path) -> None:
    accuracies = iter([0.1, 0.3, 0.3, 0.2, 0.9, 0.9])
    config = grpo(early_stopping_patience=2)
    settings = {
        "max_steps": 12,
        "eval_steps": 1,
        "validate": lambda lm, method: {"accuracy": next(accuracies)},
    }
    _, result = run(tmp_path, config, **settings)
    assert result.steps == 3
    assert result.metrics["accuracy"] == 0.3
    _, again = run(tmp_path, config, **settings)  # the same command does not go on
    assert again.steps == 3
    assert next(accuracies) == 0.9


@pytest.mark.parametrize(
    ("found", "patience", "over"),
    [
        ([0.5, 0.4, 0.4], 2, True),
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4, 0.6], 2, False),
        ([0.5] * 9, None, False),
    ],
)
def test_patience(found: list[float], patience: int | None, over: bool) -> None:
    from transformers import TrainerState

    state = TrainerState(log_history=[{"eval_accuracy": value, "step": i} for i, value in enumerate(found)])
    assert EarlyStopping(patience).out_of_patience(state) == over


def test_numbers_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    lm, method = model()
    with torch.no_grad():
        lm.extra["latent_head"].log_std.bias[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"generation 0: .* not finite"):
        grpo_train.train(lm, method, EXAMPLES, TrainingConfig(**QUICK), grpo(num_generations=16), tmp_path)


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"temperature": 0.0},
            "grpo.temperature must be above 0 (at 0 nothing is drawn, and nothing explores), got 0.0",
        ),
        ({"loss_type": "ppo"}, "grpo.loss_type must be one of grpo, dr_grpo, dapo, got 'ppo'"),
        ({"importance_sampling_level": "word"}, "must be one of token, sequence, got 'word'"),
        ({"num_generations": 1}, "grpo.num_generations must be a whole number, 2 or more, got 1"),
        ({"num_iterations": 0}, "grpo.num_iterations must be a whole number, 1 or more, got 0"),
        ({"max_latents": 0}, "grpo.max_latents must be a whole number, 1 or more, got 0"),
        ({"steps_per_generation": 0}, "grpo.steps_per_generation must be 1 or more, or null"),
        ({"epsilon": 1.5}, "grpo.epsilon must be between 0 and 1"),
        ({"confidence_thresholds": (0, 0.5)}, "each 0 or above 0.5 and at most 1, or null"),
        ({"confidence_thresholds": (1.5,)}, "each 0 or above 0.5 and at most 1, or null"),
        ({"confidence_thresholds": ()}, "grpo.confidence_thresholds must be a list of at least one value"),
        ({"epsilon_high": 0.0}, "grpo.epsilon_high must be above 0 or null"),
        ({"beta": math.nan}, "grpo.beta must be a number, 0 or more, got nan"),
        ({"max_completion_length": 0}, "max_completion_length must be 1 or more, got 0"),
        ({"latent_temperature": -1.0}, "grpo.latent_temperature must be 0, or from 1e-06 to 100, got -1.0"),
        ({"compression_factors": ()}, "grpo.compression_factors must be a list of at least one factor"),
        ({"reward_funcs": ()}, "grpo.reward_funcs must be a list of at least one reward, got ()"),
        ({"early_stopping_patience": 0}, "grpo.early_stopping_patience must be 1 or more, or null"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="grpo") as error:
        grpo(**values)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "training", "words"),
    [
        (
            {"num_generations": 3},
            {},
            r"= 8 outputs of a generation must be a multiple of grpo.num_generations \(3\)",
        ),
        (
            {"steps_per_generation": 3},
            {"gradient_accumulation_steps": 2},
            r"steps_per_generation \(3\) must be a multiple of training.gradient_accumulation_steps \(2\)",
        ),
        (
            {},
            {"draws_per_example": 2},
            "training.draws_per_example must be 1 for grpo, whose rows are outputs",
        ),
        ({"num_generations": 8, "steps_per_generation": 7}, {}, "6 questions do not fill a generation of 7"),
        ({"compression_factors": (2.5,)}, {}, "compression_factor 2.5 is not whole"),
        ({"max_latents": 200}, {}, "model's context is 128"),
    ],
)
def test_what_does_not_fit_is_found_before_the_first_step(
    tmp_path: Path, values: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run(tmp_path, grpo(**values), **training)
    assert not (tmp_path / "checkpoints").exists()


def test_methods_without_log_probs_and_twin_questions_are_refused(tmp_path: Path) -> None:
    lm, pause = tiny_lm("llama"), registry.build("pause")
    with pytest.raises(ValueError, match="method.name pause cannot be trained by grpo"):
        grpo_train.train(lm, pause, EXAMPLES, TrainingConfig(**QUICK), grpo(), tmp_path)
    lm, method = model()
    with pytest.raises(ValueError, match="some questions are there twice"):
        grpo_train.train(lm, method, [*EXAMPLES, EXAMPLES[0]], TrainingConfig(**QUICK), grpo(), tmp_path)
    with pytest.raises(
        ValueError, match="unknown reward in grpo.reward_funcs: 'acuracy', did you mean 'accuracy'"
    ):
        rewards.by_name(["acuracy"])
