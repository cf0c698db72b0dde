"""The folder of a run, and the files in it that survive a kill at any moment.

best/                 the published checkpoint: replaced as a whole when validation accuracy improves (or holding the
                      last weights, with load_best_model_at_end false)
checkpoints/          Trainer's resume state; `trainer_state.json` is written last, so a folder with it is whole
logs/                 TensorBoard
history.json          everything logged, one row a log
learning_curves.png   the same as a picture
completions.jsonl     outputs to read, where a run samples (GRPO)
inside.html, .json    what the model thinks (`run_page.py`), made of retrieval.jsonl and chains_before.json too
.lock                 held by the process that trains here
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerState

from colar import files, progress
from colar.show import curves

STATE = "trainer_state.json"
PREFIX = "checkpoint-"


class RunFolder:
    """Paths of a run and the little files in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.best = self.path / "best"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.history = self.path / "history.json"
        self.curves = self.path / "learning_curves.png"
        self.completions = self.path / "completions.jsonl"
        self.page = self.path / "inside.html"
        self.numbers = self.path / "inside.json"
        self.retrieval = self.path / "retrieval.jsonl"
        self.before = self.path / "chains_before.json"

    def clear(self) -> None:
        """Remove the files of a run, and nothing else that lies there."""
        for folder in (self.best, self.checkpoints, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        pictures = (self.curves, self.page, self.numbers, self.retrieval, self.before)
        for file in (self.history, self.completions, *pictures):
            file.unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written to its end; None where there is none."""
        for folder in self._newest_first():
            if is_whole(folder):
                return folder
        return None

    def drop_torn(self) -> None:
        """Delete checkpoints newer than the last whole one: a kill hit them while they were written."""
        for folder in self._newest_first():
            if is_whole(folder):
                return
            progress.say(f"{folder} was not written to its end: dropped")
            shutil.rmtree(folder)

    def keep_only(self, name: str | None) -> None:
        """Delete all checkpoints but this one: what an earlier run left of them on a disk that is not the main one."""
        for folder in self._newest_first():
            if folder.name != name:
                shutil.rmtree(folder)

    def write_history(self, history: list[dict[str, Any]], title: str) -> None:
        """Write history.json and the picture; numbers that are not finite become null."""
        # JSON has no NaN.
        clean = []
        for row in history:
            clean.append({key: _finite(value) for key, value in row.items()})
        files.write_json(self.history, clean)
        if curves.has_curves(clean):
            curves.learning_curves(clean, self.curves, title)

    def _newest_first(self) -> list[Path]:
        steps: dict[int, Path] = {}
        for path in self.checkpoints.glob(f"{PREFIX}*"):
            number = path.name.removeprefix(PREFIX)
            if number.isdigit():
                steps[int(number)] = path
        return [steps[step] for step in sorted(steps, reverse=True)]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's last file is there, and not cut off."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # A write that was cut off may still be JSON, of another kind.
    return isinstance(state, dict) and "global_step" in state


def read_state(folder: Path) -> TrainerState:
    """Trainer's state in a checkpoint folder: step, epoch, history, the clock."""
    return TrainerState.load_from_json(str(folder / STATE))


def clock_of(state: TrainerState) -> dict[str, Any]:
    """The clock's part of a saved state: `seconds`, `rows_per_update`, `rows`; empty for a new run."""
    clock = (state.stateful_callbacks or {}).get("Clock", {})
    return dict(clock.get("attributes", {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
