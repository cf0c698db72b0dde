"""Tables of rows: JSON, JSON Lines, CSV, TSV, Parquet, each also compressed; the Hub.

A reader yields (place, raw row) pairs. A place is what an error message names: "file:line", or "file: row 7" where a
format has no lines.
"""

import csv
import io
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from colar import files
from colar.checks import check_known, in_library
from colar.data.example import SPLITS

RawRows = Iterator[tuple[str, Any]]
"""(place, raw row) of each row of a file."""

USER_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
ENDINGS = (*USER_ENDINGS, ".txt")
"""A published source may have text files."""
DATA_DIR_VARIABLE = "COLAR_DATA_DIR"
NAMING_A_FOLDER = f"--data_dir (in a recipe data.data_dir) or {DATA_DIR_VARIABLE}"
"""The ways to name the folder of the sources' files, for errors."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
START = 200
"""Bytes by which a web page is told from rows."""
ROWS_AT_ONCE = 1024
"""Rows of a Parquet file in memory."""


def ending(path: Path) -> str:
    """`.jsonl` of `rows.jsonl` and of `rows.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read(path: Path, endings: Collection[str] = ENDINGS) -> RawRows:
    """The rows of a file with one of `endings`. ValueError names the file, and the line where it has some.

    A table that is not compressed is read as its rows are used (JSON excepted): it may be larger than the memory.
    """
    suffix = ending(path)
    if suffix not in endings:
        raise ValueError(
            f"{path}: a data file must end in {', '.join(endings)}, perhaps with .gz or .zst behind it"
        )
    stream = _opened(path)
    if suffix == ".parquet":
        return _numbered(path, _parquet(path, stream))
    # Not `seek`: the file may be a pipe.
    start = stream.peek(START)[:START]
    _check_no_page(path, start)
    if suffix in (".txt", ".jsonl"):
        return _lines(path, stream)
    if suffix == ".json":
        with stream:
            return _numbered(path, _json(path, files.decoded(stream.read(), path)))
    return _separated(path, stream, "\t" if suffix == ".tsv" else ",")


def is_user_file(name: str | Path) -> bool:
    """True if a path is called as a user's data file is, in small letters or capitals."""
    return ending(Path(name)) in USER_ENDINGS


def name_of(path: Path) -> str:
    """`my.v2` of `my.v2.jsonl` and of `my.v2.jsonl.gz`: the name of the rows, or of their split."""
    uncompressed = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return uncompressed.stem


def splits_in(folder: Path) -> list[str]:
    """The splits that a user's folder has, by name: of `<split>.jsonl` any, of other data files those of `SPLITS`."""
    # Other JSON files beside the rows are common: settings, descriptions.
    of_user = filter(is_user_file, folder.iterdir())
    return sorted({name_of(path) for path in of_user if ending(path) == ".jsonl" or name_of(path) in SPLITS})


def file_of(path: Path, split: str) -> Path:
    """A user's file, or the split's file in a user's folder, `<split>.jsonl` where there is none.

    ValueError where there are several.
    """
    if not path.is_dir():
        return path
    of_split = sorted(each for each in path.iterdir() if is_user_file(each) and name_of(each) == split)
    if len(of_split) > 1:
        names = " and ".join(each.name for each in of_split)
        raise ValueError(f"{path} has {names}, two files for one split: keep one of them")
    return of_split[0] if of_split else path / f"{split}.jsonl"


def existing(path: Path, split: str) -> Path:
    """As `file_of`, of a folder. ValueError where it is not there."""
    file = file_of(path, split)
    if not file.is_file():
        check_known(f"{path} split", [split], splits_in(path))
        raise ValueError(f"no file {file}")
    return file


def from_hub(hub: str, configs: tuple[str | None, ...], split: str) -> RawRows:
    """The rows of a Hub data set's configurations, one after the other. `hub` may be a local folder."""
    import datasets  # slow to import: only a load from the Hub waits for it

    what = (
        f"cannot load the data set {hub}, split {split!r}, from the Hub (a private or gated one needs: hf auth login; "
        "a file or folder of one's own needs its path; without a network, a source of the list needs a folder of its "
        f"files, {NAMING_A_FOLDER})"
    )
    # Each subject of MATH is a configuration of its own; most data sets have one, or none to name.
    for config in configs:
        with in_library(what):
            table = datasets.load_dataset(hub, config, split=split)
        label = f"{hub}/{config}" if config else hub
        for number, row in enumerate(table, start=1):
            yield f"{label}[{split}]: row {number}", row


def _opened(path: Path) -> io.BufferedReader:
    """The bytes of a file; of a compressed one, decompressed in memory."""
    stream = open(path, "rb")  # noqa: SIM115  # closed with the last row
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return stream
    import pyarrow  # type: ignore[import-untyped]

    with stream, in_library(f"{path}: not a whole {suffix} file"):
        return _in_memory(pyarrow.input_stream(stream, compression=COMPRESSED[suffix]).read())


def _in_memory(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(data))


def _check_no_page(path: Path, start: bytes) -> None:
    """Reject what a browser or a hub sends in place of a file."""
    start = start.lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{path}: an HTML page, not rows: download the file itself (on the Hub: resolve/, not blob/)"
        )
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: a Git LFS pointer, not rows: run git lfs pull")


def _lines(path: Path, stream: io.BufferedReader) -> RawRows:
    with stream:
        for number, line in enumerate(stream, start=1):
            # Each line by itself: the error names the one in another encoding.
            text = files.decoded(line, f"{path}:{number}")
            if text.strip():
                yield f"{path}:{number}", text.rstrip("\r\n")


def _numbered(path: Path, rows: Iterable[Any]) -> RawRows:
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _json(path: Path, text: str) -> list[Any]:
    """The rows of a JSON file: its list, or the one list in its object, or the object's values that are rows."""
    try:
        content = files.parse_json(text)
    except json.JSONDecodeError as error:
        second = text.lstrip().startswith("{") and error.msg == "Extra data"
        hint = " (an object on each line: call it .jsonl)" if second else ""
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg}{hint}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) == 1:
            return lists[0]
        if content and all(isinstance(value, dict) for value in content.values()):
            return list(content.values())
    if not isinstance(content, list):
        raise ValueError(f"{path}: must hold a list of rows, holds a {type(content).__name__}")
    return content


def _parquet(path: Path, stream: io.BufferedReader) -> Iterator[Any]:
    from pyarrow import parquet

    with stream, in_library(f"{path}: not a Parquet file"):
        source = stream if stream.seekable() else _in_memory(stream.read())
        for batch in parquet.ParquetFile(source).iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _separated(path: Path, stream: io.BufferedReader, comma: str) -> RawRows:
    """The rows of a CSV or TSV file, by the names in its first line."""
    # A chain of thoughts is longer than the 128 KiB that a field may have by default.
    csv.field_size_limit(1 << 30)
    with stream:
        lines = (files.decoded(line, path) for line in stream)
        first = next(lines, "")
        if comma == "," and "," not in first and ";" in first:
            # A spreadsheet writes this where the comma is the decimal point.
            comma = ";"
        yield from _cells(path, csv.reader(itertools.chain([first], lines), delimiter=comma, strict=True))


def _cells(path: Path, reader: Any) -> RawRows:
    try:
        head: list[str] = next(reader, [])
        if not head or len(set(head)) < len(head) or not all(name.strip() for name in head):
            raise ValueError(
                f"{path}:1: the first line must name the columns, each once, got {', '.join(head)[:80]!r}"
            )
        for cells in reader:
            place = f"{path}:{reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(head):
                raise ValueError(f"{place}: {len(cells)} cells, and the first line names {len(head)} columns")
            # An empty cell is a null.
            yield place, {name.strip(): cell or None for name, cell in zip(head, cells, strict=True)}
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.line_num}: not valid {ending(path)[1:].upper()}: {error}"
        ) from error
