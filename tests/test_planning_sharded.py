"""Weights that are split between processes (training.fsdp): what a plan says a card holds, beside what a process does."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import together
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colar import planning, recipe
from colar.model import sharded
from colar.planning import hardware
from colar.planning.estimate import Estimate
from colar.training import peak, preflight, recompute, sft
from colar.training.compiled_layers import decoder_layers
from colar.training.run_folder import RunFolder
from colar.training.stages import Stage

SMALL = ["--data.train_size", "64", "--data.validation_size", "0", "--output", "unused"]
FSDP = ["--training.fsdp", "true"]
ACCUMULATED = ["--training.gradient_accumulation_steps", "2"]
ADAPTER = ["--model.lora.r", "8", "--model.dtype", "bfloat16", "--training.gradient_checkpointing", "true"]

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(*keys: str, count: int = 2) -> Estimate:
    return planning.plan(recipe.load("tiny/cot", [*SMALL, *FSDP, *keys]), "h100", count)


class Storages(TorchDispatchMode):
    """The most that all storages hold at one time, as large as each is then: FSDP2 empties and fills its own."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0
        self._add(there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # The storage of a DTensor is none of its own.
        self._add([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        return result

    def _add(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.known[storage._cdata] = weakref.ref(storage)
        alive = [storage for reference in self.known.values() if (storage := reference()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))


def held_by_a_process(keys: list[str]) -> int:
    """Bytes at most, of the second of two batches of an update; AdamW's moments are added."""
    made = recipe.load("tiny/cot", [*SMALL, *FSDP, *keys])
    examples, _ = recipe.load_examples(made.data)
    lm, method = recipe.load_model(made)
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft.make_trainer(lm, method, examples, made.training, RunFolder(Path(folder)))
    if made.training.gradient_checkpointing:
        recompute.enable(lm)
    sharded.shard(trainer.objective, decoder_layers(lm), torch.device("cpu"))
    shares = {weight: weight.to_local() for weight in trainer.objective.parameters()}
    moments = peak.ADAM_MOMENTS * peak.bytes_of(
        share for weight, share in shares.items() if weight.requires_grad
    )
    batch = preflight.longest_batch(trainer, [Stage(0, 1)])
    trainer.objective.train()
    with Storages(list(shares.values())) as counted:
        for _ in range(made.training.gradient_accumulation_steps):
            preflight._seconds(trainer, [batch])
    return counted.peak + moments


@pytest.mark.parametrize(
    "keys",
    [ACCUMULATED, [*ACCUMULATED, "--training.per_device_train_batch_size", "1"], [*ACCUMULATED, *ADAPTER]],
    ids=["full", "one-row", "adapter"],
)
def test_memory_of_a_plan_is_what_two_processes_hold(tmp_path: Path, keys: list[str]) -> None:
    found = together(2, tmp_path, held_by_a_process, keys)
    assert planned(*keys).peak_bytes == pytest.approx(max(found), rel=0.15)


def test_more_cards_hold_less_each() -> None:
    """But never less than the weights beside the layers, which are whole on each of them."""
    sizes = [planned(count=count).numbers for count in (2, 4, 8)]
    assert [each["a card's share"] for each in sizes] == sorted(
        (each["a card's share"] for each in sizes), reverse=True
    )
    assert sizes[0]["a card's share"] == pytest.approx(4 * sizes[2]["a card's share"], rel=0.001)
    assert len({each["gathered"] for each in sizes}) == 1
    whole = planning.plan(recipe.load("tiny/cot", SMALL), "h100", 8).numbers["peak memory"]
    assert sizes[2]["peak memory"] < whole


def test_a_table_says_what_is_counted() -> None:
    said = [" ".join(line.split()) for line in planned(count=8).text()]
    assert any(
        line.startswith("a card's share") and "moments" in line and "gradients" in line for line in said
    )
    assert any(line.startswith("gathered") and "two layers" in line for line in said)
    # 8 processes read 3.2 MiB each.
    assert planned(count=8).numbers["at the start"] == pytest.approx(
        8 * planned(count=2).numbers["at the start"] / 2
    )
    assert any("weights and gradients sent in" in line for line in said)


def test_parts_of_a_batch_gather_weights_again() -> None:
    """Time grows by what is sent; one pass sends as much as an all-reduce of half of that."""
    once, parts = planned(), planned("--training.tokens_per_batch", "100")
    assert parts.numbers["an update"] > 1.2 * once.numbers["an update"]
    # Each way 1 byte of 2: a ring of two cards sends 2 (2 - 1) / 2 of all.
    assert hardware.all_reduce_seconds(hardware.GPUS["h100"], 2, 450e9) == pytest.approx(1)


def test_where_shares_do_not_fit_more_cards_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.GPUS, "small", hardware.Gpu("small", 0.008, 100, 1000, 100))
    (problem,) = planning.plan(recipe.load("tiny/cot", [*SMALL, *FSDP]), "small", 2).problems
    assert "weights, moments and gradients alone take" in problem
    assert "divide the weights between more cards" in problem
    assert "training.fsdp" not in problem


@pytest.mark.parametrize(
    ("name", "keys", "count", "says"),
    [
        ("tiny/cot", SMALL, 1, "set --count to 2 or more"),
        ("tiny/cot", [*SMALL, "--data.validation_size", "8"], 2, "set data.validation_size 0"),
        ("tiny/cot", [*SMALL, "--method.name", "coconut"], 2, "training.fsdp cannot train coconut"),
        ("tiny/grpo", SMALL, 2, "training.fsdp is for SFT"),
    ],
)
def test_what_a_run_rejects_a_plan_rejects(name: str, keys: list[str], count: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planning.plan(recipe.load(name, [*keys, *FSDP]), "h100", count)


def test_a_check_does_not_measure_what_is_split() -> None:
    with pytest.raises(ValueError, match="`colar plan` computes what a device holds"):
        planning.check(recipe.load("tiny/cot", [*SMALL, *FSDP]))
