"""lab/device.sh: its parts are bounded and do not stop each other, and every command in it is one that there is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from colar import cli, recipe

ROOT = Path(__file__).resolve().parent.parent

RECORDER = f"""#!{sys.executable} -S
import json, os, sys, time
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if "--check" in words:
    print(" an update   0.05 s   median of 10")
if "lab/benchmarks/rollout.py" in words:
    sys.exit("no memory")
if "lab/benchmarks/sft.py" in words:
    time.sleep(60)
if "--training.max_steps" in words:
    os.makedirs(words[words.index("--output") + 1] + "/best")
"""
"""A Python that writes down what it is to run: one part fails, one takes too long, and a run leaves a checkpoint."""


def run(*words: str, **environment: str) -> tuple[int, str]:
    found = subprocess.run(
        ["bash", str(ROOT / "lab" / "device.sh"), *words],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_part_that_fails_or_takes_too_long_is_named_and_the_next_begins(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        TMPDIR=str(tmp_path),
    )
    assert code == 1
    assert said.splitlines() == (out / "summary.txt").read_text().splitlines()
    for text in ("generate: done", "sft: out of time after", "rollout: failed, exit code 1: no memory"):
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


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    code, said = run(
        *("MINUTES=4", f"OUT={tmp_path}", "DEVICE=cpu", f"PYTHON={sys.executable}", "PARTS=check"),
        OMP_NUM_THREADS="1",
    )
    assert code == 0, said
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["versions"].keys() == {"colar", "torch", "transformers", "peft", "accelerate"}
    assert "an update" in (tmp_path / "check.log").read_text()


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
