"""Compare generated rows of ProsQA and ProntoQA with the published ones: two tables.

    python lab/scripts/logic_statistics.py            COLAR_DATA_DIR names the folder with the published files

Published: validation and test together. Generated: the first 4,000 rows of train, seed 0. Everything is read from the
words of the rows.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from colar.data import sources
from colar.data.example import Example

CHOICE = re.compile(r"Is (\w+) a (\w+) or (\w+)\?")
EDGE = re.compile(r"(\w+) is a (\w+)\.")
NOUN = re.compile(r"[a-z]+pus(?=es\b|\b)")


def percent(hits: Iterable[float]) -> str:
    return f"{100 * statistics.mean(hits):.1f}"


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"


def shares(values: Sequence[int], named: Sequence[int], rest: bool = False) -> str:
    """The share of each of `named` among `values`, in percent; with `rest`, the share of all larger ones, too."""
    counts = Counter(values)
    parts = [100 * counts[value] / len(values) for value in named]
    if rest:
        parts.append(100 - sum(parts))
    return " / ".join(f"{part:.1f}" for part in parts)


def published(source: str) -> list[Example]:
    return sources.load(source, "validation") + sources.load(source, "test")


def made(source: str, n: int, **options: object) -> list[Example]:
    return sources.load(source, "train", limit=n, options=options)


# --- ProsQA --------------------------------------------------------------------------------------------


def edges(row: Example) -> list[tuple[str, str]]:
    context = row.question.rpartition(" Is ")[0]
    return EDGE.findall(context.replace("Every ", ""))


def choices(row: Example) -> tuple[str, str]:
    """The first and the second choice of the question."""
    found = CHOICE.search(row.question)
    assert found is not None
    return found[2], found[3]


def right(row: Example) -> str:
    return row.answer.split()[-1].rstrip(".")


def rarer_is_right(row: Example) -> float:
    """1 where the choice that fewer facts lead to is right, one half where both have as many."""
    parents = Counter(child for _, child in edges(row))
    answer = right(row)
    other = next(choice for choice in choices(row) if choice != answer)
    if parents[answer] == parents[other]:
        return 0.5
    return float(parents[answer] < parents[other])


def n_shortest_paths(row: Example) -> int:
    """How many paths of the chain's length lead to the answer."""
    ends = Counter({row.answer.split()[0]: 1})
    for _ in row.steps:
        nearer, ends = ends, Counter()
        for parent, child in edges(row):
            ends[child] += nearer[parent]
    return ends[right(row)]


def words(row: Example) -> set[str]:
    return {word for edge in edges(row) for word in edge}


def n_entities(row: Example) -> int:
    return sum(word[0].isupper() for word in words(row))


PROSQA: dict[str, Callable[[list[Example]], str]] = {
    "nodes with an edge, mean ± standard deviation": lambda rows: spread([len(words(row)) for row in rows]),
    "facts": lambda rows: spread([len(edges(row)) for row in rows]),
    "steps: 3 / 4 / 5 / 6, %": lambda rows: shares([len(row.steps) for row in rows], (3, 4, 5, 6)),
    "entities: 2 / 3 / 4 / more, %": lambda rows: shares([n_entities(row) for row in rows], (2, 3, 4), True),
    "shortest paths a question": lambda rows: f"{statistics.mean(map(n_shortest_paths, rows)):.2f}",
    "right by the first choice, %": lambda rows: percent(choices(row)[0] == right(row) for row in rows),
    "right by the choice mentioned less often, %": lambda rows: percent(map(rarer_is_right, rows)),
}

# --- ProntoQA ------------------------------------------------------------------------------------------


def context(row: Example) -> list[str]:
    return row.question.partition(" True or false: ")[0].removesuffix(".").split(". ")


def n_nouns(row: Example) -> int:
    return len(set(NOUN.findall(row.question.lower())))


def claim_is_negated(row: Example) -> bool:
    return " not " in row.question.partition("True or false: ")[2]


def forms(rows: list[Example]) -> str:
    sentences = [sentence for row in rows for sentence in context(row)]
    tests = (lambda s: " are " in s, lambda s: s.startswith("Each "), lambda s: s.startswith("Every "))
    return " / ".join(percent(test(sentence) for sentence in sentences) for test in tests)


PRONTOQA: dict[str, Callable[[list[Example]], str]] = {
    "sentences a row": lambda rows: spread([len(context(row)) for row in rows]),
    "steps a row": lambda rows: spread([len(row.steps) for row in rows]),
    "nouns a row": lambda rows: spread([n_nouns(row) for row in rows]),
    "True, %": lambda rows: percent(row.answer == "True" for row in rows),
    "negated sentences a row": lambda rows: spread([sum(" not " in s for s in context(row)) for row in rows]),
    "the property asked for is negated, %": lambda rows: percent(" not " in row.steps[-1] for row in rows),
    'right by "False where the claim has a not", %': lambda rows: percent(
        claim_is_negated(row) == (row.answer == "False") for row in rows
    ),
    "plural / each / every, % of sentences": forms,
}


def print_table(
    columns: dict[str, list[Example]], measures: dict[str, Callable[[list[Example]], str]]
) -> None:
    print(f"| | {' | '.join(columns)} |")
    print("|---|" + "---:|" * len(columns))
    for name, measure in measures.items():
        print(f"| {name} | {' | '.join(measure(rows) for rows in columns.values())} |")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4_000, help="generated rows of each")
    n = parser.parse_args(words).rows
    prosqa = {
        "ProsQA, published": published("prosqa"),
        "`prosqa-made`": made("prosqa-made", n),
        "with `balanced: false`": made("prosqa-made", n, balanced=False),
    }
    print_table(prosqa, PROSQA)
    print()
    prontoqa = {"ProntoQA, published": published("prontoqa"), "`prontoqa-made`": made("prontoqa-made", n)}
    print_table(prontoqa, PRONTOQA)


if __name__ == "__main__":
    main()
