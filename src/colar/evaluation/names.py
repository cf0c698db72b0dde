"""Names of what is evaluated: each checkpoint and each data set has one, and no two have the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from colar.data import data_files
from colar.data.catalogue import SOURCES
from colar.evaluation.report_rows import AVERAGE
from colar.methods import registry
from colar.model import checkpoint

Name = TypeVar("Name")


class CheckpointName(NamedTuple):
    """The fields that name a checkpoint's rows; params and decoding are those of each request."""

    model: str
    method: str
    label: str
    train_seed: int | None

    def __str__(self) -> str:
        parts = [f"{self.model} {self.method}"]
        if self.label:
            parts.append(self.label)
        if self.train_seed is not None:
            parts.append(f"run {self.train_seed}")
        return ", ".join(parts)


def name_checkpoints(pairs: Iterable[tuple[str, str]], label: str | None) -> dict[CheckpointName, str]:
    """Checkpoints (folder or Hub id) by the name of their rows, from (model name, checkpoint) pairs.

    Method, label and training seed are read from the checkpoint; `label` replaces its own. Raises ValueError for two
    checkpoints of one name, and where there is no checkpoint.
    """
    named = []
    for model, path in pairs:
        info = checkpoint.read_info(checkpoint.resolve(path))
        run = info["run"]
        # A checkpoint that was made in code, not by `colar train`, has neither label nor seed.
        own_label = run.get("label", "")
        name = CheckpointName(
            model=model,
            method=registry.rebuild(info["method"], path).name,
            label=own_label if label is None else label,
            train_seed=run.get("seed"),
        )
        named.append((name, path))
    return unique_names(named)


def unique_names(pairs: Iterable[tuple[Name, str]]) -> dict[Name, str]:
    """Checkpoints by their names. ValueError where two have one."""
    by_name: dict[Name, str] = {}
    for name, path in pairs:
        if name in by_name:
            raise ValueError(
                f"two checkpoints have one name ({name}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        by_name[name] = path
    return by_name


def name_sources(texts: Iterable[str]) -> dict[str, str]:
    """Sources of data by the name of their data set, from NAME=SOURCE or SOURCE.

    A source names itself, a file by its name without endings, a folder of files by its name, however its path is
    written. Raises ValueError for two of one name, and for the name of the report's means.
    """
    pairs = []
    for text in texts:
        name, source = split_name(text)
        if name is None:
            # A whole path would be a wide head for a column, and may be written in several ways.
            if Path(text).is_dir() and text not in SOURCES:
                name = Path(text).resolve().name
            else:
                name = data_files.name_of(Path(text)) if data_files.is_user_file(text) else text
        pairs.append((name, source))
    names = [name for name, _ in pairs]
    # Rejected before all questions are answered: the report would reject the records.
    if AVERAGE in names:
        raise ValueError(
            f"no data set of --data may be called {AVERAGE!r}, as the report's mean is; write NAME=..."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets of --data have one name: {', '.join(names)}; write NAME=... for one")
    return dict(pairs)


def split_name(text: str) -> tuple[str | None, str]:
    """NAME=PATH -> (NAME, PATH); (None, text) where there is no name.

    A path may have a "=" of its own, as runs/lr=1e-4/best has. So a text that is an existing path has no name, nor has
    one with a "/" before its first "=".
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name or os.path.exists(text):
        return None, text
    return name, path
