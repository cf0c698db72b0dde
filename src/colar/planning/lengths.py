"""The tokens of a recipe's rows: its longest batch and an epoch's positions, in each stage of a curriculum.

The rows are the recipe's own, with the draws of its run. Where they are many, tokens are counted on a sample and on the
longest batch, and the rest estimated by their characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from colar.data.example import Example
from colar.methods.base import Batch, Method, Row
from colar.ops.noise import seed_from
from colar.prompts import Template
from colar.recipe import Recipe
from colar.training import preflight
from colar.training.batches import RowSchedule, part_indices
from colar.training.curriculum import Curriculum
from colar.training.sft import make_curriculum
from colar.training.stages import Stage, stages_of

SAMPLE = 200
"""Rows that means are taken of."""
COUNTED = 20_000
"""Rows up to which all tokens are counted."""


@dataclass(frozen=True)
class Part:
    """The longest batch of a stage, or the longest of its parts."""

    rows: list[Row]
    whole: bool
    """Whether it is all of the batch."""

    @property
    def padded(self) -> int:
        """Positions, padding included."""
        return len(self.rows) * max(map(len, self.rows))


@dataclass(frozen=True)
class Lengths:
    """Tokens of a run, stage by stage."""

    rows: int
    """Of an epoch."""
    curriculum: Curriculum
    stages: list[Stage]
    longest: list[Part]
    """Of each stage."""
    positions: list[float]
    """Of an epoch's batches in each stage, padding included."""
    passes: int
    """Parts of an epoch's batches: each goes forward and backward once."""
    chain: float
    """Reasoning tokens of a row as the model thinks in the end, on average."""
    answer: float


def lengths_of(
    recipe: Recipe, method: Method, template: Template, examples: Sequence[Example], count: int
) -> Lengths:
    """Tokens of a run on `count` cards: counted row by row, or by characters where there are many rows."""
    training = recipe.training
    size = training.per_device_train_batch_size
    n_draws = training.draws_per_example

    def encoded(epoch: float, indices: Sequence[int]) -> list[Row]:
        # The draws of a run: TrainingRows has the same.
        rows = []
        for index in indices:
            rng = Random(seed_from(training.seed, int(epoch), examples[index].id))
            rows += method.encode_draws(template, examples[index], rng, epoch, n_draws)
        return rows

    sample = Random(0).sample(range(len(examples)), min(SAMPLE, len(examples)))
    widths = _widths(examples, encoded, sample)
    rows_per_update = size * training.gradient_accumulation_steps * count
    schedule = RowSchedule(examples, widths, training.seed, rows_per_update, n_draws)
    n_rows = len(examples) * n_draws
    curriculum = make_curriculum(method, training, n_rows, rows_per_update)
    stages = stages_of(curriculum)

    limit = training.tokens_per_batch
    indices = preflight.widest(schedule, size)
    longest = [_longest_part(encoded(stage.begins, indices), limit) for stage in stages]
    batches = [preflight.padded(schedule, batch) for batch in preflight.batches(schedule, size)]
    # The model is validated as it thinks in the end, in every stage.
    thinking = encoded(stages[-1].begins, sample)
    return Lengths(
        rows=n_rows,
        curriculum=curriculum,
        stages=stages,
        longest=longest,
        positions=preflight.stage_positions(schedule, size, encoded, stages),
        passes=sum(1 if limit is None else -(-padded // limit) for padded in batches),
        chain=sum(len(row.chain) + row.n_latents for row in thinking) / len(thinking),
        answer=sum(len(row.answer) for row in thinking) / len(thinking),
    )


def _longest_part(rows: list[Row], limit: int | None) -> Part:
    first, *others = part_indices(Batch.collate(rows).positions(), limit)
    return Part([rows[index] for index in first.tolist()], whole=not others)


def _widths(examples: Sequence[Example], encoded: preflight.Encode, sample: Sequence[int]) -> list[int]:
    """Tokens of each example's longest row, at the start of the run."""
    if len(examples) <= COUNTED:
        return [max(map(len, encoded(0.0, [index]))) for index in range(len(examples))]
    characters = [_characters(example) for example in examples]
    rows = encoded(0.0, sample)
    n_draws = len(rows) // len(sample)
    per_character = sum(map(len, rows)) / sum(n_draws * characters[index] for index in sample)
    return [round(per_character * each) for each in characters]


def _characters(example: Example) -> int:
    return len(example.question) + sum(map(len, example.steps)) + len(example.answer) + 8
