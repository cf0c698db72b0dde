"""Bulk answers and evaluations on a Ray cluster: those of one process, each once, also where something is killed."""

import asyncio
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import ray_workers
from families import liven, save_untrained, tiny_lm
from pyarrow import parquet
from safetensors.torch import load_file, save_file

import colar
from colar import files
from colar.cli import build_parser, main
from colar.cli.checkpoints import engine_settings
from colar.engine.async_engine import AsyncEngine
from colar.engine.engine import Engine
from colar.engine.request import DECODINGS, Decoding, Request
from colar.evaluation import answer_files

pytest.importorskip("ray", reason="needs the extra ray: pip install '.[ray]'")

from benchmarks import cluster

from colar.integrations import ray_answers, ray_cluster
from colar.methods import registry

QUESTIONS = [f"Tom has {n} toys{' and friends' * (n % 4)}. How many are {n} times {n}?" for n in range(32)]
OPTIONS = ["--decoding", "sampled", "--seed", "3", "--batch_size", "4", "--max_latents", "12"]
OPTIONS += ["--max_completion_length", "12", "--show_latents"]
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


@pytest.fixture
def source(tmp_path):
    """All three formats, with a question beyond the context, a line that is no JSON and a broken table."""
    folder = tmp_path / "questions"
    table = [{"id": str(n + 1), "question": text, "answer": "7"} for n, text in enumerate(QUESTIONS)]
    too_long, nameless = {"id": "long", "question": "1 + " * 5000}, {"question": QUESTIONS[0]}
    files.write_jsonl(folder / "a.jsonl", [*table[:5], too_long, *table[5:10], nameless])
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text() + "{no JSON\n")
    parquet.write_table(pyarrow.Table.from_pylist(table[10:20]), folder / "b.parquet")
    lines = [f'{row["id"]},"{row["question"]}",7' for row in table[20:30]]
    files.write_text(folder / "c.csv", "\n".join(["id,question,answer", *lines, "31,two cells"]))
    (folder / "notes.md").write_text("not a table")
    return folder


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(ray_answers, "PART_ROWS", 4)


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


def kill_all(folder, machine):
    """Kill the actors and a whole machine once the folder has another part. Returns the numbers of actors and of parts."""
    before = len(list(folder.glob("part-*")))
    wait_for(lambda: len(list(folder.glob("part-*"))) > before)
    actors = cluster.workers("Answerer")
    machine.kill_raylet()
    for actor in actors:
        actor.kill()
    return len(actors), len(list(folder.glob("part-*")))


def test_workers_of_one_fork_draw_ids_of_their_own():
    """Two that draw the same put one object into their machine's store, and one of them aborts."""
    draw = """
import os, sys, ray_workers
ray_workers.import_ray()
import ray
for _ in range(2):
    if (child := os.fork()) == 0:
        print(ray.ObjectRef.from_random().hex(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first != second


def test_an_actor_whose_engine_has_died_ends(monkeypatch):
    """Its chunks go to another; it would fail them all at once."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    method = registry.build("cot")
    request = Request("a", "2 and 2?", method.Params(), Decoding(max_latents=2, max_completion_length=2))
    chunk = {"tasks": pickle.dumps([ray_answers.Task("f:1", request, None)])}

    async def answer():
        engine = AsyncEngine(Engine(liven(tiny_lm("llama")), method, 1))
        start = SimpleNamespace(start=lambda: engine)
        actor = ray_answers.Answerer(ray_answers.Job(start, lambda lm, completion, extra: {"id": "a"}))
        done = await actor(chunk)
        assert ended == []
        await engine.close()
        return done, await actor(chunk)

    found = [pickle.loads(done["done"])[0].failed for done in asyncio.run(answer())]
    assert (found, ended) == ([False, True], [1])


def test_each_row_is_answered_once_whatever_is_killed(
    checkpoint, source, alone, machines, tmp_path, small_parts, capsys
):
    """The driver; then, in the run that goes on, the actors and one of two machines."""
    folder = tmp_path / "answers"
    machine = machines.add_node(num_cpus=1, setup_worker_path=ray_workers.__file__)
    given = words(checkpoint, source, folder, machines.address, actors=2)
    script = tmp_path / "driver.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom colar.cli import main\nfrom colar.integrations import ray_answers\n"
        "Path(sys.argv[1]).write_text(str(os.getpid()))\nray_answers.PART_ROWS = 4\nmain(sys.argv[2:])"
    )
    # Forked as the workers are.
    driver = subprocess.Popen([sys.executable, ray_workers.__file__, script, tmp_path / "id", *given])
    wait_for(lambda: any(folder.glob("part-*")))
    os.kill(int((tmp_path / "id").read_text()), signal.SIGKILL)
    driver.wait(SECONDS)
    # A part that was being written.
    (folder / ".part-000009.jsonl.x").write_text('{"id": "q')
    written = {part: part.read_bytes() for part in folder.glob("part-*")}
    n = len(rows(sorted(written)))
    assert 0 < n < 31

    killed = []
    thread = threading.Thread(target=lambda: killed.extend(kill_all(folder, machine)))
    thread.start()
    assert main(given) == 2
    thread.join()
    machines.remove_node(machine)
    machines.wait_for_nodes()
    *_, counts, last = capsys.readouterr().err.splitlines()
    assert f"{31 - n} new answers, {n} were there" in counts
    assert "3 rows have no answer" in last
    # Before the end.
    assert killed[0] > 0
    assert killed[1] < len(list(folder.glob("part-*")))
    # A row that fails has not stopped the others.
    reasons = {row["place"]: row["reason"] for _, row in files.read_jsonl(folder / "failed.jsonl")}
    (folder / "failed.jsonl").unlink()
    assert "request long: " in reasons.pop(f"{source}/a.jsonl:6")
    assert "not valid JSON" in reasons.pop(f"{source}/a.jsonl:13")
    assert "c.csv:12: 2 cells" in reasons.pop(f"{source}/c.csv")
    assert reasons == {}
    assert {part: part.read_bytes() for part in written} == written
    found = answers(folder)
    # A row without an id is known by its file and number: each file has a first row.
    assert found.pop("a.jsonl:12")["question"] == QUESTIONS[0]
    assert found == {id: row for id, row in alone.items() if int(id) <= 30}
    # Another seed is another run.
    assert main([*given, "--seed", "4"]) == 2
    assert "seed was 3, now 4" in capsys.readouterr().err


def job_of_cot(settings=None):
    """A job without an engine, which makes requests of rows."""
    make = functools.partial(
        answer_files.make_requests,
        combinations=[registry.make_params(registry.build("cot"), {})],
        decoding=DECODINGS["greedy"],
        seed=0,
        keep_latents=False,
        is_chat=False,
    )
    return ray_answers.FileJob(settings, print, make, {})


def test_each_chunk_is_work_of_its_own(questions, machines):
    """Ray would put chunks together, and one actor would answer all of a file."""
    job = job_of_cot(ray_answers.EngineSettings("", "float32", None, None, None, 4, False))
    with ray_cluster.joined(ray_cluster.Pool(machines.address, 1, 1), "cpu", [], []) as actors:
        found = ray_cluster.ray.put(np.array([], dtype=np.uint64))
        asked = ray_answers.chunks_of(job, {str(questions): ""}, found, actors.n)
        assert asked.materialize().num_blocks() == len(QUESTIONS) / 4


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_whose_turns_have_no_place_stops_no_other(place, tmp_path):
    table = [{"question": "1 + 1?"}, {"question": "2 + 2?"}]
    table.insert(place, {"question": "And 3?", "context": [["system", "Be brief."]]})
    path = files.write_jsonl(tmp_path / "rows.jsonl", table)
    job = job_of_cot()
    found = list(ray_answers._tasks(str(path), "", job, np.array([], dtype=np.uint64)))
    failed = [isinstance(each, ray_answers.Done) for each in found]
    assert failed == [n == place for n in range(3)]
    assert "no place for a system message" in found[place].row["reason"]


def test_an_engine_of_all_weights_is_given_no_backbone(checkpoint):
    """Beside an adapter that --backbone is for."""
    words = ["evaluate", str(checkpoint), "--output", "out", "--backbone", "tiny", "--batch_size", "4"]
    settings = engine_settings(str(checkpoint), build_parser("evaluate").parse_args(words))
    assert (settings.backbone, settings.batch_size, settings.checkpoint) == (None, 4, str(checkpoint))


def test_a_large_input_is_answered_as_a_small_one(checkpoint, machines, tmp_path):
    """The benchmark's run, in small: questions beyond the context stand between those that have answers."""
    found = cluster.memory_run(machines, checkpoint, tmp_path, megabytes=1, rows=6)
    assert found["rows"] == 6
    assert found["failed"] == 10
    assert [found[name] for name in ("missing", "twice", "different", "torn")] == [0, 0, 0, 0]
    assert found["driver_mib"] > 0


def test_an_evaluation_is_that_of_one_process(checkpoint, machines, tmp_path, capsys):
    """Half of the records are there; of two models one has broken weights, which is an error by name."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = load_file(broken / "modules.safetensors")
    save_file({name: value * float("nan") for name, value in weights.items()}, broken / "modules.safetensors")
    given = ["--data", "arithmetic", "--limit", "9", "--decoding", "greedy", "sampled", "--batch_size", "4"]
    given += ["--max_latents", "12", "--max_completion_length", "8"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["evaluate", f"m={checkpoint}", *given, "--output", str(whole)]) == 0
    shutil.copytree(whole, part)
    records = (whole / "records.jsonl").read_text().splitlines(True)
    (part / "records.jsonl").write_text("".join(records[::2]))
    on_cluster = [*given, "--output", str(part), "--ray", machines.address]
    assert main(["evaluate", f"m={checkpoint}", f"broken={broken}", *on_cluster]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "broken: 18 of 18 questions have no answer" in last
    assert "arithmetic arithmetic/test/" in last
    assert main(["evaluate", f"m={checkpoint}", *on_cluster]) == 0

    def timeless(path):
        rows = files.read_json(path)["rows"]
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]

    assert timeless(part / "report.json") == timeless(whole / "report.json")
    found = [row | {"seconds": 0} for _, row in files.read_jsonl(part / "records.jsonl")]
    wanted = [json.loads(line) | {"seconds": 0} for line in records]
    assert sorted(found, key=json.dumps) == sorted(wanted, key=json.dumps)


def test_a_machine_with_other_code_is_rejected(checkpoint, source, machines, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(
        Path(colar.__file__).parent, other / "colar", ignore=shutil.ignore_patterns("__pycache__")
    )
    with open(other / "colar" / "ask.py", "a") as stream:
        stream.write("# Another version.\n")
    path = os.pathsep.join([str(other), os.environ.get("PYTHONPATH", "")])
    machine = machines.add_node(
        num_cpus=1, setup_worker_path=ray_workers.__file__, env_vars={"PYTHONPATH": path}
    )
    folder = tmp_path / "answers"
    assert main(words(checkpoint, source, folder, machines.address)) == 2
    assert "would give other answers than this machine: colar 0.1" in capsys.readouterr().err.splitlines()[-1]
    assert list(folder.glob("part-*")) == []
    machines.remove_node(machine)
    machines.wait_for_nodes()


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
        (["--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: no Ray cluster answers there"),
        (["--ray", "local", "--ray_actors", "0"], "--ray_actors must be a number, 1 or more, got 0"),
        (["--ray", "local", "--control", "zeroed"], "--ray goes neither with --control nor with torchrun"),
    ],
)
def test_wrong_words_of_an_evaluation_are_one_line(checkpoint, tmp_path, capsys, options, message):
    given = ["evaluate", str(checkpoint), "--data", "arithmetic", "--limit", "2", "--output", str(tmp_path)]
    assert main([*given, *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_without_ray_the_extra_is_named(checkpoint, questions, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "colar.integrations.ray_cluster")
    monkeypatch.delattr("colar.integrations.ray_cluster")
    given = {
        "generate": words(checkpoint, questions, tmp_path / "answers", "auto"),
        "evaluate": ["evaluate", str(checkpoint), "--output", str(tmp_path), "--limit", "2", "--ray", "auto"],
    }
    assert main(given[command]) == 2
    assert "--ray needs Ray: from your clone of colar, pip install '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray_actors", "2"], "the cluster has 1 CPUs and 0 GPUs: too few for 2 engines"),
        (["--ray_cpus", "2"], "too few for 1 engines"),
        (["--device", "cuda"], "an engine has 1 CPUs and a GPU"),
    ],
)
def test_engines_that_do_not_fit_are_one_line(
    checkpoint, questions, machines, tmp_path, capsys, options, message
):
    assert main([*words(checkpoint, questions, tmp_path / "answers", machines.address), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_machine_that_differs_is_named(checkpoint, questions, tmp_path):
    """What is compared: code and weights by digests, and the input's path."""
    here = ray_cluster.installed(str(checkpoint), [str(questions)])
    ray_cluster.check_same("10.0.0.2", here, dict(here), "--ray")
    other = tmp_path / "other"
    other.mkdir()
    for path in checkpoint.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "template.json").write_text((checkpoint / "template.json").read_text() + "\n")
    there = ray_cluster.installed(str(other), [str(questions), "/nowhere/q.jsonl"])
    assert sorted(key for key in here if here[key] != there[key]) == ["missing input", "weights"]
    with pytest.raises(ValueError, match=r"10\.0\.0\.2 would .*missing input /nowhere/q\.jsonl, here none"):
        ray_cluster.check_same("10.0.0.2", here, there, "--ray")
    # No checkpoint at that path.
    assert "/nowhere" in ray_cluster.installed("/nowhere", [])["weights"]
