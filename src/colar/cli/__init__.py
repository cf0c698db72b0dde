"""`colar`: train, evaluate, generate, serve, inspect, report, export, data, recipes, lm-eval.

Results go to stdout, everything else to stderr. The commands parse, call the library and print. Options are spelt with
underscores or hyphens. Only the given command's module is imported, because most of them need torch.
"""

import atexit
import contextlib
import gc
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from colar import __version__, checks, progress
from colar.cli.options import Parser

COMMANDS = {
    "train": ("train", "train a recipe; the same command resumes"),
    "evaluate": ("evaluate", "answer test questions, keep a record of each, and report"),
    "generate": ("generate", "answer a question, or a file of questions"),
    "serve": ("serve", "serve checkpoints behind the OpenAI API"),
    "inspect": (
        "inspect",
        "a page that shows what checkpoints think and where they fail, and the numbers behind it",
    ),
    "report": ("report", "aggregate the records of one or more evaluations into a report"),
    "export": ("export", "copy a checkpoint in half precision or with its adapter merged"),
    "data": ("data", "list, show or prepare data sources"),
    "recipes": ("train", "list or copy the recipes that ship with colar"),
    "lm-eval": ("lm_eval", "lm-evaluation-harness's own command line, with the model colar and our tasks"),
}
"""Command -> the module of this package whose `add_COMMAND` adds its options, and its help."""
HARMLESS = (
    # peft uses a deprecated name of transformers, and the new one where there is no other.
    ("`is_gradient_checkpointing` is deprecated", FutureWarning),
    # peft on GPT-2, whose linears are stored transposed: peft corrects fan_in_fan_out by itself.
    ("fan_in_fan_out is set to False but the target module is `Conv1D`", UserWarning),
)
"""Library warnings that a user cannot act on: the beginning of each message, and its category."""
TRACEBACK = "COLAR_TRACEBACK"
"""Environment variable that makes errors print their traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 wrong input (named on stderr), 130 interrupted, 143 terminated.

    1 means that another process of the run, started by torchrun, has failed or does not answer.
    """
    _quiet_libraries()
    # A console that cannot encode "±" prints "?" instead of an error after hours of work. stderr never raises one.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Imports create a million objects that stay alive: scanning them for garbage takes a fifth of the import time, and
    # half a second at exit.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    argv = sys.argv[1:] if argv is None else argv
    # Words behind "--" are no options: a question may begin with hyphens.
    end = argv.index("--") if "--" in argv else len(argv)
    words = [*map(underscored, argv[:end]), *argv[end:]]
    # After "--" argparse passes all words to the command, so that --help is lm-eval's.
    if words[:1] == ["lm-eval"]:
        words.insert(1, "--")
    parser = build_parser(words[0] if words else "")
    args, rest = parser.parse_known_args(words)
    # For `train` these are keys of the recipe, which the recipe's parser checks.
    args.overrides = rest
    try:
        # Python decodes bytes that are not UTF-8 as lone surrogates, which neither tokenizers nor files accept.
        for word in argv:
            checks.check_text(f"the command line's {word!r}", word)
        # A server handles SIGTERM by itself.
        with contextlib.nullcontext() if args.command == "serve" else _terminated_as_interrupted():
            args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (`head`, say) has closed it. Python would flush stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        return _failed(args.command, error)
    except KeyboardInterrupt as stop:
        resumes = getattr(args, "resumes", False)
        progress.say("stopped; the same command resumes from here" if resumes else "stopped")
        return 143 if isinstance(stop, _Terminated) else 130
    return 0


class _Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, the signal by which a job queue or `kill` ends a process."""


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """End the block at SIGTERM as at Ctrl-C; not under torchrun, whose processes would wait for each other."""
    if threading.current_thread() is not threading.main_thread() or "WORLD_SIZE" in os.environ:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet_libraries() -> None:
    """Keep the libraries' own bars, advice and known harmless warnings off the terminal.

    Only commands call this, so that users of colar as a library see all of it. The variables are set here because a
    library reads them when it is imported.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The Hub's client logs each of its retries; our error names the cause.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Pictures are written to files. matplotlib cannot be imported if this names a backend that is not installed.
    os.environ["MPLBACKEND"] = "agg"
    # The first two warn of kernels for other machines when they are imported, and torch warns of torchao.
    for library in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for beginning, category in HARMLESS:
        warnings.filterwarnings("ignore", message=re.escape(beginning), category=category)


def _failed(command: str, error: Exception) -> int:
    """Print an error in one line and return the exit code; raise it again if it is a defect of ours.

    Each of several processes prints its own error, unless that only repeats another's.
    """
    # Imported already by every command that can have several processes.
    processes = sys.modules.get("colar.processes")
    one_of_several = processes is not None and processes.launched() > 1
    if isinstance(error, RuntimeError) and not one_of_several:
        raise error
    code, text = 2, str(error)
    if isinstance(error, RuntimeError):
        code, text = 1, ""
        if processes is not None and not isinstance(error, processes.OtherProcessError):
            # A process group that has lost a member raises a plain RuntimeError, as a defect of ours may.
            traceback.print_exception(error)
            rank = os.environ.get("RANK")
            text = f"process {rank} stopped; if another one was killed or hangs, the same command resumes"
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    elif not (isinstance(error, (OSError, RuntimeError)) or _raised_by_colar(error)):
        text = f"{text or type(error).__name__} ({TRACEBACK}=1 shows where)"
    if text:
        # Libraries' errors may have several lines.
        line = " ".join(part.strip() for part in text.splitlines() if part.strip())
        print(f"colar {command}: error: {line}", file=sys.stderr, flush=True)
    if one_of_several:
        # Python's own exit could wait forever for the rest of a broken process group.
        sys.stdout.flush()
        os._exit(code)
    return code


def _raised_by_colar(error: Exception) -> bool:
    """True if a `raise` statement of colar raised the error, so that its text is for users; others may be defects."""
    (origin,) = traceback.extract_tb(error.__traceback__, limit=-1)
    ours = Path(__file__).parents[1] in Path(origin.filename).parents
    return ours and (origin.line or "").startswith("raise ")


def underscored(word: str) -> str:
    """`--data-dir` as `--data_dir`: options may be spelt either way."""
    if not word.startswith("--"):
        return word
    # Hyphens in a value remain: --output=runs/my-run.
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def build_parser(command: str | None = None) -> Parser:
    """The parser of all commands, with the options of `command`, or of every command if it is None."""
    parser = Parser(
        prog="colar",
        description="Fine-tune a causal language model to think in compressed latents, at any speed.",
    )
    parser.add_argument("--version", action="version", version=f"colar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        own = commands.add_parser(name, help=text, add_help=name != "lm-eval")
        if command in (None, name):
            add_options: Any = getattr(import_module(f"colar.cli.{module}"), f"add_{name.replace('-', '_')}")
            add_options(own)
    return parser
