"""From a `Recipe` to a run: data, model, method, validation and training wired together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from colar import files, progress
from colar.data import sources
from colar.data.example import Example
from colar.evaluation.evaluate import require_fit, score
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM
from colar.recipe.parsing import build_method
from colar.recipe.schema import DataConfig, Recipe, plain, to_json
from colar.training.grpo import run as grpo_run
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainResult, train


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says. Everything that can be wrong with it is found before the first step."""
    output = files.require_writable(recipe.output)
    with files.alone(output) if progress.is_main() else nullcontext():
        return _run(recipe, output, resume)


def _run(recipe: Recipe, output: Path, resume: bool) -> TrainResult:
    claim(recipe, output)
    examples, validation = load_examples(recipe.data)
    lm, method = load_model(recipe)
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, validation, params, recipe.validation.limits)
    info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    shared: dict[str, Any] = {
        "validate": make_validate(recipe, validation),
        "run_info": info,
        "resume": resume,
    }
    if recipe.grpo is not None:
        result = grpo_run.train(lm, method, examples, recipe.training, recipe.grpo, output, **shared)
    else:
        result = train(lm, method, examples, recipe.training, output, held_out=validation, **shared)
    progress.say(
        f"wrote {result.best} (the checkpoint), {output}/learning_curves.png, {output}/logs (TensorBoard)"
    )
    return result


def claim(recipe: Recipe, output: Path) -> None:
    """Write the recipe into its run folder; a folder that holds another run is refused, not mixed up."""
    path, mine, folder = output / "recipe.json", to_json(recipe), RunFolder(output)
    # A run that failed before it saved anything is none: its mistake may be put right in place.
    if path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        now, then = _flat(mine), _flat(files.read_json(path))
        # A key that came into recipes since then had its default.
        default = _flat(to_json(Recipe(output="")))
        then |= {key: default[key] for key in now.keys() - then.keys() if key in default}
        differing = [key for key in now | then if now.get(key) != then.get(key)]
        # A longer budget is the one change that a run may go on with.
        differing = [key for key in differing if key.split(".")[-1] not in RESUMABLE]
        if differing:
            raise ValueError(
                f"{output} holds another run (other {', '.join(sorted(differing))}); "
                "give this one its own --output, or remove that folder"
            )
    files.write_json(path, mine)


RESUMABLE = ("num_train_epochs", "max_hours", "max_steps", "report_to")


def load_examples(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows and validation rows."""

    def rows(source: str, split: str, limit: int | None, seed: int, options: dict[str, Any]) -> list[Example]:
        return sources.load(
            source,
            split,
            data_dir=Path(data.data_dir) if data.data_dir else None,
            limit=limit,
            seed=seed,
            skip_malformed=data.skip_malformed,
            options=options,
        )

    source = data.validation_source or data.source
    if data.validation_size != 0 and source == data.source and Path(source).is_file():
        raise ValueError(
            f"{source} is one file, which would validate on its own training rows: name another in "
            "data.validation_source, or set data.validation_size 0"
        )
    own = data.options if source == data.source else {}
    size, skip = data.train_size, data.train_skip
    train_rows = rows(data.source, data.train_split, size and skip + size, data.seed, data.options)[skip:]
    if not train_rows:
        raise ValueError(f"data.train_skip is {skip}, but {data.source} has no more rows than that")
    for more in data.mixed_in:
        split, seed = more.get("train_split", "train"), more.get("seed", data.seed)
        train_rows += rows(more["source"], split, more.get("train_size"), seed, more.get("options", {}))
    if len({example.id for example in train_rows}) < len(train_rows):  # draws are functions of a row's id
        raise ValueError("data.mixed_in: some rows are there twice; a source is mixed in once, beside others")
    if data.validation_size == 0:
        return train_rows, []
    return train_rows, rows(source, data.validation_split, data.validation_size, data.seed, own)


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


def _load_lm(recipe: Recipe, method: Method) -> LatentLM:
    model = recipe.model
    if recipe.grpo is not None:
        _take_config(recipe, method)
    torch.manual_seed(recipe.training.seed)  # peft draws an adapter's first weights from the global generator
    if model.init_from is None:
        backbone = backbones.load(model.backbone, model.dtype, recipe.training.seed)
        lm = LatentLM.from_backbone(backbone, recipe.template, model.lora)
        pretrained.attach(lm, method, recipe.training.seed)
        return lm
    seed = recipe.training.seed
    return pretrained.load_for_training(model.init_from, method, model.lora, model.dtype, seed)


def _take_config(recipe: Recipe, method: Method) -> None:
    """Reinforcement goes on with the checkpoint's method as it was trained (a measured sigma_e included).

    ValueError where the recipe names another method, or for a key another value than the checkpoint's.
    """
    folder = checkpoint.resolve(str(recipe.model.init_from))
    trained = checkpoint.read_info(folder)["method"]
    if trained["name"] != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained['name']}")
    config = registry.rebuild(trained, folder).config
    for key in set(recipe.method) - {"name"}:
        mine, theirs = getattr(method.config, key), getattr(config, key)
        if plain(mine) != plain(theirs):
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = config


def make_validate(
    recipe: Recipe, examples: list[Example]
) -> Callable[[LatentLM, Method], dict[str, float]] | None:
    """Validation by generation, or None where the recipe has no validation rows."""
    if not examples:
        return None
    settings = recipe.validation

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        params = [registry.make_params(method, values) for values in settings.params]
        return score(lm, method, examples, params, settings.decoding, settings.limits)

    return validate


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: leaf
        for key, value in tree.items()
        for path, leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
