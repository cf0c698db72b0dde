"""The folder of a run: the files in it, which survive a kill at any moment, and the recipe that it belongs to.

best/                 the published checkpoint: replaced as a whole when validation accuracy improves (or holding the
                      last weights, with load_best_model_at_end false)
checkpoints/          Trainer's resume states, of the last steps that were saved; `whole` is written last, so that one
                      that a kill left incomplete is recognised
logs/                 TensorBoard
history.json          everything logged, one row a log
completions.jsonl     outputs to read, where a run samples (GRPO)
inspect.html, .json   the model's thoughts (`recipe/run.py`)
recipe.json           the recipe, and a digest of the weights that it starts from: `RunFolder.begin`
finished.json         steps and seconds of a run that has ended; removed when it continues
.lock                 held by the process that trains here

Two runs must not mix in one folder, and a finished one is not trained again. `AutoFolder` is the folder of `colar train
auto`, around those of its stages.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState

from colar import files, progress
from colar.checks import changed_keys, check_same_run
from colar.model import checkpoint

STATE = "trainer_state.json"
WHOLE = "whole"
"""The last file of a resume state that is written, and the first that is removed."""
KEPT = 2
"""Newest resume states that are kept."""
PREFIX = "checkpoint-"
START = "weights of the start"
"""Key of recipe.json beside those of the recipe: a digest of the weights, if it starts from a checkpoint."""
BUDGET = ("training.num_train_epochs", "training.max_steps", "training.max_hours")
RESUMABLE = {
    *BUDGET,
    "output",
    "data.data_dir",
    "training.report_to",
    "training.ddp_timeout",
    "training.tokens_per_batch",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.device",
    "training.fsdp",
    "training.compile",
    "training.gradient_checkpointing",
    "training.dataloader_num_workers",
    "training.logging_steps",
    "training.save_steps",
    "validation.page_size",
}
"""Keys of a recipe that may change when a run resumes: its budget; the places of its folder and its rows; its logs,
saves and page; its device and memory; and how an update's rows are divided. Their number must stay the same, and so
must the rows, by digest: `resumable_run.py` checks both."""


class RunFolder:
    """Paths of a run and the small files in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.best = self.path / "best"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.history = self.path / "history.json"
        self.completions = self.path / "completions.jsonl"
        self.page = self.path / "inspect.html"
        self.numbers = self.path / "inspect.json"
        self.recipe = self.path / "recipe.json"
        self.finished = self.path / "finished.json"
        self._folders = (self.checkpoints, self.best, self.logs)
        self._files = (self.history, self.completions, self.page, self.numbers)

    def check_recipe(self, recipe: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise ValueError if the folder holds the run of another recipe. Logs if a run that had ended continues."""
        # A run that failed before it saved anything leaves nothing to mix with: its recipe may be corrected in place.
        if not (self.recipe.exists() and self.has_weights):
            return
        before, now = self._recipes(recipe, defaults)
        check_same_run(
            self.path,
            _fixed(before, now, RESUMABLE),
            _fixed(now, now, RESUMABLE),
            "give this run its own --output or the values that it was begun with, or --no_resume to replace it",
        )
        for key in changed_keys(before, now):
            if self.finished.exists() and key in BUDGET:
                progress.say(f"{self.path} had ended with {key} {before[key]}: it goes on with {now[key]}")

    def begin(self, recipe: dict[str, Any] | None, resume: bool) -> None:
        """Write the recipe of the run that starts or continues here; without `resume` an earlier one is removed first.

        Called after all checks of the run, so that one that fails them leaves the folder as it was.
        """
        values = None if recipe is None else _with_start(recipe)
        if not resume:
            self.clear()
        self.finished.unlink(missing_ok=True)
        if values is not None:
            files.write_json(self.recipe, values)

    def check_replaceable(self) -> None:
        """ValueError where files of something else would be replaced by those of a run."""
        # Every run of colar holds the lock, also one that was killed before it wrote anything else.
        if self.recipe.exists() or (self.path / ".lock").exists() or self.last_resume_state() is not None:
            return
        for path in (*self._folders, *self._files):
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                raise ValueError(
                    f"{path} is not of a run, and would be replaced: give another output, or delete it"
                )

    def has_finished(self, recipe: dict[str, Any], defaults: Mapping[str, Any]) -> bool:
        """True if a run of this recipe has ended. ValueError if the weights that it started from have changed."""
        if not (self.finished.exists() and self.best.exists()):
            return False
        before, now = self._recipes(recipe, defaults)
        free = RESUMABLE - set(BUDGET) | {START}
        if changed_keys(_fixed(before, now, free), _fixed(now, now, free)):
            return False
        # The checkpoint that it started from may be gone by now.
        if START in before and START in now and before[START] != now[START]:
            raise ValueError(
                f"{self.path} was trained from other weights than {recipe['model']['init_from']} holds now: give "
                "another --output, or train this stage again with --no_resume"
            )
        return True

    def goes_on(self, recipe: dict[str, Any], defaults: Mapping[str, Any]) -> bool:
        """True if a run that has ended here would be trained further, by another budget."""
        if not self.finished.exists():
            return False
        before, now = self._recipes(recipe, defaults)
        return not set(BUDGET).isdisjoint(changed_keys(before, now))

    def _recipes(
        self, recipe: dict[str, Any], defaults: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The recipe of the run that is here and the one of now, dotted. Runs of other versions of colar go on: a key
        that is gone is left out, and so is a new one at its default, from `defaults` by dotted names."""
        saved = files.read_json(self.recipe)
        before, now = _known_to_both(saved, _with_start(recipe), defaults)
        gone = [f"{key} {value!r}" for key, value in _dotted(saved).items() if key not in _dotted(before)]
        if gone:
            progress.say(
                f"{self.path} was begun by a version of colar that had {', '.join(gone)}: this one has none"
            )
        return _dotted(before), _dotted(now)

    @property
    def has_weights(self) -> bool:
        """True if a run was begun here and has saved something."""
        return self.best.exists() or self.last_resume_state() is not None

    def clear(self) -> None:
        """Remove the files of a run, and nothing else in the folder.

        recipe.json is removed last, so that after a kill at any moment the remaining files still belong to it.
        """
        self.finished.unlink(missing_ok=True)
        self.drop_states(self.resume_states())
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*self._files, self.recipe):
            file.unlink(missing_ok=True)

    def drop_completions(self, step: int) -> None:
        """Drop the outputs that were written at this update or later: they are sampled and written again."""
        if self.completions.exists():
            records = files.resume_jsonl(self.completions)
            files.write_jsonl(self.completions, [record for record in records if record["step"] < step])

    def last_resume_state(self) -> Path | None:
        """The newest resume state that is whole; None where there is none."""
        return next((state for state in self.resume_states() if (state / WHOLE).exists()), None)

    def finish_state(self, step: int) -> None:
        """Mark the resume state after a step as whole, and only then drop old ones."""
        (self.checkpoints / f"{PREFIX}{step}" / WHOLE).touch()
        self.drop_states(self.resume_states()[KEPT:])

    def drop_states(self, states: Sequence[Path]) -> None:
        """Delete resume states. After a kill at any moment, the remains of one do not count as whole."""
        for state in states:
            (state / WHOLE).unlink(missing_ok=True)
            shutil.rmtree(state, ignore_errors=True)

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Write history.json; numbers that are not finite become null, because JSON has no NaN.

        The file only shows the run, so a failure is a warning, and the run continues.
        """
        clean = [{key: _finite(value) for key, value in row.items()} for row in history]
        with progress.warn_on_error("the history"):
            files.write_json(self.history, clean)

    def resume_states(self) -> list[Path]:
        """The folders of all resume states, whole or not, the newest first."""
        found = [path for path in self.checkpoints.glob(f"{PREFIX}*") if _step(path).isdigit()]
        return sorted(found, key=lambda path: int(_step(path)), reverse=True)


class AutoFolder:
    """The folder of a run of `colar train auto`: paths below it. Any other folder has none of these files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.call = self.path / "asked.json"
        """The call that the run was made by (`recipe/auto_run.py`)."""
        self.recipe = self.path / "recipe.yaml"
        self.data = self.path / "data"
        self.results = self.path / "results"
        self.best = self.path / "best"

    @classmethod
    def of(cls, folder: str | Path) -> "AutoFolder":
        """The run that a checkpoint belongs to: its own folder, `RUN/best` or `RUN/STAGE/best`."""
        path = Path(folder)
        runs = map(cls, (path, *path.resolve().parents[:2]))
        return next((run for run in runs if run.call.exists()), cls(path))

    def rows(self, split: str) -> Path:
        """The rows of `train`, `validation` or `test`, JSON Lines."""
        return self.data / f"{split}.jsonl"

    def judge(self) -> str | None:
        """`module:function` of the user's judge; None where answers were judged by their kind."""
        return files.read_json(self.call).get("judge") if self.call.exists() else None


def read_state(folder: Path) -> TrainerState:
    """Trainer's own part of a resume state: step, epoch, history, the clock."""
    return TrainerState.load_from_json(str(folder / STATE))


def clock_of(state: TrainerState) -> dict[str, Any]:
    """The clock's part of a saved state: `seconds`, and values that a resumed run must keep; empty for a new run."""
    clock = (state.stateful_callbacks or {}).get("Clock", {})
    return dict(clock.get("attributes", {}))


def input_digest(path: str | Path, suffix: str = "") -> str | None:
    """16 hex digits of a file, or of the files in a folder whose names end with `suffix`; None where there is none."""
    path = Path(path)
    inside = [file for file in path.glob(f"*{suffix}") if not file.name.startswith(".")]
    paths = [file for file in (path, *inside) if file.is_file()]
    return files.digest(files.sha256(file) for file in sorted(paths)) if paths else None


def _with_start(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe, with a digest of the weights that it starts from, if it starts from a folder."""
    start = recipe["model"]["init_from"]
    if not start or not Path(start).exists():
        return recipe
    # Weights only: a checkpoint's settings hold the time of writing, and a finished run may publish it again.
    digest = input_digest(checkpoint.resolve(start), ".safetensors")
    return recipe | ({START: digest} if digest else {})


def _dotted(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"lora": {"r": 8}}} -> {"model.lora.r": 8}; a dict without keys stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _dotted(value) if isinstance(value, dict) and value else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): leaf for name, leaf in inner.items()}
    return flat


def _fixed(recipe: dict[str, Any], now: dict[str, Any], free: set[str]) -> dict[str, Any]:
    """The values that must stay as they are."""
    # The same weights may lie in another folder by now.
    free = free | ({"model.init_from"} if START in now else set())
    return {key: value for key, value in recipe.items() if key not in free}


OPEN = ("method", "options", "params")
"""Sections whose keys a user chooses: a key that only one recipe has is a difference."""


def _known_to_both(before: Any, now: Any, defaults: Mapping[str, Any], above: str = "") -> tuple[Any, Any]:
    """Two recipes without keys that only the first has, and without those at their default that only the second has.
    Of one version of colar, both have every key but those of `OPEN`."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [_known_to_both(*pair, defaults, f"{above}*.") for pair in zip(before, now, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    theirs = {START: before[START]} if START in before else {}
    ours = {}
    for key, value in now.items():
        dotted = f"{above}{key}"
        if key in before:
            both = (before[key], value)
            theirs[key], ours[key] = both if key in OPEN else _known_to_both(*both, defaults, f"{dotted}.")
        elif any(defaults.get(name, START) != leaf for name, leaf in _dotted({dotted: value}).items()):
            ours[key] = value
    return theirs, ours


def _step(path: Path) -> str:
    return path.name.removeprefix(PREFIX)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
