"""GRPO's outputs from a pool of Ray actors (`grpo.rollout_workers`): one process trains, N others sample.

    trainer   trained weights --ray.put, once--> all actors        a share of the questions --> each actor
              outputs of all shares, in the order of the questions <-- outputs --'

An actor has the model that the run starts from, loaded where it runs. With each call it gets the trained weights and
the method, so that one that died, and that Ray has restarted, answers its call as any other does. Who answers decides
nothing: shares follow from the questions and N, and draws from a request's seed and sample.
"""

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from colar.data.example import Example
from colar.integrations import ray_cluster
from colar.integrations.ray_cluster import ray
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops import devices

RETRIES = 3
"""Times that a call is made again whose actor has died; actors are restarted as often as they die."""
OPTION = "grpo.rollout_workers"
"""The key of a recipe, for errors."""

LoadModel = Callable[[], LatentLM]
SampleOutputs = Callable[..., list[Any]]
"""(lm, method, config, examples, seed, generation) -> outputs, those of an example one after another."""


@contextlib.contextmanager
def pool(n: int, load_model: LoadModel, start: str, roll_out: SampleOutputs) -> Iterator[SampleOutputs]:
    """`roll_out` as N actors of a cluster do it, for which this process has joined that cluster inside the block.

    `load_model` makes the model of the run's first step, from what every machine has under the same path: `start` is
    its checkpoint, and is compared. All have loaded it when the block begins. The cluster is that of $RAY_ADDRESS, else
    one that runs here, else one that is started. ValueError without a cluster, and where machines differ, N
    actors do not fit or one cannot load the model.
    """
    with ray_cluster.joined(ray_cluster.Pool(None, n, 1), None, [start], [], OPTION) as actors:
        yield ActorPool(actors, load_model, roll_out)


class ActorPool:
    """A pool of actors, called as `roll_out` is."""

    def __init__(self, actors: ray_cluster.Actors, load_model: LoadModel, roll_out: SampleOutputs) -> None:
        restarted = {"max_restarts": -1, "max_task_retries": RETRIES}
        sampler = ray.remote(Sampler).options(**actors.reserved, **restarted)
        self.samplers = [sampler.remote(load_model, roll_out) for _ in range(actors.n)]
        # Where one cannot load the model, no work has begun.
        ray.get([sampler.__ray_ready__.remote() for sampler in self.samplers])
        self.sent: tuple[bytes, Any] = (b"", None)
        """The weights of the last call, and where the actors find them."""

    def __call__(
        self,
        lm: LatentLM,
        method: Method,
        config: Any,
        examples: Sequence[Example],
        seed: int,
        generation: int,
    ) -> list[Any]:
        """The outputs by the present weights. RayError where a call has failed for good."""
        weights = trained_weights(lm)
        # Rounds of dynamic sampling have the weights of their generation.
        if weights != self.sent[0]:
            self.sent = (weights, ray.put(weights))
        calls = []
        for sampler, share in zip(self.samplers, shares(examples, len(self.samplers)), strict=False):
            calls.append(sampler.sample.remote(self.sent[1], method, config, share, seed, generation))
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
        for name, value in load(weights).items():
            parameters[name].copy_(value)
        return pickle.dumps(self.roll_out(self.lm, *arguments))


def trained_weights(lm: LatentLM) -> bytes:
    """All weights that are trained (the adapter or the whole model, and the method's modules), by name."""
    trained = {name: weight for name, weight in lm.named_parameters() if weight.requires_grad}
    weights: bytes = save({name: weight.detach().cpu().contiguous() for name, weight in trained.items()})
    return weights


def shares(examples: Sequence[Example], n: int) -> list[Sequence[Example]]:
    """N parts of the questions, or one for each question where they are fewer; the first are longer by one."""
    n = min(n, len(examples))
    size, longer = divmod(len(examples), n)
    ends = [size * i + min(i, longer) for i in range(n + 1)]
    return [examples[start:end] for start, end in itertools.pairwise(ends)]
