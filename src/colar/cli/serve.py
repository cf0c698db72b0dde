"""`colar serve`."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

from colar import checks, progress
from colar.cli.shared import (
    DECODING_HELP,
    batching_options,
    check_backbone,
    checkpoint_options,
    collector_off,
    limit_options,
    limits_of,
    load,
    model_options,
    named,
)

LIMITS = {
    "max_body": (int, "bytes of a request's body"),
    "max_prompt": (int, "characters of a question"),
    "max_samples": (int, "choices of one request"),
    "max_waiting": (int, "samples that wait for a slot; more are refused with 429"),
    "max_connections": (int, "open connections"),
    "max_unsent": (int, "bytes that wait for a slow reader before its request is cancelled"),
    "deadline": (float, "seconds that a request may take"),
    "drain": (float, "seconds that requests have to finish after SIGTERM"),
}
"""Options that are fields of `serve.limits.Limits`, whose defaults they have."""


def add_parser(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve checkpoints behind the OpenAI API",
        description="Serve one or more checkpoints: /v1/chat/completions, /v1/completions, /v1/responses, a page to "
        "watch thoughts, /metrics. Logs are JSON lines on stderr. Needs the extra `serve` (docs/serve.md).",
    )
    checkpoint_options(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all that this machine has"
    )
    serve.add_argument("--port", type=int, default=8000, help="port; 0 for any that is free")
    serve.add_argument(
        "--api_key_file", help="file with API keys, one a line (else those of $COLAR_API_KEYS, else none)"
    )
    serve.add_argument("--log_prompts", action="store_true", help="log questions and answers too")
    serve.add_argument(
        "--decoding", default="greedy", choices=["greedy", "sampled"], help=f"default; {DECODING_HELP}"
    )
    limit_options(serve, max_completion_length=64)
    batching_options(serve)
    serve.add_argument("--token_budget", type=int, help="positions of the cache in all (default: no limit)")
    for name, (kind, about) in LIMITS.items():
        serve.add_argument(f"--{name}", type=kind, help=about)
    model_options(serve)
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    try:
        with collector_off():
            from colar.engine.async_engine import apart
            from colar.model import checkpoint
            from colar.serve import app, server
    except ModuleNotFoundError as error:
        raise ValueError(
            f"colar serve needs {error.name}: from your clone of colar, pip install '.[serve]'"
        ) from error
    from colar.serve.keys import Keys
    from colar.serve.limits import Limits
    from colar.serve.logs import Log

    # Wrong options are found before a model is loaded.
    given = {name: getattr(args, name) for name in LIMITS}
    # The system would take the port modulo 2^16.
    checks.check_number("port", args.port, 0, 2**16 - 1, whole=True)
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    keys = Keys.read(args.api_key_file)
    models = _named(args.checkpoints)
    # Before the models as well: a port that is taken is found at once.
    bound = server.bind(args.host, args.port)
    try:
        check_backbone([checkpoint.resolve(path) for path in models.values()], args)
        visitors = _visitors(args.host, bound.getsockname()[0], keys)
        if not keys and visitors is None:
            progress.say(f"warning: no API key, and {args.host} can be reached from other machines")
        log = Log(args.log_prompts)
        # Apart: else this thread's OpenMP threads would be in the way of the engine's.
        served = [apart(partial(_serve, name, path, args, limits)) for name, path in models.items()]

        def say() -> None:
            log.write("started", url=server.url(bound), models=list(models), keys=bool(keys))
            # With --port 0 this is how a caller learns the port.
            print(server.url(bound), flush=True)

        server.run(server.make(app.build(served, limits, keys, log, visitors), limits, log, say), bound)
        log.write("stopped")
    finally:
        bound.close()


def _serve(name: str, path: str, args: argparse.Namespace, limits: Any) -> Any:
    """Load a checkpoint and start its engine."""
    from colar.engine.engine import Engine
    from colar.engine.request import DECODINGS
    from colar.serve.served import Served

    lm, method, _ = load(path, args)
    decoding = dataclasses.replace(DECODINGS[args.decoding], **limits_of(args))
    # The queue is bounded by the server, which counts all samples of a request at once.
    engine = Engine(
        lm,
        method,
        args.batch_size,
        args.token_budget,
        compile=args.compile,
        cuda_graphs=args.cuda_graphs,
    )
    return Served(name, lm, method, engine, decoding, limits.max_waiting)


def _visitors(host: str, address: str, keys: Any) -> Any:
    """Whom a server on this address answers; None for all who reach it: those who have a key, or other machines."""
    from colar.serve.limits import Visitors, is_loopback

    return Visitors(host) if is_loopback(address) and not keys else None


def _named(checkpoints: list[str]) -> dict[str, str]:
    """Name -> path. ValueError where two checkpoints have one name."""
    found: dict[str, str] = {}
    for text in checkpoints:
        name, path = named(text)
        if name in found:
            raise ValueError(f"two checkpoints have one name, {name}: write NAME=CHECKPOINT")
        found[name] = path
    return found
