"""Tables of the benchmarks: the JSON of one benchmark -> a table that `write_tables.py` puts into a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation.tables import BLANK, TextTable

Cells = Mapping[str, Mapping[str, Any]]

THINKING = {
    "hf-cot": "transformers `generate`, CoT",
    "published": "latent loop as published, c = 5",
    "colar5-eager": "ours, Gaussian, c = 5",
    "colar5": "the same, compiled",
    "cot": "ours, CoT, compiled",
    "colar2": "ours, Gaussian, c = 2, compiled",
    "sequential2": "ours, sequential, c = 2, compiled",
    "sequential2-shortlist": "the same with a shortlist",
    "sequential5": "ours, sequential, c = 5, compiled",
    "sequential5-shortlist": "the same with a shortlist",
}
"""Systems without "-eager" were compiled, which the engine did at commit c901c920 and before."""
RATIOS = {
    "questions/s, Gaussian at c = 5 / `generate`, 32 rows, the data's lengths": (
        "seconds", "b32/mixed", "hf-cot", "colar5-eager"
    ),
    "the same, 1 row, equal lengths": ("seconds", "b1/100", "hf-cot", "colar5-eager"),
    "questions/s, Gaussian at c = 5 / published loop, 32 rows": (
        "seconds", "b32/mixed", "published", "colar5-eager"
    ),
    "compiled: questions/s, our CoT / `generate`, 32 rows, equal lengths": ("seconds", "b32/100", "hf-cot", "cot"),
    "compiled: thinking, sequential at c = 2 / our CoT, 32 rows": (
        "thinking_seconds", "b32/100", "cot", "sequential2"
    ),
    "compiled: thinking, sequential at c = 5 / our CoT, 32 rows": (
        "thinking_seconds", "b32/100", "cot", "sequential5"
    ),
    "compiled: the same with a shortlist": ("thinking_seconds", "b32/100", "cot", "sequential5-shortlist"),
    "compiled: ms a step, sequential / Gaussian, c = 2": ("ms_per_step", "b32/100", "sequential2", "colar2"),
    "compiled: ms a step, sequential / Gaussian, c = 5": ("ms_per_step", "b32/100", "sequential5", "colar5"),
}  # fmt: skip
"""Name -> a quantity in a cell, of the one system over the other."""
SERVERS = {
    "colar5": "`colar serve`, c = 5",
    "colar5-hidden": "the same, thoughts not read",
    "engine": "its engine without HTTP",
    "cot": "`colar serve`, CoT",
    "transformers": "`transformers serve`, CoT",
    "llama-cpp": "llama.cpp's server, CoT",
}
ROLLOUTS = {
    "published": "as published",
    "rescored": "ours, with a second forward pass for log-probs",
    "ours": "ours",
    "merged": "ours with `merge_adapter`",
}
TRAINING = {
    "trainer": "transformers' `Trainer`, CoT",
    "cot": "ours, CoT",
    "colar-1": "ours, CoLaR c = 1",
    "colar-2": "ours, CoLaR c = 2",
    "colar-5": "ours, CoLaR c = 5",
}
PEAKS = {
    "loss/3072": "cross-entropy of 3,072 labels, V = 128,256",
    "loss/37035": "cross-entropy of 37,035 labels, V = 128,256",
    "score/1024": "GRPO's log-probs of 1,024 actions, V = 128,256",
    "slice/cot": "an update of two random layers, V = 128,256, 1,600 labels",
    "smollm2/cot": "an update of SmolLM2-135M, V = 49,152",
}
ENGINES = {
    "llama.cpp": "llama.cpp, CoT",
    "cot": "ours, CoT, compiled",
    "colar5": "ours, CoLaR at c = 5, compiled",
}
ONE_ROW = {
    "llama.cpp": "llama.cpp, bfloat16",
    "llama.cpp-q8": "llama.cpp, Q8_0",
    "llama.cpp-q4": "llama.cpp, Q4_1",
    "cot-eager": "ours, bfloat16",
    "cot-int8-eager": "ours, int8",
    "cot-int4-eager": "ours, int4",
}
QUANTISED = {
    "cot-float32-eager": ("float32", ""),
    "cot-eager": ("bfloat16", "bfloat16"),
    "cot-int8-eager": ("int8", "int8"),
    "cot-int4-eager": ("int4", "int4"),
}
"""System of the benchmark of thinking -> its weights, and the label of their answers in results/smollm2/weights."""
RUNS = {"sft": "SFT", "grpo": "GRPO", "evaluation": "evaluation"}


def digits(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return BLANK
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def report(folder: Path, name: str = "report") -> dict[str, Any]:
    found: dict[str, Any] = files.read_json(folder / f"{name}.json")
    return found


def thinking(folder: Path) -> TextTable:
    """Questions per second and the time of a step, on both machines."""
    cells, amx = report(folder)["cells"], report(folder, "report-amx")["cells"]
    body = []
    for system, name in THINKING.items():
        here, there = cells[system], amx[system]
        line = [name]
        for cell in ("b1/100", "b32/100"):
            line += [digits(here[cell]["questions_per_second"]), digits(here[cell]["ms_per_step"])]
        mixed = here.get("b32/mixed", {}).get("questions_per_second")
        body.append([*line, digits(mixed), digits(there["b32/100"]["questions_per_second"])])
    head = ["system", "1 row: questions/s", "ms a step", "32 rows: questions/s", "ms a step"]
    return TextTable(
        "", [*head, "32 rows, the data's lengths: questions/s", "32 rows, AMX: questions/s"], body
    )


def ratios(folder: Path) -> TextTable:
    """The ratios that the page is about, on both machines."""
    machines = [report(folder)["cells"], report(folder, "report-amx")["cells"]]
    body = []
    for name, (quantity, cell, one, other) in RATIOS.items():
        quotients = [cells[one][cell][quantity] / cells[other][cell][quantity] for cells in machines]
        body.append([name, *map(digits, quotients)])
    return TextTable("", ["ratio", "AVX-512", "AMX"], body)


def answers(folder: Path) -> TextTable:
    """Answers per second over HTTP, and how long a client waits."""
    cells = report(folder)["cells"]
    body = []
    for system, name in SERVERS.items():
        one, many = cells[system]["clients/1"], cells[system]["clients/32"]
        line = [name, digits(one["answers_per_second"]), digits(one["answer_p50_seconds"])]
        line += [digits(many["answers_per_second"]), digits(many["answer_p50_seconds"])]
        body.append([*line, digits(many["answer_p95_seconds"])])
    return TextTable(
        "", ["", "1 client: answers/s", "median, s", "32 clients: answers/s", "median, s", "95%, s"], body
    )


def times(folder: Path) -> TextTable:
    """Time per question over c and the threshold, and its share of CoT's; then of other weights, timed later."""
    body = []
    for name, weights in (("report", ""), ("report_rl", ", after GRPO")):
        if (folder / f"{name}.json").exists():
            body += _times(report(folder, name)["cells"], weights)
    head = [
        "system",
        "ms a question, alone",
        "32 at a time",
        "share of CoT's, alone",
        "32 at a time",
        "thoughts",
    ]
    return TextTable("", head, body)


def _times(cells: Cells, weights: str) -> list[list[str]]:
    systems = list(dict.fromkeys(cell.rpartition("/")[0] for cell in cells))
    thresholds = {system.partition("/")[2] for system in systems} - {"", "0"}
    # A page shows no threshold and the first from 0.7 on: those above it take as long. The JSON has all.
    shown = min((text for text in thresholds if float(text) >= 0.7), key=float, default="0")
    body = []
    for system in systems:
        factor, _, threshold = system.partition("/")
        if threshold not in ("", "0", shown):
            continue
        name = "CoT" if factor == "cot" else f"{factor.replace('=', ' = ')}{weights}"
        if threshold not in ("", "0"):
            name += f", threshold {threshold}"
        for kind, more in (("b1", ""), ("votes8", ", eight draws")):
            alone, many = cells.get(f"{system}/{kind}"), cells.get(f"{system}/b32")
            if alone is None:
                continue
            line = [f"{name}{more}", digits(alone["ms"])]
            if more:
                body.append([*line, BLANK, _share(alone, cells["cot/b1"]), BLANK, digits(alone["thoughts"])])
            elif many is not None:
                shares = [_share(alone, cells["cot/b1"]), _share(many, cells["cot/b32"])]
                body.append([*line, digits(many["ms"]), *shares, digits(many["thoughts"])])
    return body


def _share(cell: Mapping[str, Any], of: Mapping[str, Any]) -> str:
    return f"{100 * cell['ms'] / of['ms']:.0f}%"


def completions(folder: Path) -> TextTable:
    """Completions per second of a rollout, and the share of a training step that it takes."""
    cells = report(folder)["cells"]
    body = []
    for system, name in ROLLOUTS.items():
        line = [name]
        for factor in ("c=2", "c=5"):
            cell, published = cells[system][factor], cells["published"][factor]
            line += [digits(cell["completions_per_second"]), digits(published["seconds"] / cell["seconds"])]
            line.append(f"{100 * cell['rollout_share']:.0f}%")
        body.append(line)
    head = ["", "c = 2: completions/s", "x published", "share of a step"]
    return TextTable("", [*head, "c = 5: completions/s", "x published", "share of a step"], body)


def rows(folder: Path) -> TextTable:
    """Rows per second of SFT."""
    systems = report(folder)["systems"]
    body = []
    for system, name in TRAINING.items():
        cell, trainer = systems[system], systems["trainer"]
        line = [name, digits(cell["rows_per_second"])]
        line.append(digits(cell["rows_per_second"] / trainer["rows_per_second"]))
        body.append([*line, digits(cell["fed_per_row"]), digits(cell["peak_memory_gib"])])
    return TextTable("", ["", "rows/s", "x `Trainer`", "fed per row", "peak, GiB"], body)


def peaks(folder: Path) -> TextTable:
    """The most that a step's tensors took at one time, in GiB."""
    found = report(folder)
    cells, longest = found["cells"], found["before_at_longest"]
    body = []
    for work, name in PEAKS.items():
        line = [name]
        for way in ("before", "ours", "parts", "torch"):
            peak = cells.get(f"{way}:{work}", {}).get("peak_gib")
            line.append(digits(peak))
        if work == f"loss/{longest['labels']}":
            line[1] = f"{digits(longest['computed_gib'])} (computed)"
        body.append(line)
    return TextTable("", ["peak, GiB", "all logits at once", "ours", "in parts", "torch's chunks"], body)


def kills(folder: Path) -> TextTable:
    """Runs of which one process was killed at random."""
    body = []
    for row in report(folder)["rows"]:
        waited = [kill["survivor_ended_after_seconds"] for kill in row["kills"]]
        waited.sort()
        middle = (waited[(len(waited) - 1) // 2] + waited[len(waited) // 2]) / 2
        line = [RUNS[row["run"]], digits(row["seconds_without_a_kill"]), f"{len(waited)}", digits(middle)]
        body.append([*line, digits(waited[-1]), "yes" if row["same_result"] else "no"])
    head = ["run", "seconds without a kill", "kills", "median seconds until the other ends", "longest"]
    return TextTable("", [*head, "same result"], body)


def cluster_kills(folder: Path) -> TextTable:
    """Runs on a Ray cluster in which something was killed at random."""
    body = []
    found = report(folder, "kills")["rows"]
    for kind in ("actor", "machine", "driver"):
        kills = [row for row in found if row["killed"] == kind]
        runs = sum(kill["runs"] == 1 for kill in kills)
        wrong = (sum(kill[name] for kill in kills) for name in ("missing", "twice", "different", "torn"))
        body.append([kind, f"{len(kills)}", f"{runs}", *(f"{n}" for n in wrong)])
    head = ["killed", "kills", "went on", "rows missing", "twice", "different", "torn files"]
    return TextTable("", head, body)


def engines(folder: Path) -> TextTable:
    """Beside llama.cpp."""
    cells = report(folder)["cells"]
    body = []
    for system, name in ENGINES.items():
        line = [name]
        for cell in ("b1/100", "b32/100"):
            found = cells[system][cell]
            line += [digits(found["questions_per_second"]), digits(found["ms_per_step"])]
        body.append(line)
    return TextTable("", ["", "1 row: questions/s", "ms a step", "32 rows: questions/s", "ms a step"], body)


def one_row(folder: Path) -> TextTable:
    """Beside llama.cpp, in weights of fewer bits."""
    cells = report(folder, "report-quantised")["cells"]
    body = []
    for system, name in ONE_ROW.items():
        found = cells[system]["b1/100"]
        body.append([name, digits(found["questions_per_second"]), digits(found["ms_per_step"])])
    return TextTable("", ["CoT, 1 row", "questions/s", "ms a step"], body)


def quantised(folder: Path) -> TextTable:
    """CPU time of a step, and accuracy."""
    cells = report(folder, "report-weights")["cells"]
    answered = report(folder.parents[1] / "smollm2" / "weights")
    right = {
        (row["label"], row["params"]["compression_factor"]): f"{100 * row['accuracy']:.1f}"
        for row in answered["rows"]
        if row["dataset"] != "average"
    }
    for row in answered["pairs"]:
        if row["dataset"] != "average":
            interval = f"{100 * row['difference']:+.1f} ± {196 * row['se']:.1f}"
            right[row["label"], row["params"]["compression_factor"]] += f" ({interval})"
    body = []
    for system, (name, label) in QUANTISED.items():
        line = [name, *(digits(cells[system][cell]["cpu_ms_per_step"]) for cell in ("b1/25", "b32/25"))]
        body.append([*line, *(right.get((label, factor), BLANK) for factor in (1, 2))])
    head = ["weights", "1 row: CPU ms a step", "32 rows", "accuracy, c = 1", "c = 2"]
    return TextTable("", head, body)


TABLES: dict[str, Callable[[Path], TextTable]] = {
    "thinking": thinking,
    "ratios": ratios,
    "answers": answers,
    "times": times,
    "completions": completions,
    "rows": rows,
    "peaks": peaks,
    "kills": kills,
    "cluster_kills": cluster_kills,
    "engines": engines,
    "one_row": one_row,
    "quantised": quantised,
}
