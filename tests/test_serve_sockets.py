"""What no client should send, through raw sockets: the server answers or hangs up, and goes on serving."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
from families import tiny_lm
from serving import QUESTION, Slow, cot_model, running, serve_model, until

from colar.cli import main
from colar.engine.request import Decoding
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.serve.limits import Limits
from colar.serve.logs import Log, LogHandler

BODY = json.dumps({"model": "cot", "messages": [{"role": "user", "content": QUESTION}]}).encode()
LIMITS = Limits(max_body=4096, head_seconds=0.6, body_seconds=0.6)


@pytest.fixture(scope="module")
def live():
    with running(serve_model("cot", cot_model()), limits=LIMITS) as found:
        yield found


@pytest.fixture(autouse=True)
def _serves_on(live):
    """Whatever a test has sent, the next request is answered, and nothing is left of the last one."""
    yield
    status, body = answer(live, post(BODY))
    assert status == 200, body
    until(lambda: not live.served["cot"].engine.engine.busy)
    until(lambda: live.served["cot"].admission.samples == 0)


def post(body, *headers, length=None, kind="application/json"):
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        "Connection: close",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def answer(live, data, half_close=False):
    """Status and body of what the server says; status 0 where it says nothing."""
    with live.connect() as sock:
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has hung up already
        return read(sock)


def read(sock):
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    if not found:
        return 0, {}
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else {}


def test_a_normal_request(live):
    status, body = answer(live, post(BODY))
    assert status == 200
    assert body["object"] == "chat.completion"


def test_half_a_body_and_silence(live):
    status, body = answer(live, post(BODY[:20], length=len(BODY)))
    assert status == 408
    assert "did not arrive in 0.6 s" in body["error"]["message"]


def test_half_a_body_and_gone(live):
    before = len(live.lines())
    with live.connect() as sock:
        sock.sendall(post(BODY[:20], length=len(BODY)))
    until(lambda: len(live.lines()) > before)
    assert live.lines()[-1]["status"] == 499


def test_half_a_body_and_closed_for_writing(live):
    status, _ = answer(live, post(BODY[:20], length=len(BODY)), half_close=True)
    assert status in (0, 400, 408)


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"\xff\xfe{}", "UTF-8"), (b"{" * 3000, "JSON"), (b"", "JSON"), (b"\x00" * 100, "JSON"), (b"[" * 4000, "deeply")],
)  # fmt: skip
def test_a_body_that_is_no_json(live, body, words):
    status, found = answer(live, post(body))
    assert status == 400
    assert words in found["error"]["message"]


def test_100_megabytes_are_refused_at_the_head(live):
    status, body = answer(live, post(b"x" * 10, length=100 * 2**20))
    assert status == 413
    assert "larger than 4096 bytes" in body["error"]["message"]


def test_100_megabytes_that_are_sent_all_the_same(live):
    sent = 0
    with live.connect() as sock:
        sock.sendall(post(b"", length=100 * 2**20))
        try:
            for _ in range(100):
                sock.sendall(b"x" * 2**20)
                sent += 1
        except OSError:
            pass  # it has hung up
        assert sent < 100
        assert read(sock)[0] in (0, 413)


def test_chunks_without_an_end(live):
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    status, _ = answer(live, head + chunk * 8)
    assert status == 413


def test_a_chunk_of_a_wrong_length(live):
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    status, _ = answer(live, head + b"zz\r\nhello\r\n")
    assert status == 400


def test_10000_headers(live):
    status, body = answer(live, post(BODY, *(f"X-{i}: {'y' * 20}" for i in range(10_000))))
    assert status in (0, 431)
    if status:
        assert "head is larger than" in body["error"]["message"]


def test_a_newline_in_a_header_begins_no_line_of_the_log(live):
    before = len(live.log.getvalue().splitlines())
    fake = '{"time": "now", "event": "request", "status": 200, "path": "/forged"}'
    answer(live, post(BODY, f"X-Evil: a\n{fake}"))
    answer(live, post(BODY, f"User-Agent: a\r\n {fake}"))
    answer(
        live, f"GET /%0a{fake.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    until(lambda: len(live.log.getvalue().splitlines()) > before)
    for line in live.log.getvalue().splitlines():
        assert json.loads(line).get("path") != "/forged"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # TLS to a plain port
        b"GET\r\n\r\n",
        b"\r\n" * 100 + b"nonsense\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http(live, data):
    status, body = answer(live, data)
    assert status in (400, 431)
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_other_content_types_are_refused(live):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert answer(live, post(BODY, kind=kind))[0] == 415
    assert answer(live, post(BODY, kind="application/json; charset=utf-8"))[0] == 200


def test_other_methods_are_refused(live):
    for method in (b"PUT", b"DELETE", b"PATCH"):
        assert answer(live, post(BODY).replace(b"POST", method, 1))[0] == 405


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_slow_loris(live, sent):
    """A head that comes byte by byte, or never: the connection ends in time."""
    started = time.monotonic()
    with live.connect() as sock:
        sock.sendall(sent)
        sock.setblocking(False)
        found = b""
        while time.monotonic() - started < 10:
            if select.select([sock], [], [], 0.1)[0]:
                part = sock.recv(65536)
                if not part:
                    break
                found += part
            elif sent:
                sock.sendall(b"X")
        assert time.monotonic() - started < 5
    assert found.startswith(b"HTTP/1.1 408")


def test_slow_loris_on_a_connection_that_was_used(live):
    with live.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += sock.recv(65536)
        sock.sendall(b"GET /health HT")
        started = time.monotonic()
        assert b"408" in sock.recv(65536)
        assert time.monotonic() - started < 5


def test_a_long_request_is_no_slow_head():
    """The clock of the head stops when there is a request."""
    method = Slow()
    served = serve_model("slow", (tiny_lm("gpt2"), method), Decoding(max_latents=60, max_completion_length=1))
    with running(served, limits=Limits(head_seconds=0.3, body_seconds=0.3)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)
        found = client.chat.completions.create(model="slow", messages=[{"role": "user", "content": "x?"}])
        assert found.usage.completion_tokens_details.reasoning_tokens == 60


def test_two_requests_in_one_packet(live):
    with live.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + post(BODY))
        found = b""
        while part := sock.recv(65536):
            found += part
    assert found.count(b"HTTP/1.1 200") == 2


def test_many_connections_at_once(live):
    found = []

    def ask():
        found.append(answer(live, post(BODY)))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in found] == [200] * 40
    assert len({body["choices"][0]["message"]["content"] for _, body in found}) == 1


def test_a_slow_reader_is_dropped_and_its_request_cancelled():
    """Nothing is read: kernel buffers fill, then ours, and the connection is dropped."""
    method = Slow()
    method.pause = 0.0
    decoding = Decoding(max_latents=100, max_completion_length=1)
    served = serve_model("slow", (tiny_lm("gpt2"), method), decoding, slots=16)
    limits = Limits(max_unsent=20_000)
    with running(served, limits=limits) as live:
        body = {"model": "slow", "messages": [{"role": "user", "content": "x?"}], "stream": True, "n": 16}
        data = post(json.dumps({**body, "return_thoughts": True}).encode())
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(live.address)
            sock.sendall(data)
            until(lambda: len(live.lines()) == 1, 60)
        (line,) = live.lines()
        assert line["ended"] == "too slow"
        assert line["status"] == 499
        # Not a moment later: who reads the line may ask again.
        assert served.admission.samples == 0
        until(lambda: not served.engine.engine.busy)


UNREAD = Limits(body_seconds=0.5)
THINKS = Decoding(max_latents=100, max_completion_length=1)


def thoughtful(method, n=16, stream=False):
    """A model that thinks a hundred times, and a request for all of its thoughts: 0.1 MB for each answer."""
    served = serve_model("slow", (tiny_lm("gpt2"), method), THINKS, slots=16)
    body = {"model": "slow", "messages": [{"role": "user", "content": "x?"}], "n": n, "return_thoughts": True}
    return served, json.dumps({**body, "stream": stream}).encode()


def fast():
    method = Slow()
    method.pause = 0.0
    return method


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
def test_a_client_that_stops_reading_holds_no_memory(stream, headers):
    """An answer that fits into the buffers, but for some of it: the connection is dropped all the same."""
    served, body = thoughtful(fast(), n=4, stream=stream)
    data = post(body, *headers)
    if headers:
        data = data.replace(b"Connection: close\r\n", b"")
    with running(served, limits=UNREAD, small_buffers=True) as live:
        with live.connect_small() as sock:
            sock.sendall(data)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            until(lambda: live.connections == 0)
        until(lambda: not served.engine.engine.busy)
        until(lambda: served.admission.samples == 0)
        # Written after the places in the queue are given back.
        until(live.lines)
        (line,) = live.lines()
        assert line.get("ended") == ("too slow" if stream else None)


def test_a_client_that_stops_reading_in_the_middle_is_dropped_and_its_rows_cancelled():
    """Less than `max_unsent` waits, and the rows run on: it is the time in which nothing was read that ends it."""
    method = Slow()
    served, body = thoughtful(method, n=4, stream=True)
    with running(served, limits=UNREAD, small_buffers=True) as live:
        with live.connect_small() as sock:
            sock.sendall(post(body))
            sock.recv(100)
            until(lambda: len(live.lines()) == 1)
        (line,) = live.lines()
        assert line["ended"] == "too slow"
        until(lambda: not served.engine.engine.busy)
        assert method.steps < THINKS.max_latents


def test_a_client_that_reads_slowly_gets_all_of_its_answer():
    """Each time some was read the clock starts anew."""
    served, body = thoughtful(fast(), n=4)
    with running(served, limits=UNREAD, small_buffers=True) as live, live.connect_small() as sock:
        sock.sendall(post(body))
        found = b""
        started = time.monotonic()
        while part := sock.recv(8192):
            found += part
            if time.monotonic() - started < 4 * UNREAD.body_seconds:
                time.sleep(0.1)
        _, _, said = found.partition(b"\r\n\r\n")
        assert len(json.loads(said)["choices"]) == 4


def test_a_client_that_asks_again_and_again_and_reads_nothing():
    """Requests in one connection, none of whose answers is read."""
    served = serve_model("cot", cot_model())
    with running(served, limits=UNREAD, small_buffers=True) as live, live.connect_small() as sock:
        asked = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 400
        with contextlib.suppress(OSError):
            sock.sendall(asked)
        until(live.lines)
        until(lambda: live.connections == 0)
        assert len(live.lines()) < 400


def test_one_connection_more_than_allowed_is_told_so():
    with running(serve_model("cot", cot_model()), limits=Limits(max_connections=2)) as live:
        asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        with live.connect() as one, live.connect() as two:
            for sock in (one, two):
                sock.sendall(asked)
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            status, body = answer(live, asked)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
        until(lambda: live.connections == 0)
        with live.connect() as sock:
            sock.sendall(asked)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_log_that_cannot_be_written_to_drops_no_answer():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    log = Log(stream=Full())
    log.write("request", id="x")
    LogHandler(log).emit(logging.LogRecord("uvicorn", logging.WARNING, "", 0, "words", (), None))


# The command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("colar", {})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    return pretrained.save(lm, method, tmp_path_factory.mktemp("made") / "toy", {"seed": 0}, "a card")


def test_the_command_serves_and_drains_on_sigterm(checkpoint):
    """SIGTERM in the middle of an answer: it is answered to its end, then the process ends."""
    command = [
        sys.executable,
        "-m",
        "colar.cli",
        "serve",
        f"toy={checkpoint}",
        "--port",
        "0",
        "--max_latents",
        "150",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src"), "COLAR_API_KEYS": "k1 k2"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="k2", max_retries=5)
            stream = client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": QUESTION}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [next(stream), next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += list(stream)
            assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 1
            assert chunks[-2].choices[0].finish_reason
            assert process.wait(60) == 0
        finally:
            process.kill()
        lines = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines if line["event"] != "log"] == ["started", "request", "stopped"]


MISTAKES = [
    (["no/such/folder/here"], "there is no such folder"),
    (["x=a", "x=b"], "two checkpoints have one name, x"),
    (["x", "--max_body", "0"], "max_body must be a whole number, 1 or more"),
    (["x", "--api_key_file", "/no/such/file"], "No such file"),
    (["x", "--host", "203.0.113.7", "--port", "1"], "error"),
    (["x", "--port", "99999"], "port must be a whole number, from 0 to 65535, got 99999"),
    (["x", "--port", "-1"], "port must be a whole number, from 0 to 65535, got -1"),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES)
def test_mistakes_are_named_before_a_model_is_loaded(args, words, capsys):
    assert main(["serve", "--port", "0", *args]) == 2
    assert words in capsys.readouterr().err
