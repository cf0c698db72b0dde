"""What a table or a picture calls a system, from the fields of its row alone and from which of them vary.

A name holds no more than what tells the systems of one report apart: `smollm2 colar c=2 (control-zeroed), run 1`
shrinks to `colar c=2` where there is one model and one training run. Nothing here knows any method by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

AVERAGE = "average"  # the dataset of a macro-average row
SYSTEM = ("model", "method", "label", "compression_factor", "decoding", "train_seed")


def system_of(row: Row) -> tuple[Any, ...]:
    """The values that name a row's system: everything but the dataset."""
    return tuple(row[key] for key in SYSTEM)


def order(values: Iterable[Any]) -> tuple[tuple[bool, Any], ...]:
    """A sort key for values of which some are None: None comes first."""
    return tuple((value is not None, 0 if value is None else value) for value in values)


def curve_name(row: Row, rows: Iterable[Row]) -> str:
    """Name of a row's system at any speed and of any training run, among `rows`: model, method, label as needed."""
    models = {other["model"] for other in rows}
    methods = {other["method"] for other in rows if other["model"] == row["model"]}
    parts = [row["model"]] if len(models) > 1 or len(methods) == 1 else []
    parts += [row["method"]] if len(methods) > 1 else []
    parts += [f"({row['label']})"] if row["label"] else []
    return " ".join(parts)


def point_name(row: Row) -> str:
    """The speed: `c=2`, or nothing where the system has none."""
    factor = row["compression_factor"]
    return "" if factor is None else f"c={factor:g}"


def system_name(row: Row, rows: Iterable[Row]) -> str:
    """Name of a row's system among `rows`: the curve's, the speed, the training run where there are several."""
    rows = list(rows)
    plain = {**row, "label": ""}
    runs = {
        other["train_seed"]
        for other in rows
        if (other["model"], other["method"]) == (row["model"], row["method"])
    }
    parts = [curve_name(plain, rows), point_name(row), f"({row['label']})" if row["label"] else ""]
    name = " ".join(part for part in parts if part)
    return f"{name}, run {row['train_seed']}" if len(runs) > 1 else name


def is_control(label: str) -> bool:
    """Whether a system with this label answers with other thoughts than its own."""
    return without_control(label) != label


def without_control(label: str) -> str:
    """What a control was made from: "DL, control-zeroed" from DL."""
    return ", ".join(part for part in label.split(", ") if not part.startswith("control-"))


def datasets_of(rows: Iterable[Row]) -> list[str]:
    """The datasets in `rows`, sorted, without the average."""
    return sorted({row["dataset"] for row in rows} - {AVERAGE})
