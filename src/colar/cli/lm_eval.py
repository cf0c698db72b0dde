"""`colar lm-eval`: lm-evaluation-harness's own command line."""

import argparse

from colar.cli.options import Parser


def add_lm_eval(parser: Parser) -> None:
    parser.description = (
        "Run lm-evaluation-harness's own command line, with the model colar and our tasks known to it. "
        "All words go to lm-eval; `colar lm-eval run --help` has its options."
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="lm-eval's arguments, as they are")
    parser.set_defaults(run=run_lm_eval)


def run_lm_eval(args: argparse.Namespace) -> None:
    # lm-eval is an extra, which need not be installed.
    from colar.integrations import lm_eval

    lm_eval.run(args.words[1:] if args.words[:1] == ["--"] else args.words)
