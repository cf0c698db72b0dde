"""Processes that work together: errors of one of them, folders that not all of them see, a process that is gone."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from launch import Group, Outcome, together
from torch import distributed
from torch.distributed.run import main as torchrun

from colar import processes
from colar.cli import main
from colar.data import sources
from colar.model import backbones
from colar.recipe.auto_run import AutoCall, prepared
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer


def exchange(folder: Path) -> dict[str, Any]:
    processes.join(120)
    state = PartialState()
    seen: dict[str, Any] = {
        "split": processes.split_and_gather("abcde", lambda share: [letter.upper() for letter in share]),
        # Fewer items than processes.
        "few": processes.split_and_gather("ab", list),
        "main": processes.from_main(lambda: state.process_index),
    }
    own = folder / f"disk{state.process_index // 2}"
    for path in (folder / "shared", own):
        path.mkdir(exist_ok=True)
    processes.require_shared(folder / "shared")
    tries = {
        "second": lambda: processes.split_and_gather("abcde", lambda share: refuse(share, "c")),
        "both": lambda: processes.split_and_gather("abcde", lambda share: refuse(share, "be")),
        # Of any kind: the others must not wait for a share that never comes.
        "disk": lambda: processes.split_and_gather("abcde", lambda share: refuse(share, "d", OSError)),
        "memory": lambda: processes.split_and_gather(
            "abcde", lambda share: refuse(share, "a", torch.OutOfMemoryError)
        ),
        "refused": lambda: processes.from_main(refuse_all),
        "apart": lambda: processes.require_shared(own),
    }
    for name, call in tries.items():
        try:
            call()
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
    processes.leave()
    return seen


def refuse(share: Any, wrong: str, kind: type[Exception] = ValueError) -> Any:
    for letter in share:
        if letter in wrong:
            raise kind(f"no {letter}")
        yield letter


def refuse_all() -> None:
    raise ValueError("no")


def test_what_processes_tell_each_other(tmp_path: Path) -> None:
    """Three processes, of which the third has a disk of its own."""
    found = together(3, tmp_path, exchange, tmp_path)
    for seen in found:
        assert (seen["split"], seen["few"], seen["main"]) == (list("ABCDE"), ["a", "b"], 0)
        assert seen["apart"][0] == "ValueError"
        assert "all machines of the run share" in seen["apart"][1]
    # The process that found it raises it; of two errors the first one counts.
    names = ("ValueError", "OtherProcessError")
    for name, kind, letter, place in (
        ("second", "ValueError", "c", 1), ("both", "ValueError", "b", 0),
        ("disk", "OSError", "d", 1), ("memory", "OutOfMemoryError", "a", 0),
    ):  # fmt: skip
        wanted = [(names[1], f"{kind}: no {letter}")] * 3
        wanted[place] = (kind, f"no {letter}")
        assert [seen[name] for seen in found] == wanted
    assert [seen["refused"][0] for seen in found] == [names[0], names[1], names[1]]


TORCHRUN = """
import gc, sys
from pathlib import Path
gc.disable()  # a fifth of the time of the imports
from accelerate import PartialState
from colar import processes
processes.join(120)
rank = PartialState().process_index
found = processes.split_and_gather("abc", lambda share: [letter.upper() for letter in share])
Path(sys.argv[1], f"rank{rank}").write_text("".join(found))
# As the command does. A group that nobody left may end its process by SIGABRT, one run in thirteen.
processes.leave()
"""


def write_and_read(folder: Path) -> list[str]:
    processes.join(120)
    rank = distributed.get_rank()
    made = backbones.load("tiny", seed=rank)
    backbones.write_folder(made.lm, made.tokenizer, folder / f"rank{rank}")
    # All have written before one reads: a process must not find another one's files in place of its own.
    distributed.barrier()
    read = backbones.load(str(folder / f"rank{rank}"))
    processes.leave()
    return [made.fingerprint, read.fingerprint]


def test_a_backbone_is_written_whole_by_any_of_them(tmp_path: Path) -> None:
    """The process that converts SmolLM2 is the one that takes the lock first."""
    for made, read in together(2, tmp_path, write_and_read, tmp_path):
        assert made == read


def test_torchrun_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own command: the processes of all other tests are started as torchrun does (launch.py)."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # It takes these signals for good.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        torchrun(["--standalone", "--nproc-per-node=2", str(script), str(tmp_path)])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["ABC", "ABC"]


def test_one_process_works_alone(tmp_path: Path) -> None:
    assert processes.split_and_gather("abc", list) == ["a", "b", "c"]
    processes.require_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no"):
        processes.from_main(refuse_all)


TRAIN = [
    "train", "tiny/cot", "--data.train_size", "64", "--data.validation_size", "4", "--training.report_to", "none",
    "--training.per_device_train_batch_size", "4", "--training.save_steps", "2", "--training.ddp_timeout", "120",
    "--validation.limits.max_latents", "4",
]  # fmt: skip


def colar(words: list[str], dies_at: int = 0, number: int = signal.SIGKILL) -> int:
    """The command in this process; process 1 gets a signal, or hangs where that is negative, in an update."""
    if os.environ["RANK"] == "1" and dies_at:
        whole = LatentTrainer.training_step
        left = [abs(dies_at)]

        def stopped(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and dies_at > 0:
                os.kill(os.getpid(), number)
            elif left[0] == 0:
                time.sleep(60)
            return whole(*arguments, **named)

        LatentTrainer.training_step = stopped  # type: ignore[method-assign]  # this process ends here
    return main(words)


def said(outcomes: list[Outcome]) -> list[str]:
    """The errors that a user sees, of all processes."""
    text = "".join(outcome.stderr for outcome in outcomes)
    return [line for line in text.splitlines() if line.startswith("colar ")]


def test_a_killed_process_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*TRAIN, "--output", str(tmp_path / "run")]
    outcomes = Group(2, tmp_path / "killed", colar, words, 6).wait()
    assert [outcome.code for outcome in outcomes] == [1, -9]
    (line,) = said(outcomes)
    assert line.startswith("colar train: error: process 0 stopped")
    assert line.endswith("the same command resumes")
    outcomes = Group(2, tmp_path / "resumed", colar, words).wait()
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes
    assert "resumes after update 4 of 8" in outcomes[0].stderr
    steps = [row["step"] for row in json.loads((tmp_path / "run" / "history.json").read_text())]
    assert max(steps) == 8

    # And the command that evaluates it. That its records are those of one process: tests/test_parallel_evaluation.py.
    folder = tmp_path / "evaluated"
    evaluate = ["evaluate", str(tmp_path / "run" / "best"), "--limit", "9", "--output", str(folder)]
    assert together(2, tmp_path / "group", colar, [*evaluate, "--max_latents", "4"]) == [0, 0]
    assert len((folder / "records.jsonl").read_text().splitlines()) == 9
    assert (folder / "report.md").exists()


def test_all_stop_at_the_update_in_which_one_gets_sigterm(tmp_path: Path) -> None:
    words = [*TRAIN, "--output", str(tmp_path / "run")]
    outcomes = Group(2, tmp_path / "stopped", colar, words, 3, signal.SIGTERM).wait()
    assert [outcome.code for outcome in outcomes] == [-signal.SIGTERM] * 2, outcomes
    text = "SIGTERM: update 3 is saved, and a run resumes from there"
    assert [text in outcome.stderr for outcome in outcomes] == [True, False]
    state = RunFolder(tmp_path / "run").last_resume_state()
    assert state is not None
    assert state.name == "checkpoint-3"


def test_a_process_that_hangs_is_one_line(tmp_path: Path) -> None:
    words = [*TRAIN, "--output", str(tmp_path / "run"), "--training.ddp_timeout", "10"]
    group = Group(2, tmp_path / "group", colar, words, -2)
    group.processes[0].join(60)
    group.processes[1].kill()
    outcomes = group.wait()
    assert outcomes[0].code == 1
    (line,) = said(outcomes)
    assert line.endswith("the same command resumes")


def seconds_waited(folder: Path) -> float:
    """The timeout of the group that `colar train auto` makes before it has a recipe."""
    rows = [row.as_row() for row in sources.load_examples("arithmetic", "train", limit=60)]
    with prepared(AutoCall("tiny", rows, folder), ["--stages.cot.training.ddp_timeout", "77"]):
        pass
    backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
    processes.leave()
    return backend.options._timeout.total_seconds()


def test_the_time_to_wait_is_that_of_the_call_before_there_is_a_recipe(tmp_path: Path) -> None:
    assert together(2, tmp_path / "group", seconds_waited, tmp_path / "run") == [77, 77]


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    """Of the process that finds it: the main one, whose folder is taken, and both, whose recipe is wrong."""
    (tmp_path / "taken").mkdir()
    with open(tmp_path / "taken" / ".lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        words = [*TRAIN, "--output", str(tmp_path / "taken")]
        outcomes = Group(2, tmp_path / "one", colar, words).wait()
    (line,) = said(outcomes)
    assert "another process is writing to" in line
    assert [outcome.code for outcome in outcomes] == [2, 1]
    wrong = [*TRAIN, "--output", str(tmp_path / "run"), "--data.source", "no.jsonl"]
    outcomes = Group(2, tmp_path / "both", colar, wrong).wait()
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert len(said(outcomes)) == 2
    assert "Traceback" not in outcomes[0].stderr
