"""`colar train auto`: a recipe for any backbone and any file of problems, its values chosen from what is there.

    rows -> split by a hash of the question -> OUTPUT/data/{train,validation,test}.jsonl
    model, rows, device -> OUTPUT/recipe.yaml, with the reason of each choice
    stages cot, then the method's own, then grpo where it is asked for

The recipe is written once: the same command goes on with it, and `colar train OUTPUT/recipe.yaml` runs it as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from colar import files
from colar.checks import check_choice
from colar.model import tiny
from colar.ops import devices
from colar.recipe.auto_facts import PERCENTILE, SLOT, Facts

METHODS = ("sequential", "colar")
ROOM = 1.25
"""Limits of generation over that percentile: a model also makes longer chains than its rows have."""
FROM_SCRATCH = tuple(tiny.DIGITS)
SMALL = 20e6
"""Parameters up to which all weights are trained."""
COMPILED = 50e6
"""Parameters from which compiled layers repay their half minute."""
VALIDATED: list[dict[str, float]] = [{"compression_factor": 1}, {"compression_factor": 2}]
"""Per-request values of validation."""


def make_recipe(
    facts: Facts, output: str, method: str = "sequential", grpo: bool = False, judge: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The keys of the recipe, and the reasons for those that depend on the backbone, the rows or the device."""
    check_choice("--method", method, METHODS)
    if grpo and not facts.judged and judge is None:
        raise ValueError(
            "--grpo needs answers that can be judged right or wrong, and these are free text: give --judge"
        )
    scratch, lora = facts.model in FROM_SCRATCH, facts.parameters > SMALL
    on_cpu = facts.device == "cpu"
    why = []
    model: dict[str, Any] = {"backbone": facts.model}
    if lora:
        model["lora"] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
        model["dtype"] = "bfloat16" if facts.bfloat16 else "float32"
    size = f"{facts.parameters / 1e6:,.0f} M weights" if facts.parameters >= 1e6 else "under 1 M weights"
    why.append(f"model: {size}: {'LoRA on all linears' if lora else 'all are trained'}")
    speed = "bfloat16, which this device computes faster" if facts.bfloat16 else "float32"
    why.append(f"precision: {speed if lora or not on_cpu else 'float32, small weights'}")
    if on_cpu and facts.row < 256:
        model["attn_implementation"] = "eager"
        why.append("attention: eager, faster than sdpa for short rows on a CPU")

    # Within the context: nearly every question must have room for what is generated.
    room = max(2, facts.context - facts.question - SLOT)
    answer = min(math.ceil(ROOM * facts.answer) + 4, room // 2)
    chain = min(math.ceil(ROOM * facts.chain) + 4, room - answer)
    limits = {"max_latents": chain, "max_completion_length": answer, "batch_size": 64 if lora else 256}
    why.append(
        f"limits: {PERCENTILE}% of chains have at most {facts.chain} tokens, of answers {facts.answer}"
    )
    tree: dict[str, Any] = {
        "output": output,
        "model": model,
        "data": {"source": f"{output}/data", "validation_size": None},
        "training": _training(facts, scratch, lora),
        "validation": {"limits": limits},
    }
    if judge is not None:
        tree["data"]["judge"] = judge
    why.append(f"template: {facts.layout}")
    tree["template"] = {"format": facts.layout}
    cot = {"method": {"name": "cot"}}
    own, note = _method_stage(facts, method, scratch, lora)
    why.append(note)
    tree["stages"] = {"cot": cot, method: own}
    if grpo:
        tree["stages"]["grpo"] = _grpo_stage(own, limits, lora)
    return tree, why


def _training(facts: Facts, scratch: bool, lora: bool) -> dict[str, Any]:
    """Length, batch and rates of a stage of SFT."""
    on_cpu = facts.device == "cpu"
    passes = 20_000
    epochs = min(20 if scratch else 6, max(2 if facts.rows < 100_000 else 1, round(passes / facts.rows)))
    batch = 8 if facts.rows * epochs < 8_000 else 16
    training: dict[str, Any] = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch if on_cpu else 32,
        "learning_rate": 2e-3 if scratch else _rate(facts.parameters) if lora else 3e-4,
        "lr_scheduler_type": "linear" if scratch else "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.01,
        "bf16": facts.bfloat16 and (lora or not on_cpu),
        "eval_steps": 0.2,
        "save_steps": 0.05,
    }
    if scratch:
        training["adam_beta2"] = 0.99
    if not on_cpu:
        training["tokens_per_batch"] = 16_384
        training["dataloader_num_workers"] = 2
    if facts.parameters >= COMPILED and devices.can_compile(torch.device(facts.device)):
        training["compile"] = True
    return training


def _rate(parameters: int) -> float:
    """The learning rate of an adapter on all linears."""
    if parameters < 300e6:
        return 8e-4
    return 4e-4 if parameters < 2e9 else 2e-4


def _method_stage(facts: Facts, method: str, scratch: bool, lora: bool) -> tuple[dict[str, Any], str]:
    """The stage of CoLaR-SFT."""
    training: dict[str, Any] = {"modules_learning_rate": 6e-3 if scratch else 1e-3}
    if method == "colar":
        config: dict[str, Any] = {
            "name": "colar",
            "compression_factors": [1, 2, 2, 3, 4, 5],
            "latent_weight": 2.0,
        }
        note = "method: colar, the paper's head"
        return {"method": config, "training": training, "validation": {"params": VALIDATED}}, note
    grouped = facts.equations and facts.digits
    config = {
        "name": "sequential",
        "compression_factors": [1, 1, 2, 2, 3, 5],
        "confidence_thresholds": [0, 0, 0.8],
        "grouping": "equations" if grouped else "tokens",
        "merge": "ordered" if facts.digits else "sqrt",
        "lookahead_weight": 0.2,
        "shortlist": facts.equations and not scratch,
    }
    if lora:
        training["draws_per_example"] = 4
        training["per_device_train_batch_size"] = 32 if facts.device == "cpu" else 64
    speeds = [*VALIDATED, {"compression_factor": 2, "confidence_threshold": 0.8}]
    lacks = (
        "the chains are no equations" if not facts.equations else "this tokenizer has no token for each digit"
    )
    note = f"grouping: tokens, for {lacks}"
    if grouped:
        note = "grouping: equations, for the chains are equations and each digit is a token"
    return {"method": config, "training": training, "validation": {"params": speeds}}, note


def _grpo_stage(own: Mapping[str, Any], limits: Mapping[str, int], lora: bool) -> dict[str, Any]:
    """The stage of reinforcement, from the method's own."""
    return {
        "method": dict(own["method"]),
        "grpo": {
            "num_generations": 8,
            "steps_per_generation": 8,
            "compression_factors": [2],
            "max_latents": limits["max_latents"],
            "max_completion_length": limits["max_completion_length"],
            "dynamic_sampling": 3,
            "merge_adapter": lora,
        },
        "training": {
            "max_steps": 200,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "learning_rate": 5e-5 if lora else 1e-4,
            "modules_learning_rate": None,
            "draws_per_example": 1,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "logging_steps": 2,
            "eval_steps": 50,
        },
        "validation": {"params": [{"compression_factor": 2}]},
    }


def write_recipe(path: Path, tree: Mapping[str, Any], why: Sequence[str]) -> Path:
    """Write the recipe, with its reasons above it."""
    lines = [
        "# Made by `colar train auto`, with the keys that its command line set. Change what you like and run it with",
        f"#   colar train {path}",
        "# A stage's folder has recipe.json: every key as it was run, those of later command lines included.",
        "#",
    ]
    lines += [f"# {reason}" for reason in why]
    text = yaml.safe_dump(dict(tree), sort_keys=False, default_flow_style=None, width=110)
    return files.write_text(path, "\n".join(lines) + "\n" + text)
