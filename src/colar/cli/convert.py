"""`colar export` and `colar import`: a checkpoint in another form, and one of another project."""

import argparse
from pathlib import Path

from colar import progress
from colar.cli.options import Parser


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
    export.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> None:
    from colar.methods import pretrained
    from colar.model import checkpoint

    source = checkpoint.resolve(args.checkpoint)
    target = Path(args.output)
    # The target is replaced as a whole: neither the source itself nor a folder of other things may be lost.
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the checkpoint itself: give a folder that may be replaced")
    checkpoint.check_replaceable(target)
    # Without merging, the files are converted one by one: no backbone is needed.
    if args.merge:
        pretrained.merge(source, target, args.dtype)
    else:
        checkpoint.convert(source, target, args.dtype)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    progress.say(f"wrote {target} (weights {size / 1e6:.1f} MB, {args.dtype})")


def add_import(parser: Parser) -> None:
    parser.description = (
        "Make a checkpoint of one that the authors of CoLaR, Coconut, CODI or SIM-CoT published."
    )
    parser.add_argument("path", help="file, folder that holds one, or Hub id")
    parser.add_argument(
        "--backbone", required=True, help="folder or Hub id of the model that it was trained on"
    )
    parser.add_argument(
        "--output", required=True, help="folder to write; a checkpoint that is there is replaced"
    )
    parser.add_argument("--format", help="colar, coconut, codi or simcot (default: as its tensors are named)")
    parser.add_argument(
        "--latents", type=int, help="latents of coconut and codi (default: 6; 10 of Coconut in SIM-CoT)"
    )
    parser.add_argument(
        "--lora_alpha", type=int, help="lora_alpha of colar and codi (default: the file's, or else 32)"
    )
    parser.add_argument(
        "--sigma_e",
        type=float,
        help="embeds_std of colar (default: what its authors had for the model)",
    )
    parser.set_defaults(run=run_import)


def run_import(args: argparse.Namespace) -> None:
    from colar.integrations import published
    from colar.integrations.published_formats import Options

    options = Options(args.format, args.latents, args.lora_alpha, args.sigma_e)
    published.convert(args.path, args.backbone, args.output, options)
