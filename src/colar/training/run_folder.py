"""The folder of a run, and the files in it that survive a kill at any moment.

best/                 the published checkpoint: replaced as a whole when validation accuracy improves (or holding the
                      last weights, with load_best_model_at_end false)
checkpoints/          Trainer's resume state, of the last steps that were saved; `digests.json` is written last and has
                      the SHA-256 of every other file, so that a checkpoint that was cut or damaged is known
logs/                 TensorBoard
history.json          everything logged, one row a log
completions.jsonl     outputs to read, where a run samples (GRPO)
inspect.html, .json   what the model thinks (`recipe/run.py`)
recipe.json           the recipe, and a digest of the weights that it starts from (`recipe/run_claim.py`)
finished.json         steps and seconds of a run that has ended; removed when it goes on
.lock                 held by the process that trains here
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerState

from colar import files

STATE = "trainer_state.json"
DIGESTS = "digests.json"
PREFIX = "checkpoint-"


class RunFolder:
    """Paths of a run and the little files in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.best = self.path / "best"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.history = self.path / "history.json"
        self.completions = self.path / "completions.jsonl"
        self.page = self.path / "inspect.html"
        self.numbers = self.path / "inspect.json"
        self.finished = self.path / "finished.json"

    def clear(self) -> None:
        """Remove the files of a run, and nothing else that lies there."""
        for folder in (self.best, self.checkpoints, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        made = (self.history, self.completions, self.page, self.numbers, self.finished)
        for file in made:
            file.unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; None where there is none."""
        return next((folder for folder in self.newest_first() if fault(folder) is None), None)

    def keep_newest(self, number: int) -> None:
        """Delete all checkpoints but the newest `number` of them."""
        for folder in self.newest_first()[number:]:
            shutil.rmtree(folder)

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Write history.json; numbers that are not finite become null."""
        # JSON has no NaN.
        clean = []
        for row in history:
            clean.append({key: _finite(value) for key, value in row.items()})
        files.write_json(self.history, clean)

    def newest_first(self) -> list[Path]:
        """The folders of all checkpoints, whole or not, by their step."""
        steps: dict[int, Path] = {}
        for path in self.checkpoints.glob(f"{PREFIX}*"):
            number = path.name.removeprefix(PREFIX)
            if number.isdigit():
                steps[int(number)] = path
        return [steps[step] for step in sorted(steps, reverse=True)]


def write_digests(folder: Path) -> None:
    """Write the SHA-256 of every file of a checkpoint beside them: the last file of a save."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != DIGESTS and not path.name.startswith("."):
            digests[path.name] = files.sha256(path)
    files.write_json(folder / DIGESTS, digests)


def fault(folder: Path) -> str | None:
    """The name of the first file of a checkpoint that is missing, cut or damaged; None where the checkpoint is whole.

    Digests are the last file of a save: a checkpoint without them was never finished.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DIGESTS
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or files.sha256(path) != digest:
            return str(name)
    return None


def was_finished(folder: Path) -> bool:
    """True where the save of a checkpoint came to its end: a fault in it now is damage, and no kill."""
    return (folder / DIGESTS).exists()


def read_state(folder: Path) -> TrainerState:
    """Trainer's state in a checkpoint folder: step, epoch, history, the clock."""
    return TrainerState.load_from_json(str(folder / STATE))


def clock_of(state: TrainerState) -> dict[str, Any]:
    """The clock's part of a saved state: `seconds`, `rows_per_update`, `rows`; empty for a new run."""
    clock = (state.stateful_callbacks or {}).get("Clock", {})
    return dict(clock.get("attributes", {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
