"""Bulk answers on a Ray cluster: those of one process, each once, also where something is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow
import pytest
from families import save_untrained
from pyarrow import parquet

import colar
from colar import files
from colar.cli import main
from colar.evaluation import answer_files

pytest.importorskip("ray", reason="needs the extra ray: pip install '.[ray]'")

from ray.cluster_utils import Cluster

from colar.integrations import ray_cluster

QUESTIONS = [f"Tom has {n} toys{' and friends' * (n % 4)}. How many are {n} times {n}?" for n in range(32)]
OPTIONS = ["--decoding", "sampled", "--seed", "3", "--batch_size", "4", "--max_latents", "12"]
OPTIONS += ["--max_completion_length", "12", "--show_latents", "--neighbours", "1"]
SECONDS = 180
"""Time until a run that hangs is a failure."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("checkpoints") / "colar")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    return files.write_jsonl(path, ({"question": text, "answer": "7"} for text in QUESTIONS))


@pytest.fixture(scope="module")
def alone(checkpoint, questions, tmp_path_factory):
    """The answers of one process."""
    path = tmp_path_factory.mktemp("alone") / "answers.jsonl"
    words = ["generate", str(checkpoint), "--input", str(questions), "--output", str(path), *OPTIONS]
    assert main(words) == 0
    found = rows([path])
    assert len({row["answer"] for row in found.values()}) > 20
    return found


@pytest.fixture(scope="module")
def cluster():
    """One machine of two CPUs, for two engines."""
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield running
    running.shutdown()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(answer_files, "PART_ROWS", 4)


def words(checkpoint, source, output, address, actors=1):
    paths = ["generate", str(checkpoint), "--input", str(source), "--output", str(output)]
    return [*paths, *OPTIONS, "--ray", address, "--ray_actors", str(actors)]


def rows(paths):
    """Rows by id, without the time that each took; no answer is there twice."""
    found = {}
    for path in paths:
        for _, row in files.read_jsonl(path):
            assert row["id"] not in found
            found[row["id"]] = {key: value for key, value in row.items() if key != "seconds"}
    return found


def answers(folder):
    """The answers in a folder that holds nothing else: no part that is being written, no failures."""
    parts = sorted(folder.glob("part-*.jsonl"))
    assert set(folder.iterdir()) - {folder / ".lock"} == set(parts)
    assert all(part.read_text().endswith("\n") for part in parts)
    return rows(parts)


def wait_for(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_answers_are_those_of_one_process_and_are_not_given_twice(
    checkpoint, questions, alone, cluster, tmp_path, capsys
):
    folder = tmp_path / "answers"
    assert main(words(checkpoint, questions, folder, cluster.address)) == 0
    assert "32 new answers, 0 were there" in capsys.readouterr().err
    assert answers(folder) == alone
    [part] = folder.glob("part-*")
    before = part.stat().st_mtime_ns
    assert main(words(checkpoint, questions, folder, cluster.address)) == 0
    assert "0 new answers, 32 were there" in capsys.readouterr().err
    assert answers(folder) == alone
    assert part.stat().st_mtime_ns == before
    # Another seed is another run.
    assert main([*words(checkpoint, questions, folder, cluster.address), "--seed", "4"]) == 2
    assert "seed was 3, now 4" in capsys.readouterr().err


def test_a_row_that_fails_does_not_stop_the_others(checkpoint, alone, cluster, tmp_path, capsys):
    """A folder of all three formats, with a question beyond the context, a line that is no JSON, a broken table."""
    source = tmp_path / "questions"
    table = [{"id": str(n + 1), "question": text, "answer": "7"} for n, text in enumerate(QUESTIONS)]
    too_long, nameless = {"id": "long", "question": "1 + " * 5000}, {"question": QUESTIONS[0]}
    files.write_jsonl(source / "a.jsonl", [*table[:5], too_long, *table[5:10], nameless])
    (source / "a.jsonl").write_text((source / "a.jsonl").read_text() + "{no JSON\n")
    parquet.write_table(pyarrow.Table.from_pylist(table[10:20]), source / "b.parquet")
    lines = [f'{row["id"]},"{row["question"]}",7' for row in table[20:30]]
    files.write_text(source / "c.csv", "\n".join(["id,question,answer", *lines, "31,two cells"]))
    (source / "notes.md").write_text("not a table")
    folder = tmp_path / "answers"
    assert main(words(checkpoint, source, folder, cluster.address)) == 2
    assert "3 rows have no answer" in capsys.readouterr().err.splitlines()[-1]
    reasons = {row["place"]: row["reason"] for _, row in files.read_jsonl(folder / "failed.jsonl")}
    (folder / "failed.jsonl").unlink()
    found = answers(folder)
    # A row without an id is known by its file and number: each file has a first row.
    assert found.pop("a.jsonl:12")["question"] == QUESTIONS[0]
    assert found == {id: row for id, row in alone.items() if int(id) <= 30}
    assert "request long: " in reasons.pop(f"{source}/a.jsonl:6")
    assert "not valid JSON" in reasons.pop(f"{source}/a.jsonl:13")
    assert "c.csv:12: 2 cells" in reasons.pop(f"{source}/c.csv")
    assert reasons == {}


def test_a_killed_actor_is_replaced(checkpoint, questions, alone, cluster, tmp_path, small_parts):
    folder = tmp_path / "answers"
    killed = []

    def kill():
        wait_for(lambda: any(folder.glob("part-*")))
        for process in psutil.Process().children(recursive=True):
            if "Answerer" in " ".join(process.cmdline()):
                process.kill()
                killed.append(len(list(folder.glob("part-*"))))

    thread = threading.Thread(target=kill)
    thread.start()
    assert main(words(checkpoint, questions, folder, cluster.address, actors=2)) == 0
    thread.join()
    # Both, and before the end.
    assert len(killed) == 2
    assert max(killed) < len(list(folder.glob("part-*"))) == 8
    assert answers(folder) == alone


def test_after_a_killed_driver_the_rest_is_answered(
    checkpoint, questions, alone, cluster, tmp_path, small_parts, capsys
):
    folder = tmp_path / "answers"
    code = (
        "import json, sys\nfrom colar.cli import main\nfrom colar.evaluation import answer_files\n"
        "answer_files.PART_ROWS = 4\nsys.exit(main(json.loads(sys.argv[1])))"
    )
    given = json.dumps(words(checkpoint, questions, folder, cluster.address))
    driver = subprocess.Popen([sys.executable, "-c", code, given], stderr=subprocess.DEVNULL)
    wait_for(lambda: any(folder.glob("part-*")))
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    # A part that was being written.
    (folder / ".part-000009.jsonl.x").write_text('{"id": "q')
    n = len(rows(sorted(folder.glob("part-*"))))
    assert 0 < n < 32
    assert main(words(checkpoint, questions, folder, cluster.address)) == 0
    assert f"{32 - n} new answers, {n} were there" in capsys.readouterr().err
    assert answers(folder) == alone


def test_a_machine_with_other_code_is_rejected_and_a_lost_one_is_done_without(
    checkpoint, questions, alone, cluster, tmp_path, small_parts, capsys
):
    other = tmp_path / "other"
    shutil.copytree(
        Path(colar.__file__).parent, other / "colar", ignore=shutil.ignore_patterns("__pycache__")
    )
    with open(other / "colar" / "ask.py", "a") as stream:
        stream.write("# Another version.\n")
    path = os.pathsep.join([str(other), os.environ.get("PYTHONPATH", "")])
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    folder = tmp_path / "answers"
    given = words(checkpoint, questions, folder, cluster.address, actors=3)
    assert main(given) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "would give other answers than this machine: colar 0.1" in line
    cluster.remove_node(node)
    assert list(folder.glob("part-*")) == []

    # It has the third actor: the other machine has two CPUs.
    node = cluster.add_node(num_cpus=1)
    thread = threading.Thread(
        target=lambda: (wait_for(lambda: any(folder.glob("part-*"))), node.kill_raylet())
    )
    thread.start()
    assert main(given) == 0
    thread.join()
    cluster.remove_node(node)
    # The next test counts the machines that are left.
    cluster.wait_for_nodes()
    assert answers(folder) == alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--input": "nowhere"}, "--input must be a file or a folder, and there is none at nowhere"),
        ({"--input": "."}, "holds, no file that ends in .json, .jsonl"),
        ({"--ray": "127.0.0.1:1"}, "--ray 127.0.0.1:1: no Ray cluster answers there"),
        ({"--ray": "127.0.0.1:x"}, "--ray 127.0.0.1:x: no Ray cluster answers there"),
        ({"--ray_actors": "0"}, "--ray_actors must be a number, 1 or more, got 0"),
        ({"--ray_cpus": "0"}, "--ray_cpus must be a number, 1 or more, got 0"),
        ({"--output": "a_file"}, "cannot write to a_file: it is a file"),
    ],
)
def test_wrong_input_is_one_line(checkpoint, questions, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    given = words(checkpoint, questions, "answers", "127.0.0.1:1")
    for name, value in change.items():
        given += [name, value]
    assert main(given) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray_actors", "3"], "the cluster has 2 CPUs and 0 GPUs: too few for 3 engines"),
        (["--ray_cpus", "3"], "too few for 1 engines"),
        (["--device", "cuda"], "an engine has 1 CPUs and a GPU"),
    ],
)
def test_engines_that_do_not_fit_are_one_line(
    checkpoint, questions, cluster, tmp_path, capsys, options, message
):
    assert main([*words(checkpoint, questions, tmp_path / "answers", cluster.address), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_machine_that_differs_is_named(checkpoint, questions, tmp_path):
    """What is compared: code and weights by digests, and the input's path."""
    here = ray_cluster.installed(str(checkpoint), [str(questions)])
    ray_cluster.check_same("10.0.0.2", here, dict(here))
    other = tmp_path / "other"
    other.mkdir()
    for path in checkpoint.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "colar.json").write_text((checkpoint / "colar.json").read_text() + "\n")
    there = ray_cluster.installed(str(other), [str(questions), "/nowhere/q.jsonl"])
    assert sorted(key for key in here if here[key] != there[key]) == ["missing input", "weights"]
    with pytest.raises(ValueError, match=r"10\.0\.0\.2 would .*missing input /nowhere/q\.jsonl, here none"):
        ray_cluster.check_same("10.0.0.2", here, there)
    # No checkpoint at that path.
    assert "/nowhere" in ray_cluster.installed("/nowhere", [])["weights"]
