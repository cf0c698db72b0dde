"""Evaluation with a model's latents replaced: rows labelled control-zeroed, control-shuffled, control-random.

Each cell's questions are first thought about by the model itself; then they are answered with the thoughts that the
control makes of those (`analysis/controls.py`). A control is made from all questions of a cell, whichever of them are
still to be answered: a resumed evaluation feeds what an uninterrupted one would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from colar import files
from colar.analysis import controls
from colar.data.example import Example
from colar.evaluation import evaluate as plain
from colar.evaluation.evaluate import Cell, Limits, System


def require_latent(systems: Sequence[System]) -> list[System]:
    """Those systems that think in latents. ValueError where there is none: there would be nothing to replace."""
    latent = [system for system in systems if system.method.latent]
    if not latent:
        names = ", ".join(dict.fromkeys(system.method.name for system in systems))
        raise ValueError(
            f"--control replaces latents, but none of the methods ({names}) thinks in any; a chain of tokens can be "
            "cut short instead: --max_latents 6 --label control-cut"
        )
    return latent


def evaluate(
    grid: Sequence[Cell],
    kinds: Sequence[str],
    datasets: Mapping[str, Sequence[Example]],
    records: Path,
    limits: Limits,
) -> int:
    """Answer whatever of the grid under each control `records` does not hold yet. Returns how many were new."""
    done = {plain.record_key(record) for record in files.resume_jsonl(records)}
    n_new = 0
    for cell in grid:
        examples = datasets[cell.dataset]
        missing = [kind for kind in kinds if not _is_done(labelled(cell, kind), examples, done)]
        if not missing:
            continue
        requests = [plain.make_request(cell, example, limits) for example in examples]
        system = cell.system
        made = controls.build_all(system.lm, system.method, missing, requests, max_batch=limits.batch_size)
        for kind, control in zip(missing, made, strict=True):
            controlled = labelled(cell, kind)
            controlled = replace(controlled, system=replace(controlled.system, method=control))
            n_new += plain.evaluate([controlled], datasets, records, limits)
    return n_new


def labelled(cell: Cell, kind: str) -> Cell:
    """The cell under the name that its control's rows bear."""
    label = ", ".join(part for part in (cell.system.label, f"control-{kind}") if part)
    return replace(cell, system=replace(cell.system, label=label))


def _is_done(cell: Cell, examples: Sequence[Example], done: set[tuple[Any, ...]]) -> bool:
    return all(plain.record_key({**cell.key, "id": example.id}) in done for example in examples)
