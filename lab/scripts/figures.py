"""The paper's figures, each as data (JSON) and PNG.

    python lab/scripts/figures.py                          # those with committed records
    python lab/scripts/figures.py --runs runs/figures      # the others as well: what lab/reproduce/figures.sh left

A figure whose records are not there is drawn again from its data in the output folder. results/figures/README.md says
what the figures show. Layer norms are of commit ee806d3b.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation import picture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab"))

import saved_report  # noqa: E402
from paper_figures import factors, left_out, reinforcement, retrieval, scaling  # noqa: E402

RESULTS = ROOT / "results"
TOY, SMOLLM2 = "toy, 0.84M", "SmolLM2-135M"
RANKED = {TOY: ("toy", (2, 5)), SMOLLM2: ("smollm2", (2,))}
"""Panel -> the JSON of `rank_thoughts.py`, and the factors of the retrieval figure, all of them trained ones."""
SMOLLM2_PARAMETERS = 134_515_008
VALIDATION_ROWS = 400
DPI = 110
"""Of the PNG: under 150 KB each."""

DRAWN: dict[str, Callable[[Any], Any]] = {
    "retrieval": retrieval.draw,
    "factors": factors.draw,
    "left_out": left_out.draw,
    "reinforcement": reinforcement.draw,
    "scaling": scaling.draw,
}


def committed() -> dict[str, Any]:
    """Data of the figures whose records are in results/."""
    curves = saved_report.read(RESULTS / "toy" / "factors" / "report.json")
    pretrained = saved_report.read(RESULTS / "smollm2" / "factors" / "report.json")
    return {
        "factors": factors.data_of(curves),
        "left_out": {
            f"{TOY}, from scratch": left_out.data_of(curves, [1, 3, 5, 7], "tiny", "c in 1 3 5 7"),
            f"{SMOLLM2}, pretrained": left_out.data_of(pretrained, [1, 2, 3, 5], "smollm2", "snap"),
        },
        "reinforcement": reinforced(),
        **scaled(RESULTS / "toy" / "sizes"),
    }


def reinforced() -> dict[str, Any]:
    """Two tasks: a teacher who goes a step too far (toy/grpo), and one who slips in the chain (toy/grpo-thoughts)."""
    tiny = files.read_json(RESULTS / "toy" / "grpo" / "differences.json")
    slips = files.read_json(RESULTS / "toy" / "grpo-thoughts" / "differences.json")["reinforced"]
    histories = files.read_json(RESULTS / "toy" / "grpo-stability" / "report.json")["histories"]

    long = reinforcement.logged(histories["long-constant"], "eval_accuracy")
    updates = [update for update, _ in long[0]["points"]]
    accuracy = [
        reinforcement.curve("Gaussian head", long),
        reinforcement.curve("sequential head", reinforcement.validated(tiny["reinforced"], "sequential-RL")),
        reinforcement.curve(
            "SFT for as long", reinforcement.as_long(tiny["fine_tuned"], "SFT continued", updates)
        ),
    ]
    length = [
        reinforcement.curve("Gaussian head", reinforcement.logged(histories["long-constant"], "eval_length"))
    ]
    thoughts = [
        reinforcement.curve("Gaussian head", reinforcement.validated(slips, "CoLaR-NLL-RL")),
        reinforcement.curve("sequential head", reinforcement.validated(slips, "sequential-RL")),
        reinforcement.curve(
            "its thoughts fixed", reinforcement.validated(slips, "sequential-RL, thoughts fixed")
        ),
    ]
    panels = [
        {"title": "Task: stop a step earlier", "key": "accuracy", "curves": accuracy},
        {"title": "The same, its length", "key": "length", "curves": length},
        {"title": "Task: other thoughts", "key": "accuracy", "curves": thoughts},
    ]
    return {"panels": [{**panel, "rows": VALIDATION_ROWS} for panel in panels]}


def ranked(folder: Path) -> dict[str, Any]:
    """Data of the figure of retrieval, for the models whose thoughts were ranked; {} without the toy."""
    if not all((folder / name).exists() for name in ("toy.json", "case.jsonl")):
        return {}
    shares: dict[str, dict[str, Any]] = {}
    made_by = {}
    for title, (name, asked) in RANKED.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        whole = files.read_json(path)
        # The command is in lab/reproduce/figures.sh; here it would name the folders of one machine.
        made_with = {key: value for key, value in whole["provenance"].items() if key != "command"}
        made_by[title] = {"asked": whole["asked"], "provenance": made_with}
        shares[title] = {f"{c:g}": retrieval.shares_of(whole["systems"], c) for c in asked}
    problem = next(row for _, row in files.read_jsonl(folder / "problem" / "test.jsonl"))
    answers = [row for _, row in files.read_jsonl(folder / "case.jsonl")]
    case = retrieval.case_of(answers, problem["question"], " ".join(problem["steps"]), problem["answer"])
    return {"retrieval": {"case": case, "shares": shares, "records": made_by}}


def scaled(folder: Path) -> dict[str, Any]:
    """Data of the figure of sizes, beside it SmolLM2-135M on its own data; {} before the folder's report is there."""
    report = folder / "report.json"
    if not report.exists():
        return {}
    sizes = scaling.data_of(saved_report.read(report), files.read_json(folder / "parameters.json"))
    mathematics = saved_report.read(RESULTS / "smollm2" / "mathematics" / "report.json")
    of = {"cot": ("cot", ""), "colar": ("smollm2-135m", "sequential")}
    beside = scaling.beside(mathematics, of, trained=(None, 1, 2), parameters=SMOLLM2_PARAMETERS)
    panels = [
        {"title": "Toy models, equal rows", "curves": sizes},
        {"title": "SmolLM2, our head, other data", "curves": beside},
    ]
    return {"scaling": {"panels": panels}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="what lab/reproduce/figures.sh left")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "figures", help="folder for data and pictures"
    )
    args = parser.parse_args()
    output = files.require_writable(args.output)
    made = committed()
    if args.runs:
        made |= ranked(args.runs / "thoughts") | scaled(output.parent / "toy" / "sizes")
    for name, draw in DRAWN.items():
        path = output / f"{name}.json"
        if name in made:
            files.write_json(path, made[name])
        elif not path.exists():
            print(f"{name:14} no records")
            continue
        data = files.read_json(path)
        picture.save(draw(data), output / f"{name}.png", DPI)
        print(f"{name:14} {output / name}.json, .png")


if __name__ == "__main__":
    main()
