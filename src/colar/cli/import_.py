"""`colar import`."""

from __future__ import annotations

import argparse
from typing import Any

from colar.cli.shared import quiet_libraries


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="make a checkpoint of one that CoLaR's, Coconut's, CODI's or SIM-CoT's authors published",
        description="Make a checkpoint of one that the authors of CoLaR, Coconut, CODI or SIM-CoT published.",
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from colar.integrations import published
    from colar.integrations.published_formats import Options

    quiet_libraries()
    options = Options(args.format, args.latents, args.lora_alpha, args.sigma_e)
    published.convert(args.path, args.backbone, args.output, options)
