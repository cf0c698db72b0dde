"""Whether a model holds on the questions of a test set with other numbers.

    python lab/scripts/other_numbers.py write runs/other-numbers/data --data_dir FOLDER
    colar evaluate CHECKPOINT --data runs/other-numbers/data/*.jsonl --output runs/other-numbers/eval
    python lab/scripts/other_numbers.py table runs/other-numbers/eval --output FOLDER --baseline "MODEL c=1"

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
from collections.abc import Iterator, Mapping, Sequence
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
from colar.evaluation.tables import BLANK, TextTable, markdown, percent, points_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from renumber import new_rows
from renumber.equations import CannotRenumber

Answers = Mapping[str, tuple[bool, bool]]
"""Of a set's questions by id: is the answer right with the question's own numbers, and with others?"""
Pairs = dict[str, Answers]
"""The answers of one system by data set."""
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


def pairs_in(records: RecordFiles) -> dict[str, Pairs]:
    """The answers of each system. ValueError for a system that lacks a set which another one has."""
    right: defaultdict[Cell, dict[str, bool]] = defaultdict(dict)
    for cell, record in checked(records):
        right[cell][record["id"]] = record["correct"]
    systems = {cell.system for cell in right}
    pairs: defaultdict[str, Pairs] = defaultdict(dict)
    for cell, own in right.items():
        others = right.get(cell._replace(dataset=cell.dataset + OTHER))
        if others is not None:
            both = {id: (own[id], others[id]) for id in own if id in others}
            pairs[system_name(cell.system, systems)][cell.dataset] = both
    if not pairs:
        raise ValueError(f"no records of a data set and of the same one with {OTHER} behind its name")
    sets = set().union(*pairs.values())
    for system, by_set in pairs.items():
        if missing := sets - by_set.keys():
            raise ValueError(f"{system} has no answers to {', '.join(sorted(missing))} with both numbers")
    return dict(sorted(pairs.items()))


def differences(pairs: Mapping[str, Pairs], baseline: str | None = None) -> TextTable:
    """A line for each system: accuracy with the sets' numbers and with others, averaged over the sets; the paired
    difference of each set and on average; and by how much that exceeds the difference of `baseline`."""
    if baseline is not None and baseline not in pairs:
        raise ValueError(f"--baseline {baseline} is none of {', '.join(pairs)}")
    sets = sorted(next(iter(pairs.values())))
    head = ["system", "questions", "own numbers", "other numbers", *sets, "difference"]
    rows = []
    for system, by_set in pairs.items():
        accuracies = [sum(share(by_set[name], side) for name in sets) / len(sets) for side in (0, 1)]
        of_sets = [change(by_set[name]) for name in sets]
        row = [system, str(sum(map(len, by_set.values()))), *map(percent, accuracies)]
        row += map(text_of, [*of_sets, over(of_sets)])
        if baseline is not None:
            beyond = over([change(by_set[name], pairs[baseline][name]) for name in sets])
            row.append(BLANK if system == baseline else text_of(beyond))
        rows.append(row)
    return TextTable("Other numbers", head + ([f"beyond {baseline}"] if baseline else []), rows, words=1)


def share(answers: Answers, side: int) -> float:
    """The share of right answers with the set's own numbers (0) or with others (1)."""
    return sum(pair[side] for pair in answers.values()) / len(answers)


def change(answers: Answers, baseline: Answers | None = None) -> stats.Estimate:
    """The mean change of correctness from a question's own to other numbers, less that of `baseline` on it."""
    changes = {id: other - own for id, (own, other) in answers.items()}
    if baseline is None:
        return stats.mean(list(changes.values()), list(changes))
    at_baseline = {id: other - own for id, (own, other) in baseline.items()}
    return stats.paired_difference(
        list(changes.values()), list(changes), list(at_baseline.values()), list(at_baseline)
    )


def over(estimates: Sequence[stats.Estimate]) -> stats.Estimate:
    return stats.average([each.mean for each in estimates], [each.se for each in estimates])


def text_of(estimate: stats.Estimate) -> str:
    return points_of(estimate.mean, estimate.se, estimate.interval)


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
    folding.add_argument(
        "--baseline", metavar="SYSTEM", help="compare each system's difference with this one's"
    )
    folding.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    if args.action == "write":
        write(args.folder, args.data_dir)
    else:
        table = markdown(differences(pairs_in(RecordFiles(find_records(args.records))), args.baseline))
        print(files.write_text(args.output / "differences.md", table + "\n"))


if __name__ == "__main__":
    main()
