"""A device without float64 (Apple's mps): noise is made on the CPU, and nothing else is of that dtype there.

No such device is here. The CPU is taken for one, and an operation that makes float64 on it is an error.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from colar.engine import engine as engine_module
from colar.engine import running
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base, pretrained, registry
from colar.methods.base import Batch, Method
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.ops import devices, noise
from colar.training import sft
from colar.training.config import TrainingConfig
from colar.training.objective import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5)
CONFIGS: dict[str, dict[str, Any]] = {
    "gaussian": {"stop": "argmax"},
    "sampled labels": {"stop": "argmax", "chain_label": "sampled"},
    "sequential": {"compression_factors": [1, 1.5, 2.75]},
}


class NoFloat64(TorchDispatchMode):
    """Fails where an operation makes a float64 tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            assert not isinstance(tensor, Tensor) or tensor.dtype != torch.float64, func
        return result


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a device without it; what is computed on the CPU for such a device may have it."""

    def on_the_cpu(module: Any, name: str) -> None:
        own = getattr(module, name)

        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return own(*args)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("mps", "cpu"))
    on_the_cpu(noise, "_uniform")
    on_the_cpu(noise, "_normal")
    on_the_cpu(devices, "to_float64")
    on_the_cpu(base, "param_columns")


def build(config: dict[str, Any], lora: LoraSettings | None = None) -> tuple[LatentLM, Method]:
    torch.manual_seed(0)
    lm = liven(tiny_lm("llama", lora=lora))
    lm.causal_lm.get_output_embeddings().bias.requires_grad_(False)
    method = registry.build("colar", config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    return lm, method


def test_float64_is_noticed() -> None:
    with NoFloat64(), pytest.raises(AssertionError):
        torch.ones(2).double()


def test_draws_are_rounded_and_stay_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = noise.keys(torch.arange(5000), 3)
    uniform, normal = noise.uniform(keys, 3), noise.normal(keys, 3)
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("cpu",))
    rounded = noise.uniform(keys, 3)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), uniform, rtol=0, atol=2e-7)
    assert torch.equal(noise.normal(keys, 3), normal)
    largest = torch.full((1, 1), 1 - 2.0**-53, dtype=torch.float64)
    assert float(largest.float()) == 1
    monkeypatch.setattr(noise, "_uniform", lambda *_: largest)
    assert float(noise.uniform(keys, 1)) < 1


@pytest.mark.parametrize("name", CONFIGS)
def test_thinking_makes_none(name: str, request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    """And comes to the same answers, but for a draw at the very edge of a token."""
    lm, method = build(CONFIGS[name])
    requests = [
        Request(e.id, e.question, method.Params(), SAMPLED, seed=i, keep_latents=True)
        for i, e in enumerate(EXAMPLES)
    ]
    wanted = Engine(lm, method, 4).generate(requests)
    request.getfixturevalue("without_float64")
    choose_inputs = running.choose_inputs

    def watched(*args: Any) -> Any:
        with NoFloat64():
            return choose_inputs(*args)

    monkeypatch.setattr(engine_module, "choose_inputs", watched)
    found = Engine(lm, method, 4).generate(requests)
    assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
    assert sum(done.length for done in found) > 0


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_makes_none(name: str) -> None:
    lm, method = build(CONFIGS[name], LoraSettings(r=4))
    rows = [method.encode(lm.template, example, Random(i), 0.0) for i, example in enumerate(EXAMPLES)]
    flat = Batch.collate(rows).tensors()
    tensors = {key: devices.send(column, torch.device("cpu")) for key, column in flat.items()}
    assert all(column.dtype != torch.float64 for column in tensors.values())
    with NoFloat64():
        Objective(lm, method)(**tensors)["loss"].backward()


@pytest.mark.usefixtures("without_float64")
def test_a_run_trains(tmp_path: Path) -> None:
    """Its batches stay on the CPU, in float64 where they are; what is sent of them is not."""
    lm, method = build({}, LoraSettings(r=4))
    config = TrainingConfig(report_to="none", max_steps=2, per_device_train_batch_size=4, logging_steps=1)
    result = sft.train(lm, method, EXAMPLES, config, tmp_path)
    assert result.steps == 2
    assert devices.send(torch.ones(1, dtype=torch.float64), torch.device("cpu")).dtype == torch.float32


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"training.device must be one of cuda, mps, cpu, got 'tpu'"):
        TrainingConfig(device="tpu")
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match="training.device mps is not there"):
            TrainingConfig(device="mps").check_installed()
