"""The recipe of `colar train auto`, for any backbone and any rows: `Facts` about these, and the values that follow.

model, rows, device -> facts -> OUTPUT/recipe.yaml, with the reason of each choice
stages: cot, then the method's own, then grpo where it is requested
"""

import math
import re
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from colar import files, processes, yaml_settings
from colar.checks import check_choice
from colar.data.example import Example, without_too_long
from colar.methods.sequential.boundaries import DIGITS, Equations
from colar.model import backbones
from colar.ops import devices
from colar.template.template import Format, Template, TemplateConfig

MEASURED = 20_000
"""Most rows whose lengths are measured; of more, as many that are drawn."""
TURN = 32
"""More tokens than a chat template writes around a turn."""
PERCENTILE = 99.5
"""Percentile of the rows' lengths from which the limits of generation follow."""
SLOT = 32
"""Positions reserved for the speed in the prompt."""
LONGER = "choose a --model with a longer context"
"""The remedy for rows that are too long."""
EQUATION = re.compile(r"(<<)?[\d\s.,%$+*/()=-]+(>>)?")
METHODS = ("sequential", "colar")
ROOM = 1.25
"""Factor of the limits over that percentile, because a model also generates longer chains than those of its rows."""
SMALL = 20e6
"""Parameters up to which all weights are trained."""
COMPILED = 50e6
"""Parameters from which compiling the layers on a CPU pays off: it takes half a minute."""
DRAWS = 4
"""Draws of speeds per example with an adapter."""
VALIDATED: list[dict[str, float]] = [{"compression_factor": 1}, {"compression_factor": 2}]
"""Per-request values of validation."""


@dataclass(frozen=True)
class Facts:
    """The properties of a backbone and rows from which the values of a recipe follow."""

    model: str
    parameters: int
    context: int
    rows: int
    chain: int
    question: int
    answer: int
    """Tokens of a chain, a question and an answer at the `PERCENTILE`."""
    row: float
    """Mean tokens of a row."""
    equations: bool
    """True if the chains are equations."""
    digits: bool
    """True if the tokenizer has a token for each digit."""
    signs: bool
    """True if the chains' signs and "=" are tokens by themselves."""
    judged: bool
    """True if all answers can be judged right or wrong: none is free text."""
    prompt_format: Format
    """plain, or chat, as the tokenizer's chat template lays out a prompt."""
    device: str
    bfloat16: bool
    """True if the device computes faster in bfloat16."""
    processes: int = 1
    """Processes that train together."""

    @property
    def scratch(self) -> bool:
        """True if the backbone has no weights yet."""
        return self.model in backbones.TINY

    @property
    def lora(self) -> bool:
        """True if an adapter is trained, False if all weights are."""
        return self.parameters > SMALL

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def update(self, epochs: int) -> int:
        """Rows of an update on GPUs: 32, and up to 256 while there are a thousand updates."""
        rows = 32
        while rows < 256 and self.rows * epochs >= 2 * rows * 1000:
            rows *= 2
        return rows

    def share(self, rows: int, multiple: int = 1) -> int:
        """Rows of each process, a multiple of `multiple`, so that an update of all processes has about `rows`."""
        return max(1, rows // self.processes // multiple) * multiple


@dataclass(frozen=True)
class RowReader:
    """A backbone's config and its template, to measure the lengths of rows."""

    model: str
    config: Any
    template: Template

    @classmethod
    def of(cls, model: str, prompt_format: str = "auto", separator: str | None = None) -> "RowReader":
        """Read a backbone's config and tokenizer, without weights. ValueError if there is none.

        `prompt_format` is plain, chat, or auto, which is chat where the tokenizer has a chat template. `separator` is
        that of `TemplateConfig`.
        """
        config, tokenizer = backbones.described(model)
        has_chat = bool(getattr(tokenizer, "chat_template", None))
        check_choice("template", prompt_format, ["auto", "plain", "chat"])
        if prompt_format == "chat" and not has_chat:
            raise ValueError(
                f"--template chat: the tokenizer of {model} has no chat template; use plain, or auto"
            )
        chosen: Format = "chat" if has_chat and prompt_format != "plain" else "plain"
        return cls(model, config, Template(TemplateConfig(format=chosen, separator=separator), tokenizer))

    def tokens(self, example: Example) -> tuple[int, int, int]:
        """Tokens of a row's question, chain and answer."""
        question = self.template.question(example.question, context=example.context)
        chain = self.template.steps(example.steps)
        return len(question), sum(map(len, chain)), len(self.template.answer(example.answer)) - 2

    def too_long(self, examples: Sequence[Example], generated: int | None = None) -> dict[int, str]:
        """Rows that do not fit the context, by index, each with the reason.

        A row needs positions for its question, chain and answer; with `generated`, for the question and that many more.
        """
        context = backbones.context_of(self.config)
        # A token has one byte of text or more, so that of short rows none needs to be tokenised.
        around = SLOT + len(self.template.question("")) + (generated or 0)
        reasons = {}
        for index, example in enumerate(examples):
            texts = [example.question, *example.steps, example.answer, *(text for _, text in example.context)]
            if around + sum(TURN + len(text.encode()) for text in texts) <= context:
                continue
            question, chain, answer = self.tokens(example)
            n = SLOT + question + (chain + answer if generated is None else generated)
            if n > context:
                reasons[index] = (
                    f"{example.id}: the row needs {n} positions, the model's context is {context}"
                )
        return reasons

    def fitting(self, examples: Sequence[Example], kind: str, generated: int | None = None) -> list[Example]:
        """The rows without those that are `too_long`, whose number is logged; `kind` names them ("training rows")."""
        return without_too_long(examples, self.too_long(examples, generated), kind, LONGER)


def facts_of(reader: RowReader, examples: Sequence[Example], device: str | None = None) -> Facts:
    """The facts about a backbone and the training rows."""
    sample = examples if len(examples) <= MEASURED else Random(0).sample(examples, MEASURED)
    lengths = np.array([reader.tokens(example) for example in sample])
    question, chain, answer = np.ceil(np.percentile(lengths, PERCENTILE, axis=0)).astype(int).tolist()
    device = device or devices.best()
    fast = devices.computes_bfloat16(torch.device(device))
    # On the meta device a model has shapes but takes no memory.
    with torch.device("meta"):
        parameters = int(AutoModelForCausalLM.from_config(reader.config).num_parameters())
    digits, signs = _single_tokens(reader.template, examples)
    return Facts(
        model=reader.model,
        parameters=parameters,
        context=backbones.context_of(reader.config),
        rows=len(examples),
        chain=chain,
        question=question,
        answer=answer,
        row=float(lengths.sum(1).mean()),
        equations=_equations(examples),
        digits=digits,
        signs=signs,
        judged=all(example.answer_type != "text" for example in examples),
        prompt_format=reader.template.config.format,
        device=device,
        bfloat16=fast and (device != "cpu" or _bfloat16_speed() > 1.1),
        processes=processes.launched(),
    )


def _bfloat16_speed() -> float:
    """Speed of this CPU's matrix products in bfloat16 over float32.

    Some CPUs have the instructions but are slower with them: oneDNN needs matrix units (AMX) to gain much.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        # Shapes of a small model's layer with a batch of rows.
        factors = {"left": torch.ones(1024, 576, dtype=dtype), "right": torch.ones(576, 1536, dtype=dtype)}
        # The fastest of five, because the first one is slower, and so is one that shared the cores.
        seconds[dtype] = min(timeit.repeat("left @ right", globals=factors, number=1, repeat=5))
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _equations(examples: Sequence[Example]) -> bool:
    """True if nine in ten chains are equations and nothing else."""
    are_equations = [
        all(EQUATION.fullmatch(step) and "=" in step for step in row.steps) for row in examples if row.steps
    ]
    return bool(are_equations) and sum(are_equations) >= 0.9 * len(are_equations)


def _single_tokens(template: Template, examples: Sequence[Example]) -> tuple[bool, bool]:
    """Values of `Facts.digits` and `Facts.signs`."""
    try:
        equations = Equations.of(template)
    except ValueError:
        return False, False
    [ids] = template.steps(("".join(DIGITS),))
    return len(ids) == len(DIGITS), equations.are_seen(template, [row.steps for row in examples])


# --- the choice of values ------------------------------------------------------------------------------------


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
        "data": {"source": f"{output}/data", "validation_size": None},
        "training": _training(facts),
        "validation": {"limits": limits},
        "template": {"format": facts.prompt_format},
    }
    if judge is not None:
        tree["data"]["judge"] = judge
    why.append(f"template: {facts.prompt_format}")
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
        "per_device_train_batch_size": facts.share(batch if on_cpu else facts.update(epochs)),
        "learning_rate": _rate(facts),
        "lr_scheduler_type": "linear" if scratch else "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.01,
        "bf16": facts.bfloat16 and (facts.lora or not on_cpu),
        "eval_steps": 0.2,
        "save_steps": 0.05,
    }
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
        training["draws_per_example"] = DRAWS
        training["per_device_train_batch_size"] = facts.share(
            32 if facts.on_cpu else 2 * facts.update(epochs), DRAWS
        )
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
