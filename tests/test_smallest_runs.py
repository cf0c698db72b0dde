"""Every file of lab/benchmarks, lab/scripts and scripts runs, at its smallest setting, to its end.

Each runs as `python FILE ...` would, in a process that is forked from the tests' server (launch.py), in a copy of the
project: some write its pages. What a script computes is tested elsewhere (test_scripts.py and others).
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from families import tiny_lm
from launch import alone, run_file
from serving import running, serve_model

from colar import cli, files, recipe
from colar.data import sources
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs", "results", "scripts", "lab", "constraints.txt")
"""What is copied; the rest of the project is linked."""

BENCH = "--here --rounds 1 --threads 1 --output {out}"
TINY = f"--backbone tiny --source {{rows}} {BENCH}"
SMALLEST: dict[str, Sequence[str]] = {
    "lab/benchmarks/generate.py": [
        f"{TINY} --cells b1/25 --systems cot sequential5-shortlist colar5-graphs hf-cot-static published"
    ],
    "lab/benchmarks/llama_cpp.py": [f"{TINY} --cells b1/100 --systems cot"],
    "lab/benchmarks/memory.py": [
        f"{TINY} --rows 2 --pool 8 --systems before:smollm2/cot ours:smollm2/cot parts:smollm2/cot"
    ],
    "lab/benchmarks/profile_step.py": [
        f"--backbone tiny --source {{rows}} --work {work} --method cot --how {how} --rows 2 --threads 1 --output {{out}}"
        for work, how in (("decode", "graphs"), ("update", "eager"))
    ],
    "lab/benchmarks/serve.py": [f"{TINY} --systems engine --clients 1 2 --seconds 0.1"],
    "lab/benchmarks/sft.py": [f"{TINY} --rows 2 --batch-size 2 --systems trainer colar-5"],
    "lab/benchmarks/shapes.py": ["small {out}"],
    "lab/benchmarks/soak.py": ["--requests 30 --output {out}"],
    "scripts/golden.py": [
        "{out}.json --families gpt2 --variants colar",
        "--compare {out}.json {out}.json",
    ],
    "lab/scripts/grpo_report.py": ["{reinforced} --seeds 0 --output {out}"],
    "lab/scripts/rank_thoughts.py": [
        "m={sequential} --limit 2 --compression_factor 2 --max_latents 3 --max_completion_length 2 --output {out}.json"
    ],
    "lab/scripts/rejudge.py": ["{records}"],
    "lab/scripts/speed_tables.py": [""],
    "scripts/pictures.py": ["{out} --serve {url} --inspect {page}"],
    "scripts/write_cli_docs.py": [""],
    "lab/scripts/write_tables.py": [""],
}
"""File -> the arguments of each run, with names of `world` and {out}, a place that is not there yet."""
IN_THIS_PROCESS = {"lab/benchmarks/kill.py": "--kills 0 --runs 1 --rows 8 --work {out}/runs --output {out}"}
"""Those that start processes of their own, which a forked one may not."""
ELSEWHERE = {
    "lab/benchmarks/cluster.py": "ray",
    "lab/benchmarks/cluster_driver.py": "ray_serve",
    "lab/benchmarks/cluster_serve.py": "ray_serve",
    "lab/benchmarks/gates.py": "scripts",
    "lab/benchmarks/rollout.py": "scripts",
    "lab/scripts/figures.py": "figures",
    "lab/scripts/grpo_stability.py": "scripts",
    "lab/scripts/left_out.py": "scripts",
    "lab/scripts/other_numbers.py": "scripts",
    "lab/scripts/renumber_rows.py": "scripts",
    "lab/scripts/toy_backbones.py": "scripts",
    "lab/scripts/updates_in.py": "scripts",
    "scripts/draw_idea.py": "docs",
    "scripts/train_tiny_tokenizers.py": "scripts",
    "scripts/install.py": "install",  # it makes an environment, as `make test` does itself
}
"""File -> the tests that run it whole and read what it writes."""
IMPORTED = {"loss_parts": "memory", "servers": "serve", "shared": "generate", "work": "generate"}
"""Files of lab/benchmarks that do nothing by themselves -> one with a smallest run that imports each."""
BROWSER = ("scripts/pictures.py",)
PRINTS_A_FAILURE = {"lab/benchmarks/soak.py"}
"""Exit code 1 where a verdict is bad, and with few requests not every kind of fault happens."""


def write_published(folder: Path) -> None:
    """Data sets in the places and formats in which they are published, a few generated rows each."""
    rows = sources.load_examples("arithmetic", "test", limit=4)
    texts = [f"{row.question}||{' '.join(row.steps)} #### {row.answer}" for row in rows]
    files.write_text(folder / "gsm8k_aug" / "test.txt", "\n".join(texts))
    hard = [{"input": row.question, "target": int(row.answer) + 1} for row in rows]
    files.write_jsonl(folder / "gsm_hard" / "gsmhardv2.jsonl", hard)
    arith = [{"sQuestion": row.question, "lSolutions": [float(row.answer)]} for row in rows]
    files.write_json(folder / "multiarith" / "MultiArith.json", arith)


def record(dataset: str, question: str, correct: bool, factor: int = 2) -> dict[str, object]:
    """An answer as `colar evaluate` writes it."""
    return {
        "model": "m", "method": "colar", "label": "", "dataset": dataset, "params": {"compression_factor": factor}, "seed": 0,
        "decoding": "greedy", "train_seed": 0, "id": question, "completion": "7", "parsed": "7", "correct": correct,
        "truncated": False, "length": 4, "gold_length": 4 * factor, "forward_passes": 9, "seconds": 0.5,
    }  # fmt: skip


def write_records(folder: Path) -> Path:
    """Answers of one system to the published questions at two speeds, and their report."""
    rows = []
    for name in ("gsm8k-aug", "gsm-hard", "multiarith"):
        for factor in (1, 2):
            for i, example in enumerate(sources.load_examples(name, "test")):
                rows.append(record(name, example.id, i % 2 == 0, factor))
    files.write_jsonl(folder / "records.jsonl", rows)
    assert cli.main(["report", str(folder / "records.jsonl"), "--output", str(folder)]) == 0
    (folder / "records.jsonl.gz").write_bytes(gzip.compress((folder / "records.jsonl").read_bytes()))
    (folder / "records.jsonl").unlink()
    return folder


def write_reinforced(folder: Path, run: Path) -> None:
    """Two runs as lab/reproduce/table2.sh leaves them: their histories, their last states, and their answers."""
    logged = {"reward": 0.5, "latents/mean_length": 4.0, "frac_reward_zero_std": 0.5, "latents/sigma": 0.1, "clip_ratio/region_mean": 0.0,
              "grad_norm": 1.0, "sampling/logp_difference": 0.0}  # fmt: skip
    tested = {"eval_accuracy": 0.5, "eval_length": 4.0}
    for name in ("nll-0", "rl-0"):
        shutil.copytree(run / "checkpoints", folder / name / "checkpoints")
        files.write_json(
            folder / name / "history.json", [{"step": 1, **logged}, {"step": 2, **logged, **tested}]
        )
        rows = [record("sums", str(i), name == "rl-0" or i == 0) for i in range(2)]
        files.write_jsonl(folder / "test" / name / "records.jsonl", rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What the files are given, by name; {project} is the copy in which they run."""
    folder = tmp_path_factory.mktemp("world")
    project = folder / "project"
    project.mkdir()
    for path in ROOT.iterdir():
        if path.name in PAGES and path.is_dir():
            shutil.copytree(
                path, project / path.name, ignore=shutil.ignore_patterns("*.png", "*.svg", "__pycache__")
            )
        elif path.name in PAGES:
            shutil.copyfile(path, project / path.name)
        elif path.name in ("src", "tests"):
            (project / path.name).symlink_to(path)
    for name, config in (("cot", {}), ("sequential", {"confidence_thresholds": [0, 0.5]})):
        lm, method = LatentLM.from_backbone(backbones.load("tiny")), registry.build(name, config)
        pretrained.attach(lm, method, 0)
        method.prepare(lm, [])
        pretrained.save(lm, method, folder / name, {"seed": 0, "label": ""}, "card")
    sources.prepare("arithmetic", sources.splits_of("arithmetic"), folder / "rows", limit=24)
    path = folder / "arena" / "recipe.yaml"
    files.write_text(
        path,
        f"output: {folder / 'arena' / 'seed0' / 'colar'}\n"
        f"data: {{source: {folder / 'rows'}, train_size: 8, validation_size: 2}}\n"
        "method: {name: colar}\n"
        "training: {max_steps: 2, per_device_train_batch_size: 4, save_steps: 2}\n"
        "validation: {page_size: 0, params: [{compression_factor: 2}], limits: {max_latents: 4, max_completion_length: 3}}\n",
    )
    run = recipe.run(recipe.load(path)).best.parent
    write_published(folder / "published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAR_DATA_DIR", str(folder / "published"))
        write_records(folder / "records")
    write_reinforced(folder / "reinforced", run)
    page = [
        "inspect",
        str(run / "best"),
        "--limit",
        "2",
        "--max_latents",
        "4",
        "--output",
        str(folder / "page.html"),
    ]
    assert cli.main(page) == 0
    # A random model hardly ever stops: the picture of the page shows a thought of each chain.
    lm, method = tiny_lm("llama"), registry.build("colar", {})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    with running(serve_model("colar", (lm, method))) as live:
        yield {
            "project": project, "cot": folder / "cot", "sequential": folder / "sequential", "rows": folder / "rows", "run": run,
            "recipe": path, "published": folder / "published", "records": folder / "records",
            "reinforced": folder / "reinforced", "page": folder / "page.html", "url": live.url,
        }  # fmt: skip


def given(text: str, world: dict[str, object], out: Path) -> list[str]:
    return [word.format(**world, out=out) for word in text.split()]


def found() -> list[str]:
    """Every file of these folders."""
    return [
        f"{folder}/{path.name}"
        for folder in ("lab/benchmarks", "lab/scripts", "scripts")
        for path in sorted((ROOT / folder).glob("*.py"))
    ]


def test_every_file_has_a_smallest_run():
    imported = [f"lab/benchmarks/{name}.py" for name in IMPORTED]
    assert found() == sorted([*SMALLEST, *IN_THIS_PROCESS, *ELSEWHERE, *imported])
    for name, importer in IMPORTED.items():
        path = f"lab/benchmarks/{importer}.py"
        assert path in SMALLEST
        assert re.search(rf"^(import|from) {name}\b", (ROOT / path).read_text(), re.MULTILINE), name
    for path, name in ELSEWHERE.items():
        assert Path(path).stem in Path(__file__).with_name(f"test_{name}.py").read_text(), path


@pytest.mark.parametrize("path", SMALLEST)
def test_it_runs(path, world, tmp_path):
    if path in BROWSER:
        importlib.import_module("browser")  # skips where there is none
    out = tmp_path / "out"
    for text in SMALLEST[path]:
        words = [str(world["project"] / path), *given(text, world, out)]
        # To compile takes a minute, and gives the same numbers.
        environment = {"COLAR_DATA_DIR": str(world["published"]), "TORCH_COMPILE_DISABLE": "1"}
        done = alone(tmp_path / "process", run_file, words, environment)
        assert done.code == 0 or path in PRINTS_A_FAILURE, done.stderr
    if path.startswith("lab/benchmarks") and "--output" in SMALLEST[path][0]:
        names = [each.name for each in out.glob("*.json")]
        assert names, "no report"


@pytest.mark.parametrize("path", IN_THIS_PROCESS)
def test_it_runs_here(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path, *given(IN_THIS_PROCESS[path], {}, tmp_path / "out")])
    # The processes that it starts import it by name.
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    made = importlib.import_module(Path(path).stem)
    assert made.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["good"]
