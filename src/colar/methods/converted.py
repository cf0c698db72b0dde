"""Checkpoints and recipes of earlier versions: their method, in the names and keys of this one.

There was one method `colar`, and `head: sequential` made it the one that is now called `sequential`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DROPPED = ("comp_weight", "own_latents", "snap")
"""Keys of `colar` that are gone, and that inference never read."""
SEQUENTIAL = {
    "merge_rank",
    "unit",
    "numbers_from",
    "alone",
    "starts",
    "threshold_on",
    "shortlist",
    "shortlist_ids",
}
SEQUENTIAL |= {"confidence_thresholds", "lookahead_weight"}
"""Keys that `colar` had for `head: sequential`: those of other heads have them at their defaults."""
TAKEN_OVER = (
    "compression_factors",
    "merge",
    "confidence_thresholds",
    "lookahead_weight",
    "shortlist",
    "shortlist_ids",
)
"""Keys that `sequential` has taken over."""
TOKENS = {"unit": "token", "alone": [], "starts": []}
EQUATIONS = {"unit": "result", "alone": ["="], "starts": ["*", "+", "-", "/"], "numbers_from": 2}
"""The old values that `grouping: tokens` and `grouping: equations` stand for."""

CONSTANT: dict[str, dict[str, Any]] = {
    "distill": {
        "student_weight": 1.0,
        "teacher_weight": 1.0,
        "align_loss": "smooth_l1",
        "align_scale": True,
        "projection": True,
    },
    "icot": {"most_removed": None},
    "pause": {"shared": False},
    "tokenskip": {"scorer": "surprisal"},
}
"""Keys of other methods that are constants now, with their values."""


def check_recipe(name: str, config: Mapping[str, Any]) -> None:
    """Reject the name by which a recipe of an earlier version asked for `sequential`."""
    if name == "colar" and config.get("head") == "sequential":
        raise ValueError(
            "method.head sequential is a method of its own: write method.name sequential and leave method.head out; "
            "unit, alone, starts, numbers_from and threshold_on are method.grouping now (tokens | equations)"
        )


def current(saved: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The `method` entry of a checkpoint ({"name", "config"}) as this version writes it.

    ValueError, naming `where`, for an option that was on and is gone.
    """
    name, config = saved["name"], dict(saved["config"])
    # The scorer that it was for is gone.
    config.pop("scorer_model", None)
    for key, value in CONSTANT.get(name, {}).items():
        if config.pop(key, value) != value:
            raise _gone(where, key, saved["config"][key])
    if name != "colar":
        return {"name": name, "config": config}
    if config.get("own_latents", 0):
        raise _gone(where, "own_latents", config["own_latents"])
    if config.get("head") == "anchored":
        raise _gone(where, "head", "anchored")
    if config.get("head") == "sequential":
        return {"name": "sequential", "config": _sequential(config, where)}
    config = {key: value for key, value in config.items() if key not in SEQUENTIAL and key not in DROPPED}
    return {"name": name, "config": config}


def _sequential(config: dict[str, Any], where: object) -> dict[str, Any]:
    before = {"unit": "token", "numbers_from": 1, "threshold_on": "token", "merge": "sqrt", **config}
    for key in ("alone", "starts"):
        before[key] = sorted(before.get(key, []))
    grouping = "tokens" if before["unit"] == "token" else "equations"
    for key, value in (TOKENS if grouping == "tokens" else EQUATIONS).items():
        if before[key] != value:
            raise _gone(where, key, before[key])
    # The threshold of groups of equations is on digits. If no threshold was trained, the key is ignored.
    gated = grouping == "equations" and any(before.get("confidence_thresholds", ()))
    if gated and before["threshold_on"] != "number":
        raise _gone(where, "threshold_on", before["threshold_on"])
    if before["merge"] == "mean":
        raise _gone(where, "merge", "mean")
    if before["merge"] == "ordered" and before.get("merge_rank") != 32:
        raise _gone(where, "merge_rank", before.get("merge_rank"))
    return {"grouping": grouping, **{key: config[key] for key in TAKEN_OVER if key in config}}


def _gone(where: object, key: str, value: object) -> ValueError:
    return ValueError(
        f"{where}: trained with method.{key} {value!r}, an option that this version no longer has; "
        f"load it with the version that trained it, or train again without"
    )
