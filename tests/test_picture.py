"""Pictures: what is in the figure, the same bytes twice, nothing global."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from example_rows import report_row
from matplotlib.collections import PathCollection

from colar.evaluation import picture
from colar.evaluation.report_rows import ReportRow

PNG = b"\x89PNG\r\n\x1a\n"


def rows_of(*datasets: str) -> list[ReportRow]:
    made = []
    for dataset in datasets:
        made.append(report_row("CoT", dataset, None, 0.55, 25))
        made += [report_row("Fast", dataset, c, 0.55 - 0.03 * c, 25 / c) for c in (1, 2, 3, 4, 5)]
        made.append(report_row("Direct", dataset, None, 0.2, 0))
    return made


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def names(figure: Any) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def points(axes: Any) -> list[int]:
    """The number of markers of each curve."""
    return [len(each.get_offsets()) for each in axes.collections if isinstance(each, PathCollection)]


def test_one_dataset_is_one_panel_with_every_system_named_and_every_speed_tagged() -> None:
    figure = picture.accuracy_vs_length(rows_of("gsm8k", "average"))
    (axes,) = figure.axes
    assert axes.get_title("left") == "gsm8k, 50 questions"
    assert names(figure) == ["CoT", "Direct", "Fast"]
    assert texts(axes) == ["c=1", "c=2", "c=3", "c=4", "c=5"]
    assert "greedy decoding" in axes.get_xlabel()
    assert "clustered by question" in axes.get_xlabel()
    curve = max(axes.lines, key=lambda line: len(line.get_xdata()))
    assert list(curve.get_xdata()) == [25, 12.5, 25 / 3, 6.25, 5]
    assert list(curve.get_ydata()) == pytest.approx([52, 49, 46, 43, 40])
    assert points(axes) == [1, 1, 5]


def test_bars_are_1_96_standard_errors_and_absent_where_unknown() -> None:
    (axes,) = picture.accuracy_vs_length(
        [report_row("A", "d", 1, 0.5, 9), report_row("A", "d", 2, 0.4, 5, accuracy_se=None)]
    ).axes
    (bars,) = [each for each in axes.collections if not isinstance(each, PathCollection)]
    spans = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    assert spans[0] == pytest.approx((50 - 100 * 1.96 * 0.02, 50 + 100 * 1.96 * 0.02), abs=1e-3)
    assert spans[1] == pytest.approx((40, 40))


def test_several_datasets_are_shown_as_their_average() -> None:
    figure = picture.accuracy_vs_length(rows_of(*"abcdef", "average"))
    (axes,) = figure.axes
    assert axes.get_title("left") == "average of 6 datasets"
    assert names(figure) == ["CoT", "Direct", "Fast"]
    # Below the panel, not over it.
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().y1 <= axes.get_tightbbox().y0 + 1


def test_an_average_over_fewer_datasets_is_left_out() -> None:
    partly = [
        report_row("Part", "a", None, 0.4, 9),
        report_row("Part", "average", None, 0.4, 9, datasets=["a"]),
    ]
    figure = picture.accuracy_vs_length(rows_of("a", "b", "average") + partly)
    assert names(figure) == ["CoT", "Direct", "Fast"]
    assert points(figure.axes[0]) == [1, 1, 5]
    figure = picture.accuracy_vs_length([row for row in partly if row.dataset == "a"] + [
        report_row("B", "b", None, 0.4, 9), report_row("B", "average", None, 0.4, 9, datasets=["b"]),
    ])  # fmt: skip
    assert texts(figure.axes[0]) == ["no system was asked on all of them"]


def test_training_runs_are_lines_of_one_colour_with_one_name() -> None:
    rows = [
        report_row("A", "d", c, 0.5 + 0.01 * s, 9 / c, train_seed=s) for c, s in product((1, 2), (0, 1, 2))
    ]
    figure = picture.accuracy_vs_length(rows)
    (axes,) = figure.axes
    assert names(figure) == ["A"]
    assert texts(axes) == ["c=1", "c=2"]
    assert len(axes.lines) == 3
    assert len({line.get_color() for line in axes.lines}) == 1


def test_values_of_a_parameter_are_one_line_for_each_speed() -> None:
    rows = [report_row("A", "d", c, 0.5 - 0.1 * c, 9 / c) for c in (1, 2)]
    for c, t in product((1, 2), (0.95, 0.3, 0.5)):
        values = {"confidence_threshold": t}
        rows.append(report_row("A", "d", c, t / c, t, label="own", values=values))
    rows.append(report_row("A", "d", 2, 0.1, 4, label="own"))
    # One value: the speeds are joined.
    rows += [report_row("B", "d", c, 0.3, c, values={"confidence_threshold": 0.8}) for c in (1, 2)]
    figure = picture.accuracy_vs_length(rows)
    (axes,) = figure.axes
    assert names(figure) == [
        "A", "A (own, c=2)", "A (own, confidence_threshold)", "B (confidence_threshold=0.8)",
    ]  # fmt: skip
    tags = [f"c={c}, {threshold}" for c, threshold in product((1, 2), (0.3, 0.5, 0.95))]
    assert sorted(texts(axes)) == sorted([*tags, "c=1", "c=2", "c=1", "c=2"])
    joined = sorted(list(line.get_xdata()) for line in axes.lines)
    assert joined == sorted([[0.3, 0.5, 0.95], [0.3, 0.5, 0.95], [9, 4.5], [4], [1, 2]])


def test_styles_are_all_different() -> None:
    assert len({picture.style(index) for index in range(80)}) == 80


def test_names_that_begin_with_an_underscore_are_in_the_legends() -> None:
    """matplotlib takes such a name for none: before 3.10 wherever it stands, later where it is a line's own."""
    assert names(picture.accuracy_vs_length([report_row("_Part", "a", None, 0.4, 9)])) == ["_Part"]


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    """A model, a label, a data set."""
    name = r"runs/$a 20%/$x_1$ \$1 and $"
    rows = [report_row(name, name, c, 0.5, 9 / c, label=name) for c in (1, 2)]
    partly = [report_row("Part", "b", 1, 0.5, 9, label=name)]
    for dataset in (name, "b"):
        rows += [report_row(f"{name} too", dataset, 1, 0.4, 7), report_row("Other", dataset, 1, 0.3, 8)]
    rows += [report_row(model, "average", 1, 0.4, 7) for model in (f"{name} too", "Other")]
    partly.append(report_row("Part", "average", 1, 0.5, 9, label=name, datasets=["b"]))

    def drawn(stem: str) -> list[bytes]:
        paths = [
            picture.save(picture.accuracy_vs_length(rows[:2]), tmp_path / f"{stem}-one.png"),
            picture.save(picture.accuracy_vs_length(rows + partly), tmp_path / f"{stem}-several.png"),
        ]
        return [path.read_bytes() for path in paths]

    # The picture of a matplotlib that knows no mathematics.
    with matplotlib.rc_context({"text.parse_math": False}):
        expected = drawn("expected")
    assert drawn("found") == expected


def test_the_same_data_give_the_same_bytes_and_no_leftover(tmp_path: Path) -> None:
    one = picture.save(picture.accuracy_vs_length(rows_of("a", "b", "average")), tmp_path / "new" / "one.png")
    other = picture.save(
        picture.accuracy_vs_length(reversed(rows_of("a", "b", "average"))), tmp_path / "new" / "other.png"
    )
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes().startswith(PNG)
    assert {path.name for path in one.parent.iterdir()} == {"one.png", "other.png"}
    assert b"matplotlib" not in one.read_bytes().lower()


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match="taken"):
        picture.save(picture.accuracy_vs_length(rows_of("a")), tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


def test_drawing_never_loads_pyplot() -> None:
    code = (
        "import sys; from colar.evaluation import picture;"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
