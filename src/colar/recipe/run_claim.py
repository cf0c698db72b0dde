"""The recipe that a run folder belongs to: two runs must not mix in one, and a finished one is not trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colar import files, progress
from colar.checks import changed_keys, check_same_run
from colar.recipe.schema import Recipe, to_json
from colar.training.run_folder import RunFolder

START = "weights of the start"
"""Key of recipe.json beside those of the recipe: a digest, where it starts from a checkpoint."""
BUDGET = ("training.num_train_epochs", "training.max_steps", "training.max_hours")
RESUMABLE = (
    *BUDGET,
    "output",
    "data.data_dir",
    "training.report_to",
    "training.ddp_timeout",
    "training.tokens_per_batch",
    "training.packing",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.save_total_limit",
    "validation.page_size",
)
"""Keys that may change when a run resumes: a longer budget; where it lies, and where its rows do; where it is logged,
what is kept of it, its page, a limit of memory, how an update's rows are divided and packed. That their number stays
the same is checked where it is known (`training/run.py`), and so are the rows, by their digest."""


def claim_run(recipe: Recipe, output: Path, resume: bool = True) -> None:
    """Write the recipe into its run folder. ValueError where the folder holds another run: two must not mix.

    Without `resume` any run that is there is to be replaced. Says so where a run that has ended goes on.
    """
    path, folder = output / "recipe.json", RunFolder(output)
    made = _with_start(recipe)
    # A run that failed before it saved anything leaves nothing to mix with: its mistake may be corrected in place.
    if resume and path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        before, now = _dotted(files.read_json(path)), _dotted(made)
        # The same weights may lie in another folder by now.
        free = (*RESUMABLE, "model.init_from") if START in now else RESUMABLE
        check_same_run(
            output,
            {key: value for key, value in before.items() if key not in free},
            {key: value for key, value in now.items() if key not in free},
            "give this run its own --output or the values that it was begun with, or --no_resume to replace it",
        )
        if folder.finished.exists():
            for key in changed_keys({key: before[key] for key in BUDGET}, {key: now[key] for key in BUDGET}):
                progress.say(f"{output} had ended with {key} {before[key]}: it goes on with {now[key]}")
    folder.finished.unlink(missing_ok=True)
    files.write_json(path, made)


def is_finished(recipe: Recipe) -> bool:
    """True if a run has ended as the recipe says. ValueError where it began from weights that have changed."""
    folder = RunFolder(recipe.output)
    if not (folder.finished.exists() and folder.best.exists()):
        return False
    before, now = files.read_json(folder.path / "recipe.json"), _with_start(recipe)
    ignored = {"output": "", START: ""}
    if before | ignored != now | ignored:
        return False
    # The start may be gone by now.
    if START in before and START in now and before[START] != now[START]:
        raise ValueError(
            f"{folder.path} was trained from other weights than {recipe.model.init_from} holds now: give another "
            "--output, or train this stage again with --no_resume"
        )
    return True


def _with_start(recipe: Recipe) -> dict[str, Any]:
    """The recipe, with a digest of the weights in the folder that it starts from, where it starts from one."""
    start = recipe.model.init_from
    digest = start and input_digest(start)
    return to_json(recipe) | ({START: digest} if digest else {})


def input_digest(path: str | Path) -> str | None:
    """16 hex digits of a file, or of the weights in a folder, or where it has none of its files; None for no path."""
    path = Path(path)
    paths = [path] if path.is_file() else []
    if path.is_dir():
        # The settings of a checkpoint name when it was written, and a run that is finished may publish it again.
        paths = [*path.glob("*.safetensors"), *path.glob("*.bin")] or [
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        ]
    return files.digest(files.sha256(file) for file in sorted(paths)) if paths else None


def _dotted(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"lora": {"r": 8}}} -> {"model.lora.r": 8}; a dict without keys stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _dotted(value) if isinstance(value, dict) and value else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): each for name, each in inner.items()}
    return flat
