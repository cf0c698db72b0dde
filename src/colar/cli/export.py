"""`colar export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from colar import progress
from colar.cli.shared import quiet_libraries


def add_parser(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint in half precision or merged, to share it",
        description="Write a checkpoint to another folder, its weights in another dtype or its adapter merged.",
    )
    export.add_argument("checkpoint", help="folder or Hub id")
    export.add_argument("output", help="folder to write; what was there is replaced")
    export.add_argument(
        "--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="of the weights"
    )
    export.add_argument(
        "--merge", action="store_true", help="fold the adapter into the backbone and write all weights"
    )
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from colar.methods import pretrained
    from colar.model import checkpoint

    quiet_libraries()
    source, target = checkpoint.resolve(args.checkpoint), Path(args.output)
    if target.exists() and (target.resolve() == source.resolve() or not (target / "colar.json").exists()):
        raise ValueError(f"{target} exists and is not another checkpoint: give a folder that may be replaced")
    if args.merge:
        pretrained.merge(source, target, args.dtype)
    else:
        checkpoint.convert(source, target, args.dtype)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    progress.say(f"wrote {target} (weights {size / 1e6:.1f} MB, {args.dtype})")
