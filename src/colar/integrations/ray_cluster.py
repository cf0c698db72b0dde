"""A Ray cluster: joining it, checking its machines before they work, and sampling GRPO's outputs by its actors."""

import functools
import itertools
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

try:
    import ray as ray  # exported: ray_answers and ray_serve import it here, for this message
    import ray.data
except ImportError as error:
    raise ValueError("--ray needs Ray: from your clone of colar, pip install '.[ray]'") from error

import numpy as np
import safetensors.torch
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import colar
from colar import files
from colar.checks import check_number
from colar.data.example import Example
from colar.methods.base import Method
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.ops import devices


@dataclass(frozen=True)
class Pool:
    """The actors that answer: `actors` of them (None: one per GPU, else as many as fit), each with `cpus` CPUs."""

    address: str | None
    actors: int | None
    cpus: int

    def __post_init__(self) -> None:
        check_number("--ray_cpus", self.cpus, 1)
        if self.actors is not None:
            check_number("--ray_actors", self.actors, 1)


@dataclass(frozen=True)
class Actors:
    """The number of actors, and what Ray reserves for each of them."""

    n: int
    reserved: Mapping[str, int]


@contextmanager
def joined(
    pool: Pool, device: str | None, checkpoints: Sequence[str], paths: list[str], option: str = "--ray"
) -> Iterator[Actors]:
    """Join the cluster for the block, after a check that all of its machines have these checkpoints and paths.

    ValueError, which names the `option`, if there is no cluster, the actors do not fit into it, a machine differs, or
    Ray fails in the block.
    """
    connect(pool.address, option)
    try:
        actors = reserve(pool, device, option)
        for path in checkpoints:
            check_nodes(path, paths, option)
        yield actors
    except ray.exceptions.RayError as error:
        # The cause of an error in a task, because Ray's own text ends with advice on its settings.
        cause = getattr(error, "cause", None) or error
        raise ValueError(f"{option} {pool.address or 'by default'}: {last_line(cause)}") from error
    finally:
        ray.shutdown()


def connect(address: str | None, option: str) -> None:
    """Join the cluster at an address, else that of $RAY_ADDRESS, else one that runs here, else one that is started."""
    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    try:
        if colon and "/" not in host:
            # Checked first, because Ray itself retries for half a minute, and then prints a page of text.
            socket.create_connection((host, int(port)), timeout=10).close()
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        # A cluster for one command needs no dashboard, which starts a dozen processes.
        dashboard = False if address == "local" else None
        ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        # Data sets keep the settings that hold when they are made.
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        # Each chunk is a block: by default Ray would merge chunks up to 128 MB, for one actor.
        context.target_max_block_size = 1
    except (OSError, ValueError, RuntimeError) as error:
        hint = "; `ray start --head` starts one here" if address == "auto" else ""
        raise ValueError(
            f"{option} {address or 'by default'}: no Ray cluster answers there{hint} ({last_line(error)})"
        ) from error


def reserve(pool: Pool, device: str | None, option: str) -> Actors:
    """Number and resources of the actors of a pool. ValueError if they do not fit into the cluster."""
    cpus = [int(machine["Resources"].get("CPU", 0)) for machine in machines()]
    gpus = [int(machine["Resources"].get("GPU", 0)) for machine in machines()]
    on_gpu = any(gpus) if device is None else device.startswith("cuda")
    by_cpu = [n // pool.cpus for n in cpus]
    fit = sum(map(min, by_cpu, gpus)) if on_gpu else sum(by_cpu)
    n = fit if pool.actors is None else pool.actors
    if not 1 <= n <= fit:
        each = f"{pool.cpus} CPUs and a GPU" if on_gpu else f"{pool.cpus} CPUs"
        raise ValueError(
            f"{option}: an engine has {each}; the cluster has {sum(cpus)} CPUs and {sum(gpus)} GPUs: too few for "
            f"{max(n, 1)} engines"
        )
    return Actors(n, {"num_cpus": pool.cpus, "num_gpus": int(on_gpu)})


def machines() -> list[dict[str, Any]]:
    """Ray's descriptions of the machines that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def only_on(node: str) -> NodeAffinitySchedulingStrategy:
    """Ray's scheduling of a task or an actor on one machine, given by its id."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def check_nodes(path: str, inputs: list[str], option: str) -> None:
    """Compare every machine of the cluster with this one (`installed`). ValueError names a machine that differs."""
    here = installed(path, inputs)
    answers = []
    for node in machines():
        options = {"num_cpus": 0, "scheduling_strategy": only_on(node["NodeID"]), "max_retries": 0}
        task = ray.remote(installed).options(**options)
        answers.append((node["NodeManagerAddress"], task.remote(path, inputs)))
    for name, answer in answers:
        try:
            check_same(name, here, ray.get(answer), option)
        except ray.exceptions.RayError as error:
            raise ValueError(f"{option}: {name} cannot work for this command: {last_line(error)}") from error


def installed(path: str, inputs: list[str]) -> dict[str, str]:
    """Versions, digests of code and weights, and the first missing input, on the machine that runs this function."""
    package = Path(colar.__file__).parent
    code = files.digest(module.read_bytes() for module in sorted(package.rglob("*.py")))
    try:
        digest = checkpoint.digest(checkpoint.resolve(path))
    except (ValueError, OSError) as error:
        digest = str(error)
    return {
        "colar": f"{colar.__version__} ({code})",
        "torch": torch.__version__,
        "weights": digest,
        "missing input": next((each for each in inputs if not Path(each).exists()), "none"),
    }


def check_same(node: str, here: Mapping[str, str], there: Mapping[str, str], option: str) -> None:
    """Raise ValueError if a machine differs from this one."""
    differ = [f"{key} {there[key]}, here {here[key]}" for key in here if there[key] != here[key]]
    if differ:
        raise ValueError(f"{option}: {node} would give other answers than this machine: {'; '.join(differ)}")


def last_line(error: BaseException) -> str:
    """The last line of an error's text, because Ray's errors name the cause after the frames of other machines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__


# GRPO's outputs (`grpo.rollout_workers`): one process trains, N others sample
#
#   trainer   trained weights --ray.put a call--> all actors        a share of the questions --> each actor
#             outputs of all shares, in the order of the questions <-- outputs --'
#
# Each call passes the trained weights and the method, so that an actor that Ray has restarted answers as any other.
# Outputs do not depend on the actor: shares follow from the questions and N, draws from a request's seed.

ROLLOUT_OPTION = "grpo.rollout_workers"
"""The key of a recipe, for errors."""
RETRIES = 3
"""Retries of a call whose actor has died; restarts of actors are not limited."""

LoadModel = Callable[[], LatentLM]
SampleOutputs = Callable[..., list[Any]]
"""(lm, method, config, examples, seed, generation) -> outputs, those of an example one after another."""


@contextmanager
def rollout_pool(
    n: int, load_model: LoadModel, start: str, roll_out: SampleOutputs
) -> Iterator[SampleOutputs]:
    """Join a cluster for the block. Gives a function with which N of its actors do the work of `roll_out`.

    `load_model` runs in each actor, and loads the model that the run starts from; `start` is its checkpoint, which
    every machine has under the same path. ValueError as in `joined`, and if an actor cannot load the model.
    """
    with joined(Pool(None, n, 1), None, [start], [], ROLLOUT_OPTION) as actors:
        sampler = ray.remote(Sampler).options(**actors.reserved, max_restarts=-1, max_task_retries=RETRIES)
        samplers = [sampler.remote(load_model, roll_out) for _ in range(n)]
        # Wait for all actors, so that one that cannot load the model fails before any work.
        ray.get([sampler.__ray_ready__.remote() for sampler in samplers])
        yield partial(_rolled_out, samplers)


def _rolled_out(
    samplers: Sequence[Any],
    lm: LatentLM,
    method: Method,
    config: Any,
    examples: Sequence[Example],
    *draws: int,
) -> list[Any]:
    """The outputs of all actors with the current weights. RayError if a call has failed after its retries."""
    weights = ray.put(trained_weights(lm))
    pickled = ray.cloudpickle.dumps(method)
    calls = []
    for sampler, share in zip(samplers, shares(examples, len(samplers)), strict=False):
        calls.append(sampler.sample.remote(weights, pickled, config, share, *draws))
    return list(itertools.chain.from_iterable(map(pickle.loads, ray.get(calls))))


class Sampler:
    """Ray actor that samples from the model of a run."""

    def __init__(self, load_model: LoadModel, roll_out: SampleOutputs) -> None:
        self.lm = load_model().to(devices.best())
        self.roll_out = roll_out
        # The same object for the same method: for another one the engine would record its CUDA graphs anew.
        self.method_of = functools.lru_cache(maxsize=1)(pickle.loads)

    @torch.no_grad()
    def sample(self, weights: bytes, method: bytes, *arguments: Any) -> bytes:
        """The pickled outputs for a share of the questions, sampled with these weights."""
        parameters = dict(self.lm.named_parameters())
        for name, value in safetensors.torch.load(weights).items():
            parameters[name].copy_(value)
        return pickle.dumps(self.roll_out(self.lm, self.method_of(method), *arguments))


def trained_weights(lm: LatentLM) -> bytes:
    """All weights that are trained (the adapter or the whole model, and the method's modules), by name."""
    trained = {}
    for name, weight in lm.named_parameters():
        if weight.requires_grad:
            trained[name] = weight.detach().cpu().contiguous()
    return bytes(safetensors.torch.save(trained))


def shares(examples: Sequence[Example], n: int) -> list[list[Example]]:
    """Split the questions into N parts, or one per question if they are fewer; the first parts may have one more."""
    parts = np.array_split(np.arange(len(examples)), min(n, len(examples)))
    return [[examples[i] for i in part] for part in parts]
