"""The start of a run: a recipe's method, and the model with the weights of a checkpoint or of a backbone."""

from __future__ import annotations

from pathlib import Path

import torch

from colar import recipes
from colar.engine import cache
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint, quantized
from colar.model.latent_lm import LatentLM
from colar.recipe.schema import Recipe


def build_method(recipe: Recipe) -> Method:
    """The method as the recipe says. ValueError for an unknown name, key or per-request value."""
    config = dict(recipe.method)
    name = config.pop("name", "")
    if name is None:
        raise ValueError(f"method.name is blank (null): it must be one of {', '.join(registry.METHODS)}")
    method = registry.build(str(name), config)
    # A value that the method lacks fails here, and not at the first validation.
    recipe.validation.method_params(method)
    return method


def start_method(recipe: Recipe) -> Method:
    """The method as the run trains it; ValueError, before rows are read, for a start that is no checkpoint or no fit.

    Reinforcement continues with the method that the weights have learnt, a measured sigma_e included: the recipe may
    not name another method, give a key another value than the checkpoint has, or set what that method has no use for.
    A checkpoint of the Hub is downloaded.
    """
    method = build_method(recipe)
    if recipe.model.init_from is None:
        return method
    folder = _start_folder(recipe.model.init_from)
    if recipe.grpo is None:
        return method
    trained = registry.rebuild(checkpoint.read_info(folder)["method"], folder)
    if trained.name != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained.name}")
    for key in recipe.method.keys() - {"name"}:
        mine, theirs = getattr(method.config, key), getattr(trained.config, key)
        if mine != theirs:
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = trained.config
    recipe.grpo.check_method(method)
    return method


def _start_folder(init_from: str) -> Path:
    """The folder of a checkpoint. Where there is none, the message names the shipped recipe that makes it."""
    try:
        return checkpoint.check_folder(checkpoint.resolve(init_from))
    except ValueError as error:
        start = Path(init_from)
        maker = None if start.exists() else recipes.that_writes(start.parent)
        if maker is None:
            raise ValueError(f"model.init_from: {error}") from error
        raise ValueError(
            f"model.init_from: no checkpoint at {start}: there is no such folder; `colar train {maker}` makes it"
        ) from error


def load_model(recipe: Recipe, method: Method | None = None) -> tuple[LatentLM, Method]:
    """Model and method, ready to train; `method` is that of `start_method`, where it was made before."""
    method = method or start_method(recipe)
    model, seed = recipe.model, recipe.training.seed
    # peft draws an adapter's first weights from the global generator.
    torch.manual_seed(seed)
    if model.init_from is not None:
        lm = pretrained.load_for_training(
            model.init_from, method, model.lora, model.dtype, seed, model.load_in_4bit
        )
    else:
        backbone = backbones.load(model.backbone, model.dtype, seed)
        if model.load_in_4bit:
            quantized.quantize_below_adapter(backbone.lm)
        lm = LatentLM.from_backbone(backbone, recipe.template, model.lora)
        pretrained.attach(lm, method, seed)
    # The engine would refuse the backbone at the first validation, or once training has ended. It is asked before the
    # attention is replaced: a run that never generates may train with one that takes no mask.
    cache.check(lm.causal_lm)
    if model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm, method
