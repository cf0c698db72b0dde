r"""LaTeX answers: the content of `\boxed{}`, a plain spelling, and whether two expressions mean the same.

Braces are matched: cutting at the last brace of a MATH solution corrupts a tenth of its answers. Two answers are
the same when their plain spellings are equal, when they are plain numbers of equal value, or when math-verify says
so; units and bases that differ make different answers (`units.py`). A list in parentheses or brackets is ordered, a
bare list and one in braces is not: "(3,4)" is neither "3,4" nor "(4,3)", and "3,4" is "4,3" and "\{3,4\}".
math-verify is asked in a process of its own (`latex_worker.py`): its own timeouts use SIGALRM, which works in
the main thread only and cannot interrupt one long C call, and a model may write `9^{9^{9^9}}`. Here a question that
takes longer than DEADLINE_S, or more memory than the worker is allowed, ends the worker and means "not the same". A
worker that was ended by something else says nothing of a question, which a new one is asked. Replies are remembered;
what had none is asked once more the next time: the machine may have been busy.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path

from colar.data.judge.quantity import read_number
from colar.data.judge.units import measured

DEADLINE_S = 5.0
MAX_CHARACTERS = 1000
REMEMBERED = 10_000
"""Comparisons of which the outcome is kept."""
TRIES = 2
"""Deadlines after which a comparison is not asked any more: each costs its seconds."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE_BOX = re.compile(r"[^\s$]+")
# No span contains a delimiter of its own kind: the search is linear in the length of the text. `\$` is a currency sign.
_MATHS = re.compile(
    r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL
)
# What stands between two formulas: of a list, or of an equation.
_LISTED = re.compile(r",|(?:,\s*)?(?:and|or)", re.IGNORECASE)
_EQUATED = re.compile(r"=|is|equals", re.IGNORECASE)
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|mathbf)\s*\{([^{}]*)\}")
# Spellings that print alike, and the one that each becomes.
_LOOKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!]"), ""),
    (re.compile(r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*([0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"\{,\}"), ","),
    # A space counts between words and digits only: "1 2" is not "12".
    (re.compile(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])"), ""),
    (re.compile(r"\s+"), " "),
)
_PLAIN_NUMBER = re.compile(r"[-+]?\\?\$?(?:[0-9.,]+(?:/[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})")


def extract_boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, braces matched; also `\boxed 5`.

    None where there is no box, where it is empty, or where the last one never closes (a truncated completion).
    """
    start = None
    for match in _BOX.finditer(solution):
        start = match.end()
    if start is None or start >= len(solution):
        return None
    if solution[start] == "{":
        content = _braced(solution, start) or ""
    else:
        # `\boxed 5.`: the next word, without the sentence's punctuation.
        bare = _BARE_BOX.match(solution, start)
        content = bare[0].rstrip(".,;:") if bare else ""
    return content.strip() or None


def math_spans(text: str) -> list[str]:
    r"""The texts between `$...$`, `\(...\)` or `\[...\]`."""
    spans = []
    for dollars, round_ones, square_ones in _MATHS.findall(text):
        # A group a kind of delimiter; two of the three are empty.
        inner = dollars or round_ones or square_ones
        spans.append(inner.strip())
    return spans


def formula(text: str) -> str | None:
    """The formula that `text` states, all of it where it has no delimiters; None where several could be meant.

    Several in a row are a list ("$1$, $2$ and $3$"); of an equation ("$x$ is $5$") it is the right one.
    """
    found = list(_MATHS.finditer(text))
    spans = math_spans(text)
    between = [text[one.end() : other.start()].strip() for one, other in itertools.pairwise(found)]
    if len(spans) < 2:
        return spans[0] if spans else text
    if all(_LISTED.fullmatch(words) for words in between):
        # In dollars still: of a list in which all are alike, math-verify takes one.
        return ", ".join(f"${span}$" for span in spans)
    if all(_EQUATED.fullmatch(words) for words in between):
        return spans[-1]
    return None


def plain(expression: str) -> str:
    r"""One spelling for looks that do not matter: `\dfrac`, `\left(`, `\text{}`, spaces, dollars, a final full stop."""
    text = expression.strip()
    spans = math_spans(text)
    if len(spans) == 1 and _MATHS.fullmatch(text.rstrip(".")):
        text = spans[0]
    text = _WORDS.sub(r" \1 ", text)
    # In the order of the table: spaces go last, when nothing else can leave one behind.
    for pattern, replacement in _LOOKS:
        text = pattern.sub(replacement, text)
    # Where nothing is left the text itself stays: two empty spellings would pass for equal answers.
    return text.strip().removesuffix(".").strip() or expression.strip()


def same_maths(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions mean the same. Safe in threads; answers within DEADLINE_S or so."""
    spelled = plain(gold)
    other = plain(answer)
    if spelled == other:
        return True
    if max(len(gold), len(answer)) > MAX_CHARACTERS or not spelled or not other:
        return False
    only_words = not _WORDS.sub("", gold).strip(" $.\\")
    if only_words:
        # "\text{Evelyn}" is a word. As maths it would be a product of letters, in any order.
        return spelled.casefold().strip("()") == other.casefold().strip("()")
    if formula(gold) is None or formula(answer) is None:
        return False  # math-verify would take the last one
    gold, answer = _undelimited(gold), _undelimited(answer)
    expected, stated = measured(gold, answer), measured(answer, gold)
    if not expected.compatible(stated) or _ordered(expected.expression) != _ordered(stated.expression):
        return False
    gold, answer = expected.expression, stated.expression
    spelled, other = plain(gold), plain(answer)
    if spelled == other:
        return True
    if _PLAIN_NUMBER.fullmatch(spelled) and _PLAIN_NUMBER.fullmatch(other):
        # Plain numbers are compared exactly, and need no worker.
        gold_value = read_number(spelled)
        value = read_number(other)
        if gold_value is not None and value is not None:
            return gold_value == value
    if _NO_REPLY[gold, answer] >= TRIES:
        return False
    try:
        return _asked(gold, answer)
    except _NoReplyError:
        if len(_NO_REPLY) >= REMEMBERED:
            _NO_REPLY.clear()
        _NO_REPLY[gold, answer] += 1
        return False


def _undelimited(text: str) -> str:
    """The formula without its delimiters; a list of several as it is."""
    spans = math_spans(text)
    return spans[0] if len(spans) == 1 and _MATHS.fullmatch(text.strip().rstrip(".")) else text


def _ordered(expression: str) -> bool:
    """True for a list in parentheses or brackets: a pair or an interval, and no set of solutions."""
    spelled = plain(expression)
    if not spelled.startswith(("(", "[")) or not spelled.endswith((")", "]")):
        return False
    depth = 0
    commas = 0
    for position, character in enumerate(spelled):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(spelled) - 1:
            return False  # "(1,2),(3,4)" is a list of pairs
        commas += depth == 1 and character == ","
    return commas > 0


def _braced(text: str, start: int) -> str | None:
    """The text in the braces that open at `start`; None where they never close.

    `\\{` and `\\}` are characters, not braces.
    """
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # the next character is escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


class _NoReplyError(Exception):
    """The worker took too long, or died, and a new one did too. An exception, because no cache keeps one."""


class _Comparer:
    """The worker process: started at the first question, again after a deadline, and gone with its parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def same(self, gold: str, answer: str) -> bool:
        """Ask the worker. _NoReplyError where it takes too long, or dies of the question."""
        # One question at a time: a reply is known by its place in the pipe alone.
        with self._lock:
            reply, expired = self._reply(gold, answer)
            # The worker may have been dead before: a system short of memory ends one that waits, too.
            if not reply and not expired:
                reply, _ = self._reply(gold, answer)
        if not reply:
            raise _NoReplyError
        return reply == "true"

    def _reply(self, gold: str, answer: str) -> tuple[str, bool]:
        """The reply, "" where the worker died, and whether the deadline ended it."""
        process = self._process or self._start()
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        # Killing the worker ends the read below: its pipe closes, and the reply is empty.
        timer = threading.Timer(DEADLINE_S, expire)
        timer.start()
        try:
            reply = _ask(process, json.dumps([gold, answer]))
        finally:
            timer.cancel()
            timer.join()  # no timer may outlive its question and end the next one
        if expired.is_set() or not reply:
            self._stop()
        return reply, expired.is_set()

    def _start(self) -> subprocess.Popen[str]:
        worker = Path(__file__).with_name("latex_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],  # -P: this folder must not shadow the standard library
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        # The worker prints "ready", or why math-verify cannot be imported.
        greeting = process.stdout.readline().strip()
        if greeting != "ready":
            self._stop()
            raise RuntimeError(f"LaTeX answers cannot be compared: {greeting or 'math-verify did not start'}")
        return process

    def _stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            # Waits for its end and closes its pipes: each deadline would leave a zombie otherwise.
            process.communicate()

    def forget(self) -> None:
        """In a forked child: the worker and its pipes belong to the parent."""
        # A new lock: another thread of the parent may have held the old one, and would never release it here.
        self._lock = threading.Lock()
        self._process = None

    def close(self) -> None:
        with self._lock:
            self._stop()


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The worker's reply to one line, "" when it has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    except (OSError, ValueError):
        return ""


_COMPARER = _Comparer()
atexit.register(_COMPARER.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COMPARER.forget)


_NO_REPLY: Counter[tuple[str, str]] = Counter()
"""How often a comparison had no reply."""


# A model repeats its wrong answers, and a group of rollouts has many alike.
@lru_cache(maxsize=REMEMBERED)
def _asked(gold: str, answer: str) -> bool:
    """The worker's reply. _NoReplyError, which is not remembered, where there is none."""
    return _COMPARER.same(gold, answer)
