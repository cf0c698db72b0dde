"""The folder of a run, and what survives a kill at any moment.

best/                 the published checkpoint: replaced as a whole when validation accuracy improves (or holding the
                      last weights, with load_best_model_at_end false)
checkpoints/          Trainer's resume state; `trainer_state.json` is written last, so a folder with it is whole
logs/                 TensorBoard
history.json          everything logged, one row a log
learning_curves.png   the same as a picture
completions.jsonl     outputs to read, where a run samples (GRPO)
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
from colar.show import plots

STATE = "trainer_state.json"
PREFIX = "checkpoint-"


class RunFolder:
    """Paths of a run and the little files in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.best, self.checkpoints = self.path / "best", self.path / "checkpoints"
        self.logs, self.history = self.path / "logs", self.path / "history.json"
        self.curves = self.path / "learning_curves.png"
        self.completions = self.path / "completions.jsonl"

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else that lies there."""
        for folder in (self.best, self.checkpoints, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.history, self.curves, self.completions):
            file.unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written to its end; None where there is none."""
        return next((folder for folder in self._newest_first() if is_whole(folder)), None)

    def drop_torn(self) -> None:
        """Delete checkpoints newer than the last whole one: a kill hit them while they were written."""
        for folder in self._newest_first():
            if is_whole(folder):
                return
            progress.say(f"{folder} was not written to its end: dropped")
            shutil.rmtree(folder)

    def write_history(self, history: list[dict[str, Any]], title: str) -> None:
        """history.json and the picture; numbers that are not finite become null."""
        clean = [{key: _finite(value) for key, value in row.items()} for row in history]
        files.write_json(self.history, clean)
        if plots.has_curves(clean):
            plots.learning_curves(clean, self.curves, title)

    def _newest_first(self) -> list[Path]:
        found = [p for p in self.checkpoints.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)), reverse=True)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's last file is there, and not cut off."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def read_state(folder: Path) -> TrainerState:
    return TrainerState.load_from_json(str(folder / STATE))


def clock_of(state: TrainerState) -> dict[str, Any]:
    """What the clock kept when `state` was saved: `seconds`, `rows_per_update`; empty for a new run."""
    clock = (state.stateful_callbacks or {}).get("Clock", {})
    return dict(clock.get("attributes", {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
