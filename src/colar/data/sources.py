"""Load problems: `load("gsm8k-aug", "test")`, from files under a data folder, from the Hub, or from one's own file.

Where a source is looked for: under `data_dir`, else under the folder that the environment variable COLAR_DATA_DIR
names, else on the Hugging Face Hub (`catalogue.py` has the table of sources). With a data folder given, a missing
file is an error, not a silent download; a source that has no files (gpqa) always comes from the Hub.

MATH has no validation split. Here it is the tenth of train (750 of 7,500 rows, rounded down) whose questions have
the smallest SHA-256 after white space is collapsed: fixed, and the same from files, Hub and any machine. Rows of
such sources (`order="key"` in the table) are sorted by that hash and named by it, so `limit` takes a random but
fixed sample. Departure from the paper, which shuffles once and does not say how.

Malformed rows are errors that name file and line, unless `skip_malformed`; nothing is dropped unsaid.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.data import answers, formats, synthetic
from colar.data.catalogue import SOURCES, SPLITS, Source, Split
from colar.data.example import AnswerType, Example
from colar.data.formats import Fields, Parser

DATA_DIR_VARIABLE = "COLAR_DATA_DIR"
GENERATED = {"train": 10_000, "validation": 500, "test": 1_000}
"""Rows of a generated split where no `limit` is given."""
_SHOWN = 3

Rows = Iterator[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class Listing:
    """One source as `colar data list` shows it."""

    name: str
    splits: str
    answer_type: str
    found: str
    licence: str
    about: str


def load(
    source: str,
    split: str,
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_malformed: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[Example]:
    """The rows of one split, in a fixed order.

    `source` is a name of the table, a `.json` (a list) or `.jsonl` file in Coconut's format (question, steps,
    answer, perhaps id and answer_type), or a folder with `<split>.jsonl` files such as `prepare` writes. `limit`
    takes the first n rows. `seed` matters to generated sources only. `options`: the fields of `ArithmeticConfig`
    for `arithmetic`; `keep_marks` for `gsm8k`.

    Raises ValueError for an unknown source, split or option, files that are not there, a malformed row (unless
    `skip_malformed`, which says on stderr what it skipped), an empty data set, or a Hub that cannot be reached.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, or none for all rows, got {limit}")
    options = dict(options or {})
    if _is_path(source):
        _allowed("option", options, ())
        rows = _own_rows(Path(source), split)
        entry, parser, plan = Source("", "", "number", {}), formats.coconut, Split()
    else:
        _allowed("source", [source], SOURCES)
        entry = SOURCES[source]
        _allowed(f"split of {source}", [split], entry.splits)
        if source == "arithmetic":
            return _generate(split, limit, seed, options)
        _allowed(f"option of {source}", options, entry.options)
        plan = entry.splits[split]
        rows, parser = _source_rows(source, entry, plan, data_dir)
    name = Path(source).stem if _is_path(source) else source
    examples = _Reader(name, split, entry, parser, options, skip_malformed).examples(rows)
    chosen = list(islice(_arranged(examples, entry, plan), limit))
    if not chosen:
        raise ValueError(f"{source}/{split} holds no rows")
    return chosen


def prepare(
    source: str,
    splits: Iterable[str],
    output: Path,
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_malformed: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `<output>/<split>.jsonl` in Coconut's format, a split at a time and each in one step. Returns the paths.

    `load(output, split)` reads them back to equal rows. Arguments and errors are `load`'s.
    """
    files.require_writable(output)
    paths = []
    for split in splits:
        examples = load(
            source, split, data_dir=data_dir, limit=limit, seed=seed, skip_malformed=skip_malformed, options=options
        )  # fmt: skip
        lines = [json.dumps(dataclasses.asdict(example), ensure_ascii=False) + "\n" for example in examples]
        paths.append(files.write_text(Path(output) / f"{split}.jsonl", "".join(lines)))
    return paths


def describe(data_dir: Path | None = None) -> list[Listing]:
    """Every source of the table, and where each of its splits would come from now."""
    folder = _folder(data_dir)
    return [
        Listing(name, ", ".join(source.splits), source.answer_type, _found(source, folder), source.licence, source.about)
        for name, source in SOURCES.items()
    ]  # fmt: skip


def _found(source: Source, folder: Path | None) -> str:
    """Where the splits are: "built in", "Hub id", or the folder with the splits whose files are missing."""
    if source.file_parser is None and source.hub is None:
        return "built in"
    if folder is None or source.file_parser is None:
        return f"Hub {source.hub}" if source.hub else "files only (--data-dir)"
    missing = [name for name, plan in source.splits.items() if _present(plan, folder) is None]
    return f"{folder}" + (f" (not there: {', '.join(missing)})" if missing else "")


class _Reader:
    """Parses raw rows into Examples; a malformed one is an error or is counted, told and skipped."""

    def __init__(
        self, name: str, split: str, source: Source, parser: Parser, options: Mapping[str, Any], skip: bool
    ) -> None:
        self.name, self.split, self.source = name, split, source
        self.parser, self.options, self.skip = parser, options, skip

    def examples(self, rows: Rows) -> Iterator[Example]:
        seen: dict[str, int] = {}
        skipped: list[str] = []
        for index, (place, raw) in enumerate(rows):
            try:
                yield self._example(self.parser(raw, **self.options), index, seen)
            except ValueError as error:
                if not self.skip:
                    raise ValueError(f"{place}: {error}") from error
                skipped.append(f"{place}: {error}")
        if skipped:
            shown = "; ".join(skipped[:_SHOWN]) + (" ..." if len(skipped) > _SHOWN else "")
            progress.say(f"{self.name}/{self.split}: skipped {len(skipped)} malformed rows: {shown}")

    def _example(self, fields: Fields, index: int, seen: dict[str, int]) -> Example:
        """Give the row its id: its own, the hash of its question in a hash-ordered source, or its position."""
        answer_type: AnswerType = fields.answer_type or self.source.answer_type
        key = fields.key
        if key is None:
            key = formats.question_hash(fields.question) if self.source.order == "key" else str(index)
        prefix = f"{self.name}/{self.split}/"
        key = key.removeprefix(prefix)  # a file that `prepare` wrote has the whole id
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:  # MultiArith repeats 20 questions
            if fields.key is not None:
                raise ValueError(f"id {fields.key!r} occurs twice")
            key = f"{key}-{seen[key]}"
        own = fields.key if fields.key is not None and not self.source.splits else None
        example = Example(own or prefix + key, fields.question, fields.steps, fields.answer, answer_type)
        if answer_type in ("number", "choice") and answers.extract(example.answer, answer_type) is None:
            raise ValueError(f"the answer {example.answer[:40]!r} cannot be read as answer_type {answer_type!r}")
        return example


def _arranged(examples: Iterator[Example], source: Source, plan: Split) -> Iterator[Example]:
    """Sort a hash-ordered source and take the part that the split is; anything else streams through."""
    if source.order == "upstream":
        return examples
    rows = sorted(examples, key=lambda example: (len(example.id), example.id))
    held = len(rows) // 10
    return iter({"all": rows, "kept": rows[held:], "held": rows[:held]}[plan.part])


def _source_rows(name: str, source: Source, plan: Split, data_dir: Path | None) -> tuple[Rows, Parser]:
    folder = _folder(data_dir)
    if source.file_parser is not None and folder is not None:
        return _file_rows(name, source, plan, folder), source.file_parser
    if source.hub is None or source.hub_parser is None or plan.hub is None:
        raise ValueError(
            f"{name} is read from files only: put {_wanted(plan)} under a folder and name it with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    return _hub_rows(source.hub, source.hub_configs, plan.hub), source.hub_parser


def _file_rows(name: str, source: Source, plan: Split, folder: Path) -> Rows:
    paths = _present(plan, folder)
    if paths is None:
        otherwise = f", or name no folder to load {source.hub} from the Hub" if source.hub else ""
        raise ValueError(f"{name}: no {_wanted(plan)} under {folder}{otherwise}")
    if len(paths) == 1:
        return formats.read(paths[0])
    progress.say(f"{name}: no {plan.files[0][0]} under {folder}, reading {' and '.join(p.name for p in paths)}")
    return _distinct(name, paths)


def _distinct(name: str, paths: list[Path]) -> Rows:
    """The rows of several text files, one per question: what stands before "||"."""
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


def _own_rows(path: Path, split: str) -> Rows:
    if path.is_dir():
        _allowed(f"split of {path}", [split], sorted(child.stem for child in path.glob("*.jsonl")))
        path = path / f"{split}.jsonl"
    if not path.exists():
        raise ValueError(f"no file {path}")
    return formats.read(path)


def _hub_rows(hub: str, configs: tuple[str | None, ...], split: str) -> Rows:
    import datasets

    for config in configs:
        try:
            table = datasets.load_dataset(hub, config, split=split)
        except Exception as error:  # offline, gated, renamed: each library below has its own class for it
            raise ValueError(
                f"cannot load {hub} from the Hub ({type(error).__name__}: {str(error).splitlines()[0][:200]}). Log in "
                f"with `hf auth login` if it is gated; without a network, name a folder of upstream files with "
                f"--data-dir or {DATA_DIR_VARIABLE}"
            ) from error
        label = f"{hub}/{config}" if config else hub
        for number, row in enumerate(table, start=1):
            yield f"{label}[{split}]: row {number}", row


def _generate(split: str, limit: int | None, seed: int, options: dict[str, Any]) -> list[Example]:
    _allowed("option of arithmetic", options, [field.name for field in dataclasses.fields(synthetic.ArithmeticConfig)])
    n = GENERATED[split] if limit is None else limit
    return synthetic.generate(synthetic.ArithmeticConfig(**options), split, n, seed)


def _folder(data_dir: Path | None) -> Path | None:
    named = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE) or None
    if named is None:
        return None
    if not Path(named).is_dir():
        raise ValueError(f"the data folder {named} does not exist (--data-dir or {DATA_DIR_VARIABLE})")
    return Path(named)


def _present(plan: Split, folder: Path) -> list[Path] | None:
    for names in plan.files:
        paths = [folder / name for name in names]
        if all(path.exists() for path in paths):
            return paths
    return None


def _wanted(plan: Split) -> str:
    return " or ".join(" + ".join(names) for names in plan.files)


def _is_path(source: str) -> bool:
    return source not in SOURCES and (source.endswith((".json", ".jsonl")) or Path(source).is_dir())


def _allowed(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """ValueError that names the nearest and all allowed values for the first one that is not allowed."""
    allowed = list(allowed)
    for value in given:
        if value not in allowed:
            nearest = difflib.get_close_matches(value, allowed, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown {what}: {value!r}{hint} (allowed: {', '.join(allowed) or 'none'})")
