"""The servers that `serve.py` compares: how each is started, asked, and known to have done all of its work.

All make the same: chains of `CHAIN` tokens (a fifth as many latents at c = 5), then `ANSWER` tokens. A stream that ends
early, or says an error, is no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from work import ANSWER, FACTOR, Unending, best_device, load_model

CHAIN = 100
TOKENS = CHAIN + 1 + ANSWER
"""What a system makes that thinks in tokens and knows nothing of thoughts: a chain, the separator, an answer."""
POSITIONS = 512
"""Most positions of a row: the longest question of GSM8K and a chain."""
READY_SECONDS = 300.0
GRAPHS = ("colar5-graphs", "cot-graphs")
THOUGHTS = {
    "cot": CHAIN,
    "cot-graphs": CHAIN,
    "colar5-graphs": CHAIN // FACTOR,
    "colar5": CHAIN // FACTOR,
    "colar5-hidden": CHAIN // FACTOR,
    "engine": CHAIN // FACTOR,
}
"""Embeddings between the separators, for our systems."""


@dataclass(frozen=True)
class Times:
    """Of one answer, in seconds since it was asked for."""

    first: float
    whole: float


# Asking


def body_of(system: str, model: str, question: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that makes all systems do the same work."""
    body: dict[str, Any] = {"model": model, "stream": True}
    if system == "transformers":
        # No token has this id: the answer ends at its limit.
        fixed = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": -1}
        return "/v1/completions", {**body, "prompt": question, "generation_config": json.dumps(fixed)}
    if system == "llama-cpp":
        more = {"prompt": question, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return "/v1/completions", {**body, **more, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": question}], "stream_options": {"include_usage": True}}
    if system == "colar5-hidden":
        body["include_reasoning"] = False
    return "/v1/chat/completions", body


async def ask(port: int, system: str, model: str, question: str) -> Times:
    """Ask once, on a connection of its own. RuntimeError for anything but a whole stream with all of its tokens."""
    path, body = body_of(system, model, question)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        first = 0.0
        said = b""
        while part := await reader.read(65536):
            said += part
            if not first and b"data:" in said:
                first = time.perf_counter() - started
        whole = time.perf_counter() - started
    finally:
        writer.close()
    wrong = what_is_wrong(system, said)
    if wrong:
        raise RuntimeError(f"{system}: {wrong}: {said[:300]!r} ... {said[-600:]!r}")
    return Times(first, whole)


def what_is_wrong(system: str, said: bytes) -> str:
    """Why a response is no whole answer; "" where it is one."""
    if not said.startswith(b"HTTP/1.1 200"):
        return "no status 200"
    if re.search(rb'data: \{"error"', said):
        return "an error in the stream"
    found = re.findall(rb'"completion_tokens": ?(\d+)', said)
    want = THOUGHTS[system] + ANSWER if system in THOUGHTS else TOKENS
    if not found or int(found[-1]) != want:
        return f"not {want} tokens"
    return ""


# Starting


@contextlib.contextmanager
def running(system: str, args: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """A server in a process of its own; its port, the name of its model, and the process."""
    model = model_folder(args.backbone) if system == "transformers" else "model"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log_path = Path(args.output) / f"{system}.log"
    with open(log_path, "wb") as log:
        # torch.set_num_threads would hold for one thread of a server alone.
        threads = {"OMP_NUM_THREADS": str(args.threads)}
        command = _command(system, port, args)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | threads)
        try:
            _wait(process, port, log_path)
            yield port, model, process.pid
        finally:
            _end(process)


def _command(system: str, port: int, args: argparse.Namespace) -> list[str]:
    if system == "transformers":
        return _transformers(port, args)
    options = ["--server", system, "--port", str(port), "--threads", str(args.threads)]
    options += ["--slots", str(args.slots)]
    serve = str(Path(__file__).with_name("serve.py"))
    return [sys.executable, serve, *options, "--backbone", args.backbone, "--output", args.output]


def _transformers(port: int, args: argparse.Namespace) -> list[str]:
    # Its program may be anywhere: packages can lie in a folder of their own.
    program = (sys.executable, "-c", "from transformers.cli.transformers import main; main()")
    # Without numbers its cache takes 60% of the machine's memory.
    block = 32
    cache = ["--cb-block-size", str(block), "--cb-num-blocks", str(args.slots * POSITIONS // block)]
    cache += ["--cb-max-batch-tokens", "2048"]
    options = ["--continuous-batching", "--device", best_device(), "--dtype", "bfloat16", *cache]
    return [
        *program,
        "serve",
        model_folder(args.backbone),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *options,
    ]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until the server says that it is ready: llama.cpp accepts connections before. RuntimeError where it does not."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(
                f"the server ended with {process.returncode}: {' '.join(last)[:300]} (see {log})"
            )
        # An HTTP error, too, is an OSError.
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS:.0f} s: see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def model_folder(backbone: str) -> str:
    """The backbone as a Hugging Face folder."""
    from colar import files
    from colar.model import backbones

    if Path(backbone).is_dir():
        return backbone
    folder = files.cache_folder() / (backbone if backbone == "smollm2-135m" else f"bench-{backbone}")
    if not folder.exists():
        # `smollm2-135m` is written there as it is loaded.
        loaded = backbones.load(backbone, "bfloat16", seed=0)
        if not folder.exists():
            loaded.lm.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
    return str(folder)


# Ours


def engine(system: str, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The engine of one of ours, its method, and the lengths of the work."""
    import torch

    from colar.engine.engine import Engine
    from colar.engine.request import Decoding

    torch.set_num_threads(args.threads)
    name = "cot" if system.startswith("cot") else "colar"
    lm, method = load_model(args.backbone, "bfloat16", name, best_device())
    decoding = Decoding(max_latents=THOUGHTS[system], max_completion_length=ANSWER)
    made = Engine(lm, Unending(method), args.slots, cuda_graphs=system in GRAPHS)
    return made, method, decoding


class Fixed(Unending):
    """A served method at one factor: what `colar serve` reads of a method is the wrapped one's."""

    def __init__(self, method: Any) -> None:
        super().__init__(method)
        self.thinks_in_latents = method.thinks_in_latents

    def choices(self) -> dict[str, Any]:
        return {"compression_factor": [FACTOR]} if self.thinks_in_latents else {}


def serve(system: str, args: argparse.Namespace) -> None:
    """Be the server of llama.cpp, or of one of ours as `colar serve` is."""
    if system == "llama-cpp":
        _serve_llama_cpp(args)
        return
    from colar.engine.async_engine import run_in_temporary_thread
    from colar.serve import app
    from colar.serve.served_model import ServedModel

    made, method, decoding = run_in_temporary_thread(partial(engine, system, args))
    made.method = Fixed(method)
    served = ServedModel("model", made, decoding)
    bound = app.bind("127.0.0.1", args.port)
    app.run_server(app.make_server(app.build([served])), bound)


def _serve_llama_cpp(args: argparse.Namespace) -> None:
    """llama.cpp's own server, with as many rows at a time as ours; it ends with the process."""
    import xllamacpp
    from llama_cpp import model_file

    params = xllamacpp.CommonParams()
    params.model.path = str(model_file("BF16"))
    params.model_alias = {"model"}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * POSITIONS  # shared by all rows
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    listening = xllamacpp.Server(params)  # without the name it would end here
    print(listening.listening_address, flush=True)
    threading.Event().wait()
