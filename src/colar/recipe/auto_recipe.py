"""The recipe of `colar train auto`: the values that follow from the `Facts` about a backbone and rows.

facts -> OUTPUT/recipe.yaml, with the reason of each choice
stages: cot, then the method's own, then grpo where it is requested
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colar import files, yaml_settings
from colar.checks import check_choice
from colar.ops import devices
from colar.recipe.facts import PERCENTILE, SLOT, Facts

METHODS = ("sequential", "colar")
ROOM = 1.25
"""Factor of the limits over `PERCENTILE`, because a model also generates longer chains than those of its rows."""
COMPILED = 50e6
"""Parameters from which compiling the layers on a CPU pays off: it takes half a minute."""
DRAWS = 4
"""Draws of speeds per example with an adapter."""
LONG_DRAWS = 2
"""The same of long rows, which share too little with each other to be computed together."""
VALIDATED_LONG = 100
"""Validation questions with long chains: answering them all would take as long as training."""
VALIDATED: list[dict[str, float]] = [{"compression_factor": 1}, {"compression_factor": 2}]
"""Per-request values of validation."""


def make_recipe(
    facts: Facts, output: str, method: str = "sequential", grpo: bool = False, judge: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The keys of the recipe, and the reasons for most values. ValueError for `grpo` if answers cannot be judged."""
    check_choice("--method", method, METHODS)
    if grpo and not facts.judged and judge is None:
        raise ValueError(
            "--grpo needs answers that can be judged right or wrong, and these are free text: give --judge"
        )
    why = []
    model: dict[str, Any] = {"backbone": facts.model}
    if facts.lora:
        model["lora"] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
        model["dtype"] = "bfloat16" if facts.bfloat16 else "float32"
    size = f"{facts.parameters / 1e6:,.0f} M weights" if facts.parameters >= 1e6 else "under 1 M weights"
    why.append(f"model: {size}: {'LoRA on all linears' if facts.lora else 'all are trained'}")
    speed = "bfloat16, which this device computes faster" if facts.bfloat16 else "float32"
    why.append(f"precision: {'float32, small weights' if facts.on_cpu and not facts.lora else speed}")
    if facts.on_cpu and facts.row < 256:
        model["attn_implementation"] = "eager"
        why.append("attention: eager, faster than sdpa for short rows on a CPU")

    # Within the context, so that nearly every question leaves room for chain and answer.
    room = max(2, facts.context - facts.question - SLOT)
    answer = min(math.ceil(ROOM * facts.answer) + 4, room // 2)
    chain = min(math.ceil(ROOM * facts.chain) + 4, room - answer)
    at_once = 64 if facts.lora and facts.on_cpu else 256
    limits = {"max_latents": chain, "max_completion_length": answer, "batch_size": at_once}
    why.append(
        f"limits: {PERCENTILE}% of chains have at most {facts.chain} tokens, of answers {facts.answer}"
    )
    tree: dict[str, Any] = {
        "output": output,
        "model": model,
        "data": {"source": f"{output}/data", "validation_size": VALIDATED_LONG if facts.long else None},
        "training": _training(facts),
        "validation": {"limits": limits},
        "template": {"format": facts.prompt_format},
    }
    if judge is not None:
        tree["data"]["judge"] = judge
    why.append(f"template: {facts.prompt_format}")
    if facts.long:
        why.append(
            f"long chains: {VALIDATED_LONG} questions are validated, twice in a stage; {LONG_DRAWS} draws"
        )
    if facts.crowded:
        why.append(
            f"gradient_checkpointing: rows have up to {facts.longest:,} tokens, which would not fit otherwise"
        )
    own, note = _method_stage(facts, method, tree["training"]["num_train_epochs"])
    why.append(note)
    tree["stages"] = {"cot": {"method": {"name": "cot"}}, method: own}
    if grpo:
        tree["stages"]["grpo"] = _grpo_stage(facts, method, limits)
    if facts.processes > 1:
        why.append(f"batch sizes: of each of {facts.processes} processes, which share the rows of an update")
    return tree, why


def _training(facts: Facts) -> dict[str, Any]:
    """Length, batch and rates of the stages of SFT."""
    scratch, on_cpu = facts.scratch, facts.on_cpu
    # About 20,000 rows over all epochs, within these bounds on the number of epochs.
    fewest, most = (2 if facts.rows < 100_000 else 1), (20 if scratch else 6)
    epochs = min(most, max(fewest, round(20_000 / facts.rows)))
    batch = 8 if facts.rows * epochs < 8_000 else 16
    training: dict[str, Any] = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": facts.share(batch if on_cpu else facts.update_rows(epochs)),
        "learning_rate": _rate(facts),
        "lr_scheduler_type": "linear" if scratch else "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.01,
        "bf16": facts.bfloat16 and (facts.lora or not on_cpu),
        "eval_steps": 0.5 if facts.long else 0.2,
        "save_steps": 0.05,
    }
    if facts.crowded:
        training["gradient_checkpointing"] = True
    if scratch:
        training["adam_beta2"] = 0.99
    if not on_cpu:
        training["tokens_per_batch"] = 16_384
        training["dataloader_num_workers"] = 2
    # On CUDA layers are compiled by default.
    if on_cpu and facts.parameters >= COMPILED and devices.can_compile(torch.device("cpu")):
        training["compile"] = True
    return training


def _rate(facts: Facts) -> float:
    """The learning rate of SFT."""
    if facts.scratch:
        return 2e-3
    if not facts.lora:
        return 3e-4
    # Rates of an adapter on all linears.
    if facts.parameters < 300e6:
        return 8e-4
    return 4e-4 if facts.parameters < 2e9 else 2e-4


def _method_stage(facts: Facts, method: str, epochs: int) -> tuple[dict[str, Any], str]:
    """The stage of SFT by the method, and the reason for its grouping."""
    training: dict[str, Any] = {"modules_learning_rate": 6e-3 if facts.scratch else 1e-3}
    if method == "colar":
        config: dict[str, Any] = {
            "name": "colar",
            "compression_factors": [1, 2, 2, 3, 4, 5],
            "latent_weight": 2.0,
        }
        note = "method: colar, the paper's head"
        return {"method": config, "training": training, "validation": {"params": VALIDATED}}, note
    grouped = facts.equations and facts.digits and facts.signs
    config = {
        "name": "sequential",
        "compression_factors": [1, 1, 2, 2, 3, 5],
        "confidence_thresholds": [0, 0, 0.8],
        "grouping": "equations" if grouped else "tokens",
        "merge": "ordered" if facts.digits else "sqrt",
        "lookahead_weight": 0.2,
        "shortlist": facts.equations and not facts.scratch,
    }
    if facts.lora:
        draws = LONG_DRAWS if facts.long else DRAWS
        # Half of the examples of CoT's update, each several times.
        examples = 8 if facts.on_cpu else facts.update_rows(epochs) // 2
        training["draws_per_example"] = draws
        training["per_device_train_batch_size"] = facts.share(draws * examples, draws)
    speeds = [*VALIDATED, {"compression_factor": 2, "confidence_threshold": 0.8}]
    if grouped:
        note = "grouping: equations, for the chains are equations and each digit is a token"
    elif not facts.equations:
        note = "grouping: tokens, for the chains are no equations"
    elif not facts.digits:
        note = "grouping: tokens, for this tokenizer has no token for each digit"
    else:
        note = "grouping: tokens, for signs and = are joined to spaces: equations like 48/2=24 could be grouped better"
    return {"method": config, "training": training, "validation": {"params": speeds}}, note


def _grpo_stage(facts: Facts, method: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """The stage of reinforcement, which starts from the method's own stage."""
    accumulate = max(1, 4 // facts.processes)
    return {
        # No other keys: those of the checkpoint hold, which a command line may have changed.
        "method": {"name": method},
        "grpo": {
            "num_generations": 8,
            "steps_per_generation": 2 * accumulate,
            "compression_factors": [2],
            "max_latents": limits["max_latents"],
            "max_completion_length": limits["max_completion_length"],
            "dynamic_sampling": 3,
            "merge_adapter": facts.lora,
        },
        "training": {
            "max_steps": 200,
            # With two updates of 4 rows and more, whole groups of 8 for any number of processes.
            "per_device_train_batch_size": facts.share(32 // accumulate, 4),
            "gradient_accumulation_steps": accumulate,
            "learning_rate": 5e-5 if facts.lora else 1e-4,
            "modules_learning_rate": None,
            "draws_per_example": 1,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "logging_steps": 2,
            "eval_steps": 50,
        },
        "validation": {"params": [{"compression_factor": 2}]},
    }


def append_stage(path: Path, name: str, stage: Mapping[str, Any]) -> None:
    """Add a stage to a recipe: as text behind the others, so that a user's comments stay, if that is where it goes."""
    text = files.read_text(path)
    tree = yaml_settings.read_yaml(path, text)
    tree.setdefault("stages", {})[name] = stage
    _, _, block = yaml_settings.yaml_text({"stages": {name: stage}}).partition("\n")
    appended = f"{text.rstrip()}\n{block}"
    try:
        fits = yaml_settings.read_yaml(path, appended) == tree
    except ValueError:
        fits = False
    files.write_text(path, appended if fits else yaml_settings.yaml_text(tree))


def write_recipe(path: Path, tree: Mapping[str, Any], why: Sequence[str]) -> Path:
    """Write the recipe, with its reasons above it."""
    lines = [
        "# Made by `colar train auto`, with the keys that its command line set. You may change it before training;",
        "# afterwards most changes need --no_resume, which trains anew.",
        "# A stage's folder has recipe.json: every key as it was run, those of later command lines included.",
        "#",
    ]
    lines += [f"# {reason}" for reason in why]
    return files.write_text(path, "\n".join(lines) + "\n" + yaml_settings.yaml_text(tree))
