"""Whether a model holds on the questions of a test set with other numbers.

    python lab/scripts/other_numbers.py write runs/other-numbers/data --data_dir FOLDER
    colar evaluate CHECKPOINT --data runs/other-numbers/data/*.jsonl --output runs/other-numbers/eval
    python lab/scripts/other_numbers.py table runs/other-numbers/eval --output results/smollm2/other-numbers

`write` makes two files of each test set, SET.jsonl and SET-other.jsonl: the questions that can be renumbered, as they
are and with other numbers of like size, under the same ids. The chains of MultiArith and SVAMP are their equations.
`table` pairs the questions by id and writes differences.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colar import files
from colar.data import catalogue, programs, sources
from colar.data.data_files import example_of
from colar.data.example import Example, question_hash
from colar.data.programs import NotStraight
from colar.evaluation import stats
from colar.evaluation.records import RecordFiles, checked, find_records
from colar.evaluation.report_rows import Cell, system_name
from colar.evaluation.stats import half_interval
from colar.evaluation.tables import TextTable, half_width, markdown, percent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from renumber import new_rows
from renumber.equations import CannotRenumber

OTHER = "-other"
SEED = 0


def from_equation(name: str, row: dict[str, Any]) -> Example:
    """A row of SVAMP or MultiArith with its equation as the chain. Raises NotStraight where there is none.

    Ids are those of the source: records of the set with its own numbers can be judged again by it.
    """
    if name == "svamp":
        plain = catalogue.svamp(row)
        key = row["ID"]
        solution = programs.of_python(f"result = {row['Equation']}")
        fields = programs.checked(plain.question, solution, row["Answer"])
    else:
        key = question_hash(row["sQuestion"])
        fields = programs.mawps(row)
    return example_of(f"{name}/test/{key}", fields, "number")


def with_chains(name: str, data_dir: Path) -> Iterator[Example | str]:
    """The test questions of a set with chains of equations; the reason in place of one that has none."""
    if name == "gsm8k-aug":
        yield from sources.load_examples(name, "test", data_dir=data_dir, skip_malformed=True)
        return
    file = {"multiarith": "multiarith/MultiArith.json", "svamp": "svamp/SVAMP.json"}[name]
    for row in files.read_json(data_dir / file):
        try:
            yield from_equation(name, row)
        except NotStraight as reason:
            yield str(reason)


def write(output: Path, data_dir: Path) -> None:
    for name in ("gsm8k-aug", "multiarith", "svamp"):
        left_out: Counter[str] = Counter()
        pairs: dict[str, tuple[Example, Example]] = {}
        for example in with_chains(name, data_dir):
            try:
                if isinstance(example, str):
                    raise CannotRenumber(example)
                other = new_rows.new_rows_of(example, 1, SEED)[0]
                if example.question in pairs:
                    raise CannotRenumber("asked before")
            except CannotRenumber as reason:
                left_out[str(reason)] += 1
            else:
                pairs[example.question] = (example, dataclasses.replace(other, id=example.id))
        for side, ending in enumerate(("", OTHER)):
            rows = [json.dumps(pair[side].as_row(), ensure_ascii=False) for pair in pairs.values()]
            print(files.write_text(output / f"{name}{ending}.jsonl", "\n".join(rows) + "\n"))
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.most_common(4))
        print(f"{name}: {len(pairs)} of {len(pairs) + left_out.total()} questions ({reasons}, ...)")


def differences(records: RecordFiles) -> TextTable:
    """A line for each system and set: accuracy with the set's numbers and with others, and the paired difference."""
    right: defaultdict[Cell, dict[str, bool]] = defaultdict(dict)
    for cell, record in checked(records):
        right[cell][record["id"]] = record["correct"]
    systems = {cell.system for cell in right}
    rows = []
    for cell, own in right.items():
        others = right.get(cell._replace(dataset=cell.dataset + OTHER))
        if others is None:
            continue
        change = stats.paired_difference(list(others.values()), list(others), list(own.values()), list(own))
        assert change.se is not None
        assert change.interval is not None
        low, high = change.interval
        accuracies = [percent(sum(side.values()) / len(side)) for side in (own, others)]
        text = f"{100 * change.mean:+.1f} {half_width(half_interval(change.se))}{' *' if low > 0 or high < 0 else ''}"
        rows.append([system_name(cell.system, systems), cell.dataset, str(change.n), *accuracies, text])
    head = ["system", "data set", "questions", "own numbers", "other numbers", "difference"]
    return TextTable("Other numbers", head, sorted(rows), words=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    writing = actions.add_parser("write", help="make the pairs of files")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--data_dir", type=Path, required=True, help="folder with upstream files")
    folding = actions.add_parser("table", help="pair the answers")
    folding.add_argument("records", nargs="+", help="folders of colar evaluate, or their records")
    folding.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    if args.action == "write":
        write(args.folder, args.data_dir)
    else:
        table = markdown(differences(RecordFiles(find_records(args.records))))
        print(files.write_text(args.output / "differences.md", table + "\n"))


if __name__ == "__main__":
    main()
