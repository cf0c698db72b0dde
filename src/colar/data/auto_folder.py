"""The folder of a run of `colar train auto`: where later commands find its rows, and the judge of its answers."""

from __future__ import annotations

from pathlib import Path

from colar import files


class AutoFolder:
    """Paths below the folder, and what is read from them; any other folder has none of these files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.call = self.path / "asked.json"
        """The call that the run was made by (`recipe/auto_run.py`)."""
        self.recipe = self.path / "recipe.yaml"
        self.data = self.path / "data"
        self.results = self.path / "results"
        self.best = self.path / "best"

    @classmethod
    def of(cls, checkpoint: str | Path) -> AutoFolder:
        """The run that a checkpoint belongs to: its own folder, `RUN/best` or `RUN/STAGE/best`."""
        path = Path(checkpoint)
        runs = map(cls, (path, *path.resolve().parents[:2]))
        return next((run for run in runs if run.call.exists()), cls(path))

    def rows(self, split: str) -> Path:
        """The rows of `train`, `validation` or `test`, JSON Lines."""
        return self.data / f"{split}.jsonl"

    def judge(self) -> str | None:
        """`module:function` of the user's judge; None where answers were judged by their kind."""
        return files.read_json(self.call).get("judge") if self.call.exists() else None
