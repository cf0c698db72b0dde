"""How long a model thinks when asked for a compression factor that it was not trained with.

    python lab/scripts/left_out.py runs/c-curves/eval/odd-*/records.jsonl --trained 1 3 5 7 \
        --output runs/c-curves/report

Writes `lengths.md` and `lengths.json`: for each c asked for, the share of questions whose chain is as long as c asks
(the reference's tokens by c, rounded up), and the share whose chain is as long as the same model's at each trained c.
`--label` takes one model's answers out of a file of many: results/toy/factors/records.jsonl.gz --label "c in 1 3 5 7".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation.records import RecordFiles, checked
from colar.evaluation.report_rows import cell_from_json
from colar.evaluation.tables import TextTable, markdown, percent

Record = dict[str, Any]


def speed_of(record: Record) -> Any:
    return cell_from_json(record).system.speed


def shares(records: Sequence[Record], trained: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each factor asked for: `asked`, `expected` (a share) and `as_at`, shares by trained factor.

    Questions without a reference chain, or without an answer at some factor, are left out.
    """
    lengths: dict[int, dict[tuple[Any, ...], Record]] = {}
    for record in records:
        if record["gold_length"] is None:
            continue
        asked = speed_of(record)
        question = tuple(record[key] for key in ("train_seed", "decoding", "seed", "dataset", "id"))
        lengths.setdefault(asked, {})[question] = record
    answered = set.intersection(*map(set, lengths.values()))
    lengths = {c: {question: found[question] for question in answered} for c, found in lengths.items()}
    rows = []
    for asked, found in sorted(lengths.items()):
        right = [record["length"] == math.ceil(record["gold_length"] / asked) for record in found.values()]
        as_at = {
            c: sum(found[question]["length"] == lengths[c][question]["length"] for question in found)
            / len(found)
            for c in trained
        }
        rows.append({"asked": asked, "expected": sum(right) / len(right), "as_at": as_at})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+", help="of colar evaluate")
    parser.add_argument("--label", help="of the model, where the records have several")
    parser.add_argument("--trained", type=int, nargs="+", required=True, metavar="C")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    records = [
        record
        for _, record in checked(RecordFiles(args.records))
        if speed_of(record) is not None and args.label in (None, cell_from_json(record).system.note)
    ]
    found = sorted({" ".join((r["model"], r["method"], r["label"] or "")).strip() for r in records})
    if len(found) != 1:
        raise SystemExit(f"one model, please (--label); the records have {', '.join(found) or 'none such'}")
    missing = set(args.trained) - {speed_of(record) for record in records}
    if missing:
        raise SystemExit(f"no answers at c = {', '.join(map(str, sorted(missing)))}")
    rows = shares(records, args.trained)
    grid = TextTable(
        "How long it thinks",
        ["c asked for", "length / c", *(f"as at c={c}" for c in args.trained)],
        [
            [str(r["asked"]), percent(r["expected"]), *(percent(r["as_at"][c]) for c in args.trained)]
            for r in rows
        ],
        [
            "Questions, in %, whose chain is as long as c asks for, and as long as the same model's at a trained c."
        ],
    )
    output = files.require_writable(args.output)
    files.write_json(output / "lengths.json", rows)
    files.write_text(output / "lengths.md", markdown(grid) + "\n")
    print(markdown(grid))


if __name__ == "__main__":
    main()
