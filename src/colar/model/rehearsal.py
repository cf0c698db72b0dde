"""A checkpoint without weights, written and read back before a run makes its first step.

What cannot be published is found in a second, and not after hours of training.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from colar import files
from colar.checks import in_library
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.template.template import Template


def rehearse(
    lm: LatentLM, method: dict[str, Any], run: dict[str, Any], card: str, leave_out: Collection[str] = ()
) -> None:
    """Write all that `checkpoint.save` would write but the weights, and read it back.

    ValueError for a tokenizer or a model that would not come back. The backbone of an adapter comes from where it came
    from, and is not saved.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.save_rest(lm, folder, method, run, card, leave_out)
        _check_same_tokenizer(lm, folder)
    if not lm.has_adapter:
        _check_same_model(lm)


def _check_same_tokenizer(lm: LatentLM, folder: Path) -> None:
    """Reject a tokenizer that does not come back as it was saved."""
    # Of several kinds: words, numbers, white space, another alphabet.
    probe = f"{lm.template.config.question} How many, 12 * 3 = 36?\n\tÜber {lm.template.config.separator} x"
    refusal = (
        f"the tokenizer of {lm.name} ({type(lm.tokenizer).__name__}) cannot be read back from the files that it saves, "
        "so no command could read the trained model: give the backbone a tokenizer with a tokenizer.json"
    )
    # Each kind of tokenizer has errors of its own.
    with in_library(refusal):
        back = checkpoint.load_tokenizer(folder)
        Template.from_json(files.read_json(folder / "template.json"), back)
        if back.encode(probe) != lm.tokenizer.encode(probe):
            raise ValueError("a text becomes other ids")


def _check_same_model(lm: LatentLM) -> None:
    """Reject weights that the model of the saved config would not have, by name and shape."""
    kind = type(lm.causal_lm)
    # A copy: to build a model writes into its config.
    config = copy.deepcopy(lm.causal_lm.config)
    config.architectures = [kind.__name__]
    refusal = (
        f"{lm.name} cannot be saved with all weights (train an adapter, model.lora): transformers makes no model of "
        f"the config that {kind.__name__} saves"
    )
    with tempfile.TemporaryDirectory() as name, in_library(refusal), torch.device("meta"):
        config.save_pretrained(name)
        twin = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    if type(twin) is not kind:
        raise ValueError(
            f"{lm.name} cannot be saved with all weights: transformers would load a {type(twin).__name__}, not a "
            f"{kind.__name__}: train an adapter (model.lora)"
        )
    ours = {name: tuple(value.shape) for name, value in lm.causal_lm.state_dict().items()}
    loaded = {name: tuple(value.shape) for name, value in twin.state_dict().items()}
    if ours != loaded:
        name = sorted(name for name, _ in ours.items() ^ loaded.items())[0]
        raise ValueError(
            f"{lm.name} cannot be saved: {name} has shape {ours.get(name)} in this model and {loaded.get(name)} in the "
            "one that its config makes"
        )
