"""Options of several commands, and parsers of their values. Every command imports this module: torch comes later."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from colar import yaml_settings
from colar.checks import did_you_mean

DECODING_HELP = "greedy: argmax and mean latent; sampled: temperature 1, top-p 0.9, latent_temperature 1"


class Formatter(argparse.HelpFormatter):
    """Adds the default value to an option's help, if there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Compared by identity, because 0 equals False and is a default to show.
        has_default = action.default is not False and action.default not in (None, [], argparse.SUPPRESS)
        if action.option_strings and has_default:
            return f"{action.help} (default: %(default)s)"
        return action.help


class Parser(argparse.ArgumentParser):
    """argparse that accepts full option names only, and suggests the nearest name for an unknown one."""

    # An abbreviation would become ambiguous once another option has the same beginning.
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject words that no option takes, unless the command `takes_keys` of a recipe.

        argparse calls a command's own parser first, so that the error shows the usage of that command.
        """
        self._words = sys.argv[1:] if args is None else list(args)
        known, rest = super().parse_known_args(args, namespace)
        # argparse of Python 3.11 leaves an optional word out where options stand before it.
        left_out = [
            action.dest
            for action in self._positionals._group_actions
            if action.nargs == "?" and getattr(known, action.dest, None) is None
        ]
        is_behind = rest[:1] == ["--"]
        words = rest[1:] if is_behind else rest
        if len(left_out) == len(words) == 1 and (is_behind or not words[0].startswith("-")):
            setattr(known, left_out[0], words[0])
            rest = []
        if rest and not getattr(known, "takes_keys", False):
            name = rest[0].partition("=")[0]
            self.error(f"unknown {' '.join(rest)}{did_you_mean(name, self._option_string_actions)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        """Exit with the message, and a hint where an option of several values may have taken a word of another."""
        several = [action.option_strings for action in self._actions if action.nargs in ("*", "+")]
        given = [name for name in itertools.chain.from_iterable(several) if name in self._words]
        is_wrong = message.startswith(tuple(f"argument {name}: invalid" for name in given))
        if is_wrong or (given and "arguments are required" in message):
            message += " (words behind an option of several values are its values: put others before it, or after --)"
        super().error(message)


def at_least(least: int) -> Callable[[str], int]:
    """The parser of a whole number from `least` on."""

    def whole(text: str) -> int:
        if text.removeprefix("-").isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text}")

    return whole


def checkpoint_options(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[NAME=]CHECKPOINT",
        help="folder or Hub id, perhaps with a name for it",
    )


def data_options(parser: Parser) -> None:
    parser.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    parser.add_argument("--data_seed", type=int, default=0, help="seed of a generated source")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="[SOURCE.]KEY=VALUE",
        help="options of a source that has some, e.g. arithmetic.max_number=30",
    )
    parser.add_argument("--skip_malformed", action="store_true", help="skip malformed rows")
    columns_option(parser)


def columns_option(parser: Any) -> None:
    parser.add_argument(
        "--columns",
        metavar="KEY=COLUMN,...",
        help="question=problem,steps=rationale,answer=result: names of the columns in a file of your own",
    )


def judge_option(parser: Any) -> None:
    parser.add_argument(
        "--judge",
        metavar="MODULE:FUNCTION",
        help="judge of your own, called as function(question, gold, answer) (default: by the kind of answer)",
    )


def model_options(parser: Parser) -> None:
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the weights (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--weights",
        choices=["int8", "int4"],
        help="quantise linear layers; int4 needs --dtype bfloat16",
    )
    parser.add_argument(
        "--backbone",
        help="folder or Hub id of an adapter's backbone, if not the one that its checkpoint names",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")


def dtype_of(args: argparse.Namespace) -> str:
    """The value of --dtype, or the default of the device."""
    # This import needs torch.
    from colar.ops import devices

    return args.dtype or devices.inference_dtype(args.device or devices.best())


def weights_of(args: argparse.Namespace) -> str:
    """dtype and --weights as one text, which is stored with answers."""
    return f"{dtype_of(args)}, {args.weights} weights" if args.weights else dtype_of(args)


def limit_options(parser: Parser) -> None:
    # The defaults in these texts are those of `Decoding`.
    parser.add_argument(
        "--max_latents",
        type=at_least(0),
        help="maximum number of thoughts (default: the checkpoint's own, or else 128)",
    )
    parser.add_argument(
        "--max_completion_length",
        type=at_least(1),
        help="maximum tokens of an answer (default: the checkpoint's own, or else 64)",
    )


def batching_options(parser: Parser) -> None:
    parser.add_argument(
        "--batch_size",
        type=at_least(1),
        help="requests computed together (default: 256 on a CUDA GPU, 32 on others and with --ray)",
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="run decode steps on a GPU without CUDA graphs, which avoid launch overhead",
    )


def batch_size(args: argparse.Namespace) -> int:
    """`--batch_size`, or the default of the device."""
    from colar.ops import devices  # torch comes later

    if args.batch_size is not None:
        return int(args.batch_size)
    if getattr(args, "ray", None) is not None:
        # The devices that will answer are not known here.
        return devices.requests_at_once("cpu")
    return devices.requests_at_once(args.device or devices.best())


def ray_options(parser: Parser, more: str = "") -> None:
    """Options of a Ray cluster whose engines answer; `more` is added to the help of --ray."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="answer on a Ray cluster: auto (running here), local (started for this) or HOST:PORT" + more,
    )
    parser.add_argument(
        "--ray_actors",
        type=int,
        help="its engines (default: one for each GPU, else as many as fit)",
    )
    parser.add_argument("--ray_cpus", type=int, help="CPUs of each engine (default: 1)")


def check_ray(args: argparse.Namespace) -> None:
    """Reject the other options of a cluster without --ray."""
    if args.ray is None and (args.ray_actors is not None or args.ray_cpus is not None):
        raise ValueError("--ray_actors and --ray_cpus go with --ray, the cluster's address")


def cpus_of(args: argparse.Namespace) -> int:
    """The CPUs of each engine on a cluster."""
    return 1 if args.ray_cpus is None else args.ray_cpus


def params_options(parser: Parser) -> None:
    """An option for each per-request value that some method has."""
    # This import needs torch.
    from colar.methods import registry

    # Several values make several rows of a table: accuracy at c = 1, 2 and 5 is one command.
    for name in registry.all_param_names():
        parser.add_argument(
            f"--{name}",
            type=number,
            nargs="+",
            help="one or several values, for methods that have this parameter",
        )


def number(text: str) -> float:
    """A number of the command line, as int if it is whole. argparse's errors show the function's name."""
    value = float(text)
    return int(value) if value.is_integer() else value


def source_options(
    pairs: list[str], source: str, called: str = "", others: Iterable[str] = ()
) -> dict[str, Any]:
    """The options of one source, which may also be `called` by a name of its own, from the texts of --options.

    KEY=VALUE applies to every source, SOURCE.KEY=VALUE and NAME.KEY=VALUE to one. Values are YAML. The later of two
    values for a key takes precedence. ValueError for an option of a source that is neither this one nor in `others`.
    """
    chosen = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--options takes KEY=VALUE or SOURCE.KEY=VALUE, got {pair!r}")
        owner, _, key = name.rpartition(".")
        if owner in ("", source, called):
            chosen[key] = yaml_settings.read_yaml(f"--options {pair}", value)
        elif owner not in others:
            known = ", ".join(sorted({source, *others}))
            raise ValueError(f"--options {pair}: no source here is called {owner} (there is {known})")
    return chosen


def columns_of(text: str | None) -> dict[str, str] | None:
    """The columns of --columns question=problem,steps=rationale,answer=result; None without any."""
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key and column for key, _, column in pairs):
        raise ValueError(f"--columns takes KEY=COLUMN,KEY=COLUMN, got {text!r}")
    return {key.strip(): column.strip() for key, _, column in pairs}


def examples_of(
    args: argparse.Namespace, source: str, split: str, options: dict[str, Any] | None = None
) -> list[Any]:
    """The examples of a source by the data options, with the judge of the command line.

    `options` are the source's own, by default those of a command that reads this source alone.
    """
    # Imported here because `colar --help` does not need it.
    from colar.data import sources

    return sources.load_examples(
        source,
        split,
        data_dir=args.data_dir,
        limit=args.limit,
        seed=args.data_seed,
        skip_malformed=args.skip_malformed,
        options=source_options(args.options, source) if options is None else options,
        columns=columns_of(args.columns),
        judge=args.judge,
    )
