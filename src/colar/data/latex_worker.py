"""Worker process of `latex.py`: reads a `[gold, answer]` a line, writes `true` or `false`, ends with its stdin.

It imports nothing of this package, so that it starts as fast as math-verify does.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

MEMORY_BYTES = 4 * 2**30


def limit_memory() -> None:
    """Let a runaway power fail with MemoryError instead of filling the machine's memory. POSIX only."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer each line of `requests` with one line; the first line says "ready", or why nothing can be answered."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        print(error, file=replies, flush=True)
        return

    def read(expression: str) -> list[object]:
        # math-verify looks for LaTeX between dollar signs only.
        text = expression if "$" in expression else f"${expression}$"
        found: list[object] = parse(
            text, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
        )
        return found

    print("ready", file=replies, flush=True)
    for line in requests:
        gold, answer = json.loads(line)
        try:
            # Without math-verify's own timeouts: the process that asks kills this one instead.
            same = bool(verify(read(gold), read(answer), timeout_seconds=None))
        except Exception:  # whatever a parser makes of a model's text, it is not the answer
            same = False
        print("true" if same else "false", file=replies, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    limit_memory()
    # Nothing that a library prints may pass for a reply.
    channel = sys.stdout
    sys.stdout = sys.stderr
    serve(sys.stdin, channel)
