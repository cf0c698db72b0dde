"""math-verify in a process of its own: compares two LaTeX expressions within a deadline.

Its own timeouts use SIGALRM, which works in the main thread only and cannot interrupt one long C call, and a model may
write `9^{9^{9^9}}`. Here a question that takes longer than DEADLINE_S, or ends the worker by using more memory than
allowed, has no reply. This file is also the worker: it reads one `[gold, answer]` per line, writes `true` or `false`,
and ends with its stdin. It imports nothing of this package, so that it starts as fast as math-verify does.

Two numbers are compared exactly if both are closed forms. A decimal for one ("3.141593" for pi) must be within
TOLERANCE of it, a relative tolerance that becomes absolute for values above 1. Plain numbers and fractions do not reach
this file, because `latex.py` compares them exactly: "0.333333" is not 1/3.
Departure from math-verify, which treats two values less than 1e-15 apart as equal: it took 1/2004! for 1/2006!.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

DEADLINE_S = 5.0
START_S = 120.0
"""Most seconds for the imports, even on a slow file system, because a worker that hangs would block every question."""
MEMORY_BYTES = 4 * 2**30
TOLERANCE = 1e-6
DIGITS = 100
"""Digits to which two closed forms with a root or a transcendental must agree."""


class Worker:
    """The process: started at the first question, restarted if it has ended, and ended with its parent, which holds its
    stdin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def same(self, gold: str, answer: str) -> bool:
        """The reply of the process. TimeoutError if it takes too long, or if the question kills it."""
        # One question at a time, because a reply is matched to its question by their order in the pipe alone.
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            reply = ""
            try:
                with _killed_after(DEADLINE_S, process), contextlib.suppress(OSError):
                    process.stdin.write(json.dumps([gold, answer]) + "\n")
                    process.stdin.flush()
                    reply = process.stdout.readline().strip()
            except BaseException:
                # Ctrl-C, for one: the reply that is still to come would be taken for the next question's.
                self._stop()
                raise
            if not reply:
                self._stop()
                raise TimeoutError
            return reply == "true"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # -P: this folder must not shadow the standard library
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        assert self._process.stdout is not None
        # Imports take seconds, and do not count towards the first question's deadline.
        with _killed_after(START_S, self._process):
            reply = self._process.stdout.readline().strip()
        if reply != "ready":
            self._stop()
            raise RuntimeError(
                f"LaTeX answers cannot be compared: math-verify did not start, or not within {START_S:g} s"
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # Waits for its end and closes its pipes; otherwise each missed deadline would leave a zombie.
            process.communicate()


@contextlib.contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process if the block takes longer: its pipe closes, and a read from it ends with an empty reply."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no timer may outlive its block and end the next question


WORKER = Worker()
if hasattr(os, "register_at_fork"):
    # Reset in a forked child: the process, its pipes and a lock that another thread may hold are the parent's.
    os.register_at_fork(after_in_child=WORKER.__init__)  # type: ignore[misc]


# --- the worker ------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Let a runaway power fail with MemoryError instead of filling the machine's memory. POSIX only."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def compare_exactly() -> None:
    """Replace math-verify's comparison of numbers by `same_value`, also within sets, tuples and matrices."""
    from math_verify import grader
    from sympy import MatrixBase, MatrixExpr  # type: ignore[import-untyped]

    original = grader.sympy_numeric_eq

    def same(gold: Any, answer: Any, *precision: int) -> bool:
        matrix = isinstance(gold, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr)
        percent = grader.get_pct_val(gold) is not None or grader.get_pct_val(answer) is not None
        if matrix or percent:
            return bool(original(gold, answer, *precision))
        return same_value(grader.safe_sympy_doit(gold), grader.safe_sympy_doit(answer))

    grader.sympy_numeric_eq = same


def same_value(gold: Any, answer: Any) -> bool:
    """Compare two numbers of sympy; False for expressions with variables, which simplification compares exactly."""
    from sympy import Float, Rational

    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    rounded = gold.has(Float) != answer.has(Float)
    exact = []
    for value in (gold, answer):
        # A decimal has the value that is written: the bits of Float(0.1) are another number.
        decimals = {part: Rational(str(part)) for part in value.atoms(Float)}
        exact.append(value.xreplace(decimals).doit())
    if any(value.is_infinite for value in exact):
        return bool(exact[0] == exact[1] and exact[0].is_extended_real)  # 1/0 is no value
    apart = exact[0] - exact[1]
    if apart.is_Rational and (apart == 0 or not rounded):
        return bool(apart == 0)
    size = abs(exact[0].evalf(DIGITS))
    limit = TOLERANCE * min(1, size) if rounded else size * Rational(1, 10 ** (DIGITS - 20))
    return bool(abs(apart.evalf(DIGITS)) <= limit)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer each line of `requests` with one line; the first line is "ready"."""
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse, verify

    compare_exactly()
    # The parent compares units (`latex.py`), because math-verify would drop them: "5c" would be 5.
    notation = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    config = LatexExtractionConfig(normalization_config=notation)

    def read(expression: str) -> list[object]:
        # math-verify looks for LaTeX between dollar signs only.
        text = expression if "$" in expression else f"${expression}$"
        expressions: list[object] = parse(text, [config], fallback_mode="no_fallback", parsing_timeout=None)
        return expressions

    # Warm-up: sympy imports much of itself when it first compares. Under the first question's deadline, every worker on
    # a busy machine would be killed before its first reply.
    verify(read("(x+1)^2"), read("x^2+2x+1"), timeout_seconds=None)
    print("ready", file=replies, flush=True)
    for line in requests:
        gold, answer = json.loads(line)
        try:
            # Without math-verify's own timeouts: the parent kills this process instead.
            same = bool(verify(read(gold), read(answer), timeout_seconds=None))
        except Exception:  # any error of a parser on a model's text: not the answer
            same = False
        print("true" if same else "false", file=replies, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    limit_memory()
    # Text that a library prints must not pass for a reply.
    channel = sys.stdout
    sys.stdout = sys.stderr
    serve(sys.stdin, channel)
