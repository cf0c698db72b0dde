"""Raw rows of a split, from files under a data folder, from a user's own file, or from the Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colar import progress
from colar.data import formats
from colar.data.catalogue import Source, Split
from colar.data.formats import Parser

DATA_DIR_VARIABLE = "COLAR_DATA_DIR"

Rows = Iterator[tuple[str, Any]]
"""(place, raw row); a place is what an error message names: "file:line"."""


def folder(data_dir: str | Path | None) -> Path | None:
    """The data folder: `data_dir`, else the one that COLAR_DATA_DIR names, else None (the Hub)."""
    named = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE) or None
    if named is None:
        return None
    if not Path(named).is_dir():
        raise ValueError(f"the data folder {named} does not exist (--data-dir or {DATA_DIR_VARIABLE})")
    return Path(named)


def present(plan: Split, under: Path) -> list[Path] | None:
    """The first alternative of the split's files that is all there."""
    for names in plan.files:
        paths = [under / name for name in names]
        if all(path.exists() for path in paths):
            return paths
    return None


def of_source(name: str, source: Source, plan: Split, data_dir: str | Path | None) -> tuple[Rows, Parser]:
    """The rows of a source's split, and the parser that they need."""
    under = folder(data_dir)
    if source.file_parser is not None and under is not None:
        return _from_files(name, source, plan, under), source.file_parser
    if source.hub is None or source.hub_parser is None or plan.hub is None:
        raise ValueError(
            f"{name} is read from files only: put {_wanted(plan)} under a folder and name it with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    return from_hub(source.hub, source.hub_configs, plan.hub), source.hub_parser


def of_path(path: Path, split: str) -> Rows:
    """The rows of a user's file, or of `<split>.jsonl` in a user's folder."""
    if path.is_dir():
        require("split of " + str(path), [split], sorted(child.stem for child in path.glob("*.jsonl")))
        path = path / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"no file {path}")
    return formats.read(path)


def from_hub(hub: str, configs: tuple[str | None, ...], split: str) -> Rows:
    """The rows of a Hub data set's configurations, one after the other. `hub` may be a local folder."""
    import datasets

    for config in configs:
        try:
            table = datasets.load_dataset(hub, config, split=split)
        except Exception as error:  # offline, gated, renamed: every library below has classes of its own
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"cannot load {hub} from the Hub ({type(error).__name__}: {reason}). Log in with `hf auth login` "
                f"if it is gated; without a network, name a folder of upstream files with --data-dir or "
                f"{DATA_DIR_VARIABLE}"
            ) from error
        label = f"{hub}/{config}" if config else hub
        for number, row in enumerate(table, start=1):
            yield f"{label}[{split}]: row {number}", row


def require(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """ValueError, naming the nearest and all allowed values, for the first value that is not allowed."""
    allowed = list(allowed)
    for value in given:
        if value not in allowed:
            nearest = difflib.get_close_matches(str(value), allowed, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown {what}: {value!r}{hint} (allowed: {', '.join(allowed) or 'none'})")


def _from_files(name: str, source: Source, plan: Split, under: Path) -> Rows:
    paths = present(plan, under)
    if paths is None:
        otherwise = f", or name no folder to load {source.hub} from the Hub" if source.hub else ""
        raise ValueError(f"{name}: no {_wanted(plan)} under {under}{otherwise}")
    if len(paths) == 1:
        return formats.read(paths[0])
    read = " and ".join(path.name for path in paths)
    progress.say(f"{name}: no {plan.files[0][0]} under {under}, reading {read}")
    return _distinct(name, paths)


def _distinct(name: str, paths: list[Path]) -> Rows:
    """The lines of several iCoT files, one per question: what stands before "||"."""
    seen: set[str] = set()
    dropped = 0
    for path in paths:
        for place, line in formats.read(path):
            question = line.partition("||")[0].strip()
            if question in seen:
                dropped += 1
                continue
            seen.add(question)
            yield place, line
    if dropped:
        progress.say(f"{name}: dropped {dropped} rows whose question had come before")


def _wanted(plan: Split) -> str:
    return " or ".join(" + ".join(names) for names in plan.files)
