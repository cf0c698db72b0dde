"""Chaos: does every request end exactly once, with the answer of a quiet engine, whatever happens around it?

    python lab/benchmarks/soak.py --output runs/benchmarks/soak

`CLIENTS` callers share one `AsyncEngine` over the toy backbone (random weights, float64: rounding decides no token).
Their requests differ in factor, limits, question and seed. Of these

    10%    are malformed: refused at once
    5%     are over a limit, of context or budget: refused at once
    10%    are cancelled in the middle of their stream

and at random forwards raise, which ends all requests that have started, and forwards and allocations of the cache find
no memory, which ends a request that has started alone. Afterwards a quiet engine answers the same requests. The table
goes to stdout, then one JSON line; the exit code is 1 where a request was lost, ended twice or was answered
differently, or where memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import shared
import torch
from rich.console import Console

from colar import progress
from colar.engine.async_engine import AsyncEngine
from colar.engine.completion import Completion, Event, completions_of
from colar.engine.engine import Engine, QueueFull, out_of_memory
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import NoParams
from colar.methods.colar import ColarParams
from colar.model import backbones
from colar.model.latent_lm import LatentLM

CLIENTS = 96
SLOTS = 32
BUDGET = 4096
FATES = {"malformed": 0.10, "over a limit": 0.05, "cancelled": 0.10}
"""Shares of requests; the others are answered."""
ODDS = {"exceptions": 1 / 1000, "forwards without memory": 1 / 2000, "allocations without memory": 1 / 200}
GROWTH = 0.05
"""Memory at the end may be this share above that after the first tenth, or the first 1,000 requests."""
WORDS = (
    "pens",
    "eggs",
    "boxes",
    "apples",
    "has",
    "buys",
    "loses",
    "and then",
    "how many",
    "left over",
    "twice",
)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lm, method = build()
    plans = [plan(i, args.seed) for i in range(args.requests)]
    soak = Soak(lm, method, args.seed)
    asyncio.run(soak.run(plans))
    report = judge(soak, lm, method)
    report = {"benchmark": "soak", "setting": setting(args), "provenance": shared.provenance()} | report
    shared.publish(report, args.output, show, report["verdict"])
    sys.exit(0 if all(report["verdict"].values()) else 1)


def build() -> tuple[LatentLM, Any]:
    lm = LatentLM.from_backbone(backbones.load("tiny", "float32", seed=0)).eval()
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    return lm.double(), method


# What is asked


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request and what becomes of it."""

    request: Request
    fate: str
    leaves_after: int = 0
    """Events after which its caller leaves."""


def plan(i: int, seed: int) -> Plan:
    """Request number i, a function of (seed, i)."""
    rng = Random(f"{seed}/{i}")
    question = " ".join(rng.choices(WORDS, k=rng.choice((3, 8, 20, 60)))) + f" {rng.randrange(100)}?"
    sampled = rng.random() < 0.5
    decoding = Decoding(
        temperature=float(sampled),
        top_p=0.9 if sampled else 1.0,
        latent_temperature=float(sampled),
        max_latents=rng.randrange(12),
        max_completion_length=rng.choice((1, 3, 6, 20)),
    )
    params = ColarParams(rng.choice((1, 2, 3, 5)))
    request = Request(str(i), question, params, decoding, seed=rng.randrange(1 << 40), sample=i % 3)
    drawn = rng.random()
    for fate, share in FATES.items():
        if drawn < share:
            return _with(request, fate, rng)
        drawn -= share
    return Plan(request, "answered")


def _with(request: Request, fate: str, rng: Random) -> Plan:
    """A request to which this happens."""
    changes: dict[str, Any] = {}
    if fate == "malformed":
        changes = rng.choice(
            (
                {"seed": 2**63},
                {"seed": 0.5},
                {"params": NoParams()},
                {"params": None},
                {"params": ColarParams(20_000)},
            )
        )
    elif fate == "over a limit":
        long = {"question": "pens and then 7 " * 700}
        endless = {"decoding": Decoding(max_latents=BUDGET, max_completion_length=1)}
        changes = rng.choice((long, endless))
    return Plan(dataclasses.replace(request, **changes), fate, leaves_after=rng.randrange(1, 5))


# What goes wrong


class Faults:
    """Raises at random calls."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"faults/{seed}")
        self.raised: Counter[str] = Counter()

    def forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a forward."""
        self._maybe("forwards without memory", torch.OutOfMemoryError("injected: out of memory"))
        self._maybe("exceptions", ArithmeticError("injected: once"))

    def allocating(self, zeros: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """In the place of `zeros`, by which a layer of the cache allocates."""
        error = RuntimeError("injected: not enough memory: you tried to allocate 1 byte")
        self._maybe("allocations without memory", error)
        return zeros(*args)

    def _maybe(self, name: str, error: Exception) -> None:
        if self.rng.random() < ODDS[name]:
            self.raised[name] += 1
            raise error


class Soak:
    """Callers of one engine, and what came of their requests."""

    def __init__(self, lm: LatentLM, method: Any, seed: int) -> None:
        self.lm = lm
        self.faults = Faults(seed)
        self.engine = Engine(lm, method, SLOTS, token_budget=BUDGET, max_waiting=2 * SLOTS)
        for layer in self.engine.cache.layers:
            layer._zeros = functools.partial(self.faults.allocating, layer._zeros)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """(fate, outcome) -> requests."""
        self.answered: list[tuple[Request, bytes]] = []
        self.memory: list[int] = []
        """Bytes of the process, each time that some requests have ended and nothing runs."""
        self.seconds = 0.0

    async def run(self, plans: list[Plan]) -> None:
        """Ask for all of them, some hundreds at a time."""
        base = self.lm.causal_lm.base_model
        hook = base.register_forward_pre_hook(self.faults.forward, with_kwargs=True)
        served = AsyncEngine(self.engine)
        every = max(1, min(1000, len(plans) // 10))
        started = time.monotonic()
        with progress.bar("soak", len(plans)) as bar:

            async def client(queue: Iterator[Plan]) -> None:
                for planned in queue:
                    outcome = await self._ask(served, planned)
                    self.outcomes[planned.fate, outcome] += 1
                    bar.update()

            for start in range(0, len(plans), every):
                queue = iter(plans[start : start + every])
                await asyncio.gather(*(client(queue) for _ in range(CLIENTS)))
                # What is left when nothing runs is what stays: while rows run, the cache comes and goes.
                while self.engine.busy:
                    await asyncio.sleep(0.01)
                self.memory.append(resident())
        await served.close()
        hook.remove()
        self.seconds = time.monotonic() - started

    async def _ask(self, served: AsyncEngine, planned: Plan) -> str:
        """What came of a request, in a word."""
        events: list[Event] = []
        while True:
            try:
                stream = served.stream(planned.request)
                async for event in stream:
                    events.append(event)
                    if planned.fate == "cancelled" and len(events) >= planned.leaves_after:
                        await stream.aclose()
                        return "left"
            except QueueFull:
                await asyncio.sleep(0.01)
                continue
            except ValueError:
                return "refused" if not events else "refused late"
            except ArithmeticError:
                return "raised"
            except Exception as error:
                if out_of_memory(error):
                    return "no memory"
                progress.say(f"request {planned.request.id} ({planned.fate}): {error!r}")
                return type(error).__name__
            break
        if [event.kind for event in events].count("finished") != 1 or events[-1].kind != "finished":
            return "did not end once"
        (completion,) = completions_of(self.lm, events)
        self.answered.append((planned.request, digest(completion)))
        return "answered"


# What it must have been


ALLOWED = {
    "malformed": {"refused"},
    "over a limit": {"refused"},
    # A request may end before its caller leaves.
    "cancelled": {"left", "answered", "raised", "no memory"},
    "answered": {"answered", "raised", "no memory"},
}
"""Fate -> outcomes."""


def judge(soak: Soak, lm: LatentLM, method: Any) -> dict[str, Any]:
    """Compare with a quiet engine."""
    answers = Engine(lm, method, SLOTS).generate([request for request, _ in soak.answered])
    pairs = zip(answers, soak.answered, strict=True)
    different = sum(digest(completion) != found for completion, (_, found) in pairs)
    wrong = {
        f"{fate}: {outcome}": n
        for (fate, outcome), n in soak.outcomes.items()
        if outcome not in ALLOWED[fate]
    }
    growth = soak.memory[-1] / soak.memory[0] - 1 if len(soak.memory) > 1 else 0.0
    return {
        "requests": soak.outcomes.total(),
        "outcomes": {f"{fate}: {outcome}": n for (fate, outcome), n in sorted(soak.outcomes.items())},
        "faults": dict(soak.faults.raised),
        "answers": len(soak.answered),
        "answers_different": different,
        "memory_mib": [round(size / 2**20, 1) for size in soak.memory],
        "memory_growth": growth,
        "cache_positions_at_the_end": soak.engine.cache.positions,
        "seconds": soak.seconds,
        "verdict": {
            "every_request_ended_as_it_should": not wrong,
            "answers_are_those_of_a_quiet_engine": different == 0 and len(answers) > 0,
            "memory_is_flat": growth <= GROWTH,
            "faults_of_every_kind_happened": all(soak.faults.raised[name] for name in ODDS),
            "the_cache_was_given_back": soak.engine.cache.positions == 0,
        },
    }


def digest(completion: Completion) -> bytes:
    """All that a caller gets of a completion, in few bytes."""
    said = (
        completion.text,
        completion.token_ids,
        completion.thought_ids,
        completion.reason,
        completion.truncated,
    )
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()


def resident() -> int:
    """Bytes of memory that the process has (Linux), without what was freed and the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def setting(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "backbone": "tiny",
        "precision": "float64",
        "requests": args.requests,
        "seed": args.seed,
        "threads": args.threads,
        "clients": CLIENTS,
        "max_batch": SLOTS,
        "token_budget": BUDGET,
        "shares": FATES,
        "odds": ODDS,
    }


def show(report: dict[str, Any]) -> None:
    table = shared.table("chaos", ("what", "number"), texts=("what",))
    for part in ("outcomes", "faults"):
        for name, n in report[part].items():
            table.add_row(name, str(n))
        table.add_section()
    for name in ("requests", "answers", "answers_different", "memory_growth", "seconds"):
        table.add_row(name.replace("_", " "), f"{report[name]:.4g}")
    Console(width=100).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.options(__doc__, "soak")
    parser.set_defaults(threads=1)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
