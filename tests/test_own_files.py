"""A command that writes destroys nothing of the user's: it refuses, or leaves every file that it has not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from families import save_untrained

from colar import files
from colar.cli import main
from colar.data import sources

Taken = Callable[[Path], AbstractContextManager[None]]
QUICK = ["--max_latents", "2", "--max_completion_length", "2"]
ONE_UPDATE = [
    "--data.train_size", "8", "--data.validation_size", "0", "--training.max_steps", "1",
    "--training.report_to", "none",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("checkpoints") / "colar")


@pytest.fixture
def here(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user's files: rows in several places, and folders named as those of a run."""
    rows = [row.as_row() | {"mine": 1} for row in sources.load_examples("arithmetic", "train", limit=60)]
    files.write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    files.write_jsonl(
        tmp_path / "upstream" / "gsm8k" / "train.jsonl", [{"question": "1 + 1?", "answer": "1+1\n#### 2"}]
    )
    files.write_json(tmp_path / "q.json", rows[:4])
    files.write_jsonl(tmp_path / "q.html", rows[:4])
    files.write_text(tmp_path / "weights" / "best" / "notes.txt", "mine")
    for step in (1, 300):
        files.write_text(tmp_path / "states" / "checkpoints" / f"checkpoint-{step}" / "model.bin", "mine")
    files.write_text(tmp_path / "other" / "recipe.yaml", "mine")
    files.write_text(tmp_path / "logs" / "logs" / "mine.txt", "mine")
    files.write_text(tmp_path / "page" / "inspect.html", "mine")
    files.write_text(tmp_path / "zoo" / "checkpoints" / "my_model" / "w.bin", "mine")
    (tmp_path / "model").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


AUTO = "train auto --model tiny --check"
COMMANDS = [
    f"{AUTO} --data data --output .",
    f"{AUTO} --data data/train.jsonl --output .",
    f"{AUTO} --data q.json --test data/train.jsonl --output .",
    f"{AUTO} --data q.json --output other",
    f"{AUTO} --data data --output weights",
    "data prepare data --output data",
    "data prepare data/train.jsonl --limit 5 --output data",
    "data prepare gsm8k --splits train --data_dir upstream --output upstream/gsm8k",
    "inspect model --data q.json --output q.html",
    "inspect model --data q.json --output q.json",
    "train tiny/cot --output weights",
    "train tiny/cot --output states",
    "train tiny/cot --output weights --no_resume",
    "train tiny/cot --output states --no_resume",
    "train tiny/cot --output logs --no_resume",
    "train tiny/cot --output page",
    "train tiny/cot --output zoo --no_resume",
    "generate model --input q.json --output q.json",
    "export model weights",
    "evaluate model --data data/train.jsonl --limit 1 --output data",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_leaves_what_is_there(here: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(here)
    if "--output weights" in command:
        # One refusal leaves nothing behind that lets the next command pass.
        assert main([*AUTO.split(), "--data", "data", "--output", "weights"]) == 2
    words = command.split()
    more = (
        ONE_UPDATE
        if words[:2] == ["train", "tiny/cot"]
        else QUICK
        if words[0] in ("inspect", "generate", "evaluate")
        else []
    )
    code = main([*words, *more])
    after = contents(here)
    assert {name: after.get(name) for name in before} == before
    if words[0] != "evaluate":
        assert code == 2
        assert "error: " in capsys.readouterr().err


def test_a_run_of_the_api_resumes_in_its_own_folder(tmp_path: Path) -> None:
    """It has no recipe.json."""
    output = tmp_path / "run"
    words = ["train", "tiny/cot", "--output", str(output), "--training.save_steps", "1", *ONE_UPDATE]
    assert main(words) == 0
    # What tells it from another program's folder: its lock and, on a file system without locks, its whole states.
    for name in ("recipe.json", ".lock"):
        (output / name).unlink()
    words[words.index("--training.max_steps") + 1] = "2"
    assert main(words) == 0


def test_one_process_at_a_time_prepares_trains_and_measures_a_run_of_auto(
    here: Path, taken: Taken, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken(here / "run"):
        before = contents(here)
        assert main([*AUTO.split(), "--data", "data", "--output", "run"]) == 2
        assert "another process is writing to run" in capsys.readouterr().err
        assert contents(here) == before


def test_one_process_at_a_time_writes_a_file_of_answers(
    here: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fcntl = pytest.importorskip("fcntl")
    command = ["generate", "model", "--input", "q.json", "--output", "answers.jsonl", *QUICK]
    with open(here / ".answers.jsonl.lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert main(command) == 2
        assert "another process is writing to answers.jsonl" in capsys.readouterr().err
        # Another file of the folder is free.
        assert main([*command[:5], "others.jsonl", *QUICK]) == 0
    assert main(command) == 0
    assert len((here / "answers.jsonl").read_text().splitlines()) == len(
        json.loads((here / "q.json").read_text())
    )
