"""Facts about a backbone and rows, from which `auto.py` chooses the values of a recipe: sizes, lengths, the device."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from colar.checks import check_choice
from colar.data.example import Example
from colar.methods.sequential.equations import DIGITS, Equations
from colar.model import backbones
from colar.ops import devices
from colar.template.template import Format, Template, TemplateConfig

PERCENTILE = 99.5
"""Of the lengths of the rows: what is longer is cut in generation."""
SLOT = 32
"""Positions left for the speed in the prompt."""
LONGER = "choose a --model with a longer context"
EQUATION = re.compile(r"(<<)?[\d\s.,%$+*/()=-]+(>>)?")


@dataclass(frozen=True)
class Facts:
    """A backbone and rows, as far as the values of a recipe follow from them."""

    model: str
    parameters: int
    context: int
    rows: int
    chain: int
    """Tokens of a chain at the percentile."""
    question: int
    """Tokens of a question at the percentile."""
    answer: int
    """Tokens of an answer at the percentile."""
    row: float
    """Mean tokens of a row."""
    equations: bool
    """True if the chains are equations."""
    digits: bool
    """True if the tokenizer has a token for each digit."""
    judged: bool
    """True if an answer can be judged right or wrong: all but free text."""
    layout: Format
    """Of the prompt."""
    device: str
    bfloat16: bool
    """True if the device computes faster in bfloat16."""


@dataclass(frozen=True)
class Reader:
    """A backbone's config and its template, by which rows are measured."""

    model: str
    config: Any
    template: Template

    @classmethod
    def of(cls, model: str, layout: str = "auto") -> Reader:
        """The reader of a backbone, without its weights. ValueError where the backbone is not there."""
        config, tokenizer = describe(model)
        has_chat = bool(getattr(tokenizer, "chat_template", None))
        check_choice("template", layout, ["auto", "plain", "chat"])
        if layout == "chat" and not has_chat:
            raise ValueError(
                f"--template chat: the tokenizer of {model} has no chat template; use plain, or auto"
            )
        form: Format = "chat" if has_chat and layout != "plain" else "plain"
        return cls(model, config, Template(TemplateConfig(format=form), tokenizer))

    def tokens(self, example: Example) -> tuple[int, int, int]:
        """Tokens of a row's question, chain and answer."""
        question = self.template.question(example.question, context=example.context)
        chain = self.template.steps(example.steps)
        return len(question), sum(map(len, chain)), len(self.template.answer(example.answer)) - 2

    def too_long(self, examples: Sequence[Example], generated: int | None = None) -> dict[int, str]:
        """The rows that do not fit the context, by index with the reason.

        Counted is the question with its chain and answer, or with the positions that are `generated`.
        """
        context = backbones.context_of(self.config)
        found = {}
        for index, example in enumerate(examples):
            question, chain, answer = self.tokens(example)
            n = SLOT + question + (chain + answer if generated is None else generated)
            if n > context.length:
                found[index] = f"{example.id}: the row needs {n} positions, {context}"
        return found


def facts_of(reader: Reader, examples: Sequence[Example], device: str | None = None) -> Facts:
    """Describe a backbone and the training rows."""
    questions, chains, answers = zip(*map(reader.tokens, examples), strict=True)
    device = device or devices.best()
    fast = devices.computes_bfloat16(torch.device(device))
    return Facts(
        model=reader.model,
        parameters=parameters_of(reader.model, reader.config),
        context=backbones.context_of(reader.config).length,
        rows=len(examples),
        chain=_percentile(chains),
        question=_percentile(questions),
        answer=_percentile(answers),
        row=float(np.mean(chains) + np.mean(answers) + np.mean(questions)),
        equations=_equations(examples),
        digits=_digits(reader.template),
        judged=all(example.answer_type != "text" for example in examples),
        layout=reader.template.config.format,
        device=device,
        bfloat16=fast and (device != "cpu" or _bfloat16_speed() > 1.1),
    )


def describe(model: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """The config and the tokenizer of a backbone. ValueError as of `backbones.load`."""
    if model in backbones.BUILT_IN:
        backbone = backbones.load(model)
        return backbone.lm.config, backbone.tokenizer
    return backbones.described(model)


def parameters_of(model: str, config: Any) -> int:
    """The number of a backbone's weights; a model of shapes takes no memory."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def _bfloat16_speed() -> float:
    """Speed of this CPU's matrix products in bfloat16 over float32.

    Some have the instructions and are slower with them: oneDNN needs matrix units (AMX) to gain much.
    """
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        # The shape of a small model's layer with a batch of rows.
        left, right = torch.ones(1024, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        runs = []
        for _ in range(5):
            started = time.perf_counter()
            left @ right
            runs.append(time.perf_counter() - started)
        # The fastest: others had the cores to share, or were the first.
        seconds[dtype] = min(runs)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _percentile(lengths: Sequence[int]) -> int:
    return math.ceil(float(np.percentile(lengths, PERCENTILE))) if lengths else 0


def _equations(examples: Sequence[Example]) -> bool:
    """True if nine in ten chains are equations and nothing else."""
    found = [
        all(EQUATION.fullmatch(step) and "=" in step for step in row.steps) for row in examples if row.steps
    ]
    return bool(found) and sum(found) >= 0.9 * len(found)


def _digits(template: Template) -> bool:
    """True if a number is as many tokens as it has digits."""
    try:
        Equations.of(template)
    except ValueError:
        return False
    [ids] = template.steps(("".join(DIGITS),))
    return len(ids) == len(DIGITS)
