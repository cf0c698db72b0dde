"""What a recipe takes on cards that are elsewhere, computed from shapes: memory, time, disk.

    memory        weights + AdamW's moments + the longest batch's tensors (`replay.py`)
    an update     products of its positions / (cards x peak x a share of it) + the all-reduce of the gradients
    validation    thoughts and answers of the written length, a decode step for each of a batch's rows at once
    disk          the best weights, and checkpoints with moments to resume from

The rows are the recipe's own, with the draws of its run. Where they are many, tokens are counted on a sample and on the
longest batch, and the rest estimated by their characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from colar import files, recipes
from colar.checks import check_number
from colar.data.example import Example
from colar.methods.base import Batch, Method, Row
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.planning import hardware, shapes
from colar.planning.estimate import Estimate, disk, gib
from colar.planning.hardware import Gpu
from colar.planning.replay import Replayed, replay
from colar.planning.rollouts import rollout_work
from colar.planning.trace import Work, trace, twin_of
from colar.prompts import Template
from colar.recipe import Recipe, build_method, load_examples
from colar.training import peak, preflight, recompute
from colar.training.batches import RowSchedule, part_indices
from colar.training.curriculum import Curriculum

SAMPLE = 200
"""Rows that means are taken of."""
COUNTED = 20_000
"""Rows up to which all tokens are counted."""
TRUSTED = 0.85
"""Share of the free memory that an advised number of positions fills: a table is within 15% of what a run takes."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of an epoch."""

    rows: int
    longest: list[Row]
    """The rows of the longest batch, or of its longest part."""
    positions: int
    """Of an epoch's batches, padding included."""
    chain: float
    """Reasoning tokens of a row, on average."""
    answer: float


Rows = tuple[list[Example], list[Example]]
"""A recipe's rows to train on and to validate with."""


def plan(
    recipe: Recipe, gpu: str, count: int = 1, rows: Rows | None = None, as_many: int | None = None
) -> Estimate:
    """The table of a recipe on `count` cards. ValueError where its data or its backbone's shapes are not there.

    `rows` are the recipe's own, where they are loaded already. Where only a part of them is at hand, `as_many` is how
    many there are to train on: as long as these.
    """
    card = hardware.find(gpu, count)
    name = backbone_of(recipe)
    shape = shapes.find(name)
    method = build_method(recipe)
    examples, held_out = load_examples(recipe.data) if rows is None else rows
    at_hand = len(examples)
    if as_many is not None:
        check_number("rows", as_many, 1, whole=True)
        examples = list(islice(cycle(examples), as_many))
    template = Template(recipe.template, shapes.tokenizer_of(name, shape))
    lengths = lengths_of(recipe, method, template, examples, count)

    twin = twin_of(method, examples[:8])
    if recipe.grpo is None:
        work = trace(twin, method, lengths.longest, template)
    else:
        work = rollout_work(twin, method, recipe, examples)
    mode = FakeTensorMode()
    lm = shapes.without_memory(shape, method, recipe.model.dtype, recipe.model.lora, mode)
    _as_trained(
        lm, recipe, bool(next(iter(twin.causal_lm.get_input_embeddings().parameters())).requires_grad)
    )
    found = replay(lm, work, recipe.training.bf16, mode)

    estimate = Estimate(f"{name} on {count} x {card.name} ({card.memory_gib:.0f} GiB each), from shapes")
    _memory(estimate, recipe, method, lm, work, found, card)
    _time(estimate, recipe, method, lm, lengths, work, found, card, count)
    if held_out and recipe.grpo is None:
        _validation(estimate, recipe, lm, lengths, len(held_out), card)
    trained = peak.trained(lm)
    kept = recipe.training.save_total_limit
    estimate.add_bytes("checkpoints on disk", disk(trained, kept, peak.ADAM_MOMENTS))
    if as_many is not None:
        estimate.add("rows", f"{as_many:,}", f"as long as the {at_hand:,} at hand")
    share = f"{100 * hardware.TRAINING_SHARE:.0f}% of the peak"
    estimate.add("assumed", share, "where many rows are short, or texts hold rare words, it takes longer")
    return estimate


def backbone_of(recipe: Recipe) -> str:
    """The backbone's name: the recipe's, or that of the checkpoint it starts from (a folder, or a recipe's output)."""
    return _backbone(recipe.model.backbone, recipe.model.init_from)


def _backbone(name: str, start: str | None) -> str:
    if start is None:
        return name
    info = Path(start) / "colar.json"
    if info.is_file():
        return str(files.read_json(info)["backbone"])
    model = shipped_models().get(Path(start).parent)
    if model is None:
        raise ValueError(f"model.init_from {start} is not there, and no shipped recipe writes it")
    return _backbone(model.get("backbone", "tiny"), model.get("init_from"))


@lru_cache(maxsize=1)
def shipped_models() -> dict[Path, dict[str, Any]]:
    """The `model` section of every shipped recipe, by its output."""
    found = {}
    for name in recipes.names():
        # As it is written: to check every key of every recipe would take a minute.
        written = yaml.safe_load(files.layered_yaml(recipes.find(name)))
        found[Path(written["output"])] = written.get("model") or {}
    return found


def lengths_of(
    recipe: Recipe, method: Method, template: Template, examples: Sequence[Example], count: int
) -> Lengths:
    """Tokens of an epoch: counted row by row, or by characters where there are many rows."""
    training = recipe.training
    size = training.per_device_train_batch_size
    seed = training.seed
    n_draws = training.draws_per_example

    def encoded(indices: Sequence[int], epoch: float = 0.0) -> list[Row]:
        # The draws of a run: TrainingRows has the same.
        epoch = max(0.0, epoch)
        rows = []
        for index in indices:
            rng = Random(seed_from(seed, int(epoch), examples[index].id))
            rows += method.encode_draws(template, examples[index], rng, epoch, n_draws)
        return rows

    sample = Random(0).sample(range(len(examples)), min(SAMPLE, len(examples)))
    rows = encoded(sample)
    if len(examples) <= COUNTED:
        widths = [max(map(len, encoded([index]))) for index in range(len(examples))]
    else:
        characters = [_characters(example) for example in examples]
        per_character = sum(map(len, rows)) / sum(n_draws * characters[index] for index in sample)
        widths = [round(per_character * each) for each in characters]
    rows_per_update = size * training.gradient_accumulation_steps * count
    schedule = RowSchedule(examples, widths, seed, rows_per_update, n_draws)
    batches = list(preflight.batches(schedule, size))
    widest = max(batches, key=lambda batch: preflight.padded(schedule, batch))
    # A curriculum's stages have rows of different lengths: the longer of the first and the last.
    stages = [encoded(widest), encoded(widest, training.num_train_epochs - 1e-6)]
    longest = max(stages, key=lambda rows: max(map(len, rows)))
    first = part_indices(Batch.collate(longest).positions(), training.tokens_per_batch)[0]
    return Lengths(
        rows=len(examples) * n_draws,
        longest=[longest[index] for index in first.tolist()],
        positions=sum(preflight.padded(schedule, batch) for batch in batches),
        chain=sum(len(row.chain) + row.n_latents for row in rows) / len(rows),
        answer=sum(len(row.answer) for row in rows) / len(rows),
    )


def _characters(example: Example) -> int:
    return len(example.question) + sum(map(len, example.steps)) + len(example.answer) + 8


def _as_trained(lm: LatentLM, recipe: Recipe, trains_embeddings: bool) -> None:
    """Freeze and recompute as the run does."""
    if recipe.model.lora is None:
        lm.causal_lm.get_input_embeddings().weight.requires_grad_(trains_embeddings)
    if recipe.training.gradient_checkpointing:
        recompute.enable(lm)
    if recipe.model.attn_implementation is not None:
        lm.causal_lm.set_attn_implementation(recipe.model.attn_implementation)


def _memory(
    estimate: Estimate,
    recipe: Recipe,
    method: Method,
    lm: LatentLM,
    work: Work,
    found: Replayed,
    card: Gpu,
) -> None:
    weights, trained = peak.held(lm), peak.trained(lm)
    parameters = sum(weight.numel() for weight in lm.parameters())
    accumulates = (
        recipe.training.gradient_accumulation_steps > 1 or recipe.training.tokens_per_batch is not None
    )
    kept = trained if accumulates else 0
    moments = peak.ADAM_MOMENTS * trained
    rows = max(rows for rows, _ in work.passes)
    estimate.add("parameters", f"{parameters / 1e6:,.0f} M", f"{gib(weights)}; trained {gib(trained)}")
    estimate.add(
        "longest batch", f"{rows} rows", f"{work.positions:,} positions, {sum(work.logits):,} labels"
    )
    estimate.peak_bytes = weights + moments + kept + found.bytes
    estimate.add_bytes(
        "peak memory",
        estimate.peak_bytes,
        f"weights, moments {gib(moments)}, the batch {gib(found.bytes + kept)}",
    )
    usable = hardware.USABLE * card.memory_gib * hardware.GIB
    if estimate.peak_bytes > usable:
        # In parts, the gradients of all weights wait for the last one.
        room = usable - weights - moments - trained
        advice = _fewer_positions(recipe, work, found, room)
        if advice is None:
            alone = f"weights, moments and gradients alone take {gib(weights + moments + trained)}"
            if room > 0:
                alone += ", which leaves too little for the longest row"
            advice = f"{alone}: {_smaller_weights(recipe, method, 2 * parameters < usable)}"
        estimate.problems.append(f"{gib(estimate.peak_bytes)} of {card.memory_gib:.0f} GiB: {advice}")


def _fewer_positions(recipe: Recipe, work: Work, found: Replayed, room: float) -> str | None:
    """What makes a batch fit into `room` bytes. None where nothing is left of them, or all of it is done already."""
    if room <= 0:
        return None
    # Distill has two sequences a row, one after the other. The longer one counts for training.tokens_per_batch.
    at_once = max(rows * length for rows, length in work.passes)
    longest = max(length for _, length in work.passes)
    most = int(TRUSTED * room / found.bytes * at_once)
    helps = []
    # A row that is longer is a part of its own: a limit below it changes nothing.
    if most >= longest:
        round_number = most // 1024 * 1024
        helps.append(f"training.tokens_per_batch {round_number if round_number >= longest else most}")
    if not recipe.training.gradient_checkpointing:
        helps.append("training.gradient_checkpointing true")
    return f"set {' or '.join(helps)}" if helps else None


def _smaller_weights(recipe: Recipe, method: Method, half_fits: bool) -> str:
    """What helps where weights, moments and gradients do not fit. `half_fits`: the weights alone would in bfloat16."""
    training = recipe.training
    helps = []
    if half_fits and recipe.model.lora is None:
        helps.append("train an adapter (model.lora) of weights in bfloat16 (model.dtype)")
    elif half_fits and recipe.model.dtype == "float32":
        helps.append("keep the backbone's weights in bfloat16 (model.dtype)")
    # What training.fsdp rejects (training/sft.py, training/grpo/run.py).
    divisible = recipe.grpo is None and not method.unrolled
    if divisible and not training.fsdp:
        helps.append("divide the weights between several cards (training.fsdp)")
    last = "take a smaller backbone"
    advice = f"{', '.join(helps)} or {last}" if helps else last
    # A table counts all weights on each card.
    return f"{advice}; training.fsdp divides them, which is not counted here" if training.fsdp else advice


def _time(
    estimate: Estimate,
    recipe: Recipe,
    method: Method,
    lm: LatentLM,
    lengths: Lengths,
    work: Work,
    found: Replayed,
    card: Gpu,
    count: int,
) -> None:
    training = recipe.training
    rate = card.teraflops * 1e12 * hardware.TRAINING_SHARE
    size = training.per_device_train_batch_size * training.gradient_accumulation_steps * count
    share = hardware.all_reduce_seconds(card, count, peak.trained(lm))
    if recipe.grpo is not None:
        batches = training.gradient_accumulation_steps
        estimate.add_seconds(
            "an update", found.flops * batches / rate, f"{size} outputs, without their sampling"
        )
        return
    updates = -(-lengths.rows // size)
    longest = len(lengths.longest) * max(map(len, lengths.longest))
    flops = found.flops / longest * lengths.positions
    epoch = flops / rate / count + updates * share
    tokens = lengths.positions / epoch
    estimate.numbers["tokens a second"] = tokens
    estimate.numbers["flops a position"] = flops / lengths.positions
    estimate.add("an epoch", preflight.clock(epoch), f"{lengths.rows:,} rows, {tokens:,.0f} tokens a second")
    estimate.numbers["an epoch"] = epoch
    estimate.add_seconds("an update", epoch / updates, f"{size} rows; all-reduce {1e3 * share:.1f} ms")
    hours = training.max_hours
    whole = training.num_train_epochs * epoch
    limit = "" if hours is None else f"at most {hours:g} h by training.max_hours"
    shown = whole if hours is None else min(whole, 3600 * hours)
    estimate.add_seconds("the run", shown, f"{training.num_train_epochs:g} epochs {limit}".rstrip())
    curriculum = Curriculum(method, updates, int(updates * training.num_train_epochs))
    problem = preflight.too_few_hours(curriculum, epoch, hours)
    if problem is not None:
        estimate.problems.append(problem)


def _validation(
    estimate: Estimate, recipe: Recipe, lm: LatentLM, lengths: Lengths, questions: int, card: Gpu
) -> None:
    limits = recipe.validation.limits
    steps = min(lengths.chain, limits.max_latents) + min(lengths.answer, limits.max_completion_length)
    asked = questions * len(recipe.validation.params)
    size = min(limits.batch_size, asked)
    step = peak.held(lm) / (card.memory_gb_per_s * 1e9 * hardware.READING_SHARE)
    step += hardware.LAYER_SECONDS * lm.config.num_hidden_layers
    note = f"{asked:,} questions, {size} at once, {steps:.0f} steps each at most"
    estimate.add_seconds("a validation", asked / size * steps * step, note)
