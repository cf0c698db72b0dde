"""`colar`: train, evaluate, generate, serve, inspect, report, export, import, data, recipes, lm-eval.

Results go to stdout, everything else to stderr. The commands parse, call the library and print. Options are spelt with
underscores or hyphens.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from colar import __version__, checks, progress
from colar.cli import (
    data,
    evaluate,
    export,
    generate,
    import_,
    inspect,
    lm_eval,
    recipes,
    serve,
    train,
)
from colar.cli.options import Parser
from colar.cli.shared import collector_off


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 wrong input (said on stderr), 130 interrupted.

    1: another process of the run, started by torchrun, has failed or does not answer.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before any library is imported: the Hub's client says each of its retries, and then our error says what it was.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # Both warn of kernels for other machines when they are imported, and torch warns of the first.
    for library in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # Pictures are written to files. matplotlib cannot be imported where this names a backend that is not there.
    os.environ["MPLBACKEND"] = "agg"
    # A console that cannot show "±" shows "?": an error would come after an hour's work. stderr never raises one.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # When it ends, Python looks for garbage among the million objects that libraries made, for more than half a
    # second. What is frozen is not looked at.
    atexit.register(gc.freeze)
    given = sys.argv[1:] if argv is None else argv
    words = lm_eval.arguments([underscored(word) for word in given])
    with collector_off():
        parser = build_parser(words[0] if words else "")
    args, rest = parser.parse_known_args(words)
    # A command that takes a recipe accepts unknown options as its keys, which the recipe's parser checks.
    if rest and not getattr(args, "takes_keys", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        # Bytes that are no UTF-8 come as such halves: no tokenizer reads them, and no file can hold the command.
        for word in given:
            checks.check_text(f"the command line's {word!r}", word)
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads our output (`head`, say) has seen enough. Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        return _failed(args.command, error)
    except KeyboardInterrupt:
        resumes = getattr(args, "resumes", False)
        progress.say("stopped; the same command resumes from here" if resumes else "stopped")
        return 130
    return 0


def _failed(command: str, error: Exception) -> int:
    """Print an error in one line and return the exit code; raise it again where it is a defect of ours.

    Of several processes each prints its own error, but for one that only repeats another's.
    """
    # Loaded already by every command that can have several processes.
    processes = sys.modules.get("colar.processes")
    several = processes is not None and processes.launched() > 1
    if isinstance(error, RuntimeError) and not several:
        raise error
    code, text = 2, str(error)
    if isinstance(error, RuntimeError):
        code, text = 1, ""
        if processes is not None and not isinstance(error, processes.OtherProcessError):
            # A group that has lost a process raises plain RuntimeErrors, as a defect of ours may.
            traceback.print_exception(error)
            rank = os.environ.get("RANK")
            text = f"process {rank} stopped; if another one was killed or hangs, the same command resumes"
    if text:
        # Libraries explain themselves in paragraphs.
        line = " ".join(part.strip() for part in text.splitlines() if part.strip())
        print(f"colar {command}: error: {line}", file=sys.stderr, flush=True)
    if several:
        # The rest of a broken group may be waited for without end.
        sys.stdout.flush()
        os._exit(code)
    return code


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
    evaluate.add_parser(commands, method_options=command in (None, "evaluate"))
    generate.add_parser(commands, method_options=command in (None, "generate"))
    serve.add_parser(commands)
    inspect.add_parser(commands, method_options=command in (None, "inspect"))
    evaluate.add_report_parser(commands)
    export.add_parser(commands)
    import_.add_parser(commands)
    data.add_parser(commands)
    recipes.add_parser(commands)
    lm_eval.add_parser(commands)
    return parser
