"""What a recipe takes on cards that are elsewhere, computed from shapes: memory, time, disk.

    memory        weights + AdamW's moments + the longest batch's tensors: `memory.py` says what is counted
    an update     products of its positions / (cards x peak x a share of it) + what the cards send one another
    validation    thoughts and answers of the written length, a decode step for each of a batch's rows at once
    disk          the best weights, and checkpoints with moments to resume from

A curriculum's memory is that of the stage whose longest batch feeds the model most positions. Its epochs take, stage by
stage, as long as the positions that they feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from colar import files, recipes
from colar.checks import check_number
from colar.data.example import Example
from colar.model.latent_lm import LatentLM
from colar.planning import hardware, shapes
from colar.planning.estimate import Estimate, disk
from colar.planning.lengths import Lengths, lengths_of
from colar.planning.memory import Planned, add_memory, sent_a_pass
from colar.planning.replay import Replayed, replay
from colar.planning.rollouts import rollout_work
from colar.planning.trace import Twin, Work, trace, twin_of
from colar.prompts import Template
from colar.recipe import Recipe, build_method, load_examples
from colar.training import peak, preflight, recompute, sft
from colar.training.stages import Pace

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

    twin = twin_of(method, examples[:8])
    mode = FakeTensorMode()
    lm = shapes.without_memory(shape, method, recipe.model.dtype, recipe.model.lora, mode)
    _as_trained(lm, twin, recipe)
    planned = Planned(recipe, method, lm, card, count)
    _check_shares(planned, bool(held_out))
    estimate = Estimate(f"{name} on {count} x {card.name} ({card.memory_gib:.0f} GiB each), from shapes")
    if recipe.grpo is None:
        template = Template(recipe.template, shapes.tokenizer_of(name, shape))
        lengths = lengths_of(recipe, method, template, examples, count)
        _supervised(estimate, planned, lengths, twin, template, mode)
        if held_out:
            _validation(estimate, planned, lengths, len(held_out))
    else:
        _reinforcement(estimate, planned, examples, twin, mode)
    kept = recipe.training.save_total_limit
    estimate.add_bytes("checkpoints on disk", disk(peak.trained(lm), kept, peak.ADAM_MOMENTS))
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


def _as_trained(lm: LatentLM, twin: Twin, recipe: Recipe) -> None:
    """Freeze and recompute as the run does."""
    if recipe.model.lora is None:
        trains_embeddings = next(iter(twin.causal_lm.get_input_embeddings().parameters())).requires_grad
        lm.causal_lm.get_input_embeddings().weight.requires_grad_(trains_embeddings)
    if recipe.training.gradient_checkpointing:
        recompute.enable(lm)
        # Without a cache, which such layers do not take, thoughts are made otherwise (methods/unroll.py).
        recompute.enable(twin)
        twin.train()
    if recipe.model.attn_implementation is not None:
        lm.causal_lm.set_attn_implementation(recipe.model.attn_implementation)


def _check_shares(planned: Planned, validates: bool) -> None:
    """ValueError where the run could not split its weights."""
    if not planned.recipe.training.fsdp:
        return
    if planned.recipe.grpo is not None:
        raise ValueError(
            "training.fsdp is for SFT: grpo samples from the model, of which no card would have all weights"
        )
    if planned.count == 1:
        raise ValueError("training.fsdp splits weights between cards: set --count to 2 or more")
    sft.check_fsdp(planned.lm, planned.method, planned.count, validates)


def _supervised(
    estimate: Estimate,
    planned: Planned,
    lengths: Lengths,
    twin: Twin,
    template: Template,
    mode: FakeTensorMode,
) -> None:
    """Memory and time of SFT."""
    training = planned.recipe.training
    works = [trace(twin, planned.method, part.rows, template) for part in lengths.longest]
    costliest = max(range(len(works)), key=lambda stage: works[stage].positions)
    work = works[costliest]
    accumulates = training.gradient_accumulation_steps > 1 or not lengths.longest[costliest].whole
    found = _replayed(planned, work, accumulates, mode)
    add_memory(estimate, planned, work, found, accumulates)
    _time(estimate, planned, lengths, works, found.flops / work.positions)


def _reinforcement(
    estimate: Estimate, planned: Planned, examples: Sequence[Example], twin: Twin, mode: FakeTensorMode
) -> None:
    """Memory and time of GRPO."""
    training = planned.recipe.training
    batches = training.gradient_accumulation_steps
    work, whole = rollout_work(twin, planned.method, planned.recipe, examples)
    accumulates = batches > 1 or not whole
    found = _replayed(planned, work, accumulates, mode)
    add_memory(estimate, planned, work, found, accumulates)
    outputs = training.per_device_train_batch_size * batches * planned.count
    seconds = found.flops * batches / _rate(planned)
    estimate.add_seconds("an update", seconds, f"{outputs} outputs, without their sampling")


def _replayed(planned: Planned, work: Work, accumulates: bool, mode: FakeTensorMode) -> Replayed:
    return replay(
        planned.lm,
        work,
        planned.recipe.training.bf16,
        mode,
        # Where weights are split, gradients wait as shares.
        accumulates=accumulates and planned.shares == 1,
        leaving=planned.leaving,
    )


def _rate(planned: Planned) -> float:
    """Products a second of one card."""
    return planned.card.teraflops * 1e12 * hardware.TRAINING_SHARE


def _time(
    estimate: Estimate, planned: Planned, lengths: Lengths, works: Sequence[Work], flops_a_position: float
) -> None:
    """Time of epochs; `flops_a_position` counts a position as often as it is fed."""
    training, count = planned.recipe.training, planned.count
    size = training.per_device_train_batch_size * training.gradient_accumulation_steps * count
    updates = lengths.curriculum.steps_per_epoch
    sent, share = _sent(planned, lengths, updates)
    seconds = []
    for work, part, positions in zip(works, lengths.longest, lengths.positions, strict=True):
        fed = work.positions / part.padded * positions
        seconds.append(fed * flops_a_position / _rate(planned) / count + updates * share)
    pace = Pace(lengths.stages, seconds)
    epochs = sum(stage.epochs for stage in lengths.stages)
    positions = sum(stage.epochs * n for stage, n in zip(lengths.stages, lengths.positions, strict=True))
    tokens = positions / pace.run
    mean = "; the mean over all stages" if len(lengths.stages) > 1 else ""
    estimate.numbers["tokens a second"] = tokens
    estimate.add_seconds(
        "an epoch", pace.epoch, f"{lengths.rows:,} rows, {tokens:,.0f} tokens a second{mean}"
    )
    estimate.add_seconds("an update", pace.epoch / updates, f"{size} rows; {sent} {1e3 * share:.1f} ms")
    hours = training.max_hours
    limit = "" if hours is None else f"at most {hours:g} h by training.max_hours"
    shown = pace.run if hours is None else min(pace.run, 3600 * hours)
    estimate.add_seconds("the run", shown, f"{epochs:g} epochs {limit}".rstrip())
    problem = preflight.too_few_hours(lengths.curriculum, pace, hours)
    if problem is not None:
        estimate.problems.append(problem)


def _sent(planned: Planned, lengths: Lengths, updates: int) -> tuple[str, float]:
    """What cards send one another for an update, and its seconds."""
    card, count = planned.card, planned.count
    if planned.shares == 1:
        return "all-reduce", hardware.all_reduce_seconds(card, count, peak.trained(planned.lm))
    # To gather or to split is half of an all-reduce; each pass does it anew.
    a_pass = hardware.all_reduce_seconds(card, count, sent_a_pass(planned.lm)) / 2
    return "weights and gradients sent in", lengths.passes / count / updates * a_pass


def _validation(estimate: Estimate, planned: Planned, lengths: Lengths, questions: int) -> None:
    recipe, lm, card = planned.recipe, planned.lm, planned.card
    limits = recipe.validation.limits
    steps = min(lengths.chain, limits.max_latents) + min(lengths.answer, limits.max_completion_length)
    asked = questions * len(recipe.validation.params)
    size = min(limits.batch_size, asked)
    step = peak.held(lm) / (card.memory_gb_per_s * 1e9 * hardware.READING_SHARE)
    step += hardware.LAYER_SECONDS * lm.config.num_hidden_layers
    note = f"{asked:,} questions, {size} at once, {steps:.0f} steps each at most"
    estimate.add_seconds("a validation", asked / size * steps * step, note)
