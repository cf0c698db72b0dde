"""Find the raw rows of a split: in files under a data folder, in a user's own file, or on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from colar import progress
from colar.checks import check_known
from colar.data import formats
from colar.data.catalogue import SPLITS, Source, Split
from colar.data.formats import Entries, Parser

DATA_DIR_VARIABLE = "COLAR_DATA_DIR"
OWN_ENDINGS = (".jsonl", ".json")
"""Of a user's files, in small letters or capitals."""


def folder(data_dir: str | Path | None) -> Path | None:
    """The data folder: `data_dir`, else the one that COLAR_DATA_DIR names, else None (the Hub)."""
    named = data_dir
    if named is None:
        named = os.environ.get(DATA_DIR_VARIABLE) or None  # set but empty counts as not set
    if named is None:
        return None
    if not Path(named).is_dir():
        raise ValueError(f"the data folder {named} does not exist (--data-dir or {DATA_DIR_VARIABLE})")
    return Path(named)


def present(plan: Split, under: Path) -> list[Path] | None:
    """The first alternative of the split's files that is all there."""
    for names in plan.files:
        paths = [under / name for name in names]
        # One part of a training set is not a training set.
        if all(path.exists() for path in paths):
            return paths
    return None


def of_source(name: str, source: Source, plan: Split, data_dir: str | Path | None) -> tuple[Entries, Parser]:
    """The entries of a source's split, and the parser that they need."""
    under = folder(data_dir)
    # A folder that was named stands in for the Hub, for every source that has files at all.
    if source.file_parser is not None and under is not None:
        return _from_files(name, source, plan, under), source.file_parser
    if source.hub is None or source.hub_parser is None or plan.hub is None:
        raise ValueError(
            f"{name} is read from files only: put {_wanted(plan)} under a folder and name it with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    return from_hub(source.hub, source.hub_configs, plan.hub), source.hub_parser


def is_own_file(name: str | Path) -> bool:
    """Whether a path is called as a user's data file is."""
    return Path(name).suffix.lower() in OWN_ENDINGS


def splits_in(own_folder: Path) -> list[str]:
    """The splits that a user's folder of `<split>.jsonl` and `<split>.json` files has, by name."""
    splits = set()
    for path in own_folder.iterdir():
        # Other JSON files beside the rows are common: settings, descriptions.
        if path.suffix.lower() == ".jsonl" or (is_own_file(path) and path.stem in SPLITS):
            splits.add(path.stem)
    return sorted(splits)


def split_file(own_folder: Path, split: str) -> Path | None:
    """The file of a split in a user's folder. ValueError where there are several."""
    found = sorted(path for path in own_folder.iterdir() if is_own_file(path) and path.stem == split)
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ValueError(f"{own_folder} has {names}, two files for one split: keep one of them")
    return found[0] if found else None


def of_path(path: Path, split: str) -> Entries:
    """The entries of a user's file, or of the split's file in a user's folder."""
    if path.is_dir():
        file = split_file(path, split)
        if file is None:
            check_known(f"{path} split", [split], splits_in(path))
        path = file or path / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"no file {path}")
    return formats.read(path)


def from_hub(hub: str, configs: tuple[str | None, ...], split: str) -> Entries:
    """The entries of a Hub data set's configurations, one after the other. `hub` may be a local folder."""
    import datasets  # slow to import: only a load from the Hub waits for it

    # Each subject of MATH is a configuration of its own; most data sets have one, or none to name.
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


def _from_files(name: str, source: Source, plan: Split, under: Path) -> Entries:
    paths = present(plan, under)
    if paths is None:
        # The user named a folder: a download in place of a file that is not there would go unnoticed.
        otherwise = f", or name no folder to load {source.hub} from the Hub" if source.hub else ""
        raise ValueError(f"{name}: no {_wanted(plan)} under {under}{otherwise}")
    if len(paths) == 1:
        return formats.read(paths[0])
    parts = " and ".join(path.name for path in paths)
    progress.say(f"{name}: no {plan.files[0][0]} under {under}, reading {parts}")
    return _distinct(name, paths)


def _distinct(name: str, paths: list[Path]) -> Entries:
    """The lines of several iCoT files, each question once: the question is what stands before "||"."""
    seen: set[str] = set()
    dropped = 0
    for path in paths:
        for place, line in formats.read(path):
            question = line.partition("||")[0].strip()
            # The parts overlap: both have some of GSM8K's own training problems.
            if question in seen:
                dropped += 1
                continue
            seen.add(question)
            yield place, line
    if dropped:
        progress.say(f"{name}: dropped {dropped} rows whose question had come before")


def _wanted(plan: Split) -> str:
    """The split's files as an error names them: "a, or b + c" has two alternatives."""
    alternatives = [" + ".join(names) for names in plan.files]
    return " or ".join(alternatives)
