"""Replicas on a Ray cluster: the answers of one process, and one error for each request of a replica that is killed."""

import asyncio
import contextlib
import io
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
import ray_workers
import yaml
from families import save_untrained
from prometheus_client.parser import text_string_to_metric_families
from serving import QUESTION, cot_model, serve_model, until
from starlette.testclient import TestClient

pytest.importorskip("ray.serve", reason="needs the extra ray: pip install '.[ray]'", exc_type=ImportError)

import ray
from benchmarks import cluster_driver, cluster_serve

from colar.cli import build_parser, main, options, underscored
from colar.cli import serve as command
from colar.serve import app, ray_serve

SHORT = ["--max_latents", "120", "--max_completion_length", "12", "--decoding", "sampled"]
LONG = {"thinking_token_budget": 120, "seed": 6, "stream": True}
"""Thinks to its limit, for four seconds in a replica: a busy machine opens all streams, and sees them, before one ends."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("checkpoints") / "colar")


class Machines:
    """Two machines, with one CPU each."""

    def __init__(self, machines):
        self.machines = machines
        self.address = machines.address
        # At the process's end Ray would end them by a handler of signals, which a client's thread cannot set.
        machines._shutdown_at_exit = False
        self.add()

    def add(self):
        self.second = self.machines.add_node(num_cpus=1, setup_worker_path=ray_workers.__file__)

    def remove(self):
        self.machines.remove_node(self.second)
        self.machines.wait_for_nodes()


@pytest.fixture(scope="module")
def cluster(machines):
    two = Machines(machines)
    yield two
    two.remove()


def body(**fields):
    asked = {"model": "toy", "messages": [{"role": "user", "content": QUESTION}], "thinking_token_budget": 8}
    return asked | fields


class Live:
    """The command that runs, as a client sees it."""

    def __init__(self, url, alone, machines):
        self.machines = machines
        self.client = httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}, timeout=60)
        self.alone = alone
        """The application without Ray."""

    def ask(self, **fields):
        return self.client.post("/v1/chat/completions", json=body(**fields))

    @contextlib.contextmanager
    def stream(self, **fields):
        """The data of events as they come; the first one is there."""
        with self.client.stream("POST", "/v1/chat/completions", json=body(**fields)) as response:
            assert response.status_code == 200
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            yield [next(events)], events

    def metric(self, name):
        """The values of a metric, by replica."""
        # All replicas are asked each time, who have other work.
        time.sleep(0.1)
        found = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels["model"] == "toy":
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0) + sample.value
        return found

    def running(self):
        return sorted(self.metric("colar_samples_running").values())


def replicas():
    """The processes of replicas."""
    return {each.pid for each in cluster_driver.workers("ServeReplica")}


def without_times(answer):
    """What is the same for each run."""
    for choice in answer["choices"]:
        for name in ("thinking_ms", "answer_ms"):
            choice["message"]["colar"].pop(name)
    return answer | {"id": None, "created": None}


# What happens to one command, in this order


def answers_are_those_of_one_process(live):
    for fields in (
        {"seed": 3, "n": 3},
        {"seed": 4, "compression_factor": 1},
        {"temperature": 0},
        {"model": "other"},
    ):
        fields = {"seed": 0, "return_thoughts": True} | fields
        found, alone = (
            client.post("/v1/chat/completions", json=body(**fields)) for client in (live.client, live.alone)
        )
        assert found.status_code == 200
        assert without_times(found.json()) == without_times(alone.json())


def a_stream_is_that_of_one_process(live):
    texts = []
    for client in (live.client, live.alone):
        with client.stream("POST", "/v1/chat/completions", json=body(seed=3, stream=True)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events.pop() == "[DONE]"
        texts.append([json.loads(event)["choices"] for event in events])
    assert len(texts[0]) > 8
    assert texts[0] == texts[1]


def other_paths_and_mistakes_are_those_of_one_process(live):
    cases = [
        ("GET", "/health", {}),
        ("GET", "/", {}),
        ("GET", "/static/nothing", {}),
        ("GET", "/v1/models/nothing", {}),
        ("PUT", "/v1/models", {}),
        ("POST", "/v1/chat/completions", {"json": body(model="third")}),
        ("POST", "/v1/chat/completions", {"content": b"x" * 2**21}),
        ("POST", "/v1/chat/completions", {"json": body(), "headers": {"Authorization": "Bearer no"}}),
        ("GET", "/metrics", {"headers": {"Authorization": "Bearer no"}}),
    ]
    for method, path, more in cases:
        found, alone = (client.request(method, path, **more) for client in (live.client, live.alone))
        assert (found.status_code, found.content) == (alone.status_code, alone.content), path
        for name in ("content-type", "www-authenticate", "content-security-policy"):
            assert found.headers.get(name) == alone.headers.get(name), path


def the_shorter_queue_is_next_and_a_client_that_leaves_stops_its_request(live):
    # Each has answered: the router leaves out a replica that is too busy to tell its first queue.
    until(lambda: live.ask().status_code == 200 and len(live.metric("colar_requests_total")) == 2)
    with contextlib.ExitStack() as streams:
        for pairs in (1, 2):
            for _ in range(2):
                streams.enter_context(live.stream(**LONG))
            # The first event comes before the engine's first step.
            until(lambda: live.running() == [pairs, pairs])  # noqa: B023  # called at once
    until(lambda: live.running() == [0, 0])


def a_killed_replica_is_replaced_and_its_requests_have_one_error_each(live):
    def ask(number):
        if number % 3 == 0:
            started.release()
            response = live.ask(**LONG | {"stream": False})
            return response.status_code, response.json().get("error", {}).get("code")
        with live.stream(**LONG) as (events, rest):
            started.release()
            events += rest
        *_, last = events
        return 200, None if last == "[DONE]" else json.loads(last)["error"]["code"]

    before = replicas()
    assert len(before) == 2
    names = set(live.metric("colar_samples_running"))
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]
        for _ in asked:
            started.acquire()
        until(lambda: sum(live.running()) == 4)
        os.kill(min(before), signal.SIGKILL)
        found = [each.result() for each in asked]
    whole = sorted(found[0::3])
    streams = sorted((*found[1::3], *found[2::3]), key=str)
    assert set(whole) <= {(200, None), (503, "replica_failed")}
    assert set(streams) <= {(200, None), (200, "replica_failed")}
    # Those of the other one end.
    assert 0 < sum(code is None for _, code in found) < 4
    # The other one goes on alone.
    assert live.ask().status_code == 200
    assert len(set(live.metric("colar_samples_running")) & names) == 1
    live.names = names


def the_killed_one_is_replaced(live):
    for _ in range(240):
        if len(live.metric("colar_samples_running")) == 2:
            break
        # The new process needs the CPU.
        time.sleep(0.5)
    assert len(set(live.metric("colar_samples_running")) - live.names) == 1
    assert len(replicas()) == 2


def requests_of_a_killed_machine_have_one_error_each_and_another_one_takes_its_place(live):
    before = cluster_serve.replicas(live.client)
    with cluster_serve.Load(live.client, thoughts=40) as load:
        until(lambda: live.running() == [2, 2])
        killed = time.monotonic()
        live.machines.second.kill_raylet()
        # Its replica ends some time after it: until then it answers, too.
        until(lambda: any(end.name == "failed" for end in load.ends) and load.answered_since(killed))
        live.machines.remove()
        live.machines.add()
        # The router asks a new replica once for its queue, and leaves it out until that has answered.
        until(lambda: live.running() == [2, 2])
    assert len(cluster_serve.replicas(live.client) - before) == 1
    assert {end.name for end in load.ends} == {"answered", "failed"}
    # The other machine has gone on with its requests.
    assert any(end.name == "answered" and end.began < killed < end.ended for end in load.ends)


def sigterm_drains(live):
    with ThreadPoolExecutor(1) as pool, live.stream(**LONG) as (events, rest):
        whole = pool.submit(live.ask, **LONG | {"stream": False})
        # The router may count a replica that is new as busy: either one may have both.
        until(lambda: sum(live.running()) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        events += rest
        assert whole.result().status_code == 200
    assert events[-1] == "[DONE]"
    with pytest.raises(httpx.ConnectError):
        httpx.get(live.client.base_url)


STEPS = [
    answers_are_those_of_one_process,
    a_stream_is_that_of_one_process,
    the_shorter_queue_is_next_and_a_client_that_leaves_stops_its_request,
    a_killed_replica_is_replaced_and_its_requests_have_one_error_each,
    other_paths_and_mistakes_are_those_of_one_process,
    the_killed_one_is_replaced,
    requests_of_a_killed_machine_have_one_error_each_and_another_one_takes_its_place,
    sigterm_drains,
]


@pytest.fixture(scope="module")
def outcomes(checkpoint, cluster):
    """The error of each step, or None; and the command's exit status. A client's thread takes the steps."""
    models = {"toy": str(checkpoint), "other": str(checkpoint)}
    words = ["serve", *(f"{name}={path}" for name, path in models.items()), *SHORT, "--port", "0"]
    printed, found, ended = io.StringIO(), {}, threading.Event()
    application = command._application

    def take_steps():
        until(lambda: ended.is_set() or printed.getvalue())
        if ended.is_set():
            return
        with TestClient(application(models, build_parser().parse_args(words), ["key"], [])) as alone:
            alone.headers["Authorization"] = "Bearer key"
            live = Live(printed.getvalue().strip(), alone, cluster)
            for step in STEPS:
                try:
                    found[step] = step(live)
                except BaseException as error:
                    found[step] = error
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=take_steps)
    # The last step ends the server; a second signal is for one that it could not end.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    thread.start()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAR_API_KEYS", "key")
        patch.setattr(command, "_application", ray_workers.slow_application)
        found["status"] = main([*words, "--ray", "2", "--ray_address", cluster.address])
    ended.set()
    thread.join()
    signal.signal(signal.SIGTERM, before)
    return found


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_of_a_command(outcomes, step):
    if outcomes[step] is not None:
        raise outcomes[step]


def test_the_command_ends_well_and_leaves_no_replica(outcomes):
    assert outcomes["status"] == 0
    until(lambda: not replicas())


def test_replicas_end_with_a_command_that_is_killed(outcomes, checkpoint, cluster, tmp_path):
    words = cluster_serve.serve_words(checkpoint, cluster.address, "1")
    server = cluster_driver.Driver(tmp_path, words)
    assert httpx.get(f"{server.first_line()}/health").status_code == 200
    assert len(replicas()) == 1
    server.kill()
    until(lambda: not replicas())


# Without it


def test_a_replica_is_as_healthy_as_its_application():
    """Ray Serve replaces a replica whose check raises."""
    served = serve_model("cot", cot_model())

    class Command:
        class ended:
            remote = asyncio.Future

    replica = ray_serve.Replica(lambda: app.build([served], ["key"], ["localhost"]), "name", Command)

    async def check():
        await replica.check_health()
        await served.engine.close()
        with pytest.raises(RuntimeError, match='"status":"failed","models":\\["cot"\\]'):
            await replica.check_health()

    asyncio.run(check())


def test_metrics_of_replicas_are_told_apart():
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total{model="x"} 2.0\n'
    found = ray_serve.with_replicas({"p": text, "q": text.replace("2.0", "3.0")}).decode()
    assert found.splitlines() == [
        *text.splitlines()[:2],
        'a_total{model="x",replica="p"} 2.0',
        'a_total{model="x",replica="q"} 3.0',
    ]


def test_bounds_of_replicas():
    fixed, between = (ray_serve.Replicas.parse(text, None, 1, 32) for text in ("3", "1:4"))
    assert fixed.options() == {"num_replicas": 3}
    scaling = between.options()["autoscaling_config"]
    assert [scaling[name] for name in ("min_replicas", "max_replicas", "target_ongoing_requests")] == [
        1,
        4,
        32,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "auto"], "--ray is a number of replicas, N or MIN:MAX, got 'auto'; see --ray_address"),
        (["--ray", "0"], "--ray must be 1 or more replicas, and MIN at most MAX, got 0"),
        (["--ray", "3:2"], "and MIN at most MAX, got 3:2"),
        (["--ray", "1:"], "N or MIN:MAX, got '1:'"),
        (["--ray", "1", "--ray_cpus", "0"], "--ray_cpus must be a number, 1 or more, got 0"),
        (["--ray_address", "auto"], "--ray_address and --ray_cpus go with --ray"),
        (["--ray_cpus", "2"], "--ray_address and --ray_cpus go with --ray"),
        (
            ["--ray", "1", "--ray_address", "127.0.0.1:1"],
            "--ray_address 127.0.0.1:1: no Ray cluster answers there",
        ),
    ],
)
def test_wrong_options_are_one_line(checkpoint, capsys, options, message):
    assert main(["serve", str(checkpoint), "--port", "0", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_replicas_that_do_not_fit_are_one_line(checkpoint, cluster, capsys):
    words = ["serve", str(checkpoint), "--port", "0", "--ray", "3", "--ray_address", cluster.address]
    assert main(words) == 2
    assert (
        "the cluster has 2 CPUs and 0 GPUs: too few for 3 engines" in capsys.readouterr().err.splitlines()[-1]
    )


FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"},
    "spec.rayClusterSpec": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "spec.rayClusterSpec.headGroupSpec": {"rayStartParams", "template"},
    "spec.rayClusterSpec.workerGroupSpecs.0": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
    },
}  # fmt: skip
"""The fields of KubeRay's RayJob (ray.io/v1) that the manifest may have, by their place."""


def test_the_manifest_has_kuberays_fields_and_a_command_that_parses():
    manifest = yaml.safe_load((Path(__file__).parent.parent / "examples" / "kuberay.yaml").read_text())
    for place, fields in FIELDS.items():
        found = manifest
        for part in place.split(".") if place else ():
            found = found[int(part) if part.isdecimal() else part]
        assert set(found) == fields, place
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    program, *words = manifest["spec"]["entrypoint"].split()
    assert program == "colar"
    given = build_parser().parse_args([underscored(word) for word in words])
    replicas = ray_serve.Replicas.parse(
        given.ray, given.ray_address, options.cpus_of(given), given.batch_size
    )
    [group] = cluster["workerGroupSpecs"]
    assert (replicas.pool.actors, replicas.maximum) == (group["minReplicas"], group["maxReplicas"])
    # What a container mounts is a volume of its pod.
    for each in (cluster["headGroupSpec"], group):
        pod = each["template"]["spec"]
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
