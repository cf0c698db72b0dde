"""lab/device.sh: its parts are bounded and do not stop each other, and every command in it is one that there is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from colar import cli, recipe
from colar.progress import duration

ROOT = Path(__file__).resolve().parent.parent

RECORDER = f"""#!{sys.executable} -S
import json, os, sys, time
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if "--check" in words:
    print(os.environ["CHECKED"])
if "lab/benchmarks/rollout.py" in words:
    sys.exit("no memory")
if "lab/benchmarks/sft.py" in words:
    time.sleep(float(os.environ["SFT_SECONDS"]))
if "--training.max_steps" in words:
    os.makedirs(words[words.index("--output") + 1] + "/best")
"""
"""A Python that writes down what it is to run: one part fails, one may take too long, and a run leaves a checkpoint."""


def checked() -> str:
    """What `colar train --check` prints of an update of 0.05 s (test_preflight.py has the rows of its table)."""
    table = Table("", "", "", title="tiny on 1 x cpu", title_justify="left", box=None)
    table.add_row("longest batch", duration(12), "8 rows")
    table.add_row("an update", duration(0.05), "mean of 10, after 3 others")
    with (console := Console(width=100)).capture() as printed:
        console.print(table)
    return printed.get()


def run(*words: str, **environment: str) -> tuple[int, str]:
    found = subprocess.run(
        ["bash", str(ROOT / "lab" / "device.sh"), *words],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("device", "sft_seconds", "sft"), [("cpu", "0", "sft: done"), ("cuda", "60", "sft: out of time after")]
)
def test_a_part_that_fails_or_takes_too_long_is_named_and_the_next_begins(
    device: str, sft_seconds: str, sft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, calls, out = tmp_path / "python", tmp_path / "calls.jsonl", tmp_path / "out"
    python.write_text(RECORDER)
    python.chmod(0o755)
    code, said = run(
        "MINUTES=1",
        f"OUT={out}",
        f"DEVICE={device}",
        f"PYTHON={python}",
        CALLS=str(calls),
        CHECKED=checked(),
        SFT_SECONDS=sft_seconds,
        TMPDIR=str(tmp_path),
    )
    assert code == 1
    assert said.splitlines() == (out / "summary.txt").read_text().splitlines()
    for text in ("generate: done", sft, "rollout: failed, exit code 1: no memory"):
        assert text in said
    assert "evaluate: done" in said
    assert (out / "best.tar.gz").exists()
    assert not list(tmp_path.glob("tmp*")), "its own folder is gone"
    commands = [json.loads(line) for line in calls.read_text().splitlines()]
    files = {words[0] for words in commands if words[0].startswith("lab/")}
    named = ("generate", "sft", "rollout", "serve", "profile_step", "shapes")
    assert files == {f"lab/benchmarks/{name}.py" for name in named}
    (trained,) = (words for words in commands if "--training.max_steps" in words)
    updates = int(trained[trained.index("--training.max_steps") + 1])
    assert updates == 4 if device == "cpu" else updates > 100
    for words in commands:
        check_words(words, monkeypatch)


def check_words(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the options be read by what they are for, which exits where it does not know them."""
    if words[:2] == ["-m", "colar.cli"] and words[2] == "train":
        rest = [word for word in words[4:] if word != "--check"]
        (stage,) = recipe.load_stages(words[3], rest, None)
        assert stage.recipe.data.source == "arithmetic"
    elif words[:2] == ["-m", "colar.cli"]:
        cli.build_parser(words[2]).parse_args(words[2:])
    elif words[0].startswith("lab/") and "shapes" not in words[0]:
        monkeypatch.syspath_prepend(ROOT / "lab" / "benchmarks")
        monkeypatch.setattr(sys, "argv", words)
        importlib.import_module(Path(words[0]).stem)._arguments()


def test_its_own_python_runs_on_a_cpu(tmp_path: Path) -> None:
    """No part is asked for: what a part runs, and with which options, is shown above."""
    code, said = run(f"OUT={tmp_path}", "DEVICE=cpu", f"PYTHON={sys.executable}", "PARTS= ")
    assert code == 0, said
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["versions"].keys() == {"colar", "torch", "transformers", "peft", "accelerate"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["MINUTE=3"], "unknown argument MINUTE=3"),
        (["PARTS=lane trian"], "no part is named trian"),
        (["DEVICE=mps"], "DEVICE must be cuda or cpu, got mps"),
    ],
)
def test_what_it_is_not_asked_for(words: list[str], wanted: str, tmp_path: Path) -> None:
    code, said = run(f"OUT={tmp_path}", *words)
    assert code == 2
    assert wanted in said
