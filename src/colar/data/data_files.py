"""Readers of tables as examples: JSON, JSON Lines, CSV, TSV, Parquet, each optionally compressed; the Hub.

    read, from_hub -> (place, raw row) pairs -> parsed -> Fields -> examples_of -> examples

A place is the location that an error message names: "file:line", or "file: row 7" for a format without lines. Rows
with an error are left out, or abort the load (`LeftOut`).
"""

import csv
import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from colar import files, progress
from colar.checks import in_library
from colar.data.example import SPLITS, AnswerType, Example, Fields
from colar.data.judge import understood

RawRows = Iterator[tuple[str, Any]]
"""(place, raw row) of each row of a file."""
Parser = Callable[[Any], Fields]
"""Function that parses one raw row. ValueError for a row that it cannot read."""

USER_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
ENDINGS = (*USER_ENDINGS, ".txt")
"""A published source may have text files."""
DATA_DIR_VARIABLE = "COLAR_DATA_DIR"
NAMING_A_FOLDER = f"--data_dir (in a recipe data.data_dir) or {DATA_DIR_VARIABLE}"
"""The ways to name the folder of the sources' files, for errors."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
VALIDATION = {"val", "valid", "dev"}
"""Other names of the file `validation` in a folder without that."""
START = 200
"""Bytes that are checked to tell a web page from rows."""
ROWS_AT_ONCE = 1024
"""Rows of a Parquet file that are in memory at a time."""
SHOWN = 3
"""Most places that a message names."""
_READABLE = {
    "number": "write one number (42, -1,234.5, 3/4), or give the row answer_type latex or text",
    "choice": "write one letter A-J, True or False, or give the row answer_type text",
}
"""Answer type -> remedy for an answer that cannot be read as that type; other types are not checked."""


def ending(path: Path) -> str:
    """`.jsonl` of `rows.jsonl` and of `rows.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read(path: Path, endings: Collection[str] = ENDINGS) -> RawRows:
    """Read the rows of a file with one of `endings`. ValueError names the file, and the line if the format has lines.

    An uncompressed table is streamed, except for JSON, so that it may be larger than the memory.
    """
    suffix = ending(path)
    if suffix not in endings:
        raise ValueError(
            f"{path}: a data file must end in {', '.join(endings)}, perhaps with .gz or .zst behind it"
        )
    stream = _opened(path)
    if suffix == ".parquet":
        return _numbered(path, _parquet(path, stream))
    _check_no_page(path, stream.read(START))
    stream.seek(0)
    if suffix in (".txt", ".jsonl"):
        return _lines(path, stream)
    if suffix == ".json":
        with stream:
            return _numbered(path, _json(path, files.decoded(stream.read(), path)))
    return _separated(path, stream, "\t" if suffix == ".tsv" else ",")


def is_user_file(name: str | Path) -> bool:
    """True if a path has an ending of a user's data files, in lower or upper case."""
    return ending(Path(name)) in USER_ENDINGS


def name_of(path: Path) -> str:
    """`my.v2` of `my.v2.jsonl` and of `my.v2.jsonl.gz`: the name of the rows, or of their split."""
    uncompressed = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return uncompressed.stem


def splits_in(folder: Path) -> list[str]:
    """List the splits in a user's folder: any `<split>.jsonl` counts, other data files only if named as in `SPLITS`."""
    # Folders often hold other JSON files beside the rows: settings, descriptions.
    of_user = list(filter(is_user_file, folder.iterdir()))
    splits = {name_of(path) for path in of_user if ending(path) == ".jsonl" or name_of(path) in SPLITS}
    if "validation" not in splits and not VALIDATION.isdisjoint(map(name_of, of_user)):
        splits = splits - VALIDATION | {"validation"}
    return sorted(splits)


def file_of(path: Path, split: str) -> Path:
    """A user's file, or the split's file in a user's folder: `<split>.jsonl` if there is none.

    ValueError if there are several.
    """
    if not path.is_dir():
        return path
    user_files = sorted(filter(is_user_file, path.iterdir()))
    of_split = [each for each in user_files if name_of(each) == split]
    if not of_split and split == "validation":
        of_split = [each for each in user_files if name_of(each) in VALIDATION]
    if len(of_split) > 1:
        names = " and ".join(each.name for each in of_split)
        raise ValueError(f"{path} has {names}, two files for one split: keep one of them")
    return of_split[0] if of_split else path / f"{split}.jsonl"


def from_hub(hub: str, configs: tuple[str | None, ...], split: str) -> RawRows:
    """The rows of a Hub data set's configurations, one after the other. `hub` may be a local folder."""
    import datasets  # slow to import: only a load from the Hub waits for it

    hint = (
        "a private or gated one needs: hf auth login; one with several configurations: owner/name/configuration; a "
        "file or folder of one's own needs its path; without a network, a source of the list needs a folder of its "
        f"files, {NAMING_A_FOLDER}"
    )
    # Each subject of MATH is a configuration of its own; most data sets have one, or none to name.
    for config in configs:
        label = f"{hub}/{config}" if config else hub
        with in_library(f"cannot load the data set {label}, split {split!r}, from the Hub ({hint})"):
            table = datasets.load_dataset(hub, config, split=split)
        for number, row in enumerate(table, start=1):
            yield f"{label}[{split}]: row {number}", row


def _opened(path: Path) -> BinaryIO:
    """Open a file as a stream of bytes; a compressed file is decompressed in memory."""
    stream = open(path, "rb")  # noqa: SIM115  # closed with the last row
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return stream
    import pyarrow  # type: ignore[import-untyped]

    with stream, in_library(f"{path}: not a whole {suffix} file"):
        return io.BytesIO(pyarrow.input_stream(stream, compression=COMPRESSED[suffix]).read())


def _check_no_page(path: Path, start: bytes) -> None:
    """Reject an HTML page or a Git LFS pointer, which a browser or a hub may send in place of a file."""
    start = start.lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{path}: an HTML page, not rows: download the file itself (on the Hub: resolve/, not blob/)"
        )
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: a Git LFS pointer, not rows: run git lfs pull")


def _lines(path: Path, stream: BinaryIO) -> RawRows:
    with stream:
        for number, line in enumerate(stream, start=1):
            # Decoded line by line, so that the error names the line in another encoding.
            text = files.decoded(line, f"{path}:{number}")
            if text.strip():
                yield f"{path}:{number}", text.rstrip("\r\n")


def _numbered(path: Path, rows: Iterable[Any]) -> RawRows:
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _json(path: Path, text: str) -> list[Any]:
    """The rows of a JSON file: its list, or the one list in its object, or the object's values that are rows."""
    try:
        content = files.parse_json(text, path)
    except ValueError as error:
        second = text.lstrip().startswith("{") and str(error).endswith("Extra data")
        hint = " (an object on each line: call it .jsonl)" if second else ""
        raise ValueError(f"{error}{hint}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) == 1:
            return lists[0]
        if content and all(isinstance(value, dict) for value in content.values()):
            return list(content.values())
    if not isinstance(content, list):
        raise ValueError(f"{path}: must hold a list of rows, holds a {type(content).__name__}")
    return content


def _parquet(path: Path, stream: BinaryIO) -> Iterator[Any]:
    from pyarrow import parquet

    with stream, in_library(f"{path}: not a Parquet file"):
        for batch in parquet.ParquetFile(stream).iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _separated(path: Path, stream: BinaryIO, comma: str) -> RawRows:
    """The rows of a CSV or TSV file, keyed by the names in its first line."""
    # A chain of thoughts may exceed the default limit of a field, 128 KiB.
    csv.field_size_limit(1 << 30)
    with stream:
        lines = (files.decoded(line, path) for line in stream)
        first = next(lines, "")
        if comma == "," and "," not in first and ";" in first:
            # Spreadsheets write semicolons in locales whose decimal point is the comma.
            comma = ";"
        reader = csv.reader(itertools.chain([first], lines), delimiter=comma, strict=True)
        try:
            # An empty name is allowed: pandas writes one for the column of its index.
            head = [name.strip() for name in next(reader, [])]
            if not head or len(set(head)) < len(head):
                raise ValueError(
                    f"{path}:1: the first line must name the columns, each once, got {', '.join(head)[:80]!r}"
                )
            for cells in filter(None, reader):
                place = f"{path}:{reader.line_num}"
                if len(cells) != len(head):
                    raise ValueError(
                        f"{place}: {len(cells)} cells, and the first line names {len(head)} columns"
                    )
                # An empty cell is a null.
                yield place, {name: cell or None for name, cell in zip(head, cells, strict=True)}
        except csv.Error as error:
            kind = ending(path)[1:].upper()
            raise ValueError(f"{path}:{reader.line_num}: not valid {kind}: {error}") from error


# --- from raw rows to examples -----------------------------------------------------------------------------


@dataclass
class LeftOut:
    """The places of rows that cannot be read, by the reason."""

    expected: type[ValueError] | tuple[type[ValueError], ...] = ValueError
    """Errors for which a row is left out; any other aborts the load."""
    places: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: str, error: ValueError) -> None:
        """Leave out the row at this place. Raises the error, with the place, if it is not `expected`."""
        if not isinstance(error, self.expected):
            raise ValueError(f"{place}: {error}") from error
        self.places[str(error)].append(place)

    def lines(self) -> list[str]:
        """A line for each kind of reason: how many rows, and the places of the first ones."""
        # Reasons that differ only in a detail ("an operation that is no arithmetic: sqrt") are one kind.
        kinds: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
        for reason, places in self.places.items():
            kinds[reason.partition(": ")[0]][reason] = places
        lines = []
        for kind, reasons in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
            places = list(itertools.chain.from_iterable(reasons.values()))
            named = next(iter(reasons)) if len(reasons) == 1 else f"{kind}: {len(reasons)} different ones"
            more = ", ..." if len(places) > SHOWN else ""
            lines.append(f"left out {len(places):,}: {named} ({', '.join(places[:SHOWN])}{more})")
        return lines

    def say(self, name: str, n_read: int) -> None:
        """Log how many rows of `name` were read, if not all, and why the others were not."""
        if self.places:
            n_rows = n_read + sum(map(len, self.places.values()))
            progress.say(f"{name}: read {n_read:,} of {n_rows:,} rows")
        for line in self.lines():
            progress.say(f"  {line}")


class ParsedRow(NamedTuple):
    """A row whose columns could be read."""

    place: str
    number: int
    """Counted from 0, rows that are left out included."""
    fields: Fields


def parsed(raw_rows: Iterable[tuple[str, Any]], parser: Parser, left_out: LeftOut) -> Iterator[ParsedRow]:
    """Parse (place, raw row) pairs one by one; those with an error go to `left_out`."""
    for number, (place, raw) in enumerate(raw_rows):
        try:
            fields = parser(raw)
        except ValueError as error:
            left_out.add(place, error)
        else:
            yield ParsedRow(place, number, fields)


def examples_of(
    rows: Iterable[ParsedRow],
    id_of: Callable[[ParsedRow, Collection[str]], str],
    answer_type: AnswerType,
    left_out: LeftOut,
) -> Iterator[Example]:
    """Make the examples of parsed rows one by one; those with an error go to `left_out`, and take no id.

    `id_of` gets a row and the ids that are taken; `answer_type` applies to rows that name none.
    """
    taken: set[str] = set()
    for row in rows:
        name = id_of(row, taken)
        try:
            if name in taken:
                raise ValueError(f"id occurs twice: {name!r}")
            example = example_of(name, row.fields, answer_type)
        except ValueError as error:
            left_out.add(row.place, error)
        else:
            taken.add(name)
            yield example


def example_of(name: str, fields: Fields, answer_type: AnswerType) -> Example:
    """The example of this id. ValueError as of `Example`, and for an answer that the judge cannot read."""
    # Not `or`: an empty type is a wrong one.
    kind = answer_type if fields.answer_type is None else fields.answer_type
    example = Example(name, fields.question, fields.steps, fields.answer, kind, context=fields.context)
    # With a gold that cannot be read, every completion would count as wrong.
    if kind in _READABLE and not understood(fields.answer, kind):
        raise ValueError(
            f"answer cannot be read as answer_type {kind!r}: {fields.answer[:40]!r}; {_READABLE[kind]}"
        )
    return example
