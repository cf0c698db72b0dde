"""What the commands that look at chains problem by problem share (`diagnose`, `inspect`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colar.cli.shared import (
    Parser,
    check_anyone_has_params,
    check_backbone,
    check_params,
    checkpoint_options,
    data_options,
    limit_options,
    limits_of,
    load,
    named,
    own_options,
    param_grid,
    params_options,
)


def problem_options(parser: Parser, method_options: bool) -> None:
    """Checkpoints (or the folders of their runs), the problems, per-request values and limits."""
    checkpoint_options(parser)
    data_options(parser)
    parser.add_argument(
        "--data", default="arithmetic", help="source or file; its rows must have reasoning steps"
    )
    parser.add_argument("--split", default="test", help="split of the source")
    parser.add_argument("--limit", type=int, default=200, help="first N problems")
    if method_options:
        params_options(parser)
    limit_options(parser, max_completion_length=16)


def load_problems(args: argparse.Namespace) -> list[Any]:
    """The problems; per-request values out of range are rejected before them."""
    from colar.data import sources

    check_params(args)
    return sources.load(
        args.data,
        args.split,
        data_dir=args.data_dir,
        limit=args.limit,
        seed=args.data_seed,
        skip_malformed=args.skip_malformed,
        options=own_options(args.options, args.data),
    )


def decoding_of(args: argparse.Namespace) -> Any:
    """Greedy, cut at the limits."""
    from colar.engine.request import Decoding

    return Decoding(**limits_of(args))


def published(path: str) -> str:
    """A run's folder stands for the checkpoint in it; anything else for itself."""
    best = Path(path) / "best"
    return str(best) if (best / "colar.json").is_file() else path


def each_system(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any, Any, Any]]:
    """Every checkpoint at every per-request value: the fields that name its rows, model, method, params.

    ValueError for what is wrong with any of them, before the first is loaded.
    """
    from colar.look.inspection import key_of

    for name, folder in _checked(args).items():
        lm, method, _ = load(folder, args)
        for params in param_grid(method, args):
            yield key_of(name, params), lm, method, params


def _checked(args: argparse.Namespace) -> dict[str, str]:
    """The folders of the checkpoints by the names of their rows. ValueError where there is none, where two have one
    name, or where no method has a value that is asked for."""
    from colar.methods import registry
    from colar.model import checkpoint

    folders: dict[str, str] = {}
    methods = []
    for text in args.checkpoints:
        name, path = named(text)
        # Rows of two checkpoints under one name could not be told apart.
        if name in folders:
            raise ValueError(
                f"two checkpoints have one name ({name}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        folder = checkpoint.resolve(published(path))
        folders[name] = str(folder)
        # The method without its weights, which take seconds to load, tells which values it has.
        methods.append(registry.rebuild(checkpoint.read_info(folder)["method"], folder))
    check_anyone_has_params(methods, args)
    check_backbone(folders.values(), args)
    return folders
