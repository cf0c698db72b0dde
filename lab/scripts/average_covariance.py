"""How much larger is the interval of an average over GSM8k and GSM-Hard, which ask the same questions?

    python lab/scripts/average_covariance.py results/smollm2/mathematics --data_dir data

GSM-Hard is GSM8k's test set with other numbers, in another order. `stats.average` takes data sets as independent: this
adds the covariance of the two. Needs the texts of both sets (--data_dir or $COLAR_DATA_DIR, else the Hub), and records
of all their questions. A row for each greedy system, the half widths of its average in points, to stdout.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from colar.data import sources
from colar.data.example import Example
from colar.evaluation import stats
from colar.evaluation.records import cluster_of, find_records, load_records
from colar.evaluation.rows import cell_from_json, system_name

SAME, HARD = "gsm8k-aug", "gsm-hard"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", help="records.jsonl, or the folder that holds it")
    parser.add_argument("--data_dir", help="folder with upstream files")
    args = parser.parse_args()
    same, hard = (sources.load(name, "test", data_dir=args.data_dir) for name in (SAME, HARD))
    source_of = origins(list(hard), list(same))
    cells: dict[Any, dict[str, list[Mapping[str, Any]]]] = {}
    for record in load_records(find_records([args.results])):
        if record["decoding"] == "greedy":
            cell = cell_from_json(record)
            cells.setdefault(cell.system, {}).setdefault(cell.dataset, []).append(record)
    for system, datasets in cells.items():
        if {SAME, HARD} <= datasets.keys():
            correlation, apart, together = half_widths(datasets, source_of)
            print(
                f"{system_name(system, list(cells)):60} {correlation:5.2f}  ± {apart:.3f} -> ± {together:.3f}"
            )


def origins(hard: Sequence[Example], same: Sequence[Example]) -> dict[str, str]:
    """The id of each GSM-Hard question -> that of the GSM8k question with the most words in common; no two have one."""
    left = {example.id: _words(example.question) for example in same}
    by_words = {" ".join(sorted(words.elements())): id for id, words in left.items()}
    found = {}
    others = []
    for example in hard:
        words = _words(example.question)
        origin = by_words.get(" ".join(sorted(words.elements())))
        # Numbers are written out now and then: such a question has not quite the words of its origin.
        if origin in left:
            found[example.id] = origin
            del left[origin]
        else:
            others.append((example.id, words))
    for id, words in others:
        origin = max(left, key=lambda each: (words & left[each]).total() / (words | left[each]).total())
        found[id] = origin
        del left[origin]
    return found


def half_widths(
    datasets: Mapping[str, Sequence[Mapping[str, Any]]], source_of: Mapping[str, str]
) -> tuple[float, float, float]:
    """Correlation of the two sets' accuracies, and ± of the average in points, without the covariance and with it."""
    errors = {}
    for name, records in datasets.items():
        found = stats.mean([record["correct"] for record in records], [cluster_of(each) for each in records])
        assert found.se is not None, "a data set has more than one question"
        errors[name] = found.se
    same, hard = datasets[SAME], datasets[HARD]
    # The difference of one mean and the negative of the other is their sum, question by question.
    both = stats.paired_difference(
        [record["correct"] for record in same],
        [record["id"] for record in same],
        [-record["correct"] for record in hard],
        [source_of[record["id"]] for record in hard],
    )
    assert both.se is not None, "they have more than one question"
    twice_covariance = both.se**2 - errors[SAME] ** 2 - errors[HARD] ** 2
    variance = math.fsum(error**2 for error in errors.values())
    points = 100 * stats.Z95 / len(errors)
    return (
        twice_covariance / 2 / (errors[SAME] * errors[HARD]),
        points * math.sqrt(variance),
        points * math.sqrt(variance + twice_covariance),
    )


def _words(question: str) -> Counter[str]:
    return Counter(re.findall("[a-z]+", question.lower()))


if __name__ == "__main__":
    main()
