"""Load problems: `load("gsm8k-aug", "test")`, from files under a data folder, from the Hub, or from one's own file.

Where a source is looked for: under `data_dir`, else under the folder that the environment variable COLAR_DATA_DIR
names, else on the Hugging Face Hub (`catalogue.py` has the table of sources). With a data folder given, a missing
file is an error, not a silent download; a source that has no files (gpqa) always comes from the Hub.

MATH has no validation split. Here it is the tenth of train (750 rows) whose questions have the smallest SHA-256: the
paper shuffles once and does not say how. The rows of such a source (`order="key"` in the table) are sorted by that
hash, or by their publisher's id, and named by it: `limit` takes a random but fixed sample. An example that repeats a
question has the first one's id as its `cluster`: standard errors take the two as one cluster.

Malformed rows are errors that name file and line, unless `skip_malformed`; nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colar import files, progress
from colar.checks import check_holds, check_known
from colar.data import arithmetic, catalogue, data_files, layouts, own
from colar.data.catalogue import DATA_DIR_VARIABLE, SOURCES, Source, Split
from colar.data.data_files import Entries
from colar.data.example import SPLITS, AnswerType, Example, collapsed, question_hash
from colar.data.fields import Fields, Parser, coconut, named_fields
from colar.data.judge import answers
from colar.data.published_rows import UpstreamFault

__all__ = [
    "DATA_DIR_VARIABLE",
    "GENERATED",
    "GENERATORS",
    "SOURCES",
    "held_out_questions",
    "load",
    "prepare",
    "splits_of",
    "user_file",
]

GENERATORS: Mapping[str, tuple[type[Any], Callable[..., list[Example]]]] = MappingProxyType(
    {"arithmetic": (arithmetic.ArithmeticConfig, arithmetic.generate)}
)
"""Generated sources: the dataclass of the options, and the function that makes rows."""
GENERATED = {"train": 10_000, "validation": 500, "test": 1_000}
"""Rows of a generated split where no `limit` is given."""
_EXPECTED = {
    "number": "write one number (42, -1,234.5, 3/4), or give the row answer_type latex or text",
    "choice": "write one letter A-J, True or False, or give the row answer_type text",
}
_NAMED = 3  # malformed rows that a message names, of however many were left out


def load(
    source: str,
    split: str,
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_malformed: bool = False,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Example]:
    """Load the rows of one split, in a fixed order.

    `source` is a name of the table, a user's file in one of the layouts of `layouts.py`, or a folder of
    `<split>.jsonl` or other files, such as `prepare` writes. `limit` takes the first n rows. `seed` matters to
    generated sources only. `options`: the fields of a generated source's config. `columns`: those of a user's file,
    `{"question": "problem"}`, where they have other names.

    Raises ValueError for an unknown source, split or option, files that are not there, a malformed row (unless
    `skip_malformed`, which says on stderr what it skipped), an empty data set, or a Hub that cannot be reached.
    """
    check_holds("limit", limit is None or limit >= 1, limit, "1 or more, or null for all rows")
    options = dict(options or {})
    _check_source(source)
    if _is_path(source):
        check_known("file option", options, ())
        path = data_files.existing(Path(source), split)
        if columns or not _is_coconut(path):
            return _with_clusters(_in_layout(path, skip_malformed, columns)[:limit])
        reader = _Reader(f"{Path(source).stem}/{split}", coconut, "number", skip_malformed)
        found = reader.examples(data_files.read(path))
    else:
        if columns is not None:
            raise ValueError(
                f"columns are named for a file of your own, and {source} is a source of the table"
            )
        entry = SOURCES[source]
        check_known(f"{source} split", [split], entry.splits)
        if source in GENERATORS:  # made, not read
            n = GENERATED[split] if limit is None else limit
            return _generated(source, split, n, seed, options)
        check_known(f"{source} option", options, ())
        plan = entry.splits[split]
        entries, parser = catalogue.entries_of_source(source, entry, plan, data_dir)
        reader = _Reader(f"{source}/{split}", parser, entry.answer_type, skip_malformed, entry, plan)
        found = _arranged(reader.examples(entries), entry, plan)
    # Rows are read no further than `limit`: a malformed row behind it is never met.
    examples = list(itertools.islice(found, limit))
    _say_left_out(reader.name, reader.left_out)
    if not examples:
        raise ValueError(f"{source}, split {split}: no rows")
    # Behind the limit: the first one of a cluster is always among the rows that are returned.
    return _with_clusters(examples)


def prepare(source: str, splits: Iterable[str], output: str | Path, **how: Any) -> list[Path]:
    """Write `<output>/<split>.jsonl` in Coconut's format, each file in one step. Returns the paths.

    `load(output, split)` reads them back to equal rows. Other arguments and errors are `load`'s.
    """
    # Now rather than after a long read.
    files.require_writable(output)
    paths = []
    for split in splits:
        rows = [example.as_row() for example in load(source, split, **how)]
        paths.append(files.write_jsonl(Path(output) / f"{split}.jsonl", rows))
    return paths


def splits_of(source: str) -> list[str]:
    """List the splits that a source has; those of a user's folder are its files, and a file is one, called train."""
    _check_source(source)
    if not _is_path(source):
        return list(SOURCES[source].splits)
    if not Path(source).is_dir():
        return ["train"]
    splits = data_files.splits_in(Path(source))
    if not splits:
        raise ValueError(f"{source} holds no SPLIT.jsonl or SPLIT.json file")
    # A folder's train split comes first, as a source's does; splits with names of their own come last.
    known = [split for split in SPLITS if split in splits]
    return known + [split for split in splits if split not in SPLITS]


def held_out_questions(
    source: str, train_split: str, *, data_dir: str | Path | None = None, skip_malformed: bool = False
) -> set[str]:
    """The questions that no training row may ask: those of the source's other splits, and of every test set of numbers.

    The source's own splits must be there (a file has no others). Other test sets count where their files lie under
    the data folder: nothing is downloaded for them. Errors are `load`'s.
    """
    wanted = [(source, split) for split in splits_of(source) if split != train_split]
    under = catalogue.folder(data_dir)
    for name, entry in SOURCES.items():
        plan = entry.splits.get("test")
        numbers = entry.answer_type == "number"
        if under is not None and plan is not None and numbers and catalogue.present(plan, under) is not None:
            wanted.append((name, "test"))
    questions: set[str] = set()
    for name, split in dict.fromkeys(wanted):
        rows = load(name, split, data_dir=data_dir, skip_malformed=skip_malformed)
        questions.update(row.question for row in rows)
    return questions


def user_file(source: str, split: str) -> Path | None:
    """The file that a split of a user's file or folder is read from, by its real path; None for the table's sources."""
    if not _is_path(source):
        return None
    return data_files.file_of(Path(source), split).resolve()


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Parses entries into Examples. A malformed row is an error, or, with `skip`, left out."""

    name: str
    """Of source and split."""
    parser: Parser
    answer_type: AnswerType
    skip: bool
    source: Source | None = None
    plan: Split | None = None
    """Of a source of the table."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Place and fault of each row that was left out."""

    def examples(self, entries: Entries) -> Iterator[Example]:
        ids: set[str] = set()
        for index, (place, raw) in enumerate(entries):
            try:
                example = self._example(self.parser(raw), index, ids)
            except ValueError as error:
                # The publisher's own faults are known: they stop no load.
                if not self.skip and not isinstance(error, UpstreamFault):
                    raise ValueError(f"{place}: {error}") from error
                self.left_out.append(f"{place}: {error}")
                continue
            # A row that was left out keeps its number, but takes no id.
            ids.add(example.id)
            yield example

    def _example(self, fields: Fields, index: int, ids: set[str]) -> Example:
        leave_out = self.plan.leave_out if self.plan else ()
        if leave_out and question_hash(fields.question) in leave_out:
            raise UpstreamFault("the test set asks the same question")
        answer_type = fields.answer_type or self.answer_type
        example = fields.example(self._id(fields, index, ids), answer_type)
        # A gold that the judge cannot read would count every answer as wrong.
        if answer_type in ("number", "choice") and not answers.understood(example.answer, answer_type):
            found = f"answer {example.answer[:40]!r} cannot be read as answer_type {answer_type!r}"
            raise ValueError(f"{found}: {_EXPECTED[answer_type]}")
        return example

    def _id(self, fields: Fields, index: int, ids: set[str]) -> str:
        """The row's own id; else the hash of its question in a hash-ordered source; else its position."""
        # A publisher's id is unique in its own file only; a user's id is taken as it is.
        if fields.key is not None:
            key = f"{self.name}/{fields.key}" if self.source else fields.key
            if key in ids:
                raise ValueError(f"id {key!r} occurs twice")
            return key
        if self.source is None or self.source.order == "upstream":
            return f"{self.name}/{index}"
        first = f"{self.name}/{question_hash(fields.question)}"
        # MultiArith asks 20 questions twice.
        again = (f"{first}-{n}" for n in itertools.count(2))
        return next(key for key in itertools.chain([first], again) if key not in ids)


def _is_coconut(path: Path) -> bool:
    """True if a user's file is read as Coconut's, row by row; so is one whose first row is of no layout."""
    for _, raw in data_files.read(path):
        try:
            return layouts.is_coconut(named_fields(raw))
        except ValueError:  # the error of reading names the row
            break
    return True


def _in_layout(path: Path, skip: bool, columns: Mapping[str, str] | None) -> list[Example]:
    """The rows of a user's file in another layout. A malformed row is an error, or, with `skip`, left out."""
    rows = own.read(path, columns)
    left_out: list[str] = []
    for reason, places in rows.left_out.items():
        left_out += [f"{place}: {reason}" for place in places]
    if left_out and not skip:
        raise ValueError(left_out[0])
    _say_left_out(rows.name, left_out)
    return rows.examples


def _say_left_out(name: str, left_out: Sequence[str]) -> None:
    if left_out:
        more = "; ..." if len(left_out) > _NAMED else ""
        progress.say(f"{name}: left out {len(left_out)} row(s): {'; '.join(left_out[:_NAMED])}{more}")


def _arranged(examples: Iterator[Example], source: Source, plan: Split) -> Iterator[Example]:
    """Sort a hash-ordered source and take the part that the split is; anything else streams through."""
    if source.order == "upstream":
        return examples
    # These ids end in a hash of the question, or in the publisher's own: sorted, they are in no meaningful order.
    ranked = sorted(examples, key=lambda example: example.id)
    n_held = round(len(ranked) / 10)
    return iter({"held": ranked[:n_held], "kept": ranked[n_held:], "all": ranked}[plan.part])


def _with_clusters(examples: list[Example]) -> list[Example]:
    """Give each example whose question, with its turns, came before the first one's id as its cluster."""
    first_id: dict[tuple[Any, ...], str] = {}
    marked = []
    for example in examples:
        question = (example.context, collapsed(example.question))
        if question in first_id:
            example = dataclasses.replace(example, cluster=first_id[question])
        else:
            first_id[question] = example.id
        marked.append(example)
    return marked


def _generated(source: str, split: str, n: int, seed: int, options: Mapping[str, Any]) -> list[Example]:
    """The first `n` rows of a generated source. ValueError for a wrong option, or where there are too few problems."""
    config, generate = GENERATORS[source]
    # Checked here, for a dataclass answers an unknown name with a TypeError.
    check_known(f"{source} option", options, [field.name for field in dataclasses.fields(config)])
    return generate(config(**options), split, n, seed)


def _check_source(source: str) -> None:
    """Reject what is neither a source of the table nor a user's file or folder."""
    if source in SOURCES or _is_path(source):
        return
    if Path(source).is_file():
        raise ValueError(f"{source}: a file of one's own must end in {', '.join(data_files.ENDINGS[:-1])}")
    if os.sep in source:
        raise ValueError(f"no file or folder {source}")
    check_known("source", [source], SOURCES)


def _is_path(source: str) -> bool:
    # A source's name wins over a folder that happens to be called so.
    return source not in SOURCES and (data_files.is_own_file(source) or Path(source).is_dir())
