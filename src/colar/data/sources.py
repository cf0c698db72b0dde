"""Load problems, from files under a data folder, from the Hub, or from a user's file.

    load_examples("gsm8k-aug", "test")

A source is looked up under `data_dir`, else under the folder that the environment variable COLAR_DATA_DIR names, else
on the Hugging Face Hub. The table in `catalogue.py` has an entry for each source, with a location for each split. If a
data folder is given, a missing file is an error, not a silent download; a source that has no files (gpqa) always comes
from the Hub. A user's file or folder is read by `user_rows.py`.

Rows of a source with `order="key"` are sorted by their ids. Most of these are a hash of the question, so that `limit`
takes a random but fixed sample. Such a hash also selects MATH's validation rows, because the paper does not say how its
own were selected. docs/data.md has the order, ids and clusters of each source.
"""

import dataclasses
import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from colar import files, progress, yaml_settings
from colar.checks import check_holds, check_known
from colar.data import arithmetic, data_files, user_rows
from colar.data.catalogue import SOURCES, Split, UpstreamFault
from colar.data.data_files import DATA_DIR_VARIABLE, NAMING_A_FOLDER, ParsedRow, RawRows
from colar.data.example import SPLITS, Example, Fields, question_hash
from colar.data.judge import judged_by
from colar.data.programs import NotStraight

GENERATED = {"train": 10_000, "validation": 500, "test": 1_000}
"""Rows of a split of `arithmetic` where no `limit` is given."""


def load_examples(
    source: str,
    split: str,
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_malformed: bool = False,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    judge: str | None = None,
) -> list[Example]:
    """Load the rows of one split, in a fixed order.

    `source` is a name of the table, a user's file in one of the layouts of `layouts.py`, a folder of `<split>.jsonl` or
    other files, such as `prepare` writes, or a data set of the Hub, `owner/name[/config][:split]`. `limit` takes the
    first n rows. `seed` and `options` (fields of `ArithmeticConfig`) apply to `arithmetic`. `columns` maps the columns
    of a user's file, `{"question": "problem"}`, if they have other names. `judge` is the `module:function` of a user's
    judge, which accepts answers of any type.

    Raises ValueError for an unknown source, split or option, files that are not there, a malformed row (unless
    `skip_malformed`, which logs the skipped rows on stderr), an empty data set, or a Hub that cannot be reached.
    """
    check_holds("limit", limit is None or limit >= 1, limit, "1 or more, or null for all rows")
    options = dict(options or {})
    if source not in SOURCES:
        expected = ValueError if skip_malformed else ()
        rows = user_rows.read(source, columns, split, judge, expected=expected)
        rows.left_out.say(f"{rows.name}/{split}", len(rows.examples))
        # Log the inferred answer type, and how many chains lost unmarked lines.
        if rows.untyped or rows.unmarked:
            progress.say(rows.summary()[0])
        for warning in rows.unread():
            progress.say(f"warning: {rows.name}/{split}: {warning}")
        # Checked last, so that the error for a mistyped source names the source, not its options.
        check_known("file option", options, ())
        return _with_clusters(rows.examples[:limit])
    if columns is not None:
        raise ValueError(f"columns are named for a file of your own, and {source} is a source of the table")
    check_known(f"{source} split", [split], SOURCES[source].splits)
    if source == "arithmetic":  # generated, not read
        config = yaml_settings.built(arithmetic.ArithmeticConfig, options, "arithmetic.")
        n = GENERATED[split] if limit is None else limit
        examples = arithmetic.generate(config, split, n, seed)
    else:
        check_known(f"{source} option", options, ())
        # After the limit, so that the first row of a cluster is always among the rows that are returned.
        examples = _with_clusters(_published(source, split, data_dir, limit, skip_malformed))
    return judged_by(examples, judge)


def prepare(source: str, splits: Iterable[str], output: str | Path, **how: Any) -> list[Path]:
    """Write `<output>/<split>.jsonl` in Coconut's format, each file atomically. Returns the paths.

    `load_examples(output, split)` reads equal rows back. Other arguments and errors are those of `load_examples`.
    """
    # Checked now rather than after a long read.
    files.require_writable(output)
    paths = {split: Path(output) / f"{split}.jsonl" for split in splits}
    read: set[Path] = set()
    for split in paths:
        read.update(path.resolve() for path in _files_of(source, split, how.get("data_dir")))
    for path in paths.values():
        if path.resolve() in read:
            raise ValueError(f"{path} is read, and would be replaced: give another --output")
    for split, path in paths.items():
        files.write_jsonl(path, [example.as_row() for example in load_examples(source, split, **how)])
    return list(paths.values())


def splits_of(source: str) -> list[str]:
    """List the splits of a source; those of a folder are its files, and a file or Hub id has one, called train."""
    # A source takes precedence over a folder of the same name.
    if source in SOURCES:
        return list(SOURCES[source].splits)
    path = Path(source)
    if not path.is_dir():
        return ["train"]
    splits = data_files.splits_in(path)
    if not splits:
        raise ValueError(f"{source} holds no SPLIT.jsonl, nor another data file called {', '.join(SPLITS)}")
    # A folder's train split comes first, as a source's does; splits with names of their own come last.
    known = [split for split in SPLITS if split in splits]
    return known + [split for split in splits if split not in SPLITS]


def place_of(source: str, split: str) -> str | None:
    """The place that a split of a user's own data is read from, its file's real path or `owner/name[/config]:split` on
    the Hub; None for a source of the table, whose splits are never one."""
    if source in SOURCES:
        return None
    path = Path(source)
    if path.exists():
        return str(data_files.file_of(path, split).resolve())
    hub, _, part = source.partition(":")
    return f"{hub}:{part or split}"


# --- rows of the table's sources ---------------------------------------------------------------------------


def _published(
    source: str, split: str, data_dir: str | Path | None, limit: int | None, skip: bool
) -> list[Example]:
    """The first `limit` rows of a source of the table."""
    entry = SOURCES[source]
    location = entry.splits[split]
    parser = entry.parser
    assert parser is not None
    # Programs without a chain are expected and the publishers' faults are known, so neither aborts the load.
    left_out = data_files.LeftOut(ValueError if skip else (NotStraight, UpstreamFault))

    def parse(raw: Any) -> Fields:
        fields = parser(raw)
        if question_hash(fields.question) in location.leave_out:
            raise UpstreamFault("the test set asks the same question")
        return fields

    def id_of(row: ParsedRow, taken: Collection[str]) -> str:
        """The row's own id; else the hash of its question in a hash-ordered source; else its position."""
        if row.fields.key is not None:
            return f"{source}/{split}/{row.fields.key}"
        if entry.order == "upstream":
            return f"{source}/{split}/{row.number}"
        first = f"{source}/{split}/{question_hash(row.fields.question)}"
        # MultiArith asks 20 questions twice.
        again = (f"{first}-{n}" for n in itertools.count(2))
        return next(name for name in itertools.chain([first], again) if name not in taken)

    rows = data_files.parsed(_raw_rows(source, split, data_dir), parse, left_out)
    examples = data_files.examples_of(rows, id_of, entry.answer_type, left_out)
    # Read no further than `limit`, so that a malformed row behind it is no error.
    read = list(itertools.islice(examples, limit if entry.order == "upstream" else None))
    left_out.say(f"{source}/{split}", len(read))
    chosen = read if entry.order == "upstream" else _portion(read, location)[:limit]
    if not chosen:
        raise ValueError(f"{source}, split {split}: no rows")
    return chosen


def _portion(examples: list[Example], location: Split) -> list[Example]:
    """The rows of a hash-ordered source that belong to the split, sorted by id."""
    # These ids end in a hash of the question, so that sorted rows are in random order; SVAMP's do not.
    ranked = sorted(examples, key=lambda example: example.id)
    n_held = round(len(ranked) / 10)
    return {"held": ranked[:n_held], "kept": ranked[n_held:], "all": ranked}[location.portion]


def _with_clusters(examples: list[Example]) -> list[Example]:
    """Set `cluster` to the id of the first example with the same turns and question, if an earlier one has them."""
    first_id: dict[str, str] = {}
    marked = []
    for example in examples:
        if example.conversation in first_id:
            example = dataclasses.replace(example, cluster=first_id[example.conversation])
        else:
            first_id[example.conversation] = example.id
        marked.append(example)
    return marked


# --- the raw rows of a split: from a data folder, or from the Hub ------------------------------------------


def _raw_rows(source: str, split: str, data_dir: str | Path | None) -> RawRows:
    entry = SOURCES[source]
    location = entry.splits[split]
    paths = _files_of(source, split, data_dir)
    if location.parts and len(paths) > 1:
        names = " and ".join(part.name for part in paths)
        progress.say(f"{source}: no {location.file} under the data folder, reading {names}")
        return _distinct(source, paths)
    if paths:
        return itertools.chain.from_iterable(map(data_files.read, paths))
    if entry.hub is None or location.hub is None:
        raise ValueError(
            f"{source} is read from files only: put {location.file} under a folder and name it, {NAMING_A_FOLDER}"
        )
    return data_files.from_hub(entry.hub, entry.hub_configs, location.hub)


def _files_of(source: str, split: str, data_dir: str | Path | None) -> list[Path]:
    """The files that a split is read from, or the parts that replace its file; none if it comes from the Hub.

    ValueError if a data folder is named, and lacks them.
    """
    if source not in SOURCES:
        return [data_files.file_of(Path(source), split)] if Path(source).exists() else []
    check_known(f"{source} split", [split], SOURCES[source].splits)
    location = SOURCES[source].splits[split]
    folder = _data_folder(data_dir)
    # A named folder replaces the Hub for every source that has files at all.
    if location.file is None or folder is None:
        return []
    if paths := sorted(folder.glob(location.file)):
        return paths
    parts = [folder / name for name in location.parts]
    # All parts are required, so that a part of a training set does not pass for all of it.
    if parts and all(part.exists() for part in parts):
        return parts
    # An error, because the user named a folder: a download in place of a missing file would go unnoticed.
    hub = SOURCES[source].hub
    otherwise = f", or name no folder to load {hub} from the Hub" if hub else ""
    wanted = " or ".join(filter(None, [location.file, " + ".join(location.parts)]))
    raise ValueError(f"{source}: no {wanted} under {folder}{otherwise}")


def _data_folder(data_dir: str | Path | None) -> Path | None:
    """The folder of upstream files, or else the environment's; None for the Hub. ValueError if it does not exist."""
    # Set but empty counts as not set.
    folder = (os.environ.get(DATA_DIR_VARIABLE) or None) if data_dir is None else data_dir
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"the data folder {folder} does not exist: name another, {NAMING_A_FOLDER}")
    return None if folder is None else Path(folder)


def _distinct(source: str, parts: list[Path]) -> RawRows:
    """The lines of several iCoT files, each question once; the question is the text before "||"."""
    seen: set[str] = set()
    dropped = 0
    for part in parts:
        for place, line in data_files.read(part):
            question = line.partition("||")[0].strip()
            # The parts overlap: both have some of GSM8K's own training problems.
            if question in seen:
                dropped += 1
                continue
            seen.add(question)
            yield place, line
    if dropped:
        progress.say(f"{source}: dropped {dropped} rows whose question had come before")
