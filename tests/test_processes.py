"""Processes that work together: what they tell each other, folders that not all of them see, what ends them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Group, Outcome, together

from colar import processes
from colar.cli import main
from colar.training.trainer import LatentTrainer


def exchange(folder: Path) -> dict[str, Any]:
    processes.join(120)
    seen = {
        "size": processes.size(),
        "mine": list(processes.mine("abcde")),
        "split": processes.split("abcde", lambda share: [letter.upper() for letter in share]),
        "main": processes.from_main(lambda: processes.rank()),
        "first": processes.everyones(processes.first_to_say()),
    }
    for name, wrong in (("second", "d"), ("both", "bc")):
        try:
            processes.split("abcde", lambda share, wrong=wrong: refuse(share, wrong))
        except (ValueError, processes.OtherProcessError) as error:
            seen[name] = (type(error).__name__, str(error))
    try:
        processes.from_main(lambda: refuse_all())
    except (ValueError, processes.OtherProcessError) as error:
        seen["refused"] = (type(error).__name__, str(error))
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    own = folder / f"disk{processes.rank() // 2}"
    own.mkdir(exist_ok=True)
    if processes.is_main():
        (own / "weights").write_bytes(bytes(range(256)) * 10)
        (own / "empty").write_bytes(b"")
    processes.PIECE = 1000
    owner = processes.owns(own)
    seen["owns"] = (processes.owns(shared), owner)
    processes.mirror(own, owner)
    processes.wait()
    seen["files"] = {path.name: path.read_bytes() for path in own.iterdir()}
    processes.leave()
    return seen


def refuse(share: Any, wrong: str) -> Any:
    for letter in share:
        if letter in wrong:
            raise ValueError(f"no {letter}")
        yield letter


def refuse_all() -> None:
    raise ValueError("no")


def test_what_processes_tell_each_other(tmp_path: Path) -> None:
    """Three processes, of which the third has a disk of its own."""
    found = together(3, tmp_path, exchange, tmp_path)
    assert [seen["mine"] for seen in found] == [["a", "d"], ["b", "e"], ["c"]]
    for seen in found:
        assert (seen["size"], seen["split"], seen["main"]) == (3, list("ABCDE"), 0)
        assert sorted(seen["first"]) == [False, False, True]
        assert seen["files"] == {"weights": bytes(range(256)) * 10, "empty": b""}
    # Who found it raises it; of two the first one counts.
    names = ("ValueError", "OtherProcessError")
    assert [seen["second"] for seen in found] == [(names[0], "no d"), (names[1], "no d"), (names[1], "no d")]
    assert [seen["both"] for seen in found] == [(names[1], "no b"), (names[0], "no b"), (names[1], "no b")]
    assert [seen["refused"][0] for seen in found] == [names[0], names[1], names[1]]
    assert [seen["owns"] for seen in found] == [(True, True), (False, False), (False, True)]


def test_alone_there_is_nobody_to_ask(tmp_path: Path) -> None:
    assert (processes.size(), processes.rank(), processes.first_to_say()) == (1, 0, True)
    assert processes.split("abc", list) == ["a", "b", "c"]
    assert processes.everyones(1) == [1]
    assert processes.owns(tmp_path)
    processes.mirror(tmp_path, True)
    with pytest.raises(ValueError, match="no"):
        processes.from_main(refuse_all)
    assert not processes.is_lost(RuntimeError("[gloo] Connection closed by peer"))


def meet(hangs: bool) -> str:
    processes.join(10)
    processes.wait()
    if processes.rank() == 1 and hangs:
        time.sleep(60)
    if processes.rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        processes.wait()
    except RuntimeError as error:
        return processes.explain(error) if processes.is_lost(error) else "another error"
    return "met"


@pytest.mark.parametrize(
    ("hangs", "words"), [(False, "lost another one"), (True, "waited for another one in vain")]
)
def test_who_is_gone_or_hangs_ends_the_others(tmp_path: Path, hangs: bool, words: str) -> None:
    group = Group(2, tmp_path, meet, hangs)
    group.processes[0].join(60)
    if hangs:
        group.processes[1].kill()
    first, second = group.wait()
    assert (first.code, second.code) == (0, -9), first.stderr
    assert words in first.value


TRAIN = [
    "train", "tiny/cot", "--data.train_size", "64", "--data.validation_size", "4", "--training.report_to", "none",
    "--training.per_device_train_batch_size", "4", "--training.save_steps", "2", "--training.ddp_timeout", "120",
    "--validation.limits.max_latents", "4",
]  # fmt: skip


def colar(words: list[str], dies_at: int = 0) -> int:
    """The command in this process; process 1 is killed, or hangs where that is negative, in an update."""
    if os.environ["RANK"] == "1" and dies_at:
        whole = LatentTrainer.training_step
        left = [abs(dies_at)]

        def stopped(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and dies_at > 0:
                os.kill(os.getpid(), 9)
            if left[0] == 0:
                time.sleep(60)
            return whole(*arguments, **named)

        LatentTrainer.training_step = stopped  # type: ignore[method-assign]  # this process ends here
    return main(words)


def said(outcomes: list[Outcome]) -> list[str]:
    """The errors that a user sees, of all processes."""
    text = "".join(outcome.stderr for outcome in outcomes)
    assert "Traceback" not in text
    return [line for line in text.splitlines() if "error" in line]


def test_a_killed_process_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*TRAIN, "--output", str(tmp_path / "run")]
    outcomes = Group(2, tmp_path / "killed", colar, words, 6).wait()
    assert [outcome.code for outcome in outcomes] == [1, -9]
    (line,) = said(outcomes)
    assert line.startswith("colar train: error: process 0 of 2 lost another one")
    assert line.endswith("the same command resumes")
    outcomes = Group(2, tmp_path / "resumed", colar, words).wait()
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes
    steps = [row["step"] for row in json.loads((tmp_path / "run" / "history.json").read_text())]
    assert max(steps) == 8

    # And the command that evaluates it, by two processes and by one.
    for n in (2, 1):
        evaluate = [
            "evaluate",
            str(tmp_path / "run" / "best"),
            "--limit",
            "9",
            "--output",
            str(tmp_path / str(n)),
        ]
        assert together(n, tmp_path / f"group{n}", colar, [*evaluate, "--max_latents", "4"]) == [0] * n
    records = [(tmp_path / str(n) / "records.jsonl").read_text().splitlines() for n in (2, 1)]
    assert len(records[0]) == 9
    two, one = ([{**json.loads(line), "seconds": 0} for line in lines] for lines in records)
    assert two == one
    assert (tmp_path / "2" / "report.md").exists()


def test_a_process_that_hangs_is_one_line(tmp_path: Path) -> None:
    words = [*TRAIN, "--output", str(tmp_path / "run"), "--training.ddp_timeout", "10"]
    group = Group(2, tmp_path / "group", colar, words, -2)
    group.processes[0].join(60)
    group.processes[1].kill()
    outcomes = group.wait()
    assert outcomes[0].code == 1
    (line,) = said(outcomes)
    assert "waited for another one in vain" in line


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    """By the process that finds it; here the main one, whose folder is taken, and both, whose recipe is wrong."""
    (tmp_path / "taken").mkdir()
    with open(tmp_path / "taken" / ".lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        words = [*TRAIN, "--output", str(tmp_path / "taken")]
        outcomes = Group(2, tmp_path / "one", colar, words).wait()
    (line,) = said(outcomes)
    assert "another process is writing to" in line
    assert all(outcome.code in (1, 2) for outcome in outcomes)
    for mistake in (["--data.source", "no.jsonl"], ["--training.nonsense", "1"]):
        wrong = [*TRAIN, "--output", str(tmp_path / "run"), *mistake]
        outcomes = Group(2, tmp_path / mistake[0], colar, wrong).wait()
        assert [outcome.code for outcome in outcomes] == [2, 2]
        assert len(said(outcomes)) == 1
