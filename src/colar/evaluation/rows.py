"""The typed content of report.json: every row that tables and pictures are made of.

This is the one border between rows and JSON. Code works with the classes below; `to_json` and `from_json` are called
where a file is written or read, and nowhere else. In JSON the fields of `System` stand flat in each row, the dataset
after the label. A field that a row does not have (`datasets` of a single dataset, `train_seeds` of a single run) is
left out rather than null. Sections that older files lack are read as empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

CELL_KEYS = ("model", "method", "label", "dataset", "compression_factor", "decoding", "train_seed")
"""The keys that name a cell, in the order in which rows and records have them."""


@dataclass(frozen=True)
class ReportRow:
    """One system on one dataset, or averaged over its datasets. Shares (accuracy, unparsable, truncated) are 0..1."""

    system: System
    dataset: str
    """`average` for the macro-average."""
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
    accuracy_interval: list[float] | None
    """[low, high] at 95%: Wilson's for a dataset, mean ± 1.96 standard errors for an average."""
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
    """Standard error of pass@k over questions, and of maj@k below; None where they are not known."""
    maj_at_k_se: float | None = None
    datasets: list[str] | None = None
    """The datasets of an average; None for a row of one dataset."""
    train_seeds: list[int | None] | None = None
    """The training runs that a pooled row holds; None for a row of one run."""
    runs_interval: float | None = None
    """Half of the 95% t interval over training runs, of a pooled row."""

    @property
    def cell(self) -> Cell:
        return Cell(self.system, self.dataset)

    def to_json(self) -> dict[str, Any]:
        plain = cell_to_json(self.cell) | _numbers(self)
        # null means "unknown"; a key that has no meaning for a row is left out.
        if self.pass_at_k is None:
            del plain["pass_at_k_se"]
            del plain["maj_at_k_se"]
        if self.datasets is None:
            del plain["datasets"]
        if self.train_seeds is None:
            del plain["train_seeds"]
            del plain["runs_interval"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ReportRow:
        system, dataset = cell_from_json(plain)
        numbers = {key: value for key, value in plain.items() if key not in CELL_KEYS}
        return cls(system, dataset, **numbers)


@dataclass(frozen=True)
class Difference:
    """A system's accuracy minus its baseline's, paired by question, on one dataset or averaged over several."""

    system: System
    dataset: str
    baseline: System
    """Decoding and training seed are those of `system`; JSON has the other fields alone."""
    n: int
    """Questions that both answered."""
    difference: float
    se: float | None
    interval: list[float] | None
    """[low, high] at 95%."""
    datasets: list[str] | None = None
    """The datasets of an average; None for a row of one dataset."""

    def to_json(self) -> dict[str, Any]:
        plain = cell_to_json(Cell(self.system, self.dataset)) | _numbers(self)
        # Decoding and training seed are those of the row and are not repeated.
        plain["baseline"] = {
            "model": self.baseline.model,
            "method": self.baseline.method,
            "label": self.baseline.label,
            "compression_factor": self.baseline.compression_factor,
        }
        if self.datasets is None:
            del plain["datasets"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Difference:
        system, dataset = cell_from_json(plain)
        return cls(
            system,
            dataset,
            baseline=system._replace(**plain["baseline"]),
            n=plain["n"],
            difference=plain["difference"],
            se=plain["se"],
            interval=plain["interval"],
            datasets=plain.get("datasets"),
        )


@dataclass(frozen=True)
class PairDifference:
    """The difference of a pair that was asked for by name, and that difference in each training run."""

    pair: list[str]
    """[system, baseline], by their names in the tables."""
    difference: Difference
    train_seeds: list[int]
    """The training runs that both systems have; [] except on the row of the average."""
    by_run: list[float]
    """The difference in each of these runs."""
    runs_interval: float | None
    """Half of the 95% t interval over `by_run`."""

    def to_json(self) -> dict[str, Any]:
        # One flat row, so that the keys of a difference are the same in all sections.
        return {
            "pair": self.pair,
            **self.difference.to_json(),
            "train_seeds": self.train_seeds,
            "by_run": self.by_run,
            "runs_interval": self.runs_interval,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PairDifference:
        return cls(
            plain["pair"],
            Difference.from_json(plain),
            plain["train_seeds"],
            plain["by_run"],
            plain["runs_interval"],
        )


@dataclass(frozen=True)
class RunsRow:
    """Mean over the training runs of one system on one dataset, each run weighing the same."""

    system: System
    """Its training seed is None."""
    dataset: str
    train_seeds: list[int]
    accuracy: float
    interval: float | None
    """Half of the 95% t interval over runs."""
    length: float
    length_interval: float | None

    def to_json(self) -> dict[str, Any]:
        plain = cell_to_json(Cell(self.system, self.dataset)) | _numbers(self)
        # A null beside `train_seeds` would look like a run whose seed is unknown.
        del plain["train_seed"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunsRow:
        # `to_json` leaves this key out, and a cell is not read without it.
        system, dataset = cell_from_json({**plain, "train_seed": None})
        numbers = {key: value for key, value in plain.items() if key not in CELL_KEYS}
        return cls(system, dataset, **numbers)


@dataclass(frozen=True)
class Report:
    """A whole report. `evaluation/report.py` says how its sections are made."""

    provenance: Mapping[str, Any]
    baseline: str
    """The method that every system is compared with."""
    nearest: str | None
    rows: list[ReportRow]
    comparisons: list[Difference]
    train_seeds: list[RunsRow] = field(default_factory=list)
    pooled: list[ReportRow] = field(default_factory=list)
    """Rows of all training runs of a system together; [] where every system was trained once."""
    pooled_comparisons: list[Difference] = field(default_factory=list)
    pairs: list[PairDifference] = field(default_factory=list)

    @property
    def shown_rows(self) -> list[ReportRow]:
        """The rows that tables and pictures show: all runs together, where a system has several."""
        return self.pooled or self.rows

    @property
    def shown_comparisons(self) -> list[Difference]:
        """The differences between the systems of `shown_rows`."""
        return self.pooled_comparisons if self.pooled else self.comparisons

    def to_json(self) -> dict[str, Any]:
        return {
            "provenance": dict(self.provenance),
            "baseline": self.baseline,
            "nearest": self.nearest,
            "rows": [row.to_json() for row in self.rows],
            "comparisons": [row.to_json() for row in self.comparisons],
            "train_seeds": [row.to_json() for row in self.train_seeds],
            "pooled": [row.to_json() for row in self.pooled],
            "pooled_comparisons": [row.to_json() for row in self.pooled_comparisons],
            "pairs": [row.to_json() for row in self.pairs],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Report:
        """The report in a parsed report.json, of this version or an older one."""
        return cls(
            provenance=plain["provenance"],
            baseline=plain["baseline"],
            nearest=plain.get("nearest"),
            rows=[ReportRow.from_json(row) for row in plain["rows"]],
            comparisons=[Difference.from_json(row) for row in plain["comparisons"]],
            train_seeds=[RunsRow.from_json(row) for row in plain["train_seeds"]],
            pooled=[ReportRow.from_json(row) for row in plain.get("pooled", [])],
            pooled_comparisons=[Difference.from_json(row) for row in plain.get("pooled_comparisons", [])],
            pairs=[PairDifference.from_json(row) for row in plain.get("pairs", [])],
        )


def cell_to_json(cell: Cell) -> dict[str, Any]:
    """The fields that name a cell, flat, in the order of `CELL_KEYS`."""
    system = cell.system
    return {
        "model": system.model,
        "method": system.method,
        "label": system.label,
        "dataset": cell.dataset,
        "compression_factor": system.compression_factor,
        "decoding": system.decoding,
        "train_seed": system.train_seed,
    }


def cell_from_json(plain: Mapping[str, Any]) -> Cell:
    """The cell that a row of report.json, or a record, belongs to."""
    system = System(
        plain["model"],
        plain["method"],
        plain["label"],
        plain["compression_factor"],
        plain["decoding"],
        plain["train_seed"],
    )
    return Cell(system, plain["dataset"])


def datasets_of(rows: Iterable[ReportRow | Difference]) -> list[str]:
    """The datasets in `rows`, sorted, without the average."""
    return sorted({row.dataset for row in rows} - {AVERAGE})


def systems_of(rows: Iterable[ReportRow]) -> list[System]:
    """Each system in `rows` once, in their order."""
    return list(dict.fromkeys(row.system for row in rows))


def _numbers(row: ReportRow | Difference | RunsRow) -> dict[str, Any]:
    """The fields of a row but those that name its cell, in the order of the class."""
    # dataclasses.asdict would also take the system apart, and copy every list.
    names = [each.name for each in fields(row)]
    return {name: getattr(row, name) for name in names if name not in ("system", "dataset")}


# Identity and names of systems: a name is made from the fields that differ between the systems shown.
#
# A name is as short as it can be: `smollm2 colar c=2 (control-zeroed), run 1` is written `colar c=2` where there is
# one model and one training run. Nothing here knows a method by its name.

AVERAGE = "average"
"""The dataset of a macro-average row."""

CONTROL = "control-"
"""How the part of a label begins that marks a control (evaluation/controls.py)."""


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
