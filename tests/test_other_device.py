"""Everything that a GPU runs, on a device that refuses tensors of the CPU as CUDA does (fake_device.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import fake_device
import pytest
import torch
from families import EXAMPLES, tiny_lm
from test_gpu_syncs import CASES as LOOKED

from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation.evaluate import AnswerSettings, validate
from colar.look.inspect import Inspection, inspect_system
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Method
from colar.methods.rollouts import Rollouts
from colar.model import probes
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.objective import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **LOOKED,
    "threshold": (
        "sequential",
        {"confidence_thresholds": [0.5]},
        {"compression_factor": 2, "confidence_threshold": 0.5},
    ),
    "icot": ("icot", {}, {}),
    "distill": ("distill", {}, {}),
    "sim_cot": ("sim_cot", {}, {}),
}
GREEDY = Decoding(max_latents=3, max_completion_length=2)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=3, max_completion_length=2)
ASKED = EXAMPLES[:2]


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with fake_device.active() as name:
        yield name


def made(case: str) -> tuple[LatentLM, Method, Any]:
    name, config, values = CASES[case]
    lm = tiny_lm("llama")
    method = registry.build(name, config)
    torch.manual_seed(0)
    pretrained.attach(lm, method, seed=1)
    list(method.prepare(lm, EXAMPLES))
    return lm.eval(), method, registry.make_params(method, values)


def test_it_refuses_what_cuda_refuses(elsewhere: str) -> None:
    there, here = torch.ones(3, device=elsewhere), torch.ones(3)
    weight_VD = torch.ones(3, 2, device=elsewhere)
    assert (there + 1).tolist() == [2, 2, 2]
    assert (there * torch.tensor(2.0)).cpu().tolist() == [2, 2, 2]
    assert there[torch.tensor([0, 1])].tolist() == there[[0, 1]].tolist() == [1, 1]
    for mixed in (
        lambda: there + here,
        lambda: here[torch.tensor([0], device=elsewhere)],
        lambda: torch.nn.functional.embedding(torch.tensor([1]), weight_VD),
        lambda: torch.where(here > 0, there, 0.0),
        lambda: torch.cat([there, here]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mixed()


def test_trees_are_for_models_on_a_device_too(elsewhere: str) -> None:
    lm = tiny_lm("llama").to(elsewhere)
    # A new model is probed on the CPU.
    probes._FOUND.clear()
    assert probes.why_no_trees(lm.causal_lm) is None


@pytest.mark.parametrize(
    ("case", "decoding"),
    [
        *((case, GREEDY) for case in CASES if case != "sim_cot"),
        ("gaussian", SAMPLED),
        ("sequential", SAMPLED),
    ],
)
def test_answers_are_those_of_the_cpu(case: str, decoding: Decoding, elsewhere: str) -> None:
    lm, method, params = made(case)
    asked = [
        Request(row.id, row.question, params, decoding, seed, keep_latents=True)
        for seed, row in enumerate(ASKED)
    ]
    wanted = Engine(lm, method, 2).generate(asked)
    found = Engine(lm.to(elsewhere), method, 2).generate(asked)
    assert [each.text for each in found] == [each.text for each in wanted]
    assert [each.length for each in found] == [each.length for each in wanted]


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("argmax", "icot")])
def test_losses_and_gradients_are_those_of_the_cpu(case: str, elsewhere: str) -> None:
    """Training leaves batches on the CPU."""
    lm, method, _ = made(case)
    rows = [method.encode(lm.template, row, Random(0), 0.0) for row in ASKED]

    def loss(device: str) -> tuple[float, float]:
        lm.to(device).zero_grad()
        total = Objective(lm, method)(**Batch.collate(rows).tensors())["loss"]
        total.backward()
        grads = [weight.grad.norm() ** 2 for weight in lm.parameters() if weight.grad is not None]
        return float(total), float(sum(grads))

    wanted = loss("cpu")
    assert loss(elsewhere) == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("case", ["gaussian", "threshold"])
def test_the_page_of_inspect_is_that_of_the_cpu(case: str, elsewhere: str, tmp_path: Path) -> None:
    """Every part of it: controls, changed thoughts, causes, the page."""
    lm, method, params = made(case)

    def numbers(device: str) -> list[dict[str, Any]]:
        system = inspect_system("m", lm.to(device), method, ASKED, params, GREEDY)
        if device == elsewhere:
            Inspection(ASKED, [system], {"asked": {}}).save(tmp_path / "page.html")
        return _without_times(system)

    assert numbers(elsewhere) == numbers("cpu")
    assert (tmp_path / "page.html").stat().st_size > 1000


def _without_times(value: Any) -> Any:
    """The numbers rounded, without seconds."""
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if name != "seconds"}
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("case", ["cot", "gaussian", "sequential"])
def test_reinforcement_scores_what_it_sampled(case: str, elsewhere: str) -> None:
    lm, method, _ = made(case)
    config = GrpoConfig(num_generations=2, max_latents=5, max_completion_length=4)
    lm.to(elsewhere)
    outputs = rollout.roll_out(lm, method, config, EXAMPLES[:2], 0, 0)
    rollouts = rollout.collate(outputs, lm.width)
    old_RN = rollout.engine_logps(method, outputs, rollouts)
    tensors = {name: column.to(elsewhere) for name, column in rollouts.tensors().items()}
    scores = method.logps(lm, Rollouts.from_tensors(tensors))
    difference_RN = (scores.logps.detach().cpu() - old_RN).abs()
    assert float(difference_RN[scores.mask.cpu()].max()) < 1e-3
    scores.logps.sum().backward()


def test_a_validation_by_generation_is_that_of_the_cpu(elsewhere: str) -> None:
    lm, method, params = made("gaussian")
    limits = AnswerSettings(max_latents=4, max_completion_length=3)

    def found(device: str) -> dict[str, float]:
        metrics = validate(lm.to(device), method, ASKED, [params], "greedy", limits)
        return {name: value for name, value in metrics.items() if "second" not in name}

    assert found(elsewhere) == found("cpu")


def test_evaluating_leaves_each_module_as_it_was() -> None:
    lm = tiny_lm("llama").train()
    lm.decoder_layers()[0].eval()
    modes = [module.training for module in lm.modules()]
    with lm.evaluating():
        assert not any(module.training for module in lm.modules())
    assert [module.training for module in lm.modules()] == modes
    assert len(set(modes)) == 2


def test_a_gpu_answers_more_requests_at_once() -> None:
    assert [devices.requests_at_once(name) for name in ("cpu", "cuda", "cuda:1", "mps")] == [32, 256, 256, 32]
