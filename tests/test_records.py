"""Records read from files and sorted into cells: one at a time, each checked once, with the place of a wrong one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colar.evaluation import report, stats
from colar.evaluation.records import RecordFiles, by_cell, checked


def record(question: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    base = {
        "model": "tiny", "method": "cot", "label": "", "dataset": "sums", "params": {},
        "decoding": "sampled", "train_seed": 0, "seed": seed, "id": f"sums/{question}", "completion": "7", "parsed": "7",
        "correct": True, "truncated": False, "length": 4, "forward_passes": 9, "seconds": 0.5, "gold_length": 3,
    }  # fmt: skip
    return {**base, **more}


def write(path: Path, *values: Any) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(value) + "\n" for value in values).encode()))
    return path


def mixed() -> list[dict[str, Any]]:
    """Two systems, three seeds; a repeated question, one without an answer, one without a reference chain."""
    records = []
    for method in ("cot", "fast"):
        for seed in range(3):
            records.append(record(0, seed, method=method, length=seed))
            wrong = {"parsed": str(seed), "correct": False, "cluster": "sums/0"}
            records.append(record(1, seed, method=method, **wrong))
            records.append(record(2, seed, method=method, parsed=None, correct=False, gold_length=None))
    return records


def test_files_give_the_report_that_their_records_give_and_can_be_read_again(tmp_path: Path) -> None:
    records = mixed()
    found = RecordFiles(
        [write(tmp_path / "a.jsonl.gz", *records[:5]), write(tmp_path / "b.jsonl.gz", *records[5:])]
    )
    assert report.fold(found, {}) == report.fold(records, {})
    assert list(found) == list(found) == records


def test_files_are_read_one_record_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(record(0)) + "\n\n{\n").encode()))
    found = iter(RecordFiles([path]))
    assert next(found) == record(0)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:3: not valid JSON"):
        next(found)


@pytest.mark.parametrize("torn", ["{", '{"completion": "\u20ac'])
def test_a_report_leaves_out_a_record_that_is_being_written(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "records.jsonl"
    whole = [record(0), record(1)]
    text = "".join(json.dumps(each) + "\n" for each in whole).encode()
    # In the middle of a character, too.
    path.write_bytes(text + torn.encode()[: max(1, len(torn.encode()) - 1)])
    assert report.fold(RecordFiles([path]), {}) == report.fold(whole, {})
    path.write_bytes(text + json.dumps(record(2)).encode())
    assert list(RecordFiles([path])) == [*whole, record(2)]
    path.write_bytes(torn.encode() + b"\n" + text)
    with pytest.raises(ValueError, match=r"records\.jsonl:1: not valid JSON"):
        list(RecordFiles([path]))


def test_a_broken_archive_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """As a copy that was cut short is, or a file that was only called .gz."""
    whole = write(tmp_path / "whole.jsonl.gz", *mixed()).read_bytes()
    text = gzip.decompress(whole)
    broken = {
        "cut": whole[:-30],
        "damaged": whole[:60] + b"\xff\xff" + whole[62:],
        "plain": text,
    }
    for name, content in broken.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.jsonl\.gz:[0-9]+: cannot be read: "):
            list(checked(RecordFiles([path])))


def test_a_number_that_python_cannot_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"length": ' + b"1" * 5000 + b"}\n"))
    with pytest.raises(ValueError, match=r"long\.jsonl\.gz:2: .*4300 digits"):
        list(checked(RecordFiles([path])))


def test_places_count_empty_lines_and_go_through_all_files(tmp_path: Path) -> None:
    one = tmp_path / "a.jsonl"
    one.write_text("\n" + json.dumps(record(0)) + "\n\n" + json.dumps(record(1)) + "\n")
    other = write(tmp_path / "b.jsonl.gz", record(2))
    files = RecordFiles([one, other])
    assert [files.place(number) for number in (1, 2, 3)] == [f"{one}:2", f"{one}:4", f"{other}:1"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"id": "sums/1"}, r"b\.jsonl\.gz:2: the record lacks model, method"),
        ([1], r"b\.jsonl\.gz:2: the record lacks model, method"),
        (record(0), r"b\.jsonl\.gz:2: a second record of tiny, .*; the first is .*a\.jsonl\.gz:1$"),
        (record(2, correct="false"), r"b\.jsonl\.gz:2: correct must be true or false, got 'false'"),
    ],
)  # fmt: skip
def test_an_error_in_files_names_file_and_line(tmp_path: Path, second: Any, message: str) -> None:
    paths = [write(tmp_path / "a.jsonl.gz", record(0)), write(tmp_path / "b.jsonl.gz", record(1), second)]
    for read in (lambda: report.fold(RecordFiles(paths), {}), lambda: list(checked(RecordFiles(paths)))):
        with pytest.raises(ValueError, match=message):
            read()


def test_equal_texts_have_equal_numbers_in_all_cells() -> None:
    one, other = by_cell(mixed()).values()
    assert one.dtype == other.dtype
    assert one["question"].tolist() == other["question"].tolist() == [0, 1, 2] * 3
    assert one["cluster"].tolist() == [0, 0, 2] * 3
    # The texts 7, 0, none, 7, 1, none, 7, 2, none.
    assert one["parsed"].tolist() == [0, 1, -1, 0, 2, -1, 0, 3, -1]
    assert one["gold_length"][:2].tolist() == [3, 3]


@given(st.lists(st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=4, max_size=4), min_size=1))
def test_majorities_are_each_questions_own(questions: list[list[tuple[int, bool]]]) -> None:
    table = np.array(questions)
    found = stats.majorities(table[:, :, 0], table[:, :, 1].astype(bool))
    for row, share in zip(table, found.tolist(), strict=True):
        assert [share] == stats.majorities(row[None, :, 0], row[None, :, 1].astype(bool)).tolist()
