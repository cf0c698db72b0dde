"""Completions a second of GRPO's rollouts, ours beside the published way, and what share of a training step they are.

    python lab/benchmarks/rollout.py --output runs/benchmarks/rollout

SmolLM2-135M in bfloat16 with an adapter, as it is trained; real GSM8K questions, G outputs for each, sampled at
temperature 1. Chains have the lengths of the questions' own at that compression factor and answers `ANSWER` tokens, so
that all systems draw the same number of latents and tokens from the same weights.

    ours        the engine: a question is read once for all its outputs, all outputs share one queue, and the log-probs
                of the drawn actions are kept. Where an update uses a generation once, its old log-probs are the
                trainer's own, so no forward is made for them
    merged      ours, the adapter folded into the weights meanwhile (`merge_adapter`); folding and undoing it count
    rescored    ours, and old log-probs by one forward, as where several updates use a generation
    published   each output on its own: left-padded static batch until its longest chain ends, logits at every prompt
                position, all hidden states, the answer by `generate` over everything again, and old log-probs by a
                second full forward with logits at every position

Ours is followed by one update from its outputs, in batches. Its seconds give the share of a training step that the
rollouts of each system take. Every system runs in a process of its own. Rounds alternate between the systems, so that
a noisy minute hits all of them. Medians over the rounds. The table goes to stdout, then one JSON line; report.json
holds the raw runs.
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
from torch import Tensor
from work import ANSWER, Unending, best_device, chain_tokens, left_padded, load_model, load_questions

from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.rollout import Output

SYSTEMS = ("ours", "merged", "rescored", "published")
LORA = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")
"""As in the recipes of smollm2-135m."""


@dataclass(frozen=True)
class RolloutJob:
    """The outputs asked for, question by question: their requests, examples, prompts and numbers of latents."""

    requests: list[Request]
    examples: list[Example]
    ids: list[list[int]]
    lengths: list[int]


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return

    def said(run: dict[str, Any]) -> str:
        speeds = [f"{cell['completions_per_second']:.3g} ({name})" for name, cell in run["cells"].items()]
        return f"{', '.join(speeds)} completions/s"

    runs = shared.run_systems(__file__, shared.rounds_of(args.systems, args.rounds), said, args.minutes)
    report = summarise(runs, args)
    shared.publish(report, args.output, show, report["cells"])


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's generation at each factor; after each of `ours`, an update from it."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lm, method = load_model(args.backbone, _precision(args), "colar", best_device(), LORA)
    examples = load_questions(args.source, args.data_dir, limit=4 * args.questions)
    # Not counted: kernels and caches.
    small = make_job(lm, method, examples[:1], compression_factor=5, samples=2)
    generation(system, lm, method, small, args.batch)

    cells = {}
    for factor in args.compression_factors:
        job = make_job(lm, method, examples[: args.questions], factor, args.num_generations)
        shared.reset_peak()
        started = time.perf_counter()
        outputs = generation(system, lm, method, job, args.batch)
        shared.synchronize()
        seconds = time.perf_counter() - started
        cell = {
            "seconds": seconds,
            "completions_per_second": len(job.requests) / seconds,
            "latents": sum(job.lengths) / len(job.lengths),
            "peak_memory_gib": shared.peak_gib(),
        }
        if outputs is not None:
            assert outputs.thought_counts.tolist() == job.lengths, "not the work that was requested"
        if system == "ours":
            cell["update_seconds"] = update(lm, method, outputs, args.batch)
        cells[f"c={factor}"] = cell
    return {"system": system, "cells": cells}


def make_job(
    lm: LatentLM, method: Any, examples: Sequence[Example], compression_factor: int, samples: int
) -> RolloutJob:
    """Requests of `samples` outputs a question, each with as many latents as its chain has groups."""
    params = method.Params(compression_factor)
    requests = []
    of_requests = []
    lengths = []
    for index, example in enumerate(examples):
        length = -(-chain_tokens(lm, example) // compression_factor)
        decoding = Decoding(1.0, 1.0, 1.0, length, ANSWER)
        for sample in range(samples):
            requests.append(
                Request(example.id, example.question, params, decoding, index, sample, keep_latents=True)
            )
            of_requests.append(example)
            lengths.append(length)
    ids = [lm.template.question(request.question, method.speed_text(request.params)) for request in requests]
    return RolloutJob(requests, of_requests, ids, lengths)


# The systems


@torch.no_grad()
def generation(system: str, lm: LatentLM, method: Any, job: RolloutJob, batch: int) -> Rollouts | None:
    """Sample by one system, until an update could follow; the rollouts of ours. Log-probs are made batch by batch."""
    if system == "published":
        published(lm, method, job, batch)
        return None
    outputs = ours(lm, method, job, merged=system == "merged")
    if system == "rescored":
        columns = {name: column.to(lm.device) for name, column in outputs.tensors().items()}
        for start in range(0, len(job.requests), batch):
            part = {name: column[start : start + batch] for name, column in columns.items()}
            method.logps(lm, Rollouts.from_tensors(part))
    return outputs


def ours(lm: LatentLM, method: Any, job: RolloutJob, merged: bool) -> Rollouts:
    """The same calls as `rollout.roll_out` and the steps after it, for chains whose length is given."""
    with lm.merged() if merged else contextlib.nullcontext():
        made = Engine(lm, Unending(method), max_batch=64).generate(job.requests)
    sampled = []
    for example, ids, completion in zip(job.examples, job.ids, made, strict=True):
        sampled.append(Output(example, ids, completion, lm.template.eos_id))
    # Log-probs that were kept while drawing, one for each latent, stop and token.
    outputs = rollout.collate(sampled, lm.width)
    rollout.engine_logps(method, sampled, outputs)
    return outputs


def published(lm: LatentLM, method: Any, job: RolloutJob, batch: int) -> None:
    """The rollout as published, with our weights and heads."""
    ids, mask = left_padded(job.ids, lm.device)
    question = lm.embed(ids)
    lengths = torch.tensor(job.lengths, device=lm.device)
    latents: list[Tensor] = []

    # Think: a static batch until its longest chain ends; rows that are done feed latents that a mask hides.
    out = lm.causal_lm(inputs_embeds=question, attention_mask=mask, output_hidden_states=True, use_cache=True)
    for step in range(max(job.lengths)):
        # Whether to stop is drawn as it was published; the draw is not used, for the length is given.
        torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
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

    # Answer: `generate` reads everything again. Without an EOS token it does all of the work that is given.
    separator = lm.embed(torch.full((len(job.ids), 1), lm.template.separator_id, device=lm.device))
    fed = torch.cat([question, *latents, separator], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    lm.causal_lm.generation_config.eos_token_id = None
    answers = lm.causal_lm.generate(
        inputs_embeds=fed, attention_mask=mask, max_new_tokens=ANSWER, do_sample=True, pad_token_id=0
    )

    # Old log-probs: a full forward over question, latents and answer.
    whole = torch.cat([fed, lm.embed(answers)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, ANSWER), value=1)
    for start in range(0, len(whole), batch):
        rows = slice(start, start + batch)
        scored = lm.causal_lm(inputs_embeds=whole[rows], attention_mask=mask[rows], output_hidden_states=True)
        scored.logits.float().log_softmax(-1)
        lm.extra["latent_head"](scored.hidden_states[-1])


# The update


def update(lm: LatentLM, method: Any, outputs: Rollouts, batch: int) -> float:
    """Seconds of one update from these outputs: forward and backward batch by batch, AdamW.

    One batch goes before it and is not counted.
    """
    R = len(outputs.token_lengths)
    objective = GrpoObjective(lm, method, GrpoConfig())
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-6)
    # Made-up rewards and log-probs: an update takes as long whatever their values.
    columns = outputs.tensors() | {
        "advantages": torch.tensor([1.0, -1.0] * (R // 2)),
        "weights": 1 / outputs.n_actions().double(),
        "kept": torch.ones(R, dtype=torch.bool),
        "engine_logps": torch.zeros(R, int(outputs.action_positions().max())),
    }
    columns = {name: column.to(lm.device) for name, column in columns.items()}

    def learn(start: int) -> None:
        part = {name: column[start : start + batch] for name, column in columns.items()}
        in_bfloat16 = lm.causal_lm.dtype == torch.bfloat16
        with torch.autocast(lm.device.type, torch.bfloat16, enabled=in_bfloat16):
            loss = objective(num_items_in_batch=R, **part)["loss"]
        loss.backward()

    # Not counted: the first backward allocates.
    learn(0)
    optimizer.zero_grad()
    shared.synchronize()
    started = time.perf_counter()
    for start in range(0, R, batch):
        learn(start)
    optimizer.step()
    shared.synchronize()
    return time.perf_counter() - started


def _precision(args: argparse.Namespace) -> str:
    return "float32" if args.backbone == "tiny" else "bfloat16"


# The report


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, the share of a step that rollouts take, and the runs that they come from."""
    cells = shared.medians(runs, args.systems)
    names = [f"c={factor}" for factor in args.compression_factors]
    # The update is the same for all systems, and measured after ours.
    if "ours" in cells:
        for system in cells:
            for name in names:
                cell = cells[system][name]
                update_seconds = cells["ours"][name]["update_seconds"]
                cell["rollout_share"] = cell["seconds"] / (cell["seconds"] + update_seconds)
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
        "cells": cells,
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    title = (
        f"{setting['questions']} questions x {setting['num_generations']} outputs, {setting['threads']} threads, "
        f"medians of {setting['rounds']}"
    )
    columns = ("cell", "system", "latents", "completions/s", "rollouts s", "update s", "rollouts' share %")
    table = shared.table(title, columns, texts=("cell", "system"))
    for factor in setting["compression_factors"]:
        for system, cells in report["cells"].items():
            cell = cells[f"c={factor}"]
            numbers = [cell[key] for key in ("latents", "completions_per_second", "seconds")]
            numbers.append(cell.get("update_seconds"))
            numbers.append(100 * cell["rollout_share"] if "rollout_share" in cell else None)
            table.add_row(f"c={factor}", system, *(shared.shown(number) for number in numbers))
        table.add_section()
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=3))
    parser.add_argument("--questions", type=int, default=8, help='"rollout batch size of 8"')
    parser.add_argument("--num-generations", type=int, default=8, help='"group size G of 8"')
    parser.add_argument(
        "--compression-factors", type=int, nargs="+", default=[2, 5],
        help="chains have the length of the questions' own at these (the paper's: 2)",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, help="outputs in a forward of the update")
    return parser.parse_args()


if __name__ == "__main__":
    main()
