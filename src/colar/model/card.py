"""The model card of a checkpoint: README.md in the Hub's format, written from the run's record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from colar.checks import is_number
from colar.model.backbones import HUB_IDS
from colar.model.latent_lm import LatentLM

ADAPTER = "LoRA adapter"
MERGED = "a LoRA adapter, merged into all weights"
"""Descriptions of the weights in the card."""


def text(
    lm: LatentLM,
    method: Mapping[str, Any],
    run: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
) -> str:
    """Front matter and sections.

    `method` has the "name" of the method and the values of its config that are to be shown: the recipe's method
    section lacks values that came with the weights it started from. `run` is the run's record as in colar.json; the
    section of a missing key is left out. `params` are per-request values for the card's command.
    """
    recipe = run.get("recipe") or {}
    name = str(method["name"])
    kind = ADAPTER if lm.has_adapter else "all weights trained"
    label = f" ({run['label']})" if run.get("label") else ""
    introduction = (
        f"# {_short(lm.name)}, {name}{label}\n\n"
        f"A causal language model fine-tuned with colar to reason by the method `{name}`. "
        f"Backbone: `{_short(lm.name)}` ({kind})."
    )
    parts = [
        _front_matter(lm, name),
        introduction,
        _use(params or {}),
        _section("Validation", _metrics(run)),
        _section("Method", _json(method)),
        _section("Data", _json(_public(recipe.get("data")))),
    ]
    if isinstance(run.get("training"), dict):
        lora = (recipe.get("model") or {}).get("lora")
        parts.append(_section("Training", _json({"lora": lora, **run["training"]})))
    return "\n\n".join(part for part in parts if part) + "\n"


def merged(adapters_card: str) -> str:
    """An adapter's card, changed into the card of the merged weights; text that a user has written stays."""
    front, body = "", adapters_card
    if adapters_card.startswith("---\n"):
        front, end, body = adapters_card.partition("\n---\n")
        lines = [line for line in front.splitlines() if line != "- lora"]
        front = (
            "\n".join(lines).replace("base_model_relation: adapter", "base_model_relation: finetune") + end
        )
    return front + body.replace(f"({ADAPTER})", f"({MERGED})", 1)


def _front_matter(lm: LatentLM, method: str) -> str:
    """The YAML that the Hub reads: library, base model, tags."""
    front: dict[str, Any] = {"library_name": "colar", "pipeline_tag": "text-generation"}
    # `base_model` must be a Hub id, which `tiny` and a folder of this machine are not.
    base = HUB_IDS.get(lm.name, lm.name)
    is_hub_id = base.count("/") == 1 and base[0] not in "./~" and not Path(lm.name).exists()
    if is_hub_id:
        front["base_model"] = base
        front["base_model_relation"] = "adapter" if lm.has_adapter else "finetune"
    tags = ["colar", method, "latent-reasoning"]
    if lm.has_adapter:
        tags.append("lora")
    front["tags"] = list(dict.fromkeys(tags))  # the method `colar` would be there twice
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---"


def _use(params: Mapping[str, Any]) -> str:
    """The command that asks the model a question, with its per-request values."""
    options = "".join(f" --{name} {value:g}" for name, value in params.items())
    return (
        "## How to use\n\nWith colar installed:\n\n```sh\n"
        f'colar generate THIS_FOLDER "Ann has 3 pens and buys 4 more. How many has she?"{options}\n```'
    )


def _metrics(run: Mapping[str, Any]) -> str:
    """The validation metrics of these weights as a table."""
    metrics = dict(run.get("metrics") or {})
    metrics.pop("seconds", None)
    if not metrics:
        return "None: the weights are those at the end of training." if "step" in run else ""
    lines = ["| metric | value |", "|---|---|"]
    for name, value in sorted(metrics.items()):
        lines.append(f"| {name} | {f'{value:.4g}' if is_number(value) else value} |")
    note = "`length` is #L, the mean number of embeddings between question and answer."
    if is_number(run.get("epoch")) and "step" in run:
        note = f"At step {run['step']}, epoch {run['epoch']:.2f}; {note}"
    return "\n".join([*lines, "", note])


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _json(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```" if value else ""


def _public(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The data's description, without the folder of the machine that it was read on and without empty values."""
    shown = (data or {}).items()
    return {key: value for key, value in shown if key != "data_dir" and value not in (None, {})}


def _short(name: str) -> str:
    """A folder's own name, a Hub id as it is."""
    return Path(name).name if Path(name).exists() or name.startswith(("/", ".", "~")) else name
