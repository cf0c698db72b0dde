"""`colar generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.cli.shared import (
    DECODING_HELP,
    batching_options,
    collector_off,
    load,
    model_options,
    param_grid,
    params_options,
)


def add_parser(commands: Any, method_options: bool) -> None:
    generate = commands.add_parser(
        "generate",
        help="answer a question, or a file of questions",
        description="Answer one question, or every line of a JSONL file (resumable).",
    )
    generate.add_argument("checkpoint", help="folder or Hub id")
    generate.add_argument("question", nargs="?", help="the question; or use --input")
    generate.add_argument("--input", help='JSONL with "question" and, if you like, "id" in each line')
    generate.add_argument("--output", help="JSONL of answers, appended to; without it they are printed")
    if method_options:
        params_options(generate)
    generate.add_argument(
        "--show_latents", action="store_true", help="print each thought, a latent by its nearest tokens"
    )
    generate.add_argument("--neighbours", type=int, default=5, help="tokens shown for a latent")
    generate.add_argument("--decoding", default="greedy", choices=["greedy", "sampled"], help=DECODING_HELP)
    for name in ("temperature", "top_p", "latent_temperature"):
        generate.add_argument(f"--{name}", type=float, help="overrides the decoding's")
    generate.add_argument("--seed", type=int, default=0, help="fixes every draw")
    generate.add_argument("--max_latents", type=int, default=128, help="most thoughts")
    generate.add_argument("--max_completion_length", type=int, default=64, help="most tokens of the answer")
    batching_options(generate)
    model_options(generate)
    generate.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if (args.question is None) == (args.input is None):
        raise ValueError("give a question, or --input with a JSONL file, one of the two")
    if args.output and not args.input:
        raise ValueError("--output goes with --input")
    if args.neighbours < 1:
        raise ValueError(f"--neighbours must be 1 or more, got {args.neighbours}")
    with collector_off():
        from colar.engine.engine import Engine
        from colar.engine.request import fold

    decoding = _decoding(args)
    rows = _questions(args)
    if args.output:
        files.require_writable(Path(args.output).resolve().parent)
    lm, method, _ = load(args.checkpoint, args)
    grid = param_grid(method, args, strict=True)
    requests = _requests(rows, grid, decoding, args)
    # No more slots than there are requests: the cache of 32 rows costs one question a quarter of its time. What is
    # compiled is compiled for the batch that was asked for.
    batch_size = args.batch_size if args.compile else min(args.batch_size, len(requests))
    engine = Engine(lm, method, batch_size, compile=args.compile)
    if not args.output:
        gold = {row["id"]: row.get("answer") for row in rows}
        for completion in engine.generate(requests):
            _print_completion(lm, completion, gold[completion.request.id], args)
        return
    done = _done(args)
    requests = [r for r in requests if (r.id, json.dumps(dataclasses.asdict(r.params))) not in done]
    with files.append_jsonl(args.output) as write, progress.bar("generate", len(requests)) as bar:
        for completion in fold(lm, engine.stream(requests)):
            write(_answer(lm, completion, args))
            bar.advance()
    progress.say(f"wrote {args.output} ({len(requests)} new answers, {len(done)} were there)")


def _decoding(args: argparse.Namespace) -> Any:
    from colar.engine.request import DECODINGS

    named = {name: getattr(args, name) for name in ("temperature", "top_p", "latent_temperature")}
    return dataclasses.replace(
        DECODINGS[args.decoding],
        max_latents=args.max_latents,
        max_completion_length=args.max_completion_length,
        **{name: value for name, value in named.items() if value is not None},
    )


def _questions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with `id` and `question` (and `answer`, to print beside ours), from the command line or the file."""
    if args.question is not None:
        return [{"id": "question", "question": args.question}]
    rows = []
    for number, row in files.read_jsonl(args.input):
        if (
            not isinstance(row, dict)
            or not isinstance(row.get("question"), str)
            or not row["question"].strip()
        ):
            raise ValueError(f'{args.input}:{number}: no "question"')
        rows.append({**row, "id": str(row.get("id", number))})
    if not rows:
        raise ValueError(f"{args.input} has no rows")
    if len({row["id"] for row in rows}) < len(rows):
        raise ValueError(f"{args.input}: two rows have one id")
    return rows


def _done(args: argparse.Namespace) -> set[tuple[str, str]]:
    """What the output holds already. ValueError where another checkpoint, seed or decoding answered it."""
    done = set()
    for number, record in enumerate(files.resume_jsonl(args.output), start=1):
        where = f"{args.output}:{number}"
        if missing := [key for key in ("id", "params", "asked") if key not in record]:
            raise ValueError(f"{where} is no answer of colar generate: it lacks {', '.join(missing)}")
        if record["asked"] != _asked(args):
            raise ValueError(
                f"{where} holds an answer asked with {record['asked']}, now it is {_asked(args)}: "
                "give another --output"
            )
        done.add((record["id"], json.dumps(record["params"])))
    return done


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What an answer depends on beside its question and params; kept with it."""
    decoding = dataclasses.asdict(_decoding(args))
    return {"checkpoint": args.checkpoint, "seed": args.seed, "dtype": args.dtype, **decoding}


def _requests(
    rows: list[dict[str, Any]], grid: list[Any], decoding: Any, args: argparse.Namespace
) -> list[Any]:
    from colar.engine.request import Request
    from colar.ops.noise import seed_from

    return [
        Request(
            row["id"],
            row["question"],
            params,
            decoding,
            seed_from(args.seed, row["id"]),
            keep_latents=args.show_latents,
        )
        for row in rows
        for params in grid
    ]


def _answer(lm: Any, completion: Any, args: argparse.Namespace) -> dict[str, Any]:
    from colar.analysis import retrieval

    params = dataclasses.asdict(completion.request.params)
    row = {
        "id": completion.request.id,
        "params": params,
        "answer": completion.text,
        "length": completion.length,
        "asked": _asked(args),
    }
    row |= {"truncated": completion.truncated, "seconds": round(completion.seconds, 4)}
    if args.show_latents:
        readings = retrieval.read(lm, completion, args.neighbours)
        row["thoughts"] = [
            r.token if r.token is not None else [n.token for n in r.neighbours] for r in readings
        ]
    return row


def _print_completion(lm: Any, completion: Any, gold: str | None, args: argparse.Namespace) -> None:
    """One question in full, a thought a line; of a file's questions each in a few lines."""
    from colar.analysis import retrieval

    readings = retrieval.read(lm, completion, args.neighbours)
    if args.input:
        params = dataclasses.asdict(completion.request.params)
        asked = ", ".join(k if v is True else f"{k} {v:g}" for k, v in params.items() if v is not False)
        print(f"\n{completion.request.question}" + (f"  [{asked}]" if asked else ""))
        if readings:
            print("  " + "  ".join(f"[{' '.join(_short(reading))}]" for reading in readings))
    else:
        for number, reading in enumerate(readings, start=1):
            print(f"{number:4d}  {_long(reading)}")
    print(completion.text + (f"   (expected {gold})" if gold is not None else ""))
    cut = " (cut at a limit)" if completion.truncated else ""
    progress.say(f"{completion.length} thoughts{cut}, {completion.seconds:.2f} s")


def _long(reading: Any) -> str:
    """A token, or a latent's nearest tokens with their cosines and its spread."""
    if reading.token is not None:
        return repr(reading.token)
    near = "  ".join(f"{n.token!r} {n.cosine:.2f}" for n in reading.neighbours)
    return near if reading.sigma is None else f"{near}   sigma {reading.sigma:.2f}"


def _short(reading: Any) -> list[str]:
    """A token, or those of a latent's nearest tokens that stand out: at least 0.6 of the best one's cosine."""
    if reading.token is not None:
        return [reading.token.strip()]
    best = reading.neighbours[0].cosine
    return [n.token.strip() for n in reading.neighbours if n.cosine >= 0.6 * best]
