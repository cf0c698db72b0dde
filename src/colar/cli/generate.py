"""`colar generate`."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colar import files, processes, progress
from colar.cli import options
from colar.cli.checkpoints import (
    check_backbone,
    engine_settings,
    load_checkpoint,
    methods_of,
    param_combinations,
    unchecked_backbone,
)
from colar.cli.options import Parser
from colar.data import layouts
from colar.engine.completion import Completion, completions_of
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request, check_context, decoding_of
from colar.evaluation import answer_files
from colar.look.thought import EmbeddingIndex, read_thoughts, vocabulary_of
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.template.template import Template

NEAREST = 5
"""Tokens that are shown as nearest to a latent."""
LOW_CONFIDENCE = "?"
"""Mark behind the tokens of a group that ended because the next token had low confidence."""


def add_generate(generate: Parser) -> None:
    generate.description = (
        "Answer one question, or the questions of a file. With --output, the same command resumes."
    )
    generate.add_argument("checkpoint", help="folder or Hub id")
    generate.add_argument("question", nargs="?", help="the question; or use --input")
    generate.add_argument(
        "--input",
        help='file of questions (JSONL, JSON, CSV, TSV, Parquet): "question" or a chat ("messages"), and '
        'optionally "id", "context" and "answer" (the expected one)',
    )
    options.columns_option(generate)
    generate.add_argument("--system", metavar="TEXT", help="a system message before each question")
    generate.add_argument(
        "--output",
        help="JSONL file to append answers to (with --ray a folder); without it they are printed",
    )
    options.ray_options(generate, "; --input may then be a folder")
    options.params_options(generate)
    generate.add_argument(
        "--show_latents",
        action="store_true",
        help="show each thought: a latent as the tokens it was chosen as, if any, and its nearest tokens",
    )
    generate.add_argument(
        "--decoding", default="greedy", choices=["greedy", "sampled"], help=options.DECODING_HELP
    )
    for name in ("temperature", "top_p", "latent_temperature"):
        generate.add_argument(f"--{name}", type=float, help="replaces the value of --decoding")
    generate.add_argument("--seed", type=int, default=0, help="seed of every random draw")
    options.limit_options(generate)
    options.batching_options(generate)
    options.model_options(generate)
    generate.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> None:
    # Answers that the output already holds are not computed again.
    args.resumes = bool(args.output)
    _check_options(args)
    folder = checkpoint.resolve(args.checkpoint)
    check_backbone([folder], args)
    methods = methods_of({args.checkpoint: folder})
    is_chat = Template.is_chat(files.read_json(folder / "template.json"))
    check_context([("system", args.system)] if args.system is not None else [], is_chat)
    [method] = methods.values()
    decoding = decoding_of(
        method,
        args.decoding,
        **{each.name: getattr(args, each.name) for each in dataclasses.fields(Decoding)},
    )
    # Only an output needs the settings, whose digest reads all weights.
    settings = _settings(folder, decoding, args) if args.output else {}
    [combinations] = param_combinations(methods, args).values()
    make_requests = functools.partial(
        answer_files.make_requests,
        combinations=combinations,
        decoding=decoding,
        seed=args.seed,
        keep_latents=args.show_latents,
        is_chat=is_chat,
        system=args.system,
    )
    if args.ray is not None:
        _generate_with_ray(args, settings, make_requests)
        return
    if args.input:
        rows = answer_files.read_questions(args.input, _columns(args))
    else:
        rows = [{"id": "question", "question": args.question, "context": ()}]
    expected = {row["id"]: row["answer"] for row in rows if row.get("answer") is not None}
    requests = make_requests(rows)
    if args.output:
        files.require_writable(Path(args.output).resolve().parent)
        answer_files.check_output(args.output, args.input)
        with processes.locked(args.output):
            _write_answers(folder, requests, expected, settings, args)
    else:
        lm, engine = _load_engine(folder, len(requests), args)
        for completion in engine.generate(requests):
            completion.require_answer()
            # Several answers to one question: print the per-request values above each.
            if not args.input and len(requests) > 1:
                print(_params_text(completion.request.params).strip())
            _print_completion(lm, completion, expected.get(completion.request.id), args)


def _check_options(args: argparse.Namespace) -> None:
    """Reject options that do not go together, before a model is loaded."""
    if (args.question is None) == (args.input is None):
        raise ValueError("give a question, or --input with a file of questions, one of the two")
    if args.question is not None and not args.question.strip():
        raise ValueError("the question is empty")
    if args.system is not None and not args.system.strip():
        raise ValueError("--system is empty")
    if args.input is not None and args.ray is None and not Path(args.input).is_file():
        raise ValueError(f"--input must be a file of questions, and there is none at {args.input}")
    if args.columns and not args.input:
        raise ValueError("--columns goes with --input")
    _columns(args)
    if args.output and not args.input:
        raise ValueError("--output goes with --input")
    options.check_ray(args)
    if args.ray is not None and not (args.input and args.output):
        raise ValueError("--ray goes with --input, a file or a folder, and --output, a folder")


def _columns(args: argparse.Namespace) -> dict[str, str] | None:
    """The columns of --columns; questions need no answer. ValueError for an unknown key, as in a file to train on."""
    columns = options.columns_of(args.columns)
    if columns is not None:
        layouts.renamed({"answer": "answer", **columns})
    return columns


def _load_engine(folder: Path, n_requests: int, args: argparse.Namespace) -> tuple[LatentLM, Engine]:
    """The model, and an engine for this number of requests."""
    lm, method = load_checkpoint(str(folder), args)
    # No more slots than requests, because each step costs time for every slot of the cache.
    batch_size = min(options.batch_size(args), n_requests)
    return lm, Engine(lm, method, batch_size, cuda_graphs=False if args.eager else None)


def _write_answers(
    folder: Path,
    requests: list[Request],
    expected: Mapping[str, str],
    settings: Mapping[str, Any],
    args: argparse.Namespace,
) -> None:
    """Append an answer for every request that has none in the output yet."""
    answered = answer_files.find_answers(args.output, settings)
    missing = [request for request in requests if answer_files.answer_key(request, settings) not in answered]
    # The model is loaded only if a request needs it.
    if missing:
        lm, engine = _load_engine(folder, len(missing), args)
        with files.append_jsonl(args.output) as write, progress.bar("generate", len(missing)) as bar:
            for completion in completions_of(lm, engine.stream(missing)):
                completion.require_answer()
                write(_row(args, settings, lm, completion, expected.get(completion.request.id)))
                bar.update()
    there = len(requests) - len(missing)
    # Some answers may be to questions that were edited, or removed from the file, since they were answered.
    others = f", beside {len(answered) - there} to other questions or values" if len(answered) > there else ""
    progress.say(f"wrote {args.output} ({len(missing)} new answers, {there} were there{others})")


def _row(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    lm: LatentLM,
    completion: Completion,
    expected: str | None,
) -> dict[str, Any]:
    """A completion as a row of the output."""
    row = {**answer_files.answer_row(completion, settings), "checkpoint": args.checkpoint}
    if expected is not None:
        row["expected"] = expected
    if args.show_latents:
        row["thoughts"] = _texts(lm, completion)
    return row


def _generate_with_ray(
    args: argparse.Namespace, settings: Mapping[str, Any], make_requests: Callable[..., list[Request]]
) -> None:
    """Have the engines of a Ray cluster answer."""
    # Nothing of Ray is imported without --ray.
    from colar.integrations import ray_answers, ray_cluster

    job = ray_answers.FileJob(
        engine_settings(args.checkpoint, args),
        functools.partial(_row, args, settings),
        make_requests,
        settings,
        _columns(args),
    )
    ray_answers.run(
        job, args.input, args.output, ray_cluster.Pool(args.ray, args.ray_actors, options.cpus_of(args))
    )


def _settings(folder: Path, decoding: Decoding, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that an answer depends on besides its question and params; stored with the answer."""
    return {
        # A digest, because the checkpoint may lie at another path when the command resumes.
        "weights_digest": checkpoint.digest(folder),
        **unchecked_backbone([folder], args),
        "seed": args.seed,
        "dtype": options.weights_of(args),
        # Tokens for each thought, in rows that have thoughts.
        "neighbours": NEAREST if args.show_latents else None,
        **dataclasses.asdict(decoding),
    }


@functools.lru_cache(maxsize=1)
def _vocabulary(lm: LatentLM) -> EmbeddingIndex:
    """`vocabulary_of`, computed once because a command does not change the weights."""
    return vocabulary_of(lm)


def _texts(lm: LatentLM, completion: Completion) -> list[Any]:
    """The text of each thought that is a token; for a latent, the tokens that it was chosen as, or the nearest ones."""
    texts_of_thoughts: list[Any] = []
    for thought in read_thoughts(lm, completion, NEAREST, _vocabulary(lm)):
        shown = thought["tokens"] if thought["ordered"] else thought["neighbours"][:NEAREST]
        texts = [token["text"] for token in shown]
        texts_of_thoughts.append(texts[0] if thought["kind"] == "token" else texts)
    return texts_of_thoughts


def _print_completion(
    lm: LatentLM, completion: Completion, expected: str | None, args: argparse.Namespace
) -> None:
    """Print the thoughts with their numbers, each on a line or two, and the answer."""
    if args.input:
        print(f"\n{completion.request.question}{_params_text(completion.request.params)}")
    for number, thought in enumerate(read_thoughts(lm, completion, NEAREST, _vocabulary(lm)), start=1):
        print(f"{number:4d}  {_thought_text(thought)}")
    answer = completion.text
    if expected is not None:
        answer += f"   (expected {expected})"
    print(answer)
    cut = " (cut at a limit)" if completion.truncated else ""
    progress.say(f"{completion.length} thoughts{cut}, {completion.seconds:.2f} s")


def _params_text(params: Any) -> str:
    """`  [compression_factor 2]`, or an empty text for a method without per-request values."""
    # A threshold that is off (0) is not shown.
    shown = [f"{name} {value:g}" for name, value in dataclasses.asdict(params).items() if value]
    return f"  [{', '.join(shown)}]" if shown else ""


def _thought_text(thought: Any) -> str:
    """The token, if the thought is one. For a latent, the tokens that it was chosen as with their probabilities, and
    below them the nearest ones with their cosines; or, if it was not chosen as tokens, the nearest and its spread."""
    if thought["kind"] == "token":
        return repr(thought["tokens"][0]["text"])
    near = [f"{token['text']!r} {token['cosine']:.2f}" for token in thought["neighbours"][:NEAREST]]
    if thought["ordered"]:
        chosen = [f"{token['text']!r} {math.exp(token['logprob']):.2f}" for token in thought["tokens"]]
        chosen += [LOW_CONFIDENCE] * thought["low_confidence"]
        return f"{'  '.join(chosen)}\n      near: {'  '.join(near)}"
    if thought["sigma"] is not None:
        near.append(f" sigma {thought['sigma']:.2f}")
    return "  ".join(near)
