"""A real uvicorn over tiny random models, on a port of its own, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from families import EXAMPLES, liven, tiny_lm
from sequential import made

from colar.engine.engine import Engine
from colar.engine.request import Decoding
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.methods.cot import Cot, CotConfig
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.serve import app
from colar.serve.served_model import ServedModel

DECODING = Decoding(max_latents=8, max_completion_length=8)
QUESTION = EXAMPLES[3].question


def colar_model() -> tuple[LatentLM, Method]:
    """The paper's head; trained factors 1 to 5."""
    lm = liven(tiny_lm("llama"))
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    return lm, method


def sequential_model() -> tuple[LatentLM, Method]:
    return made("llama", live=True, compression_factors=[1, 2, 3, 5], confidence_thresholds=[0, 0.5])


def cot_model() -> tuple[LatentLM, Method]:
    return liven(tiny_lm("qwen2"), stop=0.1), registry.build("cot", {})


class Slow(Cot):
    """Thinks for ever, a few thoughts a second; counts them."""

    pause = 0.02

    def __init__(self) -> None:
        super().__init__(CotConfig())
        self.steps = 0

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        time.sleep(self.pause)
        self.steps += 1
        thought = super().think(lm, state)
        return Thought(thought.embeds, thought.done & False, thought.token_ids, thought.info)


def serve_model(
    name: str,
    model: tuple[LatentLM, Method],
    decoding: Decoding = DECODING,
    slots: int = 4,
    waiting: int = 64,
    **engine: Any,
) -> ServedModel:
    lm, method = model
    return ServedModel(name, Engine(lm, method, slots, max_waiting=waiting, **engine), decoding)


class Running:
    """A server that has started."""

    def __init__(
        self, served: list[ServedModel], url: str, address: tuple[str, int], uvicorn: uvicorn.Server
    ) -> None:
        self.served = {each.name: each for each in served}
        self.url = url
        self.address = address
        self.uvicorn = uvicorn

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self.uvicorn.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)


@contextlib.contextmanager
def running(
    *served: ServedModel, keys: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Iterator[Running]:
    """A server for the block. It drains at the end."""
    bound = app.bind("127.0.0.1", 0)
    started = app.make_server(app.build(served, keys, hosts))
    thread = threading.Thread(target=started.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: started.started)
    try:
        yield Running(list(served), app.url(bound), bound.getsockname()[:2], started)
    finally:
        started.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(holds: Any) -> None:
    """Wait for something that happens elsewhere: long enough for a slow machine that has other tests to run."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
