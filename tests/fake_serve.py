"""A server that speaks `colar serve`'s API and has no model: what the page is tested against, event by event.

It answers each question with one chain, cut into groups of c, and serves the page under the strictest
Content-Security-Policy. Standard library only. `requests` holds the bodies that it was sent.
"""

from __future__ import annotations

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "colar"
PAGE = SOURCE / "serve" / "page"
VIEWER = SOURCE / "look" / "page" / "viewer"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
CHAIN = (
    "<<",
    "5",
    "*",
    "5",
    "=",
    "25",
    ">>",
    "<<",
    "10",
    "+",
    "25",
    "=",
    "35",
    ">>",
    "<<",
    "35",
    "/",
    "7",
    "=",
    "5",
    ">>",
)
HOSTILE = "<img src=x onerror=window.hit=1>"

MODELS = [
    {
        "id": "smollm2",
        "object": "model",
        "created": 0,
        "owned_by": "colar",
        "colar": {
            "method": "colar",
            "params": {
                "compression_factor": {"default": 2.0, "allowed": [1, 2, 3, 5], "about": "tokens a thought"},
                "confidence_threshold": {"default": 0.0, "allowed": None, "about": "end a group early"},
            },
            "efforts": {"none": {"thinking_token_budget": 0}, "low": {"compression_factor": 5}, "medium": {"compression_factor": 2}, "high": {"compression_factor": 1}},
            "max_latents": 128,
            "max_completion_length": 64,
        },
    },
    {
        "id": "chain",
        "object": "model",
        "created": 0,
        "owned_by": "colar",
        "colar": {"method": "cot", "params": {}, "efforts": {"none": {"thinking_token_budget": 0}}, "max_latents": 128, "max_completion_length": 64},
    },
]  # fmt: skip


def thoughts(c: int | None, hostile: bool = False) -> list[dict[str, Any]]:
    """The chain as THOUGHTs: latents of c tokens each, or tokens where c is None."""
    size = c or 1
    made = []
    for index, start in enumerate(range(0, len(CHAIN), size)):
        group = CHAIN[start : start + size]
        tokens = []
        for place, text in enumerate(group):
            cosine = None if c is None else round(0.97 - 0.16 * place - 0.03 * (index % 4), 3)
            tokens.append({"id": start + place, "text": text, "cosine": cosine, "logprob": None})
        near = [{"id": 900 + k, "text": str(10 + k), "cosine": round(0.9 - 0.08 * k, 3)} for k in range(10)]
        if hostile and index == 0:
            tokens[0]["text"] = near[0]["text"] = HOSTILE
        made.append(
            {
                "index": index,
                "text": "".join(group),
                "kind": "token" if c is None else "latent",
                "tokens": tokens,
                "ordered": False,
                "neighbours": near,
                "sigma": None if c is None else round(0.03 * math.exp(0.35 * (index % 7)), 3),
                "stop_probability": None if c is None else 0.01,
                "low_confidence": False,
            }
        )
    return made


class FakeServe(ThreadingHTTPServer):
    """Listens on a free port of this machine, until it is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.key: str | None = None
        self.pause = 0.0
        """Seconds between two events."""
        self.models = MODELS
        self.cut_after: int | None = None
        """Events after which the connection is dropped."""
        self.gone = threading.Event()
        """A client left in the middle of a stream."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: browsers leave connections open, and drop them."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeServe

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/models":
            if self._allowed():
                self._json(200, {"object": "list", "data": self.server.models})
            return
        name = "index.html" if path == "/" else path.removeprefix("/static/")
        file = (PAGE if (PAGE / name).is_file() else VIEWER) / name
        if file.parent not in (PAGE, VIEWER) or not file.is_file():
            self._error(404, f"no {path}")
            return
        self._send(200, TYPES[file.suffix], file.read_bytes())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if not self._allowed():
            return
        question = body["messages"][-1]["content"]
        if "refuse" in question:
            self._error(400, "compression_factor must be a number, 1 or more", "compression_factor")
            return
        if "busy" in question:
            self._error(429, "the queue is full", wait="7")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(body, question)
        except (BrokenPipeError, ConnectionResetError):
            self.server.gone.set()

    def _stream(self, body: dict[str, Any], question: str) -> None:
        c = None if body["model"] == "chain" else int(body.get("compression_factor", 5))
        made = thoughts(c, hostile="hostile" in question)
        for sent, thought in enumerate(made):
            if sent == self.server.cut_after:
                return
            delta = {
                "reasoning": thought["text"],
                "reasoning_content": thought["text"],
                "colar": {"thoughts": [thought]},
            }
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            if "break" in question and sent == 1:
                self._event(
                    {
                        "error": {
                            "message": "the model's numbers were not finite",
                            "type": "server_error",
                            "param": None,
                            "code": None,
                        }
                    }
                )
                return
        for text in (HOSTILE,) if "hostile" in question else ("5", ""):
            self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        n = len(made)
        summary = {
            "forward_passes": n + 3,
            "thinking_ms": 20.0 * n,
            "answer_ms": 40.0,
            "finish": "stop",
        }
        self._event({"choices": [{"index": 0, "delta": {"colar": summary}, "finish_reason": "stop"}]})
        self._write("data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        # A line in the middle of an event, and a comment: both are legal, and a page must not trip over them.
        self._write(": still here\n\n")
        text = f"data: {json.dumps(data, ensure_ascii=False)}\r\n\r\n"
        half = len(text) // 2
        self._write(text[:half])
        self._write(text[half:])
        time.sleep(self.server.pause)

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _allowed(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._error(401, "no or wrong API key")
        return False

    def _error(self, status: int, message: str, param: str | None = None, wait: str | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        self._json(status, {"error": error}, {"Retry-After": wait} if wait else {})

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(body).encode(), headers)

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)
