"""Identity and names of systems: a name is made from the fields that differ between the systems shown.

A name is as short as it can be: `smollm2 colar c=2 (control-zeroed), run 1` is written `colar c=2` where there is one
model and one training run. Nothing here knows a method by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

AVERAGE = "average"
"""The dataset of a macro-average row."""

CONTROL = "control-"
"""How the part of a label begins that marks a control (evaluation/controlled.py)."""


class System(NamedTuple):
    """One line of a table: a model with its method, as it was trained and asked."""

    model: str
    method: str
    label: str
    """Parts joined by ", ": an ablation, a control, per-request values other than the speed. "" for most systems."""
    compression_factor: float | None
    """None where the method has no speed."""
    decoding: str
    """greedy or sampled."""
    train_seed: int | None
    """None where it is unknown, and where all training runs of the system are taken together."""

    def all_runs(self) -> System:
        """The system that stands for all of its training runs."""
        return self._replace(train_seed=None)


class Cell(NamedTuple):
    """A system on one dataset: one row of a report is made from its records."""

    system: System
    dataset: str


def cell_order(cell: Cell) -> tuple[Any, ...]:
    """Sort key of cells in report.json: by model, method and label, then by dataset."""
    # The dataset stands after the label, as in a row.
    system = cell.system
    return none_first(
        (
            system.model,
            system.method,
            system.label,
            cell.dataset,
            system.compression_factor,
            system.decoding,
            system.train_seed,
        )
    )


def none_first(values: Iterable[Any]) -> tuple[tuple[bool, Any], ...]:
    """Sort key for values of which some are None: None comes first."""
    key = []
    for value in values:
        present = value is not None
        # None cannot be compared with a number or a text, so something comparable stands for it.
        key.append((present, value if present else 0))
    return tuple(key)


def curve_name(system: System, systems: Collection[System]) -> str:
    """Name of a system at any speed and of any training run, among `systems`."""
    models = {other.model for other in systems}
    methods = {other.method for other in systems if other.model == system.model}
    parts = []
    # A model with one method goes by its own name; with several methods, their names tell its systems apart.
    if len(models) > 1 or len(methods) == 1:
        parts.append(system.model)
    if len(methods) > 1:
        parts.append(system.method)
    if system.label:
        parts.append(f"({system.label})")
    return " ".join(parts)


def point_name(system: System) -> str:
    """The speed: `c=2`, or an empty text where the system has none."""
    factor = system.compression_factor
    return "" if factor is None else f"c={factor:g}"


def system_name(system: System, systems: Collection[System]) -> str:
    """Name of a system in a table of `systems`: model and method, speed, label, training run, as far as they differ."""
    label = f"({system.label})" if system.label else ""
    # The speed stands before the label: `colar c=2 (snap)`.
    parts = [curve_name(system._replace(label=""), systems), point_name(system), label]
    name = " ".join(part for part in parts if part)
    # Other methods may have been trained more often: that is no reason to number the runs of this one.
    runs = {
        other.train_seed for other in systems if (other.model, other.method) == (system.model, system.method)
    }
    return f"{name}, run {system.train_seed}" if len(runs) > 1 else name


def split_option(label: str) -> tuple[str, float | None]:
    """The label without the value of its option, and that value: ("DL, ratio", 0.7) for "DL, ratio=0.7".

    The value is None, and the label as it was, where no part of it is an option with a number, or several are.
    """
    parts = label.split(", ")
    found = []
    for i, part in enumerate(parts):
        name, _, value = part.partition("=")
        try:
            found.append((i, name, float(value)))
        except ValueError:
            continue
    if len(found) != 1:
        return label, None
    ((i, name, number),) = found
    return ", ".join([*parts[:i], name, *parts[i + 1 :]]), number


def is_control(label: str) -> bool:
    """Whether a system with this label answers from thoughts that are not its own."""
    return without_control(label) != label


def without_control(label: str) -> str:
    """The label of the system that a control was made from: `DL` for `DL, control-zeroed`."""
    kept = [part for part in label.split(", ") if not part.startswith(CONTROL)]
    return ", ".join(kept)
