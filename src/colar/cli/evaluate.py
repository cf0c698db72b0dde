"""`colar evaluate`: answers of checkpoints to test questions, and the report of them."""

import argparse
import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState

from colar import files, processes
from colar.cli import options
from colar.cli.checkpoints import (
    absolute,
    check_backbone,
    data_of_runs,
    engine_settings,
    load_checkpoint,
    methods_of,
    name_and_path,
    name_checkpoints,
    name_sources,
    param_combinations,
    say_judged_by,
    say_trained_on,
    shared_limits,
    unchecked_backbone,
)
from colar.cli.options import Parser
from colar.cli.report import write_report
from colar.data.judge import judge_settings
from colar.evaluation import controls, evaluate
from colar.evaluation.controls import evaluate_controls, require_latent
from colar.evaluation.settings import claim_evaluation
from colar.model import checkpoint


def add_evaluate(parser: Parser) -> None:
    parser.description = (
        "Answer test questions with one or more checkpoints and write records.jsonl, report.json, "
        "report.md and the accuracy-versus-length picture. After an interruption, the same command resumes. "
        "Processes of torchrun, or engines of --ray, divide the questions."
    )
    options.checkpoint_options(parser)
    options.data_options(parser)
    options.judge_option(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="[NAME=]DATA",
        help="sources, or files; one source may stand under several names, with options each (default: the questions "
        "that a run of `colar train auto` held out, or else arithmetic)",
    )
    parser.add_argument("--split", default="test", help="split of the sources")
    parser.add_argument("--limit", type=int, help="use the first LIMIT questions of each")
    options.params_options(parser)
    parser.add_argument(
        "--decoding", nargs="+", default=["greedy"], choices=["greedy", "sampled"], help=options.DECODING_HELP
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
        help="decoding seeds (greedy decoding draws nothing: its records have seed 0)",
    )
    parser.add_argument(
        "--control",
        nargs="+",
        choices=tuple(controls.KINDS),
        help="answer with the latents replaced or halved (docs/methods.md), in rows labelled control-...",
    )
    parser.add_argument("--label", help="label of the rows, in place of the checkpoint's own")
    parser.add_argument("--output", required=True, help="folder for records and report")
    options.ray_options(parser)
    options.limit_options(parser)
    options.batching_options(parser)
    options.model_options(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=6 * 3600,
        metavar="SECONDS",
        help="under torchrun: end when one process has waited this long for another",
    )
    parser.set_defaults(run=run_evaluate, resumes=True)


def run_evaluate(args: argparse.Namespace) -> None:
    options.check_ray(args)
    if args.ray is not None and (args.control or processes.launched() > 1):
        raise ValueError("--ray goes neither with --control nor with torchrun")
    output = files.require_writable(args.output)
    processes.join(args.timeout)
    with processes.locked(output):
        _evaluate(args, output)
    processes.leave()


def _evaluate(args: argparse.Namespace, output: Path) -> None:
    paths = [name_and_path(text)[1] for text in args.checkpoints]
    checkpoints = name_checkpoints(args.checkpoints, args.label)
    # Before any row is read or model loaded, so that a wrong folder is reported within a second.
    folders = {str(name): checkpoint.resolve(path) for name, path in checkpoints.items()}
    check_backbone(folders.values(), args)
    methods = methods_of(folders)
    params = param_combinations(methods, args)
    evaluated = require_latent(methods) if args.control else list(methods)
    args.data = args.data or [data_of_runs(paths)]
    say_judged_by(args.judge, paths)
    datasets = _datasets(args)
    for dataset, examples in datasets.items():
        say_trained_on(dataset, examples, paths)
    limits = shared_limits(args, methods)
    answer_settings = evaluate.AnswerSettings(**limits, batch_size=options.batch_size(args), eager=args.eager)
    settings = {
        "limits": limits,
        "split": args.split,
        "options": args.options,
        "data_seed": args.data_seed,
        "dtype": options.weights_of(args),
        **judge_settings(args.judge),
        **unchecked_backbone(folders.values(), args),
    }
    # Before any process reads records, because they must belong to this evaluation.
    processes.from_main(lambda: claim_evaluation(output, settings, datasets, folders))

    records = output / "records.jsonl"
    with _cluster(args, checkpoints.values()) as actors:
        # If a cluster answers, this process needs neither a GPU nor quantised layers.
        here = {} if actors is None else {"device": "cpu", "weights": None}
        loading = argparse.Namespace(**{**vars(args), **here})
        for name, path in checkpoints.items():
            if str(name) not in evaluated:
                continue
            lm, method = load_checkpoint(path, loading)
            model = evaluate.EvaluatedModel(name.model, lm, method, name.label, name.train_seed)
            grid = evaluate.make_grid(model, datasets, params[str(name)], args.decoding, args.seeds)
            if args.control:
                evaluate_controls(grid, args.control, datasets, records, answer_settings)
            else:
                maker = None
                if actors is not None:
                    from colar.integrations import ray_answers

                    engine = engine_settings(path, args)
                    maker = functools.partial(ray_answers.make_records, engine, actors)
                evaluate.evaluate(grid, datasets, records, answer_settings, maker)
            # Freed before the next model is loaded, because a GPU may have room for one only.
            del lm, method, model, grid
    if PartialState().is_main_process:
        write_report([records], output)


@contextlib.contextmanager
def _cluster(args: argparse.Namespace, checkpoints: Iterable[str]) -> Iterator[Any]:
    """Join the cluster of --ray. Yields its `Actors`, which answer the questions; None without the option."""
    if args.ray is None:
        yield None
        return
    # Nothing of Ray is imported without --ray.
    from colar.integrations import ray_cluster

    pool = ray_cluster.Pool(args.ray, args.ray_actors, options.cpus_of(args))
    with ray_cluster.joined(pool, args.device, [absolute(path) for path in checkpoints], []) as actors:
        yield actors


def _datasets(args: argparse.Namespace) -> dict[str, Any]:
    """The examples of each data set, by its name in the report."""
    named_sources = name_sources(args.data)
    # An option may name the data set or its source.
    known = {*named_sources.keys(), *named_sources.values()}
    datasets = {}
    for name, source in named_sources.items():
        own = options.source_options(args.options, source, name, known)
        datasets[name] = options.examples_of(args, source, args.split, own)
    return datasets
