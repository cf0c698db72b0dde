"""`colar lm-eval`."""

from __future__ import annotations

import argparse
from typing import Any

from colar.cli.shared import collector_off, quiet_libraries


def add_parser(commands: Any) -> None:
    harness = commands.add_parser(
        "lm-eval",
        help="lm-evaluation-harness's own command line, with the model colar and our tasks",
        description="Run lm-evaluation-harness's own command line, with the model colar and our tasks known to it. "
        "All words go to lm-eval; `colar lm-eval run --help` has its options.",
        add_help=False,
    )
    harness.add_argument("words", nargs=argparse.REMAINDER, help="lm-eval's arguments, as they are")
    harness.set_defaults(run=run)


def arguments(words: list[str]) -> list[str]:
    """The words of a command line that argparse must leave alone: all behind `lm-eval`."""
    # Behind "--" argparse takes no word for an option of its own: --help is lm-eval's.
    return [words[0], "--", *words[1:]] if words[:1] == ["lm-eval"] else words


def run(args: argparse.Namespace) -> None:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    with collector_off():
        from colar.integrations import lm_eval
    quiet_libraries()
    lm_eval.run(words)
