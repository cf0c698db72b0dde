"""Completions a second of GRPO's rollouts, ours beside the published way, and what share of a training step they are.

    python benchmarks/rollout.py --output results/bench-rollout

SmolLM2-135M in bfloat16 with an adapter, as it is trained; real GSM8K questions, G outputs for each, sampled at
temperature 1. Chains have the lengths of the questions' own at that compression factor and answers `ANSWER` tokens, so
that all systems draw the same number of latents and tokens from the same weights.

    ours        the engine: a question read once for its outputs, one line, log-probs of what was drawn kept; where an
                update uses a generation once, its old log-probs are the trainer's own, so no forward is made for them
    merged      ours, the adapter folded into the weights meanwhile (`merge_adapter`), folding and undoing it included
    rescored    ours, and old log-probs by one forward, as where a generation is used for several updates
    published   each output on its own: left-padded static batch until its longest chain ends, logits at every prompt
                position, all hidden states, the answer by `generate` over everything again, and old log-probs by a
                second full forward with logits at every position

Ours is followed by one update from its outputs, in batches, with which the share of a training step that rollouts take
is reckoned for all of them. Every system runs in a process of its own; rounds alternate between the systems, so that a
noisy minute hits all. Medians over the rounds. The table goes to stdout, then one JSON line; the raw runs into the
output folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import shared
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from work import ANSWER, Unending, left_padded

from colar import files, progress
from colar.data import sources
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.rollouts import Rollouts
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.rollout import Output

SYSTEMS = ("ours", "merged", "rescored", "published")
LORA = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")
"""As in the recipes of smollm2-135m."""


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
        shown = (f"{c['completions_per_second']:.3g} ({name})" for name, c in runs[-1]["cells"].items())
        progress.say(f"{system}: {', '.join(shown)} completions/s")
    report = summarise(runs, args)
    path = files.require_writable(args.output) / "report.json"
    files.write_json(path, report)
    show(report)
    print(
        json.dumps({key: value for key, value in report.items() if key.startswith("vs_") and "by" not in key})
    )
    progress.say(f"wrote {path}")


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """A generation at each factor, after a small one that is not counted; by `ours`, an update from each too."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = backbones.load(args.backbone, _precision(args), 0)
    lm = LatentLM.from_backbone(backbone, lora=LORA).to(device).eval()
    lm.template.eos_id = -1  # no token's: answers end at their limit
    method: Any = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    lm.to(device)
    examples = _examples(args)
    generation(system, lm, method, job(lm, method, examples[:1], 5, samples=2), args.batch)
    cells = {}
    for factor in args.compression_factors:
        told = job(lm, method, examples[: args.questions], factor, args.num_generations)
        started = time.perf_counter()
        outputs = generation(system, lm, method, told, args.batch)
        seconds = time.perf_counter() - started
        assert outputs.thought_counts.tolist() == told.lengths, "not the work that was asked for"
        cells[f"c={factor}"] = {
            "seconds": seconds,
            "completions_per_second": len(told.requests) / seconds,
            "latents": sum(told.lengths) / len(told.lengths),
        }
        if system == "ours":
            cells[f"c={factor}"]["update_seconds"] = update(lm, method, outputs, args.batch)
    return {"system": system, "cells": cells}


def job(lm: LatentLM, method: Any, examples: Sequence[Any], factor: int, samples: int) -> Job:
    """Requests of `samples` outputs a question, each with as many latents as its chain has groups."""
    params, requests, asked, lengths = method.Params(factor), [], [], []
    for index, example in enumerate(examples):
        length = -(-sum(map(len, lm.template.steps(example.steps))) // factor)
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
def generation(system: str, lm: LatentLM, method: Any, told: Job, batch: int) -> Rollouts:
    """Rollouts, sampled and ready to be learnt from, by one system; a forward for log-probs goes batch by batch."""
    if system == "published":
        return published(lm, method, told, batch)
    outputs = ours(lm, method, told, merged=system == "merged")
    if system == "rescored":
        for start in range(0, len(told.requests), batch):
            method.logps(lm, slice_of(outputs, start, start + batch, lm.device), "mean")
    return outputs


def ours(lm: LatentLM, method: Any, told: Job, merged: bool) -> Rollouts:
    """`rollout.roll_out` and what it is followed by, but for chains whose length is given."""
    with lm.merged() if merged else contextlib.nullcontext():
        made = Engine(lm, Unending(method), max_batch=64).generate(told.requests)
    sampled = [
        Output(example, ids, completion, lm.template.eos_id)
        for example, ids, completion in zip(told.examples, told.ids, made, strict=True)
    ]
    outputs = rollout.collate(sampled, lm.width)
    rollout.engine_logps(method, sampled, outputs, "mean")
    return outputs


def published(lm: LatentLM, method: Any, told: Job, batch: int) -> Rollouts:
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
    for start in range(0, len(whole), batch):
        rows = slice(start, start + batch)
        scored = lm.causal_lm(inputs_embeds=whole[rows], attention_mask=mask[rows], output_hidden_states=True)
        scored.logits.float().log_softmax(-1)
        lm.extra["latent_head"](scored.hidden_states[-1])
    return _outputs(told, torch.cat(latents, 1), lengths, answers)


def _outputs(told: Job, latents: Tensor, lengths: Tensor, answers: Tensor) -> Rollouts:
    """The published rollout's tensors as ours, so that the same update follows."""
    longest = max(map(len, told.ids))
    R = len(told.ids)
    return Rollouts(
        question_ids=torch.tensor([[*row, *[0] * (longest - len(row))] for row in told.ids]),
        question_lengths=torch.tensor([len(row) for row in told.ids]),
        thought_ids=torch.full(latents.shape[:2], -1),
        latents=latents.cpu(),
        thought_counts=lengths.cpu(),
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


def update(lm: LatentLM, method: Any, outputs: Rollouts, batch: int) -> float:
    """Seconds of one update from these outputs: forward and backward batch by batch, AdamW. One batch goes before it,
    uncounted."""
    R = len(outputs.token_lengths)
    objective = GrpoObjective(lm, method, GrpoConfig())
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-6)
    more = {
        "advantages": torch.tensor([1.0, -1.0] * (R // 2)),
        "weights": 1 / outputs.n_actions().double(),
        "kept": torch.ones(R, dtype=torch.bool),
        "engine_logps": torch.zeros(R, int(outputs.positions().max())),
    }
    tensors = {name: column.to(lm.device) for name, column in {**outputs.tensors(), **more}.items()}

    def learn(start: int) -> None:
        part = {name: column[start : start + batch] for name, column in tensors.items()}
        with torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.causal_lm.dtype == torch.bfloat16):
            loss = objective(num_items_in_batch=R, **part)["loss"]
        loss.backward()

    learn(0)
    optimizer.zero_grad()
    started = time.perf_counter()
    for start in range(0, R, batch):
        learn(start)
    optimizer.step()
    return time.perf_counter() - started


def slice_of(outputs: Rollouts, start: int, end: int, device: torch.device) -> Rollouts:
    tensors = outputs.tensors().items()
    return Rollouts.from_tensors({name: column[start:end].to(device) for name, column in tensors})


def _precision(args: argparse.Namespace) -> str:
    return "float32" if args.backbone == "tiny" else "bfloat16"


def _examples(args: argparse.Namespace) -> list[Any]:
    limit = 4 * args.questions
    found = sources.load(args.source, "test", data_dir=args.data_dir, limit=limit, skip_malformed=True)
    return [example for example in found if example.steps]


# The report


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, the ratios that matter, and everything that they come from."""
    cells = shared.medians(runs, args.systems)
    names = [f"c={factor}" for factor in args.compression_factors]
    for system in cells:
        for name in names if "ours" in cells else ():
            cell, seconds = cells[system][name], cells["ours"][name]["update_seconds"]
            cell["rollout_share"] = cell["seconds"] / (cell["seconds"] + seconds)
    ratios: dict[str, Any] = {}
    for key, system in (
        ("vs_published", "ours"),
        ("vs_published_merged", "merged"),
        ("vs_published_rescored", "rescored"),
    ):
        if {system, "published"} <= set(cells):
            times = {c: cells["published"][c]["seconds"] / cells[system][c]["seconds"] for c in names}
            ratios |= {key: times[names[0]], f"{key}_by_factor": times}
    return {
        "benchmark": "rollout",
        "setting": {
            "backbone": args.backbone,
            "source": args.source,
            "rounds": args.rounds,
            "threads": args.threads,
            "precision": _precision(args),
            "questions": args.questions,
            "num_generations": args.num_generations,
            "compression_factors": args.compression_factors,
            "answer_tokens": ANSWER,
            "update_batch": args.batch,
        },
        "provenance": shared.provenance(),
        **ratios,
        "cells": cells,
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    table = Table(
        title=f"{setting['questions']} questions x {setting['num_generations']} outputs, {setting['threads']} threads, "
        f"medians of {setting['rounds']}"
    )
    for column in (
        "cell",
        "system",
        "latents",
        "completions/s",
        "rollouts s",
        "update s",
        "rollouts' share %",
    ):
        table.add_column(column, justify="left" if column in ("cell", "system") else "right")
    for factor in setting["compression_factors"]:
        for system, cells in report["cells"].items():
            cell = cells[f"c={factor}"]
            shown = [
                cell["latents"],
                cell["completions_per_second"],
                cell["seconds"],
                cell.get("update_seconds"),
            ]
            shown.append(100 * cell["rollout_share"] if "rollout_share" in cell else None)
            numbers = ("" if value is None else f"{value:.3g}" for value in shown)
            table.add_row(f"c={factor}", system, *numbers)
        table.add_section()
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.any_model(shared.parser(__file__, __doc__, SYSTEMS, rounds=3))
    parser.add_argument("--questions", type=int, default=8, help='"rollout batch size of 8"')
    parser.add_argument("--num-generations", type=int, default=8, help='"group size G of 8"')
    parser.add_argument(
        "--compression-factors", type=int, nargs="+", default=[2, 5],
        help="chains have the length of the questions' own at these; the first (the paper's, 2) is vs_published",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, default=8, help="outputs of an update that are learnt from at once"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
