"""GRPO's outputs from a pool of Ray actors: those of one process, also where actors are killed."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray_workers
import torch

from colar.data.arithmetic import ArithmeticConfig, generate
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.recipe.run import load_method, load_model, load_model_and_rows, run, sampling_pool
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, ValidationConfig, to_json
from colar.training.config import TrainingConfig
from colar.training.grpo import rollout
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.rollout import Output
from colar.training.resumable_run import TrainResult
from colar.training.run_folder import RunFolder

pytest.importorskip("ray", reason="needs the extra ray: pip install '.[ray]'")

from benchmarks import cluster

from colar.integrations import ray_cluster

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTIONS = list(generate(ArithmeticConfig(), "test", 5, seed=0))
"""Of two shares one has three, the other two."""
GRPO = GrpoConfig(num_generations=2, max_latents=4, max_completion_length=4, compression_factors=(2.0, 3.0))


@pytest.fixture(scope="module")
def machines(ray_folder: Path) -> Iterator[Any]:
    """A cluster of two CPUs."""
    with ray_workers.cluster(ray_folder, 2) as running:
        yield running


@pytest.fixture
def address(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, runs find the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", machines.address)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints to start from, by their method."""
    folder = tmp_path_factory.mktemp("starts")
    return {name: save(folder / name, name) for name in ("colar", "sequential")}


def save(folder: Path, name: str) -> Path:
    """A random model whose rows end at different lengths."""
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
    method = registry.build(name)
    pretrained.attach(lm, method, 0)
    change(lm)
    with torch.no_grad():
        lm.causal_lm.get_output_embeddings().weight[[lm.template.separator_id, lm.template.eos_id]] *= 3
    method.prepare(lm, [])
    return pretrained.save(lm, method, folder, {"seed": 7, "label": ""}, "# card\n")


@torch.no_grad()
def change(lm: LatentLM) -> None:
    """Move all trained weights, as an optimiser does."""
    draws = torch.Generator().manual_seed(1)
    for weight in lm.parameters():
        if weight.requires_grad:
            weight += 0.1 * torch.randn(weight.shape, generator=draws)


def recipe(start: Path, folder: Path, lora: bool = False, **grpo: Any) -> Recipe:
    """Three updates, each by a generation of its own."""
    return Recipe(
        output=str(folder),
        model=ModelConfig(init_from=str(start), lora=LoraSettings(r=4, lora_alpha=8) if lora else None),
        data=DataConfig(train_size=8, validation_size=0),
        method={"name": start.name},
        training=TrainingConfig(
            max_steps=3, per_device_train_batch_size=8, learning_rate=1e-4, report_to="none", logging_steps=1
        ),
        validation=ValidationConfig(page_size=0),
        grpo=dataclasses.replace(GRPO, reward_funcs=("length_penalty",), **grpo),
    )


def fields(outputs: Sequence[Output]) -> list[Any]:
    """Everything about outputs that can be compared: not seconds, nor the place in the queue of their engine."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [value.dtype, value.tolist()]
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    rows = []
    for output in outputs:
        completion = dataclasses.replace(output.completion, seconds=0, number=0)
        rows.append([output.example, output.question_ids, output.eos_id, plain(vars(completion))])
    return rows


def kill_one_that_samples() -> threading.Thread:
    """A thread that kills an actor in the middle of its call."""

    def kill() -> None:
        while not (sampling := cluster.workers("Sampler.sample")):
            pass
        sampling[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize(("name", "lora", "kills"), [("colar", True, True), ("sequential", False, False)])
@pytest.mark.usefixtures("address")
def test_outputs_are_those_of_one_process(
    name: str, lora: bool, kills: bool, starts: dict[str, Path], tmp_path: Path
) -> None:
    """Bit for bit where batches are the same. In the second generation weights have changed, and an actor is killed."""
    made = recipe(starts[name], tmp_path, lora, rollout_workers=2)
    method = load_method(made)
    lm = load_model(made, method)
    lengths = set()
    with sampling_pool(made, method) as roll_out:
        assert roll_out is not None
        for generation in range(2):
            killing = kill_one_that_samples() if kills and generation else None
            found = roll_out(lm, method, GRPO, QUESTIONS, 3, generation)
            if killing is not None:
                killing.join()
            assert fields(found) == fields(in_shares(lm, method, GRPO, QUESTIONS, 3, generation))
            # In a batch with other rows the last bit of a sum may be another one.
            alone = rollout.roll_out(lm, method, GRPO, QUESTIONS, 3, generation)
            assert [output.sampled_ids for output in found] == [output.sampled_ids for output in alone]
            lengths |= {(output.completion.length, len(output.sampled_ids)) for output in found}
            change(lm)
    assert len(lengths) > 3


def curve(result: TrainResult) -> list[dict[str, float]]:
    rows = [row for row in result.history if "loss" in row]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def in_shares(lm: LatentLM, method: Method, config: Any, examples: Any, *draws: int) -> list[Output]:
    """The outputs of one process, in the batches that two actors have."""
    n = -(-len(examples) // 2)
    shares = [share for share in (examples[:n], examples[n:]) if share]
    return [output for share in shares for output in rollout.roll_out(lm, method, config, share, *draws)]


@pytest.mark.usefixtures("address")
def test_a_run_is_that_of_one_process(starts: dict[str, Path], tmp_path: Path) -> None:
    """Losses and all metrics of three updates; dynamic sampling asks for one more question, or two, at a time."""
    made = recipe(starts["colar"], tmp_path / "pool", dynamic_sampling=1, rollout_workers=2)
    found = curve(run(made))
    method = load_method(made)
    lm, examples, _ = load_model_and_rows(made, method)
    assert made.grpo is not None
    same = grpo_train.train(
        lm, method, examples, made.training, made.grpo, tmp_path / "shares", roll_out=in_shares
    )
    assert found == curve(same)
    assert len({row["grad_norm"] for row in found}) == 3
    # The number of actors may change when a run goes on.
    alone = recipe(starts["colar"], Path(made.output), dynamic_sampling=1)
    RunFolder(made.output).check_recipe(to_json(alone))


def test_outputs_are_pickled_without_the_rows_beside_them(starts: dict[str, Path]) -> None:
    """A thought's tensors are views of those of the engine's batch, and there are thousands of them."""
    for name, lora in (("colar", True), ("sequential", False)):
        made = recipe(starts[name], Path(), lora)
        method = load_method(made)
        outputs = rollout.roll_out(load_model(made, method), method, GRPO, QUESTIONS, 3, 0)
        pickled = pickle.dumps(outputs)
        assert fields(pickle.loads(pickled)) == fields(outputs)
        tensors = [tensor for output in outputs for tensor in output.completion.info.values()]
        assert len(pickled) < 3 * sum(tensor.nbytes for tensor in tensors) + 4000 * len(outputs)


@pytest.mark.usefixtures("address")
def test_more_actors_than_cpus_are_one_line(starts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^grpo.rollout_workers: .* 2 CPUs and 0 GPUs: too few for 3 engines$"
    ):
        run(recipe(starts["colar"], tmp_path, rollout_workers=3))


@pytest.mark.usefixtures("address")
def test_a_model_that_an_actor_cannot_load_is_one_line(starts: dict[str, Path], tmp_path: Path) -> None:
    made = recipe(starts["colar"], tmp_path)
    elsewhere = partial(load_model, recipe(tmp_path / "colar", tmp_path), load_method(made))
    with (
        pytest.raises(
            ValueError, match=r"^grpo.rollout_workers by default: .*no checkpoint at .*there is no such"
        ),
        ray_cluster.rollout_pool(1, elsewhere, str(starts["colar"]), rollout.roll_out),
    ):
        pass


def test_wrong_input_is_one_line(
    starts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^grpo.rollout_workers must be a whole number, 0 or more, got -1$"):
        recipe(starts["colar"], tmp_path, rollout_workers=-1)
    made = recipe(starts["colar"], tmp_path, rollout_workers=2)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"^grpo.rollout_workers 127.0.0.1:1: no Ray cluster answers there"):
        run(made)
    assert made.grpo is not None
    with pytest.raises(
        ValueError, match="must be 0 under torchrun, whose 2 processes divide the questions, got 2"
    ):
        made.grpo.plan(made.training, 2)
    method = load_method(made)
    lm = load_model(made, method)
    with pytest.raises(ValueError, match="grpo.rollout_workers is for a recipe"):
        grpo_train.train(lm, method, QUESTIONS, made.training, made.grpo, tmp_path)
    here = {"weights": "1"}
    with pytest.raises(ValueError, match="^grpo.rollout_workers: 10.0.0.2 would give other answers"):
        ray_cluster.check_same("10.0.0.2", here, {"weights": "2"}, ray_cluster.ROLLOUT_OPTION)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ValueError, match=r"^grpo.rollout_workers needs Ray: .* pip install '.\[ray\]', or set it 0$"
    ):
        recipe(starts["colar"], tmp_path, rollout_workers=2)


@pytest.mark.parametrize(
    ("questions", "n", "sizes"), [(5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1]), (4, 1, [4])]
)
def test_shares_are_even_and_in_order(questions: int, n: int, sizes: list[int]) -> None:
    examples = [QUESTIONS[0]] * questions
    assert [len(share) for share in ray_cluster.shares(examples, n)] == sizes
    assert [each for share in ray_cluster.shares(QUESTIONS, n) for each in share] == QUESTIONS
