"""A Ray cluster: joining it, what is checked of its machines before they work, and GRPO's outputs from its actors."""

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
    import ray as ray  # exported: ray_answers and ray_serve have it from here, behind this message
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
    """The actors that answer: `actors` of them (None: one for each GPU, else as many as fit), `cpus` CPUs each."""

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
    """Inside, this process has joined the cluster, whose machines all have these checkpoints and paths.

    ValueError, which names the `option`, where there is no cluster, the actors do not fit into it, a machine differs or
    Ray fails inside.
    """
    connect(pool.address, option)
    try:
        actors = reserve(pool, device, option)
        for path in checkpoints:
            check_nodes(path, paths, option)
        yield actors
    except ray.exceptions.RayError as error:
        # Of an error in a task, Ray's own text ends with what its settings could be.
        cause = getattr(error, "cause", None) or error
        raise ValueError(f"{option} {pool.address or 'by default'}: {last_line(cause)}") from error
    finally:
        ray.shutdown()


def connect(address: str | None, option: str) -> None:
    """Join the cluster at an address, or that of $RAY_ADDRESS, or the one that runs here, or one that is started."""
    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    try:
        if colon and "/" not in host:
            # Ray itself tries for half a minute, and then prints a page.
            socket.create_connection((host, int(port)), timeout=10).close()
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        # A cluster of one command has no dashboard, which starts a dozen processes.
        dashboard = False if address == "local" else None
        ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        # Data sets have the settings of the time at which they are made.
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        # A chunk is a block of its own: Ray would put chunks together until they fill 128 MB, for one actor.
        context.target_max_block_size = 1
    except (OSError, ValueError, RuntimeError) as error:
        hint = "; `ray start --head` starts one here" if address == "auto" else ""
        raise ValueError(
            f"{option} {address or 'by default'}: no Ray cluster answers there{hint} ({last_line(error)})"
        ) from error


def reserve(pool: Pool, device: str | None, option: str) -> Actors:
    """The actors of a pool. ValueError where they do not fit into the cluster."""
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
    """Compare what every machine of the cluster has with what is here. ValueError names a machine that differs."""
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
    """Code and weights on the machine that runs this, by digests, and the first of the inputs that it does not see."""
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
    """Reject a machine that has something else than this one."""
    differ = [f"{key} {there[key]}, here {here[key]}" for key in here if there[key] != here[key]]
    if differ:
        raise ValueError(f"{option}: {node} would give other answers than this machine: {'; '.join(differ)}")


def last_line(error: BaseException) -> str:
    """The end of an error's text: Ray's have the frames of other machines, and then what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__


# GRPO's outputs (`grpo.rollout_workers`): one process trains, N others sample
#
#   trainer   trained weights --ray.put a call--> all actors        a share of the questions --> each actor
#             outputs of all shares, in the order of the questions <-- outputs --'
#
# With each call an actor gets the trained weights and the method, so that one that Ray has restarted answers as any
# other does. Which actor answers decides nothing: shares follow from the questions and N, draws from a request's seed.

ROLLOUT_OPTION = "grpo.rollout_workers"
"""The key of a recipe, for errors."""
RETRIES = 3
"""Times that a call is made again whose actor has died; actors are restarted as often as they die."""

LoadModel = Callable[[], LatentLM]
SampleOutputs = Callable[..., list[Any]]
"""(lm, method, config, examples, seed, generation) -> outputs, those of an example one after another."""


@contextmanager
def rollout_pool(
    n: int, load_model: LoadModel, start: str, roll_out: SampleOutputs
) -> Iterator[SampleOutputs]:
    """Inside, this process has joined a cluster, of which N actors do what `roll_out` does.

    `load_model` makes the model that the run starts from, where an actor runs: `start` is its checkpoint, which every
    machine has under the same path. ValueError as of `joined`, and where an actor cannot load the model.
    """
    with joined(Pool(None, n, 1), None, [start], [], ROLLOUT_OPTION) as actors:
        sampler = ray.remote(Sampler).options(**actors.reserved, max_restarts=-1, max_task_retries=RETRIES)
        samplers = [sampler.remote(load_model, roll_out) for _ in range(n)]
        # Where one cannot load the model, no work has begun.
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
    """The outputs of all actors by the present weights. RayError where a call has failed for good."""
    weights = ray.put(trained_weights(lm))
    calls = []
    for sampler, share in zip(samplers, shares(examples, len(samplers)), strict=False):
        calls.append(sampler.sample.remote(weights, method, config, share, *draws))
    return list(itertools.chain.from_iterable(map(pickle.loads, ray.get(calls))))


class Sampler:
    """An actor: the model of a run, which samples."""

    def __init__(self, load_model: LoadModel, roll_out: SampleOutputs) -> None:
        self.lm = load_model().to(devices.best())
        self.roll_out = roll_out

    @torch.no_grad()
    def sample(self, weights: bytes, *arguments: Any) -> bytes:
        """The pickled outputs of a share of the questions, by these weights."""
        parameters = dict(self.lm.named_parameters())
        for name, value in safetensors.torch.load(weights).items():
            parameters[name].copy_(value)
        return pickle.dumps(self.roll_out(self.lm, *arguments))


def trained_weights(lm: LatentLM) -> bytes:
    """All weights that are trained (the adapter or the whole model, and the method's modules), by name."""
    trained = {}
    for name, weight in lm.named_parameters():
        if weight.requires_grad:
            trained[name] = weight.detach().cpu().contiguous()
    return bytes(safetensors.torch.save(trained))


def shares(examples: Sequence[Example], n: int) -> list[list[Example]]:
    """N parts of the questions, or one for each question where they are fewer; the first are longer by one."""
    parts = np.array_split(np.arange(len(examples)), min(n, len(examples)))
    return [[examples[i] for i in part] for part in parts]
