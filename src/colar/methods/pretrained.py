"""A model and its method together: saved as a checkpoint folder, loaded for inference or for more training.

`model/checkpoint.py` writes and reads the files. This module rebuilds the method from a folder's `method` entry, and
creates and loads the method's modules. Published folders do not hold `Method.training_modules`: inference does not
need them, and another stage of training creates them afresh.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from colar.checks import check_holds
from colar.methods import registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint, quantized, weights
from colar.model import card as model_card
from colar.model.latent_lm import LatentLM
from colar.model.lora import LoraSettings
from colar.ops import devices


def save(
    lm: LatentLM,
    method: Method,
    folder: str | Path,
    run: dict[str, Any],
    card: str,
    gathered: dict[str, Tensor] | None = None,
) -> Path:
    """Write model and method as a checkpoint folder; `gathered` as for `weights.save`."""
    # Through JSON, so that tuples become lists, as they are when the folder is read.
    entry = {"name": method.name, "config": json.loads(json.dumps(dataclasses.asdict(method.config)))}
    for key, values in (("params", method.default_params), ("limits", method.default_limits)):
        if values:
            entry[key] = dict(values)
    return checkpoint.save(lm, folder, entry, run, card, gathered)


def check_loadable(lm: LatentLM) -> None:
    """ValueError if all weights would be saved of a class that transformers cannot load from the config that it saves.

    The text part of Emu3 is such a class. An adapter is saved without its backbone, so that any class will do.
    """
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(lm.causal_lm.config), ())
    kind = type(lm.causal_lm)
    if not lm.has_adapter and kind not in (kinds if isinstance(kinds, tuple) else (kinds,)):
        raise ValueError(
            f"{lm.name} cannot be saved with all weights: transformers loads no {kind.__name__} from the config that "
            "it saves: train an adapter (model.lora)"
        )


def save_pretrained(
    lm: LatentLM, method: Method, folder: str | Path, run: dict[str, Any] | None = None
) -> Path:
    """`save` for users, who may name any folder: ValueError if it holds anything but a checkpoint.

    `run` describes how the model was trained, in JSON values of your own.
    """
    checkpoint.check_replaceable(folder)
    run = {} if run is None else run
    check_holds("run", isinstance(run, dict), run, "keys and values")
    # The card shows these two.
    for key in ("metrics", "recipe"):
        check_holds(f"run.{key}", isinstance(run.get(key, {}), dict), run.get(key), "keys and values")
    return save(lm, method, folder, run, card_of(lm, method, run))


def card_of(lm: LatentLM, method: Method, run: dict[str, Any]) -> str:
    """The model card. Its command has the last validation params of the run's recipe that the method supports, or else
    those of a request that names none."""
    validation = (run.get("recipe") or {}).get("validation") or {}
    # Without validation rows, no value of the recipe has been tried.
    params = registry.possible_params(method, [{}, *validation.get("params", ())])[-1]
    return model_card.text(lm, method.non_default_config(), run, dataclasses.asdict(params))


def load(
    path_or_id: str | Path, dtype: str = "float32", backbone: str | None = None
) -> tuple[LatentLM, Method]:
    """Load a checkpoint folder (or Hub id) as model and method, ready for inference or further training."""
    folder = checkpoint.resolve(path_or_id)
    lm, info = checkpoint.load(folder, dtype, backbone)
    method = registry.rebuild(info["method"], folder)
    # The modules are created first, so that their shapes are known, and then loaded.
    lm.add_modules(method.modules(lm))
    weights.load_modules(lm.extra, folder)
    return lm.eval(), method


def load_for_inference(
    path_or_id: str | Path,
    dtype: str | None = None,
    backbone: str | None = None,
    device: str | torch.device | None = None,
    quantization: str | None = None,
) -> tuple[LatentLM, Method]:
    """`load`, with the adapter merged into the weights, on `device`: by default the GPU if there is one.

    `dtype` is by default bfloat16 on a GPU that computes in it, else float32. `quantization`, int8 or int4, quantises
    linear layers after the merge (`model/quantized.py`), as `--weights` of the commands does.
    """
    place = devices.usable(device or devices.best())
    dtype = dtype or devices.inference_dtype(place)
    if quantization is not None:
        quantized.check(quantization, dtype, place)
    lm, method = load(path_or_id, dtype, backbone)
    # Nothing is trained here, and without the adapter a step costs no more than a step of the backbone.
    if quantization is None:
        # A GPU multiplies faster. Layers that are quantised are sent one by one.
        lm.to(place)
    lm.merge()
    if quantization is not None:
        quantized.quantize(lm, quantization, place)
    return lm.to(place), method


def merge(folder: str | Path, target: str | Path, dtype: str, backbone: str | None = None) -> Path:
    """Write the adapter checkpoint in `folder` as one of all weights: merged in float32, then rounded to `dtype`.

    `backbone` is the place of the adapter's backbone, if it is not where the checkpoint says.
    """
    folder = checkpoint.resolve(folder)
    info = checkpoint.read_info(folder)
    if info["weights"] != "adapter":
        raise ValueError(f"{folder} has no adapter to merge: it holds all weights already")
    lm, method = load(folder, backbone=backbone)
    lm.merge()
    text = model_card.merged((folder / "README.md").read_text("utf-8", "replace"))
    # The method's modules stay in float32, in which they were trained.
    lm.causal_lm.to(backbones.DTYPES[dtype])
    return save(lm, method, target, info["run"], text)


def load_for_training(
    path_or_id: str | Path,
    method: Method,
    lora: LoraSettings | None,
    dtype: str,
    seed: int,
    load_in_4bit: bool = False,
) -> LatentLM:
    """Load a checkpoint's weights for another stage of training, with the modules of `method`.

    The modules are loaded if the checkpoint is of the same method, and created afresh if it is not. With `lora` the
    checkpoint's adapter is trained further (its settings must be the same), or full weights get a new one.
    """
    folder = checkpoint.resolve(path_or_id)
    info = checkpoint.read_info(folder)
    if info["weights"] == "adapter" and lora is None:
        raise ValueError(
            f"{folder} is an adapter: model.lora must be given, with the settings that it has "
            "(or make it full weights: colar export --merge)"
        )
    lm, _ = checkpoint.load(folder, dtype, load_in_4bit=load_in_4bit)
    if isinstance(lm.lm, PeftModel) and lora is not None:
        lora.check_same(lm.lm, folder)
    elif lora is not None:
        # For a Hub id the name is the id, because its folder is in this machine's cache.
        name = str(folder if Path(path_or_id).exists() else path_or_id)
        backbone = backbones.Backbone(name, lm.causal_lm, lm.tokenizer, lm.fingerprint)
        lm = LatentLM(backbone, lm.template, lora)
    attach(lm, method, seed)
    # `load_modules` rejects modules of other names or shapes, except those that define how they start (`Startable`).
    if registry.rebuild(info["method"], folder).name == method.name:
        weights.load_modules(lm.extra, folder, leave_out=lm.training_only, starts=True)
    return lm


def attach(lm: LatentLM, method: Method, seed: int) -> None:
    """Give `lm` the modules of a method that is about to be trained, initialised from `seed`."""
    # The global generator is restored, so that later draws do not depend on the modules' sizes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm.add_modules(method.modules(lm))
        lm.add_modules(method.training_modules(lm), training_only=True)
