"""How many updates a run would make in the wall-clock that another one took.

    python lab/scripts/updates_in.py runs/table2/nll-0 --as-long-as runs/table2/rl-0

Prints one number: the first run's updates a second, evaluations included, times the seconds of the second run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from colar.training import run_folder
from colar.training.run_folder import RunFolder


def clock(folder: Path) -> tuple[int, float]:
    """Updates that a run made, and its seconds, summed over resumes."""
    last = RunFolder(folder).last_resume_state()
    if last is None:
        raise SystemExit(f"{folder} has no checkpoint: nothing was trained there")
    state = run_folder.read_state(last)
    return state.global_step, run_folder.clock_of(state)["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--as-long-as", type=Path, required=True, metavar="RUN", help="run folder")
    args = parser.parse_args()
    steps, seconds = clock(args.run)
    print(max(1, round(steps * clock(args.as_long_as)[1] / seconds)))


if __name__ == "__main__":
    main()
