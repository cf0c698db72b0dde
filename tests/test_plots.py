"""Pictures: what is in the figure, the same bytes twice, nothing global."""

from __future__ import annotations

import math
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
from colar.evaluation.rows import ReportRow
from colar.training import curves

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
    figure = picture.draw_accuracy(rows_of("gsm8k", "average"))
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
    (axes,) = picture.draw_accuracy(
        [report_row("A", "d", 1, 0.5, 9), report_row("A", "d", 2, 0.4, 5, accuracy_se=None)]
    ).axes
    (bars,) = [each for each in axes.collections if not isinstance(each, PathCollection)]
    spans = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    assert spans[0] == pytest.approx((50 - 100 * 1.96 * 0.02, 50 + 100 * 1.96 * 0.02), abs=1e-3)
    assert spans[1] == pytest.approx((40, 40))


def test_several_datasets_stand_beside_the_average_four_at_most() -> None:
    figure = picture.draw_accuracy(rows_of(*"abcdef", "average"))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["average of 6 datasets, 4 of them beside it", *"abcd"]
    assert names(figure) == ["CoT", "Direct", "Fast"]
    assert [len(texts(axes)) for axes in figure.axes] == [5, 0, 0, 0, 0]
    # Below the panels, not over them.
    picture.settle(figure)
    lowest = min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert figure.legends[0].get_window_extent().y1 <= lowest + 1
    with pytest.raises(ValueError, match="need rows of their average"):
        picture.draw_accuracy(rows_of("a", "b"))
    with pytest.raises(ValueError, match="at least one row"):
        picture.draw_accuracy([])


def test_an_average_over_fewer_datasets_is_left_out() -> None:
    partly = [
        report_row("Part", "a", None, 0.4, 9),
        report_row("Part", "average", None, 0.4, 9, datasets=["a"]),
    ]
    figure = picture.draw_accuracy(rows_of("a", "b", "average") + partly)
    assert names(figure) == ["CoT", "Direct", "Fast", "Part"]
    assert [len(points(axes)) for axes in figure.axes] == [3, 4, 3]
    figure = picture.draw_accuracy([row for row in partly if row.dataset == "a"] + [
        report_row("B", "b", None, 0.4, 9), report_row("B", "average", None, 0.4, 9, datasets=["b"]),
    ])  # fmt: skip
    assert texts(figure.axes[0]) == ["no system was asked on all of them"]


def test_training_runs_are_lines_of_one_colour_with_one_name() -> None:
    rows = [
        report_row("A", "d", c, 0.5 + 0.01 * s, 9 / c, train_seed=s) for c, s in product((1, 2), (0, 1, 2))
    ]
    figure = picture.draw_accuracy(rows)
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
    figure = picture.draw_accuracy(rows)
    (axes,) = figure.axes
    assert names(figure) == ["A", "A (own)", "A (own, confidence_threshold)", "B (confidence_threshold)"]
    tags = [f"c={c}, {threshold}" for c, threshold in product((1, 2), (0.3, 0.5, 0.95))]
    assert sorted(texts(axes)) == sorted([*tags, "c=1", "c=2", "c=2", "c=1", "c=2"])
    joined = sorted(list(line.get_xdata()) for line in axes.lines)
    assert joined == sorted([[0.3, 0.5, 0.95], [0.3, 0.5, 0.95], [9, 4.5], [4], [1, 2]])


def test_styles_are_all_different() -> None:
    assert len({picture.style(index) for index in range(80)}) == 80


def history() -> list[dict[str, Any]]:
    logged: list[dict[str, Any]] = []
    for step in range(1, 101):
        rate = 1e-4 * (1 - step / 100)
        logged.append({"step": step, "loss": 100 * math.exp(-step / 10) + 0.01, "learning_rate": rate})
        logged[-1] |= {"loss/latent": 1.0, "grad_norm": math.nan if step == 3 else 1.0, "epoch": step / 50}
        if step % 50 == 0:
            logged.append({"step": step, "eval_loss": 2.0, "eval_accuracy": step / 200, "eval_runtime": 3.0})
            logged[-1] |= {"eval_accuracy/compression_factor=2": step / 400}
    return [*logged, {"step": 100, "train_loss": 0.5, "train_runtime": 9.0, "total_flos": 1e9}]


def test_learning_curves_draw_every_quantity_once_in_order_of_interest() -> None:
    figure = curves.draw_history(history(), "a run")
    titles = [axes.get_title("left") for axes in figure.axes if axes.axison]
    assert titles == ["loss", "loss/latent", "accuracy", "grad_norm", "learning_rate"]
    loss, _, accuracy, norm = figure.axes[:4]
    assert [len(line.get_xdata()) for line in loss.lines] == [100, 100, 2]  # raw, running mean, validation
    assert loss.get_yscale() == "log"
    assert list(accuracy.lines[0].get_ydata()) == [0.25, 0.5]
    assert list(accuracy.lines[1].get_ydata()) == [0.125, 0.25]  # a variant is a line of the same panel
    assert accuracy.lines[1].get_label() == "compression_factor=2"
    assert len(norm.lines[0].get_xdata()) == 99  # the NaN is left out
    assert figure.get_suptitle() == "a run"


def test_learning_curves_take_a_history_of_one_entry_and_refuse_an_empty_one(tmp_path: Path) -> None:
    assert curves.learning_curves([{"step": 1, "loss": 2.0}], tmp_path / "one.png", "x").stat().st_size > 3000
    for nothing in ([], [{"step": 1, "epoch": 0.5}], [{"loss": 1.0}], [{"step": 1, "loss": math.inf}]):
        with pytest.raises(ValueError, match="at least one number"):
            curves.learning_curves(nothing, tmp_path / "none.png", "x")


SPEEDS = [f"compression_factor={c}/confidence_threshold=0.95" for c in range(1, 9)]


@pytest.mark.parametrize("names", [SPEEDS[:n] for n in range(1, 9)], ids=len)
@pytest.mark.parametrize("panels", [1, 5])
def test_the_names_of_learning_curves_cover_nothing(names: list[str], panels: int) -> None:
    validated = {f"eval_accuracy/{name}": 0.1 * n for n, name in enumerate(names)}
    logged = [{"step": step, "eval_accuracy": 0.5, **validated} for step in (50, 100)]
    figure = curves.draw_history(logged if panels == 1 else [*history(), *logged], "a run")
    picture.settle(figure)
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    others = ["training (thick: running mean)", "validation", "compression_factor=2"]
    assert shown == (["validation", *names] if panels == 1 else [*others, *names])
    box = legend.get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
    assert box.y0 >= 0
    drawn = [axes for axes in figure.axes if axes.axison]
    assert len(drawn) == panels
    for axes in drawn:
        assert axes.get_legend() is None
        # Below the panels, and these have kept their height.
        assert box.y1 <= axes.get_tightbbox().y0 + 1
        assert axes.get_window_extent().height > 1.2 * figure.dpi


def test_a_speed_has_one_colour_in_all_panels() -> None:
    logged = [
        {"step": step, "eval_length/c=1": 9.0, "eval_length/c=2": 5.0, "eval_accuracy/c=2": 0.5}
        for step in (1, 2)
    ]
    figure = curves.draw_history(logged, "a run")
    accuracy, length = (axes.lines for axes in figure.axes)
    assert [line.get_color() for line in accuracy] == [length[1].get_color()] != [length[0].get_color()]
    marks = [handle.get_color() for handle in figure.legends[0].legend_handles]
    assert marks == [line.get_color() for line in length]


def test_a_run_without_validation_needs_no_names() -> None:
    assert curves.draw_history([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}], "a run").legends == []


def test_a_name_that_is_wider_than_the_picture_widens_it() -> None:
    figure = curves.draw_history([{"step": 1, "eval_loss/" + "x" * 150: 1.0}], "a run")
    picture.settle(figure)
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.width


def test_names_that_begin_with_an_underscore_are_in_the_legends() -> None:
    """matplotlib takes such a name for none: before 3.10 wherever it stands, later where it is a line's own."""
    assert names(picture.draw_accuracy([report_row("_Part", "a", None, 0.4, 9)])) == ["_Part"]
    figure = curves.draw_history([{"step": 1, "eval_loss": 1.0, "eval_loss/_own": 2.0}], "_a run")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["validation", "_own"]


@pytest.mark.curves
def test_a_history_without_numbers_has_no_curves() -> None:
    assert curves.has_curves([{"step": 1, "loss": 2.0}])
    assert not curves.has_curves([])
    assert not curves.has_curves(
        [{"step": 1, "epoch": 1, "train_runtime": 3.0, "train_loss": 1.0, "loss": None}]
    )


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    """A title, a panel, a curve in a legend; a model, a label, a data set."""
    name = r"runs/$a 20%/$x_1$ \$1 and $"
    logged = [{"step": 1, "loss": 1.0, name: 1.0, f"eval_loss/{name}": 1.0}]
    rows = [report_row(name, name, c, 0.5, 9 / c, label=name) for c in (1, 2)]
    partly = [report_row("Part", "b", 1, 0.5, 9, label=name)]
    for dataset in (name, "b"):
        rows += [report_row(f"{name} too", dataset, 1, 0.4, 7), report_row("Other", dataset, 1, 0.3, 8)]
    rows += [report_row(model, "average", 1, 0.4, 7) for model in (f"{name} too", "Other")]
    partly.append(report_row("Part", "average", 1, 0.5, 9, label=name, datasets=["b"]))

    def drawn(stem: str) -> list[bytes]:
        paths = [
            curves.learning_curves(logged, tmp_path / f"{stem}-curves.png", name),
            picture.accuracy_vs_length(rows[:2], tmp_path / f"{stem}-one.png"),
            picture.accuracy_vs_length(rows + partly, tmp_path / f"{stem}-several.png"),
        ]
        return [path.read_bytes() for path in paths]

    # The picture of a matplotlib that knows no mathematics.
    with matplotlib.rc_context({"text.parse_math": False}):
        expected = drawn("expected")
    assert drawn("found") == expected


def test_the_powers_of_a_logarithmic_axis_stay_mathematics(tmp_path: Path) -> None:
    figure = curves.draw_history(history(), "$ and $")
    picture.save(figure, tmp_path / "powers.png")
    loss = figure.axes[0]
    labels = [label for label in loss.get_yticklabels() if label.get_text()]
    assert any("10^{" in label.get_text() for label in labels)
    assert all(label.get_parse_math() for label in labels)
    assert not figure._suptitle.get_parse_math()


def test_running_mean_follows_a_straight_line_without_lag() -> None:
    line = [float(value) for value in range(100)]
    assert curves._running_mean(line) == pytest.approx(line)
    assert curves._running_mean([0.0, 3.0, 0.0]) == pytest.approx([0.0, 1.0, 0.0])


def test_the_same_data_give_the_same_bytes_and_no_leftover(tmp_path: Path) -> None:
    one = picture.accuracy_vs_length(rows_of("a", "b", "average"), tmp_path / "new" / "one.png")
    other = picture.accuracy_vs_length(reversed(rows_of("a", "b", "average")), tmp_path / "new" / "other.png")
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes().startswith(PNG)
    assert {path.name for path in one.parent.iterdir()} == {"one.png", "other.png"}
    assert b"matplotlib" not in one.read_bytes().lower()


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match="taken"):
        picture.accuracy_vs_length(rows_of("a"), tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


def test_drawing_never_loads_pyplot() -> None:
    code = (
        "import sys; from colar.training import curves; curves.draw_history([{'step': 1, 'loss': 1.0}], 'x');"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
