"""Judge the answers in committed results again, and fold their reports again, after a change of the judge.

    COLAR_DATA_DIR=data python lab/scripts/rejudge.py results/smollm2/mathematics results/smollm2/grpo

Each folder holds `records.jsonl.gz` and the report folded from it. The records of the data sets in `--data` get
today's verdict (`parsed`, `correct`) and today's cluster; what the model wrote, and all other records, stay as they
are. The report keeps its title, its pairs and its provenance, which gains the key `rejudged`: when, and by which
command. A folder in which nothing changes is left alone. `git diff` shows which numbers of report.md read otherwise.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from colar import progress
from colar.data import sources
from colar.data.example import Example
from colar.data.judge import verdict_by_type
from colar.evaluation import report
from colar.evaluation.provenance import collect_provenance
from colar.evaluation.records import RecordFiles, checked

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import saved_report

Record = dict[str, Any]
_judged = cache(verdict_by_type)
"""Most questions are answered alike by many systems and samples."""


def rejudged(record: Record, example: Example) -> Record:
    """The record with today's verdict and cluster; its keys in the order in which `colar evaluate` writes them."""
    verdict = _judged(record["completion"], example.answer, example.answer_type)
    found: Record = {}
    for key, value in record.items():
        if key == "cluster":
            continue
        found[key] = value
        if key == "id" and example.cluster:
            found["cluster"] = example.cluster
    found["parsed"] = verdict.parsed
    found["correct"] = verdict.correct
    return found


def rejudge(records: Sequence[Record], golds: Mapping[str, Mapping[str, Example]]) -> list[Record]:
    """All records in their order; `golds` are examples by id, by data set. ValueError where one has no gold."""
    found = []
    for record in records:
        examples = golds.get(record["dataset"])
        if examples is None:
            found.append(record)
            continue
        if record["id"] not in examples:
            raise ValueError(f"{record['dataset']} has no question {record['id']}: these are other data")
        found.append(rejudged(record, examples[record["id"]]))
    return found


def refold(folder: Path, golds: Mapping[str, Mapping[str, Example]], stamp: Mapping[str, Any]) -> bool:
    """Rejudge one folder of results; False if nothing changed. `stamp`, when and how, goes into the provenance."""
    path = folder / "records.jsonl.gz"
    saved = saved_report.read(folder / "report.json")
    records = [record for _, record in checked(RecordFiles([path]))]
    made = rejudge(records, golds)
    if made == records:
        return False
    old = folder / "report.md"
    title = (
        old.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") if old.exists() else folder.name
    )
    # A pair has a row for each data set; it is asked for once.
    pairs = list(dict.fromkeys((row.pair[0], row.pair[1]) for row in saved.pairs))
    provenance = {**saved.provenance, "rejudged": dict(stamp)}
    report.write(folder, made, title=title, provenance=provenance, pairs=pairs)
    # Last: until the records are written, the command can be given again.
    write_records(path, made)
    return True


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Replace a gzipped JSONL file in one step. As `gzip -9n`: without a time or a name, so that bytes repeat."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="folders with records.jsonl.gz and report.json")
    parser.add_argument(
        "--data", nargs="+", default=["gsm-hard", "multiarith"], help="sources to judge again"
    )
    parser.add_argument("--split", default="test", help="split that the records are of")
    args = parser.parse_args()
    now = collect_provenance()
    stamp = {"command": now["command"], "time": now["time"]}
    golds = {}
    for name in args.data:
        examples = sources.load_examples(name, args.split)
        golds[name] = {example.id: example for example in examples}
    for folder in args.results:
        changed = refold(folder, golds, stamp)
        progress.say(f"{folder}: {'judged again' if changed else 'nothing to change'}")


if __name__ == "__main__":
    main()
