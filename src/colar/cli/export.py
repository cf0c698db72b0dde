"""`colar export`: a checkpoint in another dtype, or with its adapter merged."""

import argparse
from pathlib import Path

from colar import progress
from colar.cli.options import Parser
from colar.methods import pretrained
from colar.model import checkpoint


def add_export(export: Parser) -> None:
    export.description = (
        "Copy a checkpoint to another folder, with its weights in another dtype or its adapter merged."
    )
    export.add_argument("checkpoint", help="folder or Hub id")
    export.add_argument("output", help="folder to write; a checkpoint that is there is replaced")
    export.add_argument(
        "--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="dtype of the weights"
    )
    export.add_argument(
        "--merge", action="store_true", help="merge the adapter into the backbone and write all weights"
    )
    export.add_argument("--backbone", help="with --merge: the adapter's backbone, where it lies elsewhere")
    export.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> None:
    if args.backbone and not args.merge:
        raise ValueError("--backbone goes with --merge: without it no backbone is loaded")
    target = Path(args.output)
    checkpoint.check_replaceable(target)
    source = checkpoint.resolve(args.checkpoint)
    # The target is replaced as a whole: neither the source itself nor a folder of other things may be lost.
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the checkpoint itself: give a folder that may be replaced")
    # Without merging, the files are converted one by one, and no backbone is needed.
    if args.merge:
        pretrained.merge(source, target, args.dtype, args.backbone)
    else:
        checkpoint.convert(source, target, args.dtype)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    progress.say(f"wrote {target} (weights {size / 1e6:.1f} MB, {args.dtype})")
