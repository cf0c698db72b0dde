"""Typed content of report.json, and the names of systems in tables and pictures.

In JSON the fields of `System` stand flat in each row, the dataset after the label. A field that does not apply to a row
(`datasets` of a single dataset) is left out.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

AVERAGE = "average"
"""The dataset of a macro-average row."""

BASELINE = "cot"
"""The method that every system is compared with."""

CONTROL = "control-"
"""Prefix of the part of a label that marks a control (evaluation/controls.py)."""


ParamValues = tuple[tuple[str, float], ...]
"""Per-request values sorted by name: the speed, and values other than the default. (("compression_factor", 2),)"""

SPEED = "compression_factor"
"""The parameter that sets how fast a method thinks, `c` in tables: tokens of the reference chain per thought."""


def param_values(params: Any) -> ParamValues:
    """Values of a method's `Params` that identify a system."""
    values = {}
    for each in fields(params):
        value = getattr(params, each.name)
        if each.name == SPEED or value != each.default:
            values[each.name] = value
    return tuple(sorted(values.items()))


def speed_of(values: ParamValues) -> float | None:
    """Tokens of the reference chain per thought; None for a method without a speed."""
    return dict(values).get(SPEED)


def c_text(values: ParamValues) -> str:
    """The speed as shown in tables, `c=2`; "" if there is none."""
    factor = speed_of(values)
    return "" if factor is None else f"c={factor:g}"


def without_speed(values: ParamValues) -> ParamValues:
    """The values other than the speed."""
    return tuple(pair for pair in values if pair[0] != SPEED)


def texts(values: ParamValues) -> list[str]:
    """Each value as text, `confidence_threshold=0.8`."""
    return [f"{name}={value:g}" for name, value in values]


# Systems


class System(NamedTuple):
    """One line of a table: a model with its method, and how it was trained and evaluated."""

    model: str
    method: str
    label: str
    """An ablation, a control, or both joined by ", "; "" for most systems."""
    params: ParamValues
    """The request's values: the speed, and those that are not the method's default."""
    decoding: str
    """greedy or sampled."""
    train_seed: int | None
    """None if it is unknown, and for all training runs of the system together."""

    def plain(self) -> "System":
        """The unchanged system: without the label, and without values other than the speed."""
        return self._replace(label="", params=tuple(pair for pair in self.params if pair[0] == SPEED))

    @property
    def is_control(self) -> bool:
        """True if the label marks a control: its thoughts were replaced or halved."""
        return self.without_control() != self

    def without_control(self) -> "System":
        """The system that a control was made from: `DL` for `DL, control-zeroed`."""
        parts = [part for part in self.label.split(", ") if not part.startswith(CONTROL)]
        return self._replace(label=", ".join(parts))

    @property
    def note(self) -> str:
        """The text in brackets after its name: `DL, confidence_threshold=0.8`."""
        parts = [self.label, *texts(without_speed(self.params))]
        return ", ".join(part for part in parts if part)

    @property
    def speed(self) -> float | None:
        """Tokens of the reference chain per thought; None for a method without a speed."""
        return speed_of(self.params)

    def order(self, dataset: str = "") -> tuple[Any, ...]:
        """Sort key of systems in a report, or, with `dataset`, of its rows."""
        values = (self.model, self.method, self.note, dataset, self.speed, self.decoding, self.train_seed)
        # None cannot be compared with a number or a text: it is replaced by 0, and sorts first.
        return tuple((value is not None, 0 if value is None else value) for value in values)


class Cell(NamedTuple):
    """A system on one dataset, whose records make one row of a report."""

    system: System
    dataset: str


# Names: as short as they can be. `smollm2 colar c=2 (control-zeroed), run 1` is written `colar c=2` where there is one
# model, one training run and no control.


def base_name(system: System, systems: Collection[System]) -> str:
    """Name of a model with its method among `systems`, without the speed."""
    models = {other.model for other in systems}
    methods = {other.method for other in systems if other.model == system.model}
    parts = []
    # A model with one method goes by its own name; with several methods, their names tell its systems apart.
    if len(models) > 1 or len(methods) == 1:
        parts.append(system.model)
    if len(methods) > 1:
        parts.append(system.method)
    return " ".join(parts)


def system_name(system: System, systems: Collection[System]) -> str:
    """Name of a system in a table of `systems`: speed and note, and model, method and run as far as they differ."""
    bracketed = f"({system.note})" if system.note else ""
    parts = [base_name(system, systems), c_text(system.params), bracketed]
    name = " ".join(part for part in parts if part)
    # Runs are numbered only where the model was trained several times under one label.
    trained = system.without_control()[:3]
    runs = {other.train_seed for other in systems if other.without_control()[:3] == trained}
    return f"{name}, run {system.train_seed}" if len(runs) > 1 else name


# JSON


def cell_to_json(cell: Cell) -> dict[str, Any]:
    """The fields that identify a cell, as a flat dict."""
    return {
        "model": cell.system.model,
        "method": cell.system.method,
        "label": cell.system.label,
        "dataset": cell.dataset,
        "params": dict(cell.system.params),
        "decoding": cell.system.decoding,
        "train_seed": cell.system.train_seed,
    }


def cell_from_json(plain: Mapping[str, Any]) -> Cell:
    """The cell that a row of report.json, or a record, belongs to."""
    params = tuple(sorted(plain["params"].items()))
    names = (plain["model"], plain["method"], plain["label"], params, plain["decoding"], plain["train_seed"])
    return Cell(System(*names), plain["dataset"])


@dataclass(frozen=True)
class _Row:
    system: System
    dataset: str
    """`average` for the macro-average."""

    @property
    def cell(self) -> Cell:
        return Cell(self.system, self.dataset)

    def to_json(self) -> dict[str, Any]:
        """The row as an object: the fields of its cell, then its numbers."""
        plain = cell_to_json(self.cell)
        for each in fields(self):
            value = getattr(self, each.name)
            # A field whose default is None is left out if it is None; other nulls mean "unknown".
            if each.name not in ("system", "dataset") and not (value is None and each.default is None):
                plain[each.name] = value
        return plain


@dataclass(frozen=True)
class ReportRow(_Row):
    """One system on one dataset, or averaged over its datasets. Shares (accuracy, unparsable, truncated) are 0..1."""

    seeds: list[int]
    """Decoding seeds."""
    n: int
    """Questions."""
    accuracy: float
    accuracy_se: float | None
    """Standard error clustered by question; None for a single question."""
    unparsable: float
    length: float
    """#L: embeddings emitted while thinking, mean."""
    forward_passes: float
    seconds_per_question: float
    length_se: float | None
    reference_length: float | None
    """Mean of ceil(L_r / c) over the questions that have a reference chain of L_r tokens."""
    truncated: float
    samples: int
    """Records: questions x seeds x training runs, less the ones that are missing."""
    seeds_interval: float | None
    """Half of the 95% t interval over decoding seeds."""
    pass_at_k: float | None
    maj_at_k: float | None
    pass_at_k_se: float | None = None
    """Standard error of pass@k over questions, and of maj@k below."""
    maj_at_k_se: float | None = None
    datasets: list[str] | None = None
    """The datasets of an average."""
    train_seeds: list[int | None] | None = None
    """The training runs that a pooled row holds."""
    runs_interval: float | None = None
    """Half of the 95% t interval over training runs, in a pooled row."""


@dataclass(frozen=True)
class Difference(_Row):
    """A system's accuracy minus its baseline's, paired by question, on one dataset or averaged over several."""

    baseline: System
    """Its decoding and training seed are those of `system`, so JSON leaves them out."""
    n: int
    """Questions that both answered."""
    difference: float
    se: float | None
    interval: list[float] | None
    """[low, high] at 95%."""
    datasets: list[str] | None = None
    """The datasets of an average."""
    pair: list[str] | None = None
    """[system, baseline] as named in the tables, if the pair was requested by name."""
    train_seeds: list[int] | None = None
    """Training runs that both systems of a requested pair have; [] except in the row of the average."""
    by_run: list[float] | None = None
    """The difference in each of these runs."""
    runs_interval: float | None = None
    """Half of the 95% t interval over `by_run`."""

    def to_json(self) -> dict[str, Any]:
        baseline = cell_to_json(Cell(self.baseline, self.dataset))
        own = ("model", "method", "label", "params")
        return super().to_json() | {"baseline": {key: baseline[key] for key in own}}


@dataclass(frozen=True)
class Report:
    """A whole report; `evaluation/report.py` describes its sections."""

    provenance: Mapping[str, Any]
    rows: list[ReportRow]
    comparisons: list[Difference]
    pooled: list[ReportRow] = field(default_factory=list)
    """Rows of all training runs of a system together; [] if every system was trained once."""
    pooled_comparisons: list[Difference] = field(default_factory=list)
    pairs: list[Difference] = field(default_factory=list)

    @property
    def shown_rows(self) -> list[ReportRow]:
        """The rows that tables and pictures show: those of all runs together, if a system has several."""
        return self.pooled or self.rows

    @property
    def shown_comparisons(self) -> list[Difference]:
        """The differences between the systems of `shown_rows`."""
        return self.pooled_comparisons if self.pooled else self.comparisons

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"provenance": dict(self.provenance), "baseline": BASELINE}
        for name in (*ROWS, *DIFFERENCES):
            plain[name] = [row.to_json() for row in getattr(self, name)]
        return plain


ROWS = ("rows", "pooled")
DIFFERENCES = ("comparisons", "pooled_comparisons", "pairs")


def datasets_of(rows: Iterable[ReportRow | Difference]) -> list[str]:
    """The datasets in `rows`, sorted, without the average."""
    return sorted({row.dataset for row in rows} - {AVERAGE})


def systems_of(rows: Iterable[ReportRow]) -> list[System]:
    """Each system in `rows` once, in their order."""
    return list(dict.fromkeys(row.system for row in rows))
