"""`colar serve`."""

import argparse
import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from colar import checks, progress
from colar.cli import options
from colar.cli.checkpoints import LIMITS, absolute, check_backbone, load_checkpoint, paths_by_name
from colar.cli.options import Parser
from colar.engine.async_engine import run_in_temporary_thread
from colar.engine.engine import Engine
from colar.engine.request import decoding_of
from colar.model import checkpoint

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_serve(serve: Parser) -> None:
    serve.description = (
        "Serve one or more checkpoints: /v1/chat/completions, a page to watch thoughts, "
        "/metrics. Logs go to stderr. Needs the extra `serve` (docs/serve.md)."
    )
    options.checkpoint_options(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all that this machine has"
    )
    serve.add_argument("--port", type=int, default=8000, help="port; 0 for any that is free")
    serve.add_argument(
        "--api_key_file", help="file with API keys, one a line (else those of $COLAR_API_KEYS, else none)"
    )
    serve.add_argument(
        "--decoding",
        default="greedy",
        choices=["greedy", "sampled"],
        help=f"default; {options.DECODING_HELP}",
    )
    options.limit_options(serve)
    options.batching_options(serve)
    serve.add_argument(
        "--token_budget",
        type=options.at_least(1),
        help="positions of the cache in all (default: no limit)",
    )
    serve.add_argument(
        "--max_waiting", type=int, default=256, help="samples that wait for a slot; more are refused with 429"
    )
    serve.add_argument(
        "--drain", type=int, default=60, help="seconds that requests have to finish after SIGTERM"
    )
    options.model_options(serve)
    serve.add_argument(
        "--ray",
        metavar="N",
        help="N replicas on a Ray cluster behind this address, or MIN:MAX of them as requests come; needs the extra "
        "`ray` (docs/scale.md)",
    )
    serve.add_argument(
        "--ray_address",
        metavar="ADDRESS",
        help="the cluster: auto (the one that runs here), local (started for this command) or HOST:PORT (default: "
        "$RAY_ADDRESS, else the one that runs here, else local)",
    )
    serve.add_argument("--ray_cpus", type=int, help="CPUs of each replica (default: 1)")
    serve.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> None:
    try:
        from colar.serve import app
    except ModuleNotFoundError as error:
        raise ValueError(
            f"colar serve needs {error.name}: from your clone of colar, pip install '.[serve]'"
        ) from error

    # Wrong options are rejected before a model is loaded.
    checks.check_number("port", args.port, 0, 2**16 - 1, whole=True)
    checks.check_number("max_waiting", args.max_waiting, 1, whole=True)
    checks.check_number("drain", args.drain, 1)
    replicas = None
    if args.ray is not None:
        # Nothing of Ray is imported without --ray.
        from colar.serve import ray_serve

        replicas = ray_serve.Replicas.parse(
            args.ray, args.ray_address, options.cpus_of(args), options.batch_size(args)
        )
    elif args.ray_address is not None or args.ray_cpus is not None:
        raise ValueError("--ray_address and --ray_cpus go with --ray, a number of replicas")
    keys = app.read_keys(args.api_key_file)
    models = {name: absolute(path) for name, path in paths_by_name(args.checkpoints).items()}
    args.backbone = args.backbone and absolute(args.backbone)
    # A port in use is reported before a model is loaded, too.
    with app.bind(args.host, args.port) as bound:
        check_backbone([checkpoint.resolve(path) for path in models.values()], args)
        alone = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
        if not keys and not alone:
            progress.say(f"warning: no API key, and {args.host} can be reached from other machines")
        # Without a key only these Host names are answered: a site that a browser on this machine visits could have its
        # own name resolve to this address (DNS rebinding).
        hosts = ["localhost", "127.0.0.1", "[::1]", args.host] if alone and not keys else []
        make_app = partial(_application, models, args, keys, hosts)
        running = (
            contextlib.nullcontext(make_app())
            if replicas is None
            else ray_serve.running(make_app, models, replicas, args.device, args.drain)
        )
        with running as application:
            server = app.make_server(application, args.drain)
            # With --port 0 a caller learns the port from this line.
            print(app.url(bound), flush=True)
            app.run_server(server, bound)


def _application(
    models: Mapping[str, str], args: argparse.Namespace, keys: Sequence[str], hosts: Sequence[str]
) -> "FastAPI":
    """Load the models, and make the application that serves them."""
    from colar.serve import app

    # Loaded in threads that end: otherwise this thread's OpenMP threads would compete with the engine's.
    served = [run_in_temporary_thread(partial(_serve, name, path, args)) for name, path in models.items()]
    return app.build(served, keys, hosts)


def _serve(name: str, path: str, args: argparse.Namespace) -> Any:
    """Load a checkpoint and start its engine."""
    from colar.serve.served_model import ServedModel

    lm, method = load_checkpoint(path, args)
    decoding = decoding_of(method, args.decoding, **{name: getattr(args, name) for name in LIMITS})
    engine = Engine(
        lm,
        method,
        options.batch_size(args),
        args.token_budget,
        args.max_waiting,
        cuda_graphs=False if args.eager else None,
    )
    # A question of one token and the separator, with the limits that a request has by default.
    needed = engine.scheduler.smallest_size(1, 2 + decoding.positions_after_question).positions
    if args.token_budget is not None and needed > args.token_budget:
        raise ValueError(
            f"--token_budget {args.token_budget} is too small for the default limits (max_latents "
            f"{decoding.max_latents}, max_completion_length {decoding.max_completion_length}): model {name} needs "
            f"{needed} or more"
        )
    return ServedModel(name, engine, decoding)
