"""A Ray cluster: joining it, and checking its machines before they work."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import ray as ray  # exported: ray_answers and ray_serve import it here, for this message
    import ray.data
except ImportError as error:
    raise ValueError("--ray needs Ray: from your clone of colar, pip install '.[ray]'") from error

import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import colar
from colar import files
from colar.checks import check_number
from colar.model import checkpoint


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
