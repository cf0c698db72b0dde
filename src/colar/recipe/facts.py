"""Facts about a backbone, rows and a device, from which the recipe of `colar train auto` follows (`auto_recipe.py`)."""

import re
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from colar import processes, progress
from colar.checks import check_choice
from colar.data.example import Example, without_too_long
from colar.methods.sequential.boundaries import DIGITS, Equations
from colar.model import backbones
from colar.ops import devices
from colar.template.template import Format, Template, TemplateConfig

MEASURED = 20_000
"""Most rows whose lengths are measured: of a larger file, this many drawn at random."""
TURN = 32
"""More tokens than a chat template writes around a turn."""
PERCENTILE = 99.5
"""Percentile of the rows' lengths from which the limits of generation follow."""
LONG = 1000
"""Mean tokens of a row from which chains count as long."""
SLOT = 32
"""Positions reserved for the speed in the prompt."""
LONGER = "choose a --model with a longer context"
"""The remedy for rows that are too long."""
EQUATION = re.compile(r"(<<)?[\d\s.,%$+*/()=-]+(>>)?")
BESIDE_SIGN = re.compile(r"\s*([+*/=<>()-])\s*")
ACTIVATIONS = 48
"""Bytes that a position takes until the backward pass for each layer and dimension: 2.06 MB in Qwen2.5-1.5B and 4.45 in
7B, by an adapter on all linears in bfloat16 (one layer of each, counted on a CPU)."""
SMALL = 20e6
"""Parameters up to which all weights are trained."""


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
    longest: int
    """Tokens of the longest row that was measured."""
    activations: float
    """Bytes that a position of a row takes until the backward pass, about."""
    memory: float
    """Bytes of a GPU's memory; infinite on other devices."""
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

    @property
    def long(self) -> bool:
        """True for chains in sentences of a thousand tokens and more."""
        return self.row >= LONG

    @property
    def crowded(self) -> bool:
        """True if the weights and the longest row would leave less than a fifth of a GPU's memory."""
        weights = 2 if self.lora else 16
        return weights * self.parameters + self.activations * self.longest > 0.8 * self.memory

    def update_rows(self, epochs: int) -> int:
        """Rows of an update on GPUs: 32, and up to 256 while there are a thousand updates. The learning rate stays: a
        larger update's gradient only has less noise.
        """
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
    # With a bar, because 120 million tokens take minutes.
    lengths = np.array([reader.tokens(example) for example in progress.track(sample, "measure rows")])
    question, chain, answer = np.ceil(np.percentile(lengths, PERCENTILE, axis=0)).astype(int).tolist()
    device = device or devices.best()
    fast = devices.computes_bfloat16(torch.device(device))
    # On the meta device a model has shapes but takes no memory.
    with torch.device("meta"):
        parameters = int(AutoModelForCausalLM.from_config(reader.config).num_parameters())
    text = reader.config.get_text_config()
    layers, width = text.num_hidden_layers, text.hidden_size
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
        longest=int(lengths.sum(1).max()),
        activations=ACTIVATIONS * layers * width,
        memory=devices.memory(torch.device(device)),
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


def without_spaces(example: Example) -> Example:
    """The example with its equations written as 48/2=24: most tokenizers join a sign to a space before it."""
    steps = (BESIDE_SIGN.sub(r"\1", step) if EQUATION.fullmatch(step) else step for step in example.steps)
    return replace(example, steps=tuple(steps))


def _single_tokens(template: Template, examples: Sequence[Example]) -> tuple[bool, bool]:
    """Values of `Facts.digits` and `Facts.signs`."""
    try:
        equations = Equations.of(template)
    except ValueError:
        return False, False
    [ids] = template.steps(("".join(DIGITS),))
    return len(ids) == len(DIGITS), equations.are_seen(template, [row.steps for row in examples])
