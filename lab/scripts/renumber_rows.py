"""A source's training rows, and the same stories and chains with other numbers, as a file for `data.source`.

    python lab/scripts/renumber_rows.py gsm8k-aug --versions 4 --seed 9 --output runs/renumbered/gsm8k-aug-4-9.jsonl

The new rows, up to `--versions` for each row (lab/renumber), follow the source's own and have `~1`, `~2`, ... behind
its id. None asks a question of the source's other splits or of the test sets gsm8k-aug, gsm8k, gsm-hard, svamp and
multiarith, which must all be there. gsm8k-aug's 9,915 rows without its whole train.txt take five minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from colar import files
from colar.data import sources

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from renumber import new_rows

TEST_SETS = ("gsm8k-aug", "gsm8k", "gsm-hard", "svamp", "multiarith")


def held_out_questions(source: str, split: str, data_dir: str | None) -> set[str]:
    """The questions that no new row may ask."""
    others = [(source, other) for other in sources.splits_of(source) if other != split]
    tests = [(name, "test") for name in TEST_SETS]
    return {
        row.question
        for name, other in dict.fromkeys([*others, *tests])
        for row in sources.load_examples(name, other, data_dir=data_dir, skip_malformed=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="one whose steps are equations, or a file or folder of your own")
    parser.add_argument("--split", default="train")
    parser.add_argument("--versions", type=int, default=1, help="new rows for each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    args = parser.parse_args()
    rows = sources.load_examples(args.source, args.split, data_dir=args.data_dir, skip_malformed=True)
    held_out = held_out_questions(args.source, args.split, args.data_dir)
    found = new_rows.renumbered(rows, args.versions, args.seed, held_out)
    found.say(len(rows))
    print(files.write_jsonl(args.output, [row.as_row() for row in [*rows, *found.examples]]))


if __name__ == "__main__":
    main()
