"""Run as a script by `latex.py`: reads `[gold, answer]` a line, writes `true` or `false`, ends with its stdin.

It imports nothing of this package, so that it starts as fast as math-verify does.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

MEMORY_BYTES = 4 * 2**30


def limit_memory() -> None:
    """A runaway power fails with MemoryError instead of taking the machine along. POSIX only."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def serve(requests: TextIO, replies: TextIO) -> None:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        print(error, file=replies, flush=True)
        return

    def read(expression: str) -> list[object]:
        text = expression if "$" in expression else f"${expression}$"
        found: list[object] = parse(
            text, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
        )
        return found

    print("ready", file=replies, flush=True)
    for line in requests:
        gold, answer = json.loads(line)
        try:
            same = bool(verify(read(gold), read(answer), timeout_seconds=None))
        except Exception:  # whatever a parser makes of a model's text, it is not the answer
            same = False
        print("true" if same else "false", file=replies, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    limit_memory()
    channel, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may pass for a reply
    serve(sys.stdin, channel)
