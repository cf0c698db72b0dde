"""Completions a second of GRPO's rollouts, ours beside the published way, and what share of a training step they are.

    python benchmarks/rollout.py --output results/bench-rollout

SmolLM2-135M in bfloat16 with an adapter, as it is trained; real GSM8K questions, G outputs for each, sampled at
temperature 1. Chains have the lengths of the questions' own at that compression factor and answers `ANSWER` tokens, so
that all systems draw the same number of latents and tokens from the same weights.

    ours        the engine: a question read once for its outputs, one line, log-probs of what was drawn kept; where an
                update uses a generation once, its old log-probs are the trainer's own, so no forward is made for them
    rescored    ours, and old log-probs by one forward, as where a generation is used for several updates
    published   each output on its own: left-padded static batch until its longest chain ends, logits at every prompt
                position, all hidden states, the answer by `generate` over everything again, and old log-probs by a
                second full forward with logits at every position

Each run is followed by one update from its outputs (the same for all), which gives the share of a training step that
its rollouts take. Every system runs in a process of its own; rounds alternate between the systems, so that a noisy
minute hits all. Medians over the rounds. The table goes to stdout, then one JSON line; the raw runs into the output
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import shared
import torch
from generate import ANSWER, Unending, left_padded
from rich.console import Console
from rich.table import Table
from torch import Tensor

from colar import files, progress
from colar.data import sources
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import registry
from colar.methods.outputs import Outputs
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training import rollout
from colar.training.grpo import GrpoObjective
from colar.training.grpo_config import GrpoConfig
from colar.training.rollout import Rollout

SYSTEMS = ("ours", "rescored", "published")
LORA = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")
"""As in recipes/smollm2-135m."""


@dataclass(frozen=True)
class Job:
    """The outputs asked for, question by question, and how many latents each has."""

    requests: list[Request]
    examples: list[Any]
    ids: list[list[int]]
    lengths: list[int]


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    runs = []
    for system in progress.track([name for _ in range(args.rounds) for name in args.systems], "rollout"):
        runs.append(shared.in_a_process(__file__, system))
        progress.say(f"{system}: {runs[-1]['completions_per_second']:.3g} completions/s")
    report = summarise(runs, args)
    path = files.require_writable(args.output) / "report.json"
    files.write_json(path, report)
    show(report)
    print(
        json.dumps({key: report[key] for key in ("vs_published", "vs_published_rescored") if key in report})
    )
    progress.say(f"wrote {path}")


def measure(system: str, args: argparse.Namespace) -> dict[str, float | str]:
    """One generation and one update from it, after a small one of each that is not counted."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = backbones.load(args.backbone, "float32" if args.backbone == "tiny" else "bfloat16", 0)
    lm = LatentLM.from_backbone(backbone, lora=LORA).to(device).eval()
    lm.template.eos_id = -1  # no token's: answers end at their limit
    method: Any = registry.build("colar")
    registry.attach(lm, method, 0)
    method.prepare(lm, [])
    lm.to(device)
    examples = _examples(args)
    trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    generation(system, lm, method, job(lm, method, examples[:1], args, samples=2))
    told = job(lm, method, examples[: args.questions], args, args.num_generations)
    started = time.perf_counter()
    outputs = generation(system, lm, method, told)
    seconds = time.perf_counter() - started
    update(lm, method, slice_of(outputs, 0, 2), optimizer, args.batch)
    update_seconds = update(lm, method, outputs, optimizer, args.batch)
    assert outputs.latent_counts.tolist() == told.lengths, "not the work that was asked for"
    return {
        "system": system,
        "seconds": seconds,
        "completions_per_second": len(told.requests) / seconds,
        "latents_per_second": sum(told.lengths) / seconds,
        "update_seconds": update_seconds,
        "rollout_share": seconds / (seconds + update_seconds),
    }


def job(lm: LatentLM, method: Any, examples: Sequence[Any], args: argparse.Namespace, samples: int) -> Job:
    """Requests of `samples` outputs a question, each with as many latents as its chain has groups."""
    params, requests, asked, lengths = method.Params(args.compression_factor), [], [], []
    for index, example in enumerate(examples):
        length = -(-sum(map(len, lm.template.steps(example.steps))) // args.compression_factor)
        decoding = Decoding(1.0, 1.0, 1.0, length, ANSWER)
        for sample in range(samples):
            requests.append(
                Request(example.id, example.question, params, decoding, index, sample, keep_latents=True)
            )
            asked.append(example)
            lengths.append(length)
    ids = [lm.template.question(r.question, method.prompt(r.params)) for r in requests]
    return Job(requests, asked, ids, lengths)


# The systems


@torch.no_grad()
def generation(system: str, lm: LatentLM, method: Any, told: Job) -> Outputs:
    """Outputs, sampled and ready to be learnt from, by one system."""
    if system == "published":
        return published(lm, method, told)
    outputs = ours(lm, method, told)
    if system == "rescored":
        for start in range(0, len(told.requests), 8):
            method.logps(lm, slice_of(outputs, start, start + 8), "mean")
    return outputs


def ours(lm: LatentLM, method: Any, told: Job) -> Outputs:
    """`rollout.roll_out` and what it is followed by, but for chains whose length is given."""
    made = Engine(lm, Unending(method), max_batch=64).generate(told.requests)
    rollouts = [
        Rollout(example, ids, completion, lm.template.eos_id)
        for example, ids, completion in zip(told.examples, told.ids, made, strict=True)
    ]
    outputs = rollout.collate(rollouts, lm.width)
    rollout.engine_logps(rollouts, outputs, "mean")
    return outputs


def published(lm: LatentLM, method: Any, told: Job) -> Outputs:
    """The rollout as published, with our weights and heads."""
    ids, mask = left_padded(told.ids, lm.device)
    question = lm.embed(ids)
    lengths = torch.tensor(told.lengths, device=lm.device)
    latents: list[Tensor] = []
    out = lm.causal_lm(inputs_embeds=question, attention_mask=mask, output_hidden_states=True, use_cache=True)
    for step in range(max(told.lengths)):
        torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)  # stop or go on
        mean, log_std = lm.extra["latent_head"](out.hidden_states[-1][:, -1])
        drawn = mean + log_std.exp() * torch.randn_like(mean)
        latents.append((drawn * method.sigma_e)[:, None].to(question))
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        mask[:, -1] = step < lengths
        out = lm.causal_lm(
            inputs_embeds=latents[-1],
            attention_mask=mask,
            past_key_values=out.past_key_values,
            output_hidden_states=True,
            use_cache=True,
        )
    separator = lm.embed(torch.full((len(told.ids), 1), lm.template.separator_id, device=lm.device))
    fed = torch.cat([question, *latents, separator], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    lm.causal_lm.generation_config.eos_token_id = None  # the work is given
    answers = lm.causal_lm.generate(
        inputs_embeds=fed, attention_mask=mask, max_new_tokens=ANSWER, do_sample=True, pad_token_id=0
    )
    whole = torch.cat([fed, lm.embed(answers)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, ANSWER), value=1)
    scored = lm.causal_lm(inputs_embeds=whole, attention_mask=mask, output_hidden_states=True)
    scored.logits.float().log_softmax(-1)
    lm.extra["latent_head"](scored.hidden_states[-1])
    return _outputs(told, torch.cat(latents, 1), lengths, answers)


def _outputs(told: Job, latents: Tensor, lengths: Tensor, answers: Tensor) -> Outputs:
    """The published rollout's tensors as ours, so that the same update follows."""
    longest = max(map(len, told.ids))
    R = len(told.ids)
    return Outputs(
        question_ids=torch.tensor([[*row, *[0] * (longest - len(row))] for row in told.ids]),
        question_lengths=torch.tensor([len(row) for row in told.ids]),
        latents=latents.cpu(),
        latent_counts=lengths.cpu(),
        token_ids=answers.cpu(),
        token_lengths=torch.full((R,), ANSWER),
        stopped=torch.zeros(R, dtype=torch.bool),
        temperature=torch.ones(R, dtype=torch.float64),
        latent_temperature=torch.ones(R, dtype=torch.float64),
        params={
            "compression_factor": torch.full((R,), float(told.requests[0].params.compression_factor)),
            "snap": torch.zeros(R),
        },
    )


# The update


def update(lm: LatentLM, method: Any, outputs: Outputs, optimizer: Any, batch: int) -> float:
    """Seconds of one update from these outputs, in batches: forward, backward, AdamW."""
    R = len(outputs.token_lengths)
    objective = GrpoObjective(lm, method, GrpoConfig())
    more = {
        "advantages": torch.tensor([1.0, -1.0] * (R // 2)),
        "weights": 1 / outputs.n_actions().double(),
        "kept": torch.ones(R, dtype=torch.bool),
        "engine_logps": torch.zeros(R, int(outputs.positions().max())),
    }
    started = time.perf_counter()
    tensors = {**outputs.tensors(), **more}
    for start in range(0, R, batch):
        part = {name: column[start : start + batch].to(lm.device) for name, column in tensors.items()}
        with torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.causal_lm.dtype == torch.bfloat16):
            loss = objective(num_items_in_batch=R, **part)["loss"]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


def slice_of(outputs: Outputs, start: int, end: int) -> Outputs:
    return Outputs.from_tensors({name: column[start:end] for name, column in outputs.tensors().items()})


def _examples(args: argparse.Namespace) -> list[Any]:
    folder = Path(args.data_dir) if args.data_dir else None
    found = sources.load(args.source, "test", data_dir=folder, limit=4 * args.questions, skip_malformed=True)
    return [example for example in found if example.steps]


# The report


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, the ratios that matter, and everything that they come from."""
    systems = {
        name: {
            key: median(run[key] for run in runs if run["system"] == name)
            for key in runs[0]
            if key != "system"
        }
        for name in args.systems
    }
    ratios = {}
    for key, name in (("vs_published", "ours"), ("vs_published_rescored", "rescored")):
        if {name, "published"} <= set(systems):
            ratios[key] = systems["published"]["seconds"] / systems[name]["seconds"]
    return {
        "benchmark": "rollout",
        "setting": {
            "backbone": args.backbone,
            "source": args.source,
            "rounds": args.rounds,
            "threads": args.threads,
            "precision": "float32" if args.backbone == "tiny" else "bfloat16",
            "questions": args.questions,
            "num_generations": args.num_generations,
            "compression_factor": args.compression_factor,
            "answer_tokens": ANSWER,
            "update_batch": args.batch,
        },
        "provenance": files.provenance()
        | {"command": shared.command(__file__), "accelerator": shared.accelerator()},
        **ratios,
        "systems": systems,
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    table = Table(
        title=f"{setting['questions']} questions x {setting['num_generations']} outputs, "
        f"c = {setting['compression_factor']}, {setting['threads']} threads, medians of {setting['rounds']}"
    )
    for column in ("system", "completions/s", "latents/s", "rollouts s", "update s", "rollouts' share %"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, run in report["systems"].items():
        shown = [
            run[key] for key in ("completions_per_second", "latents_per_second", "seconds", "update_seconds")
        ]
        table.add_row(name, *(f"{value:.3g}" for value in [*shown, 100 * run["rollout_share"]]))
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="results/bench-rollout", help="folder for report.json")
    parser.add_argument("--backbone", default="smollm2-135m", help="a name, a folder or a Hub id")
    parser.add_argument("--source", default="gsm8k-aug", help="a source (`colar data list`) or a file")
    parser.add_argument("--data-dir", default=None, help="folder with upstream files; else $COLAR_DATA_DIR")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system; medians are shown")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--questions", type=int, default=8, help='"rollout batch size of 8"')
    parser.add_argument("--num-generations", type=int, default=8, help='"group size G of 8"')
    parser.add_argument("--compression-factor", type=int, default=2, help="c (the paper's RL: 2)")
    parser.add_argument(
        "--batch", type=int, default=8, help="outputs of an update that are learnt from at once"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
