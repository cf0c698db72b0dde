"""A checkpoint without weights, written and read back before a run makes its first step.

What cannot be published is found in a second, and not after the last update.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from colar import files
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.template.template import Template


def rehearse(
    lm: LatentLM, method: dict[str, Any], run: dict[str, Any], card: str, leave_out: Collection[str] = ()
) -> None:
    """Write what `save` would, but for the weights, and read it back: ValueError for a model that cannot be saved.

    It is called before training: what cannot be published must not be trained for hours.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.save_rest(lm, folder, method, run, card, leave_out)
        _check_same_tokenizer(lm, folder)
        twin = _twin(lm)
        if isinstance(lm.lm, PeftModel):
            lm.lm.peft_config["default"].save_pretrained(name)
            adapted = checkpoint.with_empty_adapter(twin, folder)
            mine, theirs = (
                get_peft_model_state_dict(each, save_embedding_layers=False) for each in (lm.lm, adapted)
            )
            _check_same_weights(lm, mine, theirs)
        else:
            _check_same_weights(lm, lm.causal_lm.state_dict(), twin.state_dict())


def _check_same_tokenizer(lm: LatentLM, folder: Path) -> None:
    """Reject a tokenizer that does not come back as it was saved."""
    # Of several kinds: words, numbers, white space, another alphabet.
    probe = f"{lm.template.config.question} How many, 12 * 3 = 36?\n\tÜber {lm.template.config.separator} x"
    try:
        back = checkpoint.load_tokenizer(folder)
        Template.from_json(files.read_json(folder / "template.json"), back)
        same = back.encode(probe) == lm.tokenizer.encode(probe)
    # Each kind of tokenizer has errors of its own.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        if same:
            return
        reason = "a text becomes other ids"
    raise ValueError(
        f"the tokenizer of {lm.name} ({type(lm.tokenizer).__name__}) cannot be read back from the files that it saves, "
        f"so no command could read the trained model ({reason}): give the backbone a tokenizer with a tokenizer.json"
    )


def _twin(lm: LatentLM) -> PreTrainedModel:
    """The model that the backbone's config makes, without numbers."""
    causal_lm = lm.causal_lm
    # A copy: to build a model writes into its config.
    config = copy.deepcopy(causal_lm.config)
    if lm.has_adapter:
        # The backbone comes from where it came from, as the class that it is.
        with torch.device("meta"):
            return type(causal_lm)(config)
    with tempfile.TemporaryDirectory() as name:
        config.architectures = [type(causal_lm).__name__]
        try:
            config.save_pretrained(name)
            with torch.device("meta"):
                twin = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{lm.name} cannot be saved with all weights: transformers makes no model of the config that "
                f"{type(causal_lm).__name__} saves ({' '.join(str(error).split())[:200]}): "
                "train an adapter (model.lora)"
            ) from error
    if type(twin) is not type(causal_lm):
        raise ValueError(
            f"{lm.name} cannot be saved with all weights: transformers would load a {type(twin).__name__}, not a "
            f"{type(causal_lm).__name__}: train an adapter (model.lora)"
        )
    return twin


def _check_same_weights(lm: LatentLM, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Reject weights that a model loaded from the saved config would not have, by name and shape."""
    ours = {name: tuple(value.shape) for name, value in mine.items()}
    loaded = {name: tuple(value.shape) for name, value in theirs.items()}
    if ours != loaded:
        name = sorted(name for name, _ in ours.items() ^ loaded.items())[0]
        raise ValueError(
            f"{lm.name} cannot be saved: {name} has shape {ours.get(name)} in this model and {loaded.get(name)} in the "
            "one that its config makes"
        )
