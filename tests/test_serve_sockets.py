"""The server through raw sockets and as a command: broken requests, clients that leave or do not read, SIGTERM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading

import openai
import pytest
from families import tiny_lm
from launch import Group
from serving import QUESTION, Slow, cot_model, running, serve_model, until

from colar.cli import main
from colar.engine.request import Decoding
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.serve import app

BODY = json.dumps({"model": "cot", "messages": [{"role": "user", "content": QUESTION}]}).encode()


@pytest.fixture(scope="module")
def live():
    with running(serve_model("cot", cot_model())) as found:
        yield found


@pytest.fixture(autouse=True)
def _serves_on(live):
    """Whatever a test has sent, the next request is answered, and nothing is left of the last one."""
    yield
    status, body = answer(live, post(BODY))
    assert status == 200, body
    until(lambda: not live.served["cot"].engine.engine.busy)


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
    """Status and body of the response; status 0 where there is none."""
    with live.connect() as sock:
        # It may have hung up already.
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                found += part
    if not found:
        return 0, {}
    head, _, body = found.partition(b"\r\n\r\n")
    # uvicorn answers in plain text what is no HTTP.
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else body


def test_half_a_body_and_gone(live):
    with live.connect() as sock:
        sock.sendall(post(BODY[:20], length=len(BODY)))
    until(lambda: live.connections == 0)
    status, _ = answer(live, post(BODY[:20], length=len(BODY)), half_close=True)
    assert status in (0, 400)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xfe{}", "must be JSON"), (b"{" * 3000, "must be JSON"), (b"", "the body is missing"), (b"[" * 4000, "pars"),
        (b"\x00" * 100, "must be JSON"), (b"[1]", "must be a JSON object"), (b'"text"', "must be a JSON object"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "finite"), (b'{"a": "\xff"}', "pars"), (b'{"\\ud800": 1}', "unknown field"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate"), (b'{"a": ' + b"9" * 5000 + b"}", "pars"),
        (b"[" * 100_000, "pars"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_request(live, body, words):
    status, found = answer(live, post(body))
    assert status == 400
    assert words in found["error"]["message"]


def test_a_body_that_is_too_large(live):
    assert answer(live, post(b"x" * 10, length=100 * 2**20))[0] == 413
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert answer(live, head + (b"10000\r\n" + b"x" * 2**16 + b"\r\n") * 20)[0] == 413
    assert answer(live, head + b"zz\r\nhello\r\n")[0] == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # TLS to a plain port
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        post(BODY, *(f"X-{i}: {'y' * 20}" for i in range(10_000))),
    ],
)
def test_what_is_no_http(live, data):
    assert answer(live, data)[0] in (0, 400)


def test_other_content_types_and_methods_are_refused(live):
    """A page of another site can send forms and plain text to a server on this machine, but no JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, body = answer(live, post(BODY, kind=kind))
        assert status == 400
        assert "application/json" in body["error"]["message"]
    assert answer(live, post(BODY, kind="application/json; charset=utf-8"))[0] == 200
    for method in (b"PUT", b"DELETE", b"PATCH", b"OPTIONS"):
        assert answer(live, post(BODY).replace(b"POST", method, 1))[0] == 405


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


def test_one_connection_more_than_allowed_is_503(monkeypatch):
    monkeypatch.setattr(app, "MAX_CONNECTIONS", 2)
    with running(serve_model("cot", cot_model())) as live:
        health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        with live.connect() as one:
            one.sendall(health)
            assert one.recv(1000).startswith(b"HTTP/1.1 200")
            assert answer(live, health)[0] == 503
        until(lambda: live.connections == 0)
        assert answer(live, health.replace(b"Host", b"Connection: close\r\nHost"))[0] == 200


def test_a_client_that_stops_reading_holds_no_rows():
    """The engine does not wait for it."""
    method = Slow()
    method.pause = 0.0
    served = serve_model(
        "slow", (tiny_lm("gpt2"), method), Decoding(max_latents=100, max_completion_length=1)
    )
    body = {"model": "slow", "messages": [{"role": "user", "content": "x?"}], "n": 8, "return_thoughts": True}
    with running(served) as live, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(live.address)
        sock.sendall(post(json.dumps({**body, "stream": True}).encode()))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not served.engine.engine.busy)


# The command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("colar", {})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    return pretrained.save(lm, method, tmp_path_factory.mktemp("made") / "toy", {"seed": 0}, "a card")


def serve(folder, words):
    """The command in this process, which was forked (launch.py); its stdout and stderr go into files as they come."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, number)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115  # stays open until the process ends
    os.environ["COLAR_API_KEYS"] = "k1 k2"
    return main(["serve", *words, "--port", "0", "--max_latents", "150"])


def test_the_command_serves_and_drains_on_sigterm(checkpoint, tmp_path):
    """SIGTERM in the middle of an answer: it is answered to its end, then the process ends."""
    group = Group(1, tmp_path / "group", serve, tmp_path, [f"toy={checkpoint}"])
    (process,) = group.processes
    try:
        printed = tmp_path / "stdout"
        until(lambda: (printed.exists() and printed.read_text().endswith("\n")) or not process.is_alive())
        url = printed.read_text().strip()
        assert url.startswith("http://127.0.0.1:"), group.wait()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k2", max_retries=5)
        stream = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": QUESTION}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [next(stream), next(stream)]
        os.kill(process.pid, signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 1
        assert chunks[-2].choices[0].finish_reason
        (outcome,) = group.wait(60)
        assert (outcome.code, outcome.value) == (0, 0), outcome
    finally:
        process.kill()
    assert "POST /v1/chat/completions" in (tmp_path / "stderr").read_text()


MISTAKES = [
    (["no/such/folder/here"], "there is no such folder"),
    (["x=a", "x=b"], "two checkpoints have one name (x)"),
    (["x", "--max_waiting", "0"], "max_waiting must be a whole number, 1 or more"),
    (["x", "--api_key_file", "/no/such/file"], "No such file"),
    (["x", "--host", "203.0.113.7", "--port", "1"], "error"),
    (["x", "--port", "99999"], "port must be a whole number, from 0 to 65535, got 99999"),
    (["x", "--port", "-1"], "port must be a whole number, from 0 to 65535, got -1"),
]


def test_a_budget_for_no_question_is_refused_at_the_start(checkpoint, capsys, monkeypatch):
    monkeypatch.delenv("COLAR_API_KEYS", raising=False)
    words = ["--port", "0", "--max_latents", "20", "--max_completion_length", "10", "--device", "cpu"]
    assert main(["serve", str(checkpoint), *words, "--token_budget", "40"]) == 2
    said = "--token_budget 40 is too small for the default limits (max_latents 20, max_completion_length 10)"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("args", "words"), MISTAKES)
def test_mistakes_are_named_before_a_model_is_loaded(args, words, capsys):
    assert main(["serve", "--port", "0", *args]) == 2
    assert words in capsys.readouterr().err
