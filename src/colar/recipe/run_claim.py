"""The recipe that a run folder belongs to: two runs must not mix in one, and a finished one is not trained again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from colar import files, progress, yaml_settings
from colar.checks import changed_keys, check_same_run
from colar.recipe.schema import Recipe, SourceRows, to_json
from colar.training.run_folder import RunFolder

INPUTS = ("model.backbone", "model.init_from", "data.source", "data.validation_source")
"""Keys that name a folder or a file of the user's, if they do not name one of ours or of the Hub."""
PIECE, PIECES = 1 << 18, 64
"""Bytes of a piece of a file that are digested, and the number of pieces."""
OPEN = ("method.", "data.options.")
"""Beginnings of keys that are not the schema's."""
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

    A folder or file that is named in other words, or was moved, is the same one: inputs.json has digests of the inputs.
    """
    path, digests = output / "recipe.json", output / "inputs.json"
    now = _flat(recipe)
    folder = RunFolder(output)
    found = {key: input_digest(now[key]) for key in INPUTS if now[key] is not None}
    # A run that failed before it saved anything leaves nothing to mix with: its mistake may be corrected in place.
    if resume and path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        before = _flat(files.read_json(path))
        known = files.read_json(digests) if digests.exists() else {}
        for key in found.keys() & {key for key in INPUTS if before[key] is not None}:
            same_path = os.path.normpath(before[key]) == os.path.normpath(now[key])
            if same_path or (found[key] is not None and found[key] == known.get(key)):
                now[key] = before[key]
        check_same_run(
            output,
            {key: value for key, value in before.items() if key not in RESUMABLE},
            {key: value for key, value in now.items() if key not in RESUMABLE},
            "give this run its own --output or the values that it was begun with, or --no_resume to replace it",
        )
        if folder.finished.exists():
            for key in changed_keys({key: before[key] for key in BUDGET}, {key: now[key] for key in BUDGET}):
                progress.say(f"{output} had ended with {key} {before[key]}: it goes on with {now[key]}")
    folder.finished.unlink(missing_ok=True)
    files.write_json(path, to_json(recipe))
    files.write_json(digests, {key: digest for key, digest in found.items() if digest is not None})


def is_finished(recipe: Recipe) -> bool:
    """True if a run has ended as the recipe says. ValueError where it began from weights that have changed."""
    folder = RunFolder(recipe.output)
    if not (folder.finished.exists() and folder.best.exists()):
        return False
    # The folder may have been named in other words.
    if to_json(recipe) | {"output": ""} != files.read_json(folder.path / "recipe.json") | {"output": ""}:
        return False
    start = recipe.model.init_from
    known = files.read_json(folder.path / "inputs.json").get("model.init_from")
    if start is not None and known is not None and input_digest(start) not in (None, known):
        raise ValueError(
            f"{folder.path} was trained from other weights than {start} holds now: give another --output, or train "
            "this stage again with --no_resume"
        )
    return True


def input_digest(path: str | Path) -> str | None:
    """16 hex digits of a file, or of the weights in a folder, or where it has none of its files; None for no path.

    A file of more than 16 MiB by its size and 64 pieces of it: a model of 8B parameters takes a second.
    """
    path = Path(path)
    paths = [path] if path.is_file() else []
    if path.is_dir():
        # The settings of a checkpoint name when it was written, and a run that is finished may publish it again.
        paths = [*path.glob("*.safetensors"), *path.glob("*.bin")] or [
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        ]
    if not paths:
        return None
    return files.digest(part for file in sorted(paths) for part in _parts(file, named=path.is_dir()))


def _parts(file: Path, named: bool) -> Iterator[str | bytes]:
    size = file.stat().st_size
    yield f"{file.name if named else ''} {size}\n"
    starts: Iterable[int] = range(0, size, PIECE)
    if size > PIECES * PIECE:
        starts = [(size - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
    with open(file, "rb") as stream:
        for start in starts:
            stream.seek(start)
            yield stream.read(PIECE)


def _flat(recipe: Recipe | dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe, or of a recipe.json, by their dotted names.

    An older recipe.json lacks the keys that have come since: that run had their defaults. It may also have keys that
    are gone.
    """
    tree = to_json(recipe) if isinstance(recipe, Recipe) else recipe
    flat = {**_dotted(to_json(Recipe(output=""))), **_dotted(tree)}
    flat["data.mixed_in"] = [{**asdict(SourceRows("")), **entry} for entry in flat["data.mixed_in"]]
    known = {key for key, _, _ in yaml_settings.keys(Recipe)}
    return {key: value for key, value in flat.items() if key in known or key.startswith(OPEN)}


def _dotted(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"lora": {"r": 8}}} -> {"model.lora.r": 8}; a dict without keys stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _dotted(value) if isinstance(value, dict) and value else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): each for name, each in inner.items()}
    return flat
