"""`colar`: train, plan, evaluate, generate, diagnose, report, export, data, recipes.

Results go to stdout, everything else to stderr. The commands wire the library together and hold no
logic of their own. Options are spelt with underscores or hyphens.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from colar import __version__, progress
from colar.cli import data, diagnose, evaluate, export, generate, plan, recipes, report, train
from colar.cli.shared import Parser, collector_off


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 wrong input (said on stderr), 130 interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # When it ends, Python looks for garbage among the million objects that libraries made, for more than half a
    # second. What is frozen is not looked at.
    atexit.register(gc.freeze)
    given = sys.argv[1:] if argv is None else argv
    words = [underscored(word) for word in given]
    with collector_off():
        parser = build_parser(words[0] if words else "")
    args, rest = parser.parse_known_args(words)
    # These take what argparse does not know: a recipe's keys, which its own parser checks.
    if rest and args.run not in (train.run, plan.run):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads our output (`head`, say) has seen enough. Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError) as error:
        # Not `progress.say`: an error is shown whichever process it comes from.
        print(f"colar {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.say("stopped; the same command resumes from here")
        return 130
    return 0


def underscored(word: str) -> str:
    """`--data-dir` as `--data_dir`: options may be spelt either way."""
    if not word.startswith("--"):
        return word
    # Hyphens in a value stay: --output=runs/my-run.
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def build_parser(command: str | None = None) -> Parser:
    """The parser of all commands; `command` is the one that was asked for, None for all commands in full.

    The options for methods' per-request values come from the methods, whose import takes seconds. Only the command
    that was asked for gets them.
    """
    parser = Parser(
        prog="colar",
        description="Fine-tune a causal language model to think in compressed latents, at any speed.",
    )
    parser.add_argument("--version", action="version", version=f"colar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_parser(commands)
    plan.add_parser(commands)
    evaluate.add_parser(commands, method_options=command in (None, "evaluate"))
    generate.add_parser(commands, method_options=command in (None, "generate"))
    diagnose.add_parser(commands, method_options=command in (None, "diagnose"))
    report.add_parser(commands)
    export.add_parser(commands)
    data.add_parser(commands)
    recipes.add_parser(commands)
    return parser
