"""The model card of a checkpoint: README.md in the Hub's format, written from what the run knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from colar.model.backbones import HUB_IDS
from colar.model.latent_lm import LatentLM


def text(lm: LatentLM, method: str, run: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> str:
    """Front matter and sections. `run` is the run's record as colar.json keeps it; what it lacks is left out.

    `params` are the method's per-request values with their defaults; the command shows them, or those that the run
    validated last with, where it names some.
    """
    recipe = run.get("recipe") or {}
    validated = ((recipe.get("validation") or {}).get("params") or [{}])[-1]
    config = recipe.get("method") or {"name": method}
    parts = [
        _front_matter(lm, method, run),
        f"# {_short(lm.name)}, {method}{_labelled(run)}\n\n"
        f"A causal language model fine-tuned with colar to reason by the "
        f"method `{method}`. Backbone: `{_short(lm.name)}` "
        f"({'LoRA adapter' if lm.has_adapter else 'all weights trained'}).",
        _use({**(params or {}), **validated}),
        _section("Validation", _metrics(run)),
        _section("Method", _json(config)),
        _section("Data", _json(_public(recipe.get("data")))),
        _section("Training", _json({"lora": (recipe.get("model") or {}).get("lora"), **run["training"]}))
        if "training" in run
        else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(lm: LatentLM, method: str, run: Mapping[str, Any]) -> str:
    front: dict[str, Any] = {"library_name": "colar", "pipeline_tag": "text-generation"}
    base = HUB_IDS.get(lm.name, lm.name)
    if base.count("/") == 1 and not Path(lm.name).exists() and base[0] not in "./~":
        front["base_model"] = base
        front["base_model_relation"] = "adapter" if lm.has_adapter else "finetune"
    tags = ["colar", method, "latent-reasoning", *(["lora"] if lm.has_adapter else [])]
    front["tags"] = list(dict.fromkeys(tags))
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---"


def _use(params: Mapping[str, Any]) -> str:
    asked = "".join(
        f" --{name} {'true' if value is True else f'{value:g}'}"
        for name, value in params.items()
        if value is not False
    )
    return (
        "## How to use\n\nWith colar installed:\n\n```sh\n"
        f'colar generate THIS_FOLDER "Ann has 3 pens and buys 4 more. How many has she?"{asked}\n```'
    )


def _metrics(run: Mapping[str, Any]) -> str:
    metrics = {name: value for name, value in (run.get("metrics") or {}).items() if name != "seconds"}
    if not metrics:
        return "None: the weights are those at the end of training." if "step" in run else ""
    lines = ["| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items())]
    where = f"At step {run['step']}, epoch {run['epoch']:.2f}; " if run.get("epoch") is not None else ""
    note = f"{where}`length` is #L, the mean number of embeddings between question and answer."
    return "\n".join([*lines, "", note])


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _json(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```" if value else ""


def _public(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The data's description without the folders of the machine that it was read on."""
    return {
        key: value for key, value in (data or {}).items() if key != "data_dir" and value not in (None, {})
    }


def _short(name: str) -> str:
    """A folder's own name, a Hub id as it is."""
    return Path(name).name if Path(name).exists() or name.startswith(("/", ".", "~")) else name


def _labelled(run: Mapping[str, Any]) -> str:
    return f" ({run['label']})" if run.get("label") else ""
