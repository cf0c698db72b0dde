"""Write docs/cli.md from the commands' own --help. `tests/test_cli.py` checks that it is up to date."""

from __future__ import annotations

import os
from pathlib import Path

# Before the parser is made: argparse wraps at the width of the terminal.
os.environ["COLUMNS"] = "100"

from colar.cli import build_parser

COMMANDS = ("", "train", "evaluate", "generate", "serve", "inspect", "report", "export")
COMMANDS += (
    "data list",
    "data show",
    "data prepare",
    "recipes list",
    "recipes copy",
    "lm-eval",
)


def render() -> str:
    """The page."""
    parts = [
        "# Command line\n\nMade from `--help` by `scripts/write_cli_docs.py`. `-` works in place of `_` in options.\n"
    ]
    for command in COMMANDS:
        parts.append(f"## colar {command}".rstrip() + f"\n\n```\n{_help(command)}```\n")
    return "\n".join(parts)


def _help(command: str) -> str:
    """The help of a command, "" being colar itself; argparse has no public way down to a subcommand's parser."""
    parser = build_parser()
    for word in command.split():
        choices = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
        parser = choices[word]
    return parser.format_help()


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
    path.write_text(render())
    print(path)
