"""Random mutations of what users give, and the judgement of what comes of it.

A case is data (JSON-like, so that a found one is a row of a table); `failure` runs a call and says what is wrong with
how it ended: anything but a result or an error of ours. Ours are a ValueError that a `raise` in src/colar makes, in
one line, and an OSError, which names its file.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import math
import re
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from huggingface_hub.errors import HFValidationError

import colar
from colar import cli
from colar.checks import NonFiniteError

SOURCE = str(Path(colar.__file__).parent)
FOREIGN = re.compile(
    r"values to unpack|invalid literal|object is not|unhashable|codec can't|has no attribute|argument must be"
    r"|not supported between|out of range|could not convert|Traceback|unexpected keyword|is not iterable"
)
"""Words of Python's own errors: a command that shows one has not checked what it was given."""

TWO_LINES = "a\nb"
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, 1.5, -0.0, 1e-300, 1e308, math.nan, math.inf, -math.inf, 2**31, 2**63, -(2**63) - 1,
    10**30, 10**400, "", " ", "x", "0", "-1", "1e-4", "1e999", "nan", "null", "true", "none", "###", TWO_LINES, "a\tb", "\0", "\x1b[31m",
    "\ud800", "\u202e", "é" * 300, "x" * 5000, "../..", "/", "~", "a/b", "a/b/c", "C:\\x", "%s {0} {x} {}", "<|endoftext|>",
    [], [[]], [None], [0], [1, 2], [math.nan], ["x"], ["x", 1], [{}], {}, {"": None}, {"x": 1}, {"name": "x"}, {"x": {"x": []}},
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "x", "0", "1", "-1", "2", "0.5", "-0.5", "1e999", "nan", "inf", "99999999999999999999", "9" * 5000, "null", "true", "[]",
    "{}", "[1, 2]", "=", "a=", "=b", "a=b", "a.b=c", "a=[", "a=1=2", "x,y", "a\nb", "\udcff", "é" * 300, "nowhere/at/all", "/dev/null", ".",
    "--", "-", "meta", "cpu:7", "cuda", "mps", "%s", "{0}", "*", "~", "a/b", "a/b/c", "@x", "tiny", "tiny/cot", "x.json", "x.html",
)  # fmt: skip


class TooLongError(BaseException):
    """A case took longer than its time: it was accepted, and works."""


def failure(call: Callable[[], object], seconds: float = 5.0) -> str | None:
    """None where the call ended well; else what it raised, and where."""
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        call()
    except TooLongError:
        return None
    except (NonFiniteError, OSError, HFValidationError):  # the Hub's client says well what its ids are
        return None
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).replace(TWO_LINES, "")  # a value may be quoted as it was given
        # Of the package's own subclasses, too: TooLong, for one.
        own = type(error) is ValueError or (
            isinstance(error, ValueError) and type(error).__module__.startswith("colar.")
        )
        ours = own and frame.filename.startswith(SOURCE)
        ours = ours and linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise")
        if ours and text and "\n" not in text:
            return None
        return f"{type(error).__name__}: {text[:300]!r} at {frame.filename}:{frame.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _stop(*_: object) -> None:
    raise TooLongError


def odd(random: Random, depth: int = 2) -> Any:
    """A value that hardly anybody means."""
    kind = random.random()
    if depth and kind < 0.08:
        return [odd(random, depth - 1) for _ in range(random.randrange(4))]
    if depth and kind < 0.14:
        return {
            random.choice(["x", "name", "", "1", "é"]): odd(random, depth - 1)
            for _ in range(random.randrange(3))
        }
    if kind < 0.2:
        nested: Any = random.choice(ODD)
        for _ in range(random.choice([5, 90, 400])):
            nested = [nested] if random.random() < 0.8 else {"x": nested}
        return nested
    return random.choice(ODD)


def changed(random: Random, value: Any) -> Any:
    """The value with one place in it, at any depth, dropped or replaced; keys may come in addition."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value, key=str))
        kind = random.random()
        if kind < 0.2:
            return {name: other for name, other in value.items() if name != key}
        if kind < 0.25:
            return {**value, random.choice(["x", "", "extra"]): odd(random)}
        return {**value, key: changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        kind = random.random()
        if kind < 0.15:
            return value[:place] + value[place + 1 :]
        if kind < 0.25:
            return [*value, value[place]]
        return [*value[:place], changed(random, value[place]), *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.4:
        return random.choice(
            [value + 1, value - 1, -value, value * 2, value / 2, str(value), 0, value * 10**6]
        )
    return odd(random)


def damaged(random: Random, content: bytes) -> bytes:
    """A file's content emptied, cut off, doubled, or with a few bytes changed."""
    kind = random.randrange(6)
    if kind == 0:
        return b""
    if kind == 1:
        return content[: len(content) // 2]
    if kind == 2:
        return content[: random.randrange(len(content) + 1)]
    if kind == 3:
        return content + content
    if kind == 4:
        return random.choice(
            [
                b"null",
                b"[]",
                b"{}",
                b"3",
                b'"x"',
                b"\xef\xbb\xbf" + content,
                b"\xff\xfe",
                b"\0" * 64,
                b"\n",
                b"[" * 100_000,
                b"9" * 5000,
            ]
        )
    flipped = bytearray(content)
    for _ in range(random.randrange(1, 4)):
        if flipped:
            # Headers and keys stand at the beginning of most files.
            end = min(len(flipped), random.choice([16, 400, len(flipped)]))
            flipped[random.randrange(end)] = random.choice(
                [0, 10, 34, 44, 48, 57, 91, 93, 123, 125, 195, 255]
            )
    return bytes(flipped)


def command(argv: list[str]) -> None:
    """Run a command in this process. AssertionError where it ends neither well nor with one line of ours."""
    shown, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
        try:
            code = cli.main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
    lines = [line for line in said.getvalue().splitlines() if "error:" in line]
    if code not in (0, 2, 130):
        raise AssertionError(f"exit code {code}: {said.getvalue()[-300:]}")
    if code == 2 and (not lines or FOREIGN.search(lines[-1])):
        raise AssertionError(f"exit code 2: {said.getvalue()[-500:]}")
