"""The paper's figures: data by hand from small records, and what is drawn of them."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from example_rows import report_row
from paper_figures import factors, left_out, points, reinforcement, retrieval, scaling
from script_files import module

from colar.evaluation import picture
from colar.evaluation.report_rows import Report, ReportRow
from colar.evaluation.stats import Z95

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


def report(rows: list[ReportRow], pooled: list[ReportRow] | None = None) -> Report:
    return Report({}, rows, [], pooled=pooled or [])


def row(label: str = "", c: float | None = 2, accuracy: float = 0.5, **more: Any) -> ReportRow:
    return report_row("colar", "average", c, accuracy, label=label, **{"length": 8.0, **more})


def named(axes: Any) -> list[str]:
    return axes.get_legend_handles_labels()[1]


# Points


def test_points_are_the_pooled_rows_with_their_runs() -> None:
    runs = [row(accuracy=0.4, train_seed=0, length=7.0), row(accuracy=0.6, train_seed=1, length=9.0)]
    others = [row("DL"), row(c=3), row(decoding="sampled")]
    pooled = [row(accuracy=0.5, train_seed=None, accuracy_se=0.05, length_se=0.25, reference_length=8.5)]
    (point,) = points.points(report([*runs, *others], pooled), "colar", "colar", "")
    assert point == {
        "c": 2, "accuracy": 0.5, "accuracy_half": pytest.approx(0.05 * Z95), "length": 8.0,
        "length_half": pytest.approx(0.25 * Z95), "reference_length": 8.5, "n": 50,
        "runs": [
            {"train_seed": 0, "accuracy": 0.4, "length": 7.0},
            {"train_seed": 1, "accuracy": 0.6, "length": 9.0},
        ],
    }  # fmt: skip


def test_points_come_by_factor_and_an_unknown_error_is_none() -> None:
    found = points.points(report([row(c=5), row(c=1, accuracy_se=None)]), "colar", "colar", "")
    assert [point["c"] for point in found] == [1, 5]
    assert [point["accuracy_half"] is None for point in found] == [True, False]
    with pytest.raises(ValueError, match="no greedy rows of colar colar 'MP' on average"):
        points.points(report([row()]), "colar", "colar", "MP")


# Random against single, left out


def three_systems() -> Report:
    rows = []
    for label, accuracy in (("", 0.5), ("one c", 0.7), ("one c, a fifth", 0.2)):
        rows += [row(label, c, accuracy - c / 100, length=20 / c, length_se=0.1) for c in (1, 2, 3)]
    return report(rows)


def test_random_is_a_line_and_each_single_c_a_bar() -> None:
    data = factors.data_of(three_systems(), "colar")
    assert [point["accuracy"] for point in data["random"]] == pytest.approx([0.49, 0.48, 0.47])
    assert list(data["single"]) == ["one c", "one c, a fifth"]
    accuracy, length = factors.draw(data).axes
    assert [bar.get_height() for bar in accuracy.patches] == pytest.approx([69, 68, 67, 19, 18, 17])
    (random,) = [line for line in accuracy.lines if line.get_label() == "random c, all rows"]
    assert list(random.get_ydata()) == pytest.approx([49, 48, 47])
    assert [bar.get_height() for bar in length.patches][:3] == pytest.approx([20, 10, 20 / 3])
    assert sorted(named(accuracy)) == ["one c, a fifth of the rows", "one c, all rows", "random c, all rows"]


def test_factors_left_out_stand_on_grey() -> None:
    rows = [row(c=c, reference_length=20 / c) for c in (1, 2, 3, 4)]
    data = left_out.data_of(report(rows), [1, 3], "colar", "")
    assert data["trained"] == [1, 3]
    accuracy, length = left_out.draw({"toy": data}).axes
    grey = [patch for patch in accuracy.patches if patch.get_width() == pytest.approx(0.8)]
    assert [patch.get_x() + 0.4 for patch in grey] == pytest.approx([2, 4])
    assert "what c asks for, ceil(tokens / c)" in named(length)
    assert "what c asks for, ceil(tokens / c)" not in named(accuracy)
    with pytest.raises(ValueError, match="no answers at c = 5, 7"):
        left_out.data_of(report(rows), [1, 5, 7], "colar", "")


# Retrieval


def thought(
    question: str, position: int, ids: list[int], ranks: list[int], kinds: list[str]
) -> dict[str, Any]:
    return {"question": question, "position": position, "token_ids": ids, "ranks": ranks, "kinds": kinds}


def chains(*thoughts: dict[str, Any]) -> dict[str, Any]:
    of = {"thoughts": list(thoughts)}
    return {"params": {"compression_factor": 2}, "retrieval": {"own": of, "written": of, "reference": of}}


def test_a_token_is_found_among_as_many_as_its_group_has_different_tokens() -> None:
    assert retrieval.nearest(thought("q", 0, [7, 8], [0, 2], ["bracket", "operand"])) == [True, False]
    # One token twice: a set of one.
    assert retrieval.nearest(thought("q", 0, [7, 7], [1, 1], ["operand", "operand"])) == [False, False]


def test_the_control_guesses_from_the_other_questions_alone() -> None:
    thoughts = [
        thought("a", 0, [1, 5], [9, 9], ["bracket", "operand"]),
        thought("b", 0, [1, 6], [9, 9], ["bracket", "operand"]),
        thought("c", 0, [1, 6], [9, 9], ["bracket", "operand"]),
        thought("a", 1, [5], [9], ["result"]),
    ]
    # For a, the others have 1 twice and 6 twice; for b: 1 twice, 5 and 6 once each, of which 5 is the smaller.
    assert retrieval.commonest(thoughts) == [[True, False], [True, False], [True, False], [False]]


def test_shares_by_kind_with_errors_by_question() -> None:
    system = chains(
        thought("a", 0, [1, 5], [0, 1], ["bracket", "operand"]),
        thought("b", 0, [1, 6], [0, 2], ["bracket", "operand"]),
    )
    shares = retrieval.shares_of([system], 2)
    assert list(shares) == ["commonest", "own", "written", "reference"]
    assert shares["own"]["bracket"] == {"share": 1.0, "half": 0.0, "n": 2}
    # Of two questions one: sd(ddof=1) 0.7071 over sqrt(2).
    assert shares["own"]["operand"] == {"share": 0.5, "half": pytest.approx(0.5 * Z95), "n": 2}
    assert shares["own"]["sign"] == {"share": None, "half": None, "n": 0}
    assert shares["commonest"]["bracket"]["share"] == 1
    assert shares["commonest"]["operand"]["share"] == 0
    with pytest.raises(ValueError, match="no thoughts were ranked at c = 5"):
        retrieval.shares_of([system], 5)


def test_a_thought_is_shown_as_its_c_nearest_tokens() -> None:
    answers = [
        {
            "params": {"compression_factor": 2},
            "thoughts": [[" <<", "7", "x"], ["+", "2", "x"]],
            "answer": "9",
        },
        {
            "params": {"compression_factor": 1},
            "thoughts": [["<<", "7", "x"], [" times as many. How", "x"], ["incomprehensibilities"]],
            "answer": "8",
        },
    ]
    case = retrieval.case_of(answers, "Seven and two?", "<<7+2=9>>", "9")
    assert [chain["thoughts"] for chain in case["chains"]] == [
        [["<<"], ["times as…"], ["incomprehensi…"]],
        [["<<", "7"], ["+", "2"]],
    ]
    system = chains(thought("a", 0, [1, 5], [0, 1], ["bracket", "operand"]))
    shares = {
        "toy": {"2": retrieval.shares_of([system], 2)},
        "SmolLM2": {"2": retrieval.shares_of([system], 2)},
    }
    figure = retrieval.draw({"case": case, "shares": shares})
    first = figure.axes[0]
    written = [text.get_text() for text in first.texts]
    assert {"c = 2", "<< 7", "+ 2", "→  9", "c = 1", "<<", "→  8"} <= set(written)
    # No two texts of a chain overlap.
    renderer = figure.canvas.get_renderer()
    line = [
        text.get_window_extent(renderer)
        for text in first.texts
        if text.get_text() in ("c = 2", "<< 7", "+ 2", "→  9")
    ]
    assert all(left.x1 < right.x0 for left, right in pairwise(line))


TWO_AMOUNTS = "Ann pays $12 for each of 3 bags and gets $3 back. How much is it?"
NO_FORMULA = "Ann pays $12 for each of 3 bags, 20% off, and gets $3 back. How much is it?"
ESCAPED = r"Ann pays \$12 for 5_ bags and $3^2$ for {6}."


def test_a_text_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    """The question, the reference, thoughts, the answer, a title, the name of a curve."""
    question, reference, text = TWO_AMOUNTS, NO_FORMULA, ESCAPED
    answers = [
        {"params": {"compression_factor": 2}, "thoughts": [["$1_2$", "20%"], ["$", "$3"]], "answer": text}
    ]
    system = chains(thought("a", 0, [1, 5], [0, 1], ["bracket", "operand"]))
    case = retrieval.case_of(answers, question, reference, text)
    shares = {text: {"2": retrieval.shares_of([system], 2)}}
    made = reinforcement.curve(question, [{"train_seed": 0, "points": [[0, 0.5], [10, 1.0]]}])
    panels = [{"title": reference, "key": "length", "rows": 400, "curves": [made]}]

    def drawn(name: str) -> list[bytes]:
        figures = [retrieval.draw({"case": case, "shares": shares}), reinforcement.draw({"panels": panels})]
        paths = [picture.save(each, tmp_path / f"{name}-{i}.png") for i, each in enumerate(figures)]
        return [path.read_bytes() for path in paths]

    # The picture of a matplotlib that knows no mathematics.
    with matplotlib.rc_context({"text.parse_math": False}):
        expected = drawn("expected")
    assert drawn("found") == expected


# Reinforcement


def test_a_curve_has_its_runs_and_their_mean() -> None:
    runs = [
        {"train_seed": 0, "points": [[0, 0.4], [10, 0.6]]},
        {"train_seed": 1, "points": [[0, 0.6], [10, 1.0]]},
    ]
    curve = reinforcement.curve("a", runs)
    assert curve["mean"] == [[0, 0.5], [10, pytest.approx(0.8)]]
    with pytest.raises(ValueError, match="no runs of b"):
        reinforcement.curve("b", [])
    with pytest.raises(ValueError, match="validated after different updates"):
        reinforcement.curve("a", [runs[0], {"train_seed": 1, "points": [[0, 0.6]]}])


def test_records_of_reinforcement_become_runs() -> None:
    reinforced = [
        {"name": "x", "seed": 3, "validations": [[0, 0.5]]},
        {"name": "y", "seed": 0, "validations": []},
    ]
    assert reinforcement.validated(reinforced, "x") == [{"train_seed": 3, "points": [[0, 0.5]]}]
    tuned = [{"name": "more SFT", "seed": 1, "eval_accuracy": [0.4, 0.5]}]
    assert reinforcement.as_long(tuned, "more SFT", [0, 10]) == [
        {"train_seed": 1, "points": [[0, 0.4], [10, 0.5]]}
    ]
    history = [{"step": 0, "eval_length": 14.0}, {"step": 5, "loss": 1.0}, {"step": 10, "eval_length": 12.0}]
    assert reinforcement.logged(history, "eval_length") == [
        {"train_seed": 0, "points": [[0, 14.0], [10, 12.0]]}
    ]


def test_lengths_have_no_binomial_interval_and_accuracies_do() -> None:
    made = reinforcement.curve("a", [{"train_seed": 0, "points": [[0, 0.5], [10, 1.0]]}])
    panels = [{"title": key, "key": key, "rows": 400, "curves": [made]} for key in ("accuracy", "length")]
    accuracy, length = reinforcement.draw({"panels": panels}).axes
    assert list(accuracy.lines[0].get_ydata()) == [50, 100]
    assert named(accuracy) == ["a (1 run)"]
    (shade,) = accuracy.collections
    heights = shade.get_paths()[0].vertices[:, 1]
    # Wilson at 200 of 400: 45.1 to 54.9.
    assert min(heights) == pytest.approx(45.1, abs=0.1)
    assert not length.collections


# Scaling


def sized(*models: str) -> Report:
    rows = []
    for model in models:
        rows.append(report_row(model, "average", None, 0.9))
        rows += [report_row(model, "average", c, 0.8 - c / 10) for c in (1, 2, 5)]
    for made in rows:
        c = dict(made.system.params).get("compression_factor")
        object.__setattr__(made, "system", made.system._replace(method="cot" if c is None else "colar"))
    return report(rows)


def test_curves_go_over_sizes_smallest_first() -> None:
    curves = scaling.data_of(sized("big", "small"), {"big": 4_000_000, "small": 100_000})
    assert [curve["name"] for curve in curves] == ["CoT", "CoLaR, c = 1", "CoLaR, c = 2", "CoLaR, c = 5"]
    for curve, accuracy in zip(curves, (0.9, 0.7, 0.6, 0.3), strict=True):
        assert [point["parameters"] for point in curve["points"]] == [100_000, 4_000_000]
        assert [point["accuracy"] for point in curve["points"]] == pytest.approx([accuracy, accuracy])
    with pytest.raises(ValueError, match="no greedy rows of big cot"):
        scaling.data_of(sized("small"), {"big": 4_000_000, "small": 100_000})
    beside = scaling.beside(
        sized("small"), {"cot": ("small", ""), "colar": ("small", "")}, (None, 2), 135_000_000
    )
    assert [curve["name"] for curve in beside] == ["CoT", "CoLaR, c = 2"]
    assert [len(curve["points"]) for curve in beside] == [1, 1]
    panels = [{"title": "toy", "curves": curves}, {"title": "SmolLM2", "curves": beside}]
    toy, pretrained = scaling.draw({"panels": panels}).axes
    assert [text.get_text() for text in toy.get_xticklabels()] == ["0.1M", "4M"]
    assert [text.get_text() for text in pretrained.get_xticklabels()] == ["135M"]


# Files


def test_a_picture_is_the_same_twice(tmp_path: Path) -> None:
    made = reinforcement.curve("a", [{"train_seed": 0, "points": [[0, 0.5], [10, 1.0]]}])
    data = {"panels": [{"title": "t", "key": "accuracy", "rows": 400, "curves": [made]}]}
    first, again = (picture.save(reinforcement.draw(data), tmp_path / f"{name}.png") for name in "ab")
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes().startswith(PNG)


def test_committed_figures_are_those_of_the_committed_records() -> None:
    """Their data anew from results/, number by number; and each has its pictures, the PNG below 150 KB."""
    figures = module("lab/scripts/figures.py")
    folder = ROOT / "results" / "figures"
    made = figures.committed()
    assert set(made) == {"factors", "left_out", "reinforcement", "scaling"}
    for name, data in made.items():
        assert figures.files.read_json(folder / f"{name}.json") == data, f"{name}: run lab/scripts/figures.py"
    for path in folder.glob("*.json"):
        assert path.stem in {*figures.DRAWN, "norms"}  # drawn at commit ee806d3b
        assert path.with_suffix(".png").stat().st_size < 150_000


def test_the_script_writes_data_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    figures = module("lab/scripts/figures.py")
    small = {"panels": [{"title": "t", "key": "length", "rows": 4, "curves": [
        reinforcement.curve("a", [{"train_seed": 0, "points": [[0, 0.5], [10, 1.0]]}])]}]}  # fmt: skip
    monkeypatch.setattr(figures, "committed", lambda: {"reinforcement": small})
    monkeypatch.setattr(sys, "argv", ["figures.py", "--output", str(tmp_path)])
    figures.main()
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"reinforcement.json", "reinforcement.png"}
    said = capsys.readouterr().out
    assert "scaling        no records" in said
    # Without records the data that is there is drawn again.
    (tmp_path / "reinforcement.png").unlink()
    monkeypatch.setattr(figures, "committed", dict)
    figures.main()
    assert (tmp_path / "reinforcement.png").exists()
