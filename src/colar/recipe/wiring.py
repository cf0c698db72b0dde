"""From a `Recipe` to a run: data, model, method, validation and training wired together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from colar import files, kept, processes, progress, recipes
from colar.checks import check_same_run
from colar.data import renumber, sources
from colar.data.example import Example
from colar.engine import cache
from colar.engine.request import DECODINGS
from colar.evaluation.evaluate import require_fit, score
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM
from colar.recipe.parsing import build_method
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, plain, to_json
from colar.training.grpo import run as grpo_run
from colar.training.run_folder import RunFolder
from colar.training.run_page import PageCallback, RunPage
from colar.training.sft import TrainResult, train


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says, in its own folder. ValueError for what is wrong with it, before the first step."""
    output = files.require_writable(recipe.output)
    check_start(recipe.model)
    # Joined first: which process owns the folder is settled among all of them.
    processes.join(recipe.training.ddp_timeout)
    # One lock for a run on each disk: under torchrun one process holds it for all.
    owner = processes.owns(output)
    with files.alone(output) if owner else nullcontext():
        if owner:
            claim(recipe, output)
        return _run(recipe, output, resume)


def _run(recipe: Recipe, output: Path, resume: bool) -> TrainResult:
    examples, held_out = load_examples(recipe.data)
    lm, method = load_model(recipe)
    if recipe.generates:
        # An engine that cannot run the backbone would say so at the first validation, after an epoch.
        cache.check(lm.causal_lm)

    # A validation question beyond the model's context would fail after the first epoch: it is looked for now.
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, held_out, params, recipe.validation.limits)

    validate = make_validate(recipe, held_out)
    run_info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    page = make_page(recipe, held_out, params, output)
    watch = []
    if page is not None:
        reinforced = recipe.grpo is not None
        watch.append(PageCallback(page, lm, method, before=reinforced, retrieval=not reinforced))
    if recipe.grpo is not None:
        result = grpo_run.train(
            lm, method, examples, recipe.training, recipe.grpo, output,
            validate=validate, run_info=run_info, resume=resume, callbacks=watch,
        )  # fmt: skip
    else:
        result = train(
            lm, method, examples, recipe.training, output,
            held_out=held_out, validate=validate, run_info=run_info, resume=resume, callbacks=watch,
        )  # fmt: skip
    if page is not None and processes.is_main():
        page.write(lm, method)
    progress.say(
        f"wrote {result.best} (the checkpoint), {output}/learning_curves.png, {output}/logs (TensorBoard)"
    )
    if page is not None and page.folder.page.exists():
        progress.say(f"what it thinks: {page.folder.page}")
    return result


def make_page(recipe: Recipe, held_out: list[Example], params: Sequence[Any], output: Path) -> RunPage | None:
    """The page of the run; None where the recipe wants none, or has no validation rows."""
    settings = recipe.validation
    if settings.page_size == 0 or not held_out:
        return None
    decoding = replace(
        DECODINGS[settings.decoding],
        max_latents=settings.limits.max_latents,
        max_completion_length=settings.limits.max_completion_length,
    )
    return RunPage(RunFolder(output), held_out[: settings.page_size], params, decoding)


def claim(recipe: Recipe, output: Path) -> None:
    """Write the recipe into its run folder. ValueError where the folder holds another run: two must not mix."""
    path = output / "recipe.json"
    now = to_json(recipe)
    folder = RunFolder(output)
    # A run that failed before it saved anything leaves nothing to mix with: its mistake may be corrected in place.
    if path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        before = files.read_json(path)
        # An older recipe.json lacks the keys that have come since: that run had their defaults. It may also have keys
        # that are gone.
        defaults = _flat(to_json(Recipe(output="")))
        kept = {key: value for key, value in _flat(before).items() if key not in REMOVED}
        check_same_run(
            output,
            _lasting({**defaults, **kept}),
            _lasting({**defaults, **_flat(now)}),
            "give this run its own --output, or remove that folder",
        )
    files.write_json(path, now)


REMOVED = ("grpo.top_p",)
"""Keys that recipes once had, and that could have one value only: an older run folder may name them."""
RESUMABLE = (
    "num_train_epochs",
    "max_hours",
    "max_steps",
    "report_to",
    "ddp_timeout",
    "tokens_per_batch",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "page_size",
)
"""Keys that may change when a run resumes: a longer budget, where it is logged, its page, a limit of memory, how an
update's rows are divided. That their number stays the same is checked where it is known (`training/run.py`)."""


def _lasting(flat: dict[str, Any]) -> dict[str, Any]:
    """The keys that must stay as they are when a run resumes."""
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in RESUMABLE}


def load_examples(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows, and validation rows ([] where the recipe has none).

    ValueError where validation would be on training rows, where rows occur twice, or where none are left.
    """
    held_out = _validation_rows(data)
    train_rows = _first_source(data)
    train_rows += _renumbered(
        data, data.source, data.train_split, train_rows, data.renumber, data.seed, held_out
    )
    for mixed in data.mixed_in:
        source, split = mixed["source"], mixed.get("train_split", "train")
        seed = mixed.get("seed", data.seed)
        rows = _load(data, source, split, mixed.get("train_size"), seed, mixed.get("options", {}))
        rows = _apart(rows, train_rows, source, split)
        new = _renumbered(data, source, split, rows, mixed.get("renumber", 0), seed, held_out)
        train_rows += rows + new
    # A row's random draws are a function of its id: two rows of one id would see the same draws.
    repeated = [id for id, n in Counter(example.id for example in train_rows).items() if n > 1]
    if repeated:
        raise ValueError(
            f"data.mixed_in: some rows occur twice, {repeated[0]!r} for one; a source is mixed in once, beside other "
            "sources"
        )
    trained = {(example.id, example.question) for example in train_rows}
    shared = [example.id for example in held_out if (example.id, example.question) in trained]
    if shared:
        raise ValueError(
            f"data.validation_source: {len(shared)} of its rows are trained on, {shared[0]!r} for one: name other "
            "rows, or set data.validation_size 0"
        )
    return train_rows, held_out


def _apart(rows: list[Example], before: list[Example], source: str, split: str) -> list[Example]:
    """The rows of a source that is mixed in; of a user's file whose ids others have, by ids that name the file.

    Rows without an id are called after their file's stem, which two files may share. Rows that are really the same keep
    their ids: they occur twice.
    """
    if sources.own_file(source, split) is None:
        return rows
    questions = {row.id: row.question for row in before}
    taken = [row for row in rows if row.id in questions]
    if not taken or any(questions[row.id] == row.question for row in taken):
        return rows
    prefix = f"{source}/{split}:"
    apart = []
    for row in rows:
        cluster = prefix + row.cluster if row.cluster else ""
        apart.append(replace(row, id=prefix + row.id, cluster=cluster))
    return apart


def _first_source(data: DataConfig) -> list[Example]:
    """Rows train_skip to train_skip + train_size of the recipe's main source, without those of too many steps."""
    limit = None if data.train_size is None else data.train_skip + data.train_size
    rows = _load(data, data.source, data.train_split, limit, data.seed, data.options)
    if len(rows) <= data.train_skip:
        raise ValueError(
            f"data.train_skip is {data.train_skip}, but {data.source} has no more rows than that"
        )
    rows = rows[data.train_skip :]
    longest = data.max_reasoning_steps
    if longest is None:
        return rows
    kept_rows = [row for row in rows if len(row.steps) <= longest]
    if not kept_rows:
        raise ValueError(
            f"data.max_reasoning_steps is {longest}, and every row of {data.source} has more steps"
        )
    progress.say(
        f"{data.source}: {len(kept_rows):,} of {len(rows):,} rows have at most {longest} steps of reasoning"
    )
    return kept_rows


def _renumbered(
    data: DataConfig,
    source: str,
    split: str,
    rows: list[Example],
    versions: int,
    seed: int,
    held_out: list[Example],
) -> list[Example]:
    """New rows made of `rows` by other numbers; none of them asks a question of validation or of a test set."""
    if versions == 0:
        return []
    questions = sources.held_out_questions(
        source, split, data_dir=data.data_dir, skip_malformed=data.skip_malformed
    )
    # Validation may be on another source, whose questions are not among those of `source`.
    questions.update(example.question for example in held_out)
    key = kept.digest(versions, seed, sorted(questions), *rows)
    # Minutes of work, which a run that resumes would do again.
    found = _from_tensor(
        kept.kept("renumbered", key, lambda: _to_tensor(renumber.renumbered(rows, versions, seed, questions)))
    )
    renumber.say(found, len(rows))
    if found.alone.total() == len(rows):
        raise ValueError(f"data.renumber: {source} has no row whose chain is equations that can be run again")
    return found.examples


def _to_tensor(found: renumber.Renumbered) -> dict[str, torch.Tensor]:
    """Renumbered rows as the bytes of their JSON: what is kept are tensors (`kept.py`)."""
    values = {
        "examples": [asdict(example) for example in found.examples],
        "alone": found.alone,
        "held_out": found.held_out,
        "repeated": found.repeated,
    }
    return {"json": torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)}


def _from_tensor(tensors: dict[str, torch.Tensor]) -> renumber.Renumbered:
    values = json.loads(bytes(tensors["json"].numpy()))
    examples = [Example(**{**row, "steps": tuple(row["steps"])}) for row in values.pop("examples")]
    return renumber.Renumbered(examples, alone=Counter(values.pop("alone")), **values)


def _validation_rows(data: DataConfig) -> list[Example]:
    """The rows that select the checkpoint."""
    if data.validation_size == 0:
        return []
    source = data.validation_source or data.source
    same = source == data.source
    if same and data.validation_split == data.train_split:
        raise ValueError(
            f"data.validation_split {data.validation_split} is the one to train on: name another, another "
            "data.validation_source, or set data.validation_size 0"
        )
    if same and Path(source).is_file():
        raise ValueError(
            f"{source} is one file, which would validate on its own training rows: name another in "
            "data.validation_source, or set data.validation_size 0"
        )
    # The same file may be written in several ways.
    file = sources.own_file(source, data.validation_split)
    trained = [(data.source, data.train_split)]
    trained += [(mixed["source"], mixed.get("train_split", "train")) for mixed in data.mixed_in]
    for other, split in trained:
        if file is not None and file == sources.own_file(other, split):
            raise ValueError(
                f"data.validation_source: {source} and {other} are one file, {file}, which would validate on its own "
                "training rows: name another, or set data.validation_size 0"
            )
    # The main source's options mean nothing to another one.
    options = data.options if same else {}
    return _load(data, source, data.validation_split, data.validation_size, data.seed, options)


def _load(
    data: DataConfig, source: str, split: str, limit: int | None, seed: int, options: dict[str, Any]
) -> list[Example]:
    """The first `limit` rows of a source, with what all sources of a recipe share."""
    return sources.load(
        source,
        split,
        data_dir=Path(data.data_dir) if data.data_dir else None,
        limit=limit,
        seed=seed,
        skip_malformed=data.skip_malformed,
        options=options,
    )


def load_model(recipe: Recipe) -> tuple[LatentLM, Method]:
    """Model and method, ready to train: from a checkpoint's weights or from a backbone."""
    method = build_method(recipe)
    lm = _load_lm(recipe, method)
    if recipe.model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(recipe.model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm, method


def check_start(model: ModelConfig) -> None:
    """Reject a `model.init_from` at which there is no checkpoint; the message names the shipped recipe that makes it.

    A checkpoint of the Hub is downloaded.
    """
    if model.init_from is None:
        return
    try:
        checkpoint.check_folder(checkpoint.resolve(model.init_from))
    except ValueError as error:
        start = Path(model.init_from)
        maker = None if start.exists() else recipes.that_writes(start.parent)
        if maker is None:
            raise ValueError(f"model.init_from: {error}") from error
        raise ValueError(
            f"model.init_from: no checkpoint at {start}: there is no such folder; `colar train {maker}` makes it"
        ) from error


def _load_lm(recipe: Recipe, method: Method) -> LatentLM:
    model = recipe.model
    check_start(model)
    seed = recipe.training.seed
    # Before the method's modules are made: their shapes follow from its config.
    if recipe.grpo is not None:
        _take_config(recipe, method)
    # peft draws an adapter's first weights from the global generator.
    torch.manual_seed(seed)
    if model.init_from is not None:
        return pretrained.load_for_training(
            model.init_from, method, model.lora, model.dtype, seed, model.number_tokens
        )
    backbone = backbones.load(model.backbone, model.dtype, seed)
    lm = LatentLM.from_backbone(backbone, recipe.template, model.lora, model.number_tokens)
    pretrained.attach(lm, method, seed)
    return lm


def _take_config(recipe: Recipe, method: Method) -> None:
    """Give `method` the config that the checkpoint was trained with, a measured sigma_e included.

    Reinforcement continues with the method that the weights have learnt. ValueError where the recipe names another
    method, or gives a key another value than the checkpoint has.
    """
    folder = checkpoint.resolve(str(recipe.model.init_from))
    trained = checkpoint.read_info(folder)["method"]
    if trained["name"] != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained['name']}")
    config = registry.rebuild(trained, folder).config
    for key in recipe.method:
        if key == "name":
            continue
        mine = getattr(method.config, key)
        theirs = getattr(config, key)
        # JSON made lists of the checkpoint's tuples.
        if plain(mine) != plain(theirs):
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = config


def make_validate(
    recipe: Recipe, examples: list[Example]
) -> Callable[[LatentLM, Method], dict[str, float]] | None:
    """A function that validates by generation; None where the recipe has no validation rows."""
    if not examples:
        return None
    settings = recipe.validation

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        params = [registry.make_params(method, values) for values in settings.params]
        return score(lm, method, examples, params, settings.decoding, settings.limits)

    return validate


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"lora": {"r": 8}}} -> {"model.lora.r": 8}; a dict without keys stays as it is."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            for inner_key, inner_value in _flat(value).items():
                flat[f"{key}.{inner_key}"] = inner_value
        else:
            flat[key] = value
    return flat
