"""The judge: hand-made tables of what is read, what is right, and what must never pass."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.data.judge import Verdict, extract, math_process, verdict_by_type
from colar.data.judge.latex import extract_boxed
from colar.data.judge.numbers import canonical, read_number, same_number
from colar.data.sources import load_examples

TYPES = ("number", "latex", "choice", "text")

READ_AS_NUMBER = [
    ("42", "42"),
    (" -42 ", "-42"),
    ("042", "42"),
    ("10.0", "10"),
    ("36.", "36"),
    (".45", "0.45"),
    ("1,234.50 dollars", "1234.5"),
    ("1,000,000", "1000000"),
    ("The answer is 1,234.50 dollars.", "1234.5"),
    ("So the final answer is: **18**", "18"),
    ("The answer is **18**.", "18"),
    ("The answer is **$18** (see above).", "18"),
    ("Tom has **18 apples**, and all is done.", "18"),
    ("Answer: 42. There are 3 left over", "42"),
    ("The final answer is:\n\\[\n42\n\\]\nThere are 3 left over", "42"),
    ("The answer is\n$$\n42\n$$", "42"),
    ("The answer is $5 for Ann.\nBob gets $6.", "5"),
    ("Answer: 42! There are 3 left over", "42"),
    ("First 7. The answer is 8. No, the answer is 9", "9"),
    # An answer ends where it is complete: what a model invents behind it is not read.
    ("#### 4\nA pen costs 2. How much do 3 cost?\n#### 6", "4"),
    ("#### 4\n\nQuestion: A pen costs 3.\nAnswer: 9", "4"),
    ("So 2 + 2 = 4. #### 4 Question: How many?\n#### 3", "4"),
    ("The answer is 8.\n\nQ: How many?\nA: The answer is 3", "8"),
    ("4\n\nProblem 2: Tom has 3.\n#### 3", "4"),
    ("\\boxed{4}\nUser: and now? \\boxed{5}", "4"),
    ("#### 4. Wait: #### 5", "5"),  # reads as a numbered heading
    ("#### 1. Add\n2 + 3\n#### 2. Say it\nThe answer is 5", "5"),
    ("Let me restate:\nQuestion: how many?\nThe answer is 7", "7"),
    ("#### 42", "42"),
    (r"\boxed{42}", "42"),
    (r"2 then \boxed{41} then \boxed{42}", "42"),
    ("$42$", "42"),
    ("$1,234", "1234"),
    (r"\$1{,}234", "1234"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("−5", "-5"),
    ("- 5", "-5"),
    ("x = - 5", "-5"),
    ("45%", "45"),
    (r"45\%", "45"),
    ("3/4", "0.75"),
    ("1/3", "1/3"),
    (r"\frac{3}{4}", "0.75"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"\frac12", "0.5"),
    ("1 1/2", "1.5"),
    (r"2\frac{1}{2}", "2.5"),
    ("1e5", "100000"),
    ("3.509e-07", "0.0000003509"),
    (r"1.5 \times 10^6", "1500000"),
    ("1.5 x 10^{3}", "1500"),
    ("5km", "5"),
    ("5 m^2", "5"),
    ("6*7 = 42", "42"),
    ("6 x 7 = 42", "42"),
    ("6 X $7 = $42", "42"),
    ("6x7=42", "42"),
    ("x=5", "5"),
    ("42\n42.0", "42"),
    ("1 ½", "1.5"),
    (r"2 \frac{1}{2}", "2.5"),
    (r"2\;\frac12", "2.5"),
    (r"\frac1{2}", "0.5"),
    (r"\frac{1}2", "0.5"),
    (r"\frac 12", "0.5"),
    ("2024\n2024/1", "2024"),
    ("42。", "42"),
    # Units: shorter ones, and those of a rate.
    ("144 sq. ft.", "144"),
    ("5 PM", "5"),
    ("5 P.M.", "5"),
    ("5 kgs", "5"),
    ("5 kWh", "5"),
    ("1 yr", "1"),
    ("$15/hour", "15"),
    ("3 / day", "3"),
    # An abbreviation ends no sentence.
    ("The answer is Rs. 50", "50"),
    ("The answer is approx. 50. It is done", "50"),
    ("3 + 2 = 5, so x = 5", "5"),
    ("3a = 27, or a = 9", "9"),
    ("12a-a=55 or a=5", "5"),
    ("The answer is 5. I am sure that this answer is correct.", "5"),
    ("Answer: 5\nThe answer is reasonable", "5"),
    ("5! = 120", "120"),
    ("x = y = 5", "5"),
]
NOT_A_NUMBER = [
    "", "  ", "forty-two", "12 13 14", "3 apples and 4 pears", "10-5", "10 - 5", "5 * 3", "2 **3", "(2)**(3)", "**2** and **3**", "2**10", "12x",
    "1,2345", "12,13", "1,23", "3.14.15", "1/2/3", "1 / 2 / 3", "1/0", "3.5/4", "2020-01-05", "10:30", "COVID-19",
    "x2", "1_000", "٣", "the answer is", r"\boxed{}", r"\boxed{42", "1e999999999", "1e401", "nan", "inf", "(1,2)",
    # Decimals as in Europe, and factors.
    "0,042", "042,000", "6 x 7", "6 X $7", "42 x (1)", "42 x = 42", "2 x = 42",
    "The answer is 42. That answer is wrong.",
    # Inequalities, several equations, two lines, and what lies below zero.
    "x >= 42", "x<=42", "x != 42", "x =/= 42", "n >= 40, n <= 42",
    "x = 1 or x = 42", "x = 1, y = 42", "x=1; y=42", "x_1 = 1 and x_2 = 42", r"\boxed{x = 1 \text{ or } x = 42}",
    "$x = 1$ or $x = 42$", "a = 1, b = 2, and c = 42", "41\n1/1", "42 degrees below zero", "42° below zero", "42/hypotenuse",
    "42/x", "42/sec(x)", "42/day/2",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), READ_AS_NUMBER)
def test_a_number_is_read(text: str, value: str) -> None:
    assert extract(text, "number") == value


@pytest.mark.parametrize("text", NOT_A_NUMBER)
def test_no_number_is_guessed(text: str) -> None:
    assert extract(text, "number") is None
    assert verdict_by_type(text, "42", "number") == Verdict(correct=False, parsed=None)


@pytest.mark.parametrize(
    ("completion", "gold", "correct"),
    [
        ("10.0", "10", True),
        ("10.0001", "10", False),  # integers are exact
        ("1,234", "1234", True),
        ("0.4", "2/5", True),
        ("5.0001", "5", False),
        ("123456789012345678901234567890", "123456789012345678901234567890", True),
        ("123456789012345678901234567891", "123456789012345678901234567890", False),  # equal as floats
        ("3244047.1", "3244047.0999999996", True),  # GSM-Hard's golds carry float noise
        ("3244047", "3244047.0999999996", False),  # 0.1 off
        ("3245000", "3244047.0999999996", False),
        ("14053029.6667", "14053029.666666666", True),
        ("14053029.67", "14053029.666666666", False),  # 0.0033 off
        ("14053100", "14053029.666666666", False),
        ("55938720", "55938720.00000001", True),
        ("0.3333", "1/3", True),
        ("0.33", "1/3", False),
        ("4.5009", "4.5", True),
        ("4.501", "4.5", False),  # PAL has <, not <=
        ("10.0009", "10", False),
        ("3.509e-7", "3.509e-07", True),
        ("0", "3.509e-07", True),  # PAL's rule has this price
        ("0", "0.0016791648", False),
        ("-3.5", "3.5", False),
        ("45", "45%", True),
        ("0.45", "45%", False),
    ],
)
def test_numbers_compare(completion: str, gold: str, correct: bool) -> None:
    assert verdict_by_type(completion, gold, "number").correct is correct


@pytest.mark.parametrize(
    "gold", [Fraction(5, 2), Fraction(-5, 2), Fraction(28_106_059, 2), Fraction(1, 10**7)]
)
def test_the_tolerance_is_absolute_and_open(gold: Fraction) -> None:
    just_within = Fraction(999_999, 10**9)
    for sign in (-1, 1):
        assert same_number(gold, gold + sign * just_within)
        assert not same_number(gold, gold + sign * Fraction(1, 1000))


def test_an_integer_gold_has_no_tolerance() -> None:
    assert same_number(Fraction(10), Fraction(10))
    assert not same_number(Fraction(10), Fraction(10) + Fraction(1, 10**9))


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\left\{1, \frac{1}{2}\right\}} because {x}", r"\left\{1, \frac{1}{2}\right\}"),
        (r"\boxed{\left\{x : x > 2\right.} and more}", r"\left\{x : x > 2\right."),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"$\boxed 2$.", "2"),
        (r"$\boxed {17}.$", "17"),
        (r"\fbox{9}", "9"),
        (r"\fbox{\boxed{7}}", "7"),
        ("no box", None),
        (r"\boxed{}", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedwidth{3}", None),
    ],
)
def test_boxes_match_their_braces(solution: str, answer: str | None) -> None:
    assert extract_boxed(solution) == answer


@pytest.mark.parametrize(
    ("completion", "gold", "correct"),
    [
        (r"\boxed{\frac34}", r"\frac{3}{4}", True),
        ("0.75", r"\frac{3}{4}", True),
        ("0.76", r"\frac{3}{4}", False),
        ("12", "(1,2)", False),
        ("(1,2)", "12", False),
        ("1 2", "12", False),
        (r"$\left( 1, 2 \right)$", "(1,2)", True),
        ("(2,1)", "(1,2)", False),
        ("1,234", "1234", True),
        (r"The answer is $x^2+1$.", "1+x^2", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("(x+1)^2", "x^2+2x+2", False),
        (r"\dfrac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}", True),
        ("evelyn", r"\text{Evelyn}", True),
        ("Elvyne", r"\text{Evelyn}", False),  # the same letters: equal as a product
        ("(C)", r"\text{(C)}", True),
        ("C", r"\text{(C)}", True),
        ("5", "x=5", True),
        # Bases and units: the same on both sides, or none on one.
        ("4210_8", "4210_7", False),
        ("4210_{7}", "4210_7", True),
        ("4210", "4210_7", True),
        (r"11_2, 101_3", "11_2, 101_2", False),
        (r"5\text{ m}", r"5\text{ cm}", False),
        ("45", r"45\%", True),
        ("45 percent", r"45\%", True),
        ("0.45", r"45\%", False),
        (r"10\%", "0.1", False),
        (r"\emptyset", r"\varnothing", True),
        (r"\{x | x > 2\}", r"\{x \mid x>2\}", True),
        ("5 centimeters", r"5\text{ cm}", True),
        ("5 m", r"5\text{ m}", True),
        ("5m", "5", False),  # a variable
        ("5c", "5", False),
        ("3s^2", "3", False),
        ("5", r"5\text{ cm}", True),
        ("5 meters", "5", True),
        ("18.90 dollars", "18.90", True),
        ("18.90 dollars", r"\$18.90", True),
        ("18.90 euros", r"\$18.90", False),
        (r"34\text{ units}^2", r"34\text{ sq. units}", True),
        (r"440\text{ cm}^3", r"440\text{ cm}^2", False),
        (r"2\pi", "2", False),
        ("2pi", "2", False),
        ("2 pi", "2", False),
        ("2 * pi", "2", False),
        ("2 tau", "2", False),
        ("2 pies", "2", True),
        ("5 million", "5", False),
        # Closed forms are exact however small; a decimal for one that never ends is not.
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}", False),
        (r"2^{-99}", r"\frac{1}{2^{99}}", True),
        (r"2^{-98}", r"\frac{1}{2^{99}}", False),
        (r"(1, \frac{1}{2^{98}})", r"(1, \frac{1}{2^{99}})", False),
        (r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}", False),
        (r"\frac{\sqrt{2}}{2^{98}}", r"\frac{\sqrt{2}}{2^{99}}", False),
        (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}", True),
        ("3.141593", r"\pi", True),
        ("3.1416", r"\pi", False),
        ("0.0000002", r"\frac{\pi}{10000000}", False),
        # Parentheses make an order.
        ("3,4", "(3,4)", False),
        ("(3,4)", "3,4", False),
        (r"\{4,3\}", "3,4", True),
        ("(1,2),(3,4)", "(3,4),(1,2)", True),
        ("90", r"90^\circ", True),
        (r"\boxed{5", "5", False),
        # Infinity is equal to itself alone, also at the end of an interval.
        (r"-\infty", r"\infty", False),
        ("5", r"\infty", False),
        (r"\infty", "5", False),
        ("[2,5)", r"[2,\infty)", False),
        (r"(\infty,2)", r"(-\infty,2)", False),
        (r"(-\infty,3]", r"(-\infty,2]", False),
        (r"( -\infty , \frac{4}{2} ]", r"(-\infty,2]", True),
        # A pair or an interval may have its name.
        ("(x, y) = (1, 2)", "(1,2)", True),
        ("(1,2)", "P = (1, 2)", True),
        ("(x, y) = (2, 1)", "(1,2)", False),
        (r"x \in [1,2]", "[1,2]", True),
        (r"x \in (1,2]", "[1,2]", False),
        ("x = 3,4", "(3,4)", False),
        ("(2,3)", "2<x<3", True),
        ("[2,3)", "2<x<3", False),
        # Signs as a keyboard has them.
        ("(−∞, 2]", r"(-\infty,2]", True),
        ("(−∞, 2)", r"(-\infty,2]", False),
        ("2√3", r"2\sqrt{3}", True),
        ("√10", r"\sqrt{10}", True),
        ("√(x+1)", r"\sqrt{1+x}", True),
        ("√30", r"\sqrt{3}", False),
        ("x ∈ [1,2]", "[1,2]", True),
        # Numbers in other spellings.
        (r"12\,345", "12345", True),
        (r"1\,23", "123", False),
        ("1.5e6", "1500000", True),
        ("1.5e6", "1.5e7", False),
        ("3 1/2", r"\frac{7}{2}", True),
        ("-3 1/2", "-3.5", True),
        ("3 1/2", r"\frac{31}{2}", False),
        ("60 miles per hour", "60 mph", True),
        # What stands beside the one formula may change it.
        ("not $5$", "5", False),
        ("The answer is not $5$.", "5", False),
        ("$5$ million", "5", False),
        ("-$5$", "5", False),
        ("6 - $5$", "5", False),
        ("minus $5$", "5", False),
        ("at least $5$", "5", False),
        ("more than $5$", "5", False),
        (r"x > \(5\)", "5", False),
        ("$5$ and 6", "5", False),
        ("$5$, 6", "5", False),
        ("6 or $5$", "5", False),
        ("2$5$", "5", False),
        ("$5$ or more", "5", False),
        ("half of $5$", "5", False),
        ("- $5$", "5", True),  # a list
        ("The value of f(2) is $5$, and we are done.", "5", True),
        ("x = $5$ cm", "5", True),
        ("Since 3 < 4, $5$ is right to 2 places", "5", True),
        ("For n = 3, it is $5$ in all.", "5", True),
        ("The answer is **$5$**.", "5", True),
        ("**1/2**", r"\frac{1}{2}", True),
        ("x**2", r"2x", False),
        # Inches and minutes are units; pi may have one.
        (r"12\text{ in}", "12", True),
        ("12 in.", r"12\text{ inches}", True),
        (r"12\text{ in}^2", "12 square inches", True),
        (r"12\text{ in}", r"12\text{ ft}", False),
        ("5 min", r"5\text{ minutes}", True),
        ("5 min", r"5\text{ hours}", False),
        (r"\min", r"\text{ minutes}", False),
        (r"36\pi\text{ cm}^2", r"36\pi", True),
        (r"36 \pi", r"36\pi \text{ square units}", True),
        (r"36\pi square units", r"36\pi", True),
        (r"36\pi\text{ cm}^2", r"36\pi\text{ cm}^3", False),
        (r"35\pi\text{ cm}^2", r"36\pi", False),
        # A dollar sign in a formula ends none.
        (r"The answer is $\$5$.", r"\$5", True),
        (r"$\$18.90$", "18.90", True),
        (r"$\$18.90$", "18.91", False),
        (r"It costs $x$ or \$5", "5", False),
        # Of several formulas none is picked: a list is all of them.
        ("The answer is $5$, not $6$", "6", False),
        ("The answer is $5$, not $6$", "5", False),
        ("First $a=5$. Then we get $b=6$.", "6", False),
        ("$5$; $6$", "6", False),
        (r"\boxed{$5$, not $6$}", "6", False),
        ("The answers are $3$, $4$, and $5$.", "3,4,5", True),
        ("$3$, $4$, and $5$", "5", False),
        (r"\(5\) and \(6\)", "5,6", True),
        ("$5$ or $6$", "6", False),
        ("$5$ or $5$", "5", True),
        ("The value of $m+n$ is $5$.", "5", True),
        ("$m+n$ is $5$", "5", True),
        ("$x$ = $5$", "5", True),
        ("$ $", " ", False),
        # A formula is not cut where a sentence would end.
        ("The final answer is:\n\\[\nx^2+1\n\\]", "1+x^2", True),
        ("The answer is\n\n$$\n\\frac12\n$$\n\nDone.", r"\frac{1}{2}", True),
        (r"The answer is $34\text{ sq. units}$.", r"34\text{ sq. units}", True),
        (r"The answer is $11,\! 111$.", r"11,\! 111", True),
        ("The answer is $5$! No, $6$.", "5", True),
    ],
)
def test_latex_compares(completion: str, gold: str, correct: bool) -> None:
    assert verdict_by_type(completion, gold, "latex").correct is correct


MONEY_AND_UNITS = (r"\$18.90", r"-\$0.50", r"\$1,\!657", r"11,\! 111,\! 111,\! 100", r"34\text{ sq. units}",
                   "90\\text{ square\nunits}", r"\frac{3}{4}", r"\{1, 2\}", r"\text{(B)}", "x^2+1")  # fmt: skip
WAYS_TO_STATE = ("{}", "${}$", "The answer is ${}$.", "so the answer is $${}$$", "Answer: \\({}\\)", "**Answer:** {}",
                 "The answer is\n\\[\n{}\n\\]\nIt is done.", "so $\\boxed{{{}}}$.")  # fmt: skip


@pytest.mark.parametrize("gold", MONEY_AND_UNITS)
@pytest.mark.parametrize("way", WAYS_TO_STATE)
def test_an_answer_is_read_alike_however_it_is_stated(gold: str, way: str) -> None:
    """Golds of MATH: each is right in every form, and spelled as it is without."""
    assert verdict_by_type(way.format(gold), gold, "latex") == Verdict(True, extract(gold, "latex"))


def test_latex_is_judged_in_any_thread() -> None:
    """math-verify's own timeouts raise outside the main thread; the process serves several at once."""
    verdicts: dict[int, tuple[bool, bool]] = {}

    def work(n: int) -> None:
        right = verdict_by_type(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}", "latex").correct
        verdicts[n] = (right, verdict_by_type(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n + 1}", "latex").correct)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == dict.fromkeys(range(1, 5), (True, False))


def test_a_runaway_expression_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_by_type("y+x", "x+y", "latex").correct  # the worker is up
    monkeypatch.setattr(math_process, "DEADLINE_S", 0.5)
    start = time.monotonic()
    assert not verdict_by_type("9^{9^{9^{9}}}", "5z", "latex").correct
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    assert verdict_by_type("z+x", "x+z", "latex").correct  # a new worker answers the next question


def test_a_question_without_a_reply_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline on a busy machine says nothing of the answer: it must not stand for the process's life."""
    assert verdict_by_type("y+x", "x+y", "latex").correct  # the worker is up
    monkeypatch.setattr(math_process, "DEADLINE_S", 0.0)
    assert not verdict_by_type("(w+1)^2", "w^2+2w+1", "latex").correct
    monkeypatch.undo()
    assert verdict_by_type("(w+1)^2", "w^2+2w+1", "latex").correct


def test_a_worker_that_was_ended_before_the_question_is_replaced() -> None:
    assert verdict_by_type("s+t", "t+s", "latex").correct  # not asked before: the worker is up
    worker = math_process.WORKER._process
    assert worker is not None
    worker.kill()
    worker.wait()
    assert verdict_by_type("(v+1)^2", "v^2+2v+1", "latex").correct
    assert not verdict_by_type("(v+1)^2", "v^2+2v+2", "latex").correct


def test_a_reply_that_an_interrupt_left_behind_is_no_other_questions() -> None:
    worker = math_process.Worker()
    assert worker.same("x+1", "1+x")
    assert worker._process is not None
    worker._process.send_signal(signal.SIGSTOP)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            worker.same("x+2", "2+x")
    finally:
        signal.signal(signal.SIGALRM, before)
    questions = [("x+1", "x+2"), ("2y", "y+y"), ("x^2", "x+x")]
    assert [worker.same(*question) for question in questions] == [False, True, False]
    worker._stop()


def test_a_worker_is_ready_when_it_has_imported_all_that_a_question_needs() -> None:
    """On a busy machine a deadline that covers imports would end one worker after another, and no answer be right."""
    code = """if True:
        import io, json, sys
        from colar.data.judge import math_process

        def questions():
            before = set(sys.modules)
            for answer in ("x^2+2x+1", "x^2+2x+2"):
                yield json.dumps(["(x+1)^2", answer])
            print(sorted(set(sys.modules) - before))

        replies = io.StringIO()
        math_process.serve(questions(), replies)
        print(replies.getvalue().split())
    """
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["[]", "['ready', 'true', 'false']"]


def test_a_worker_that_hangs_in_its_imports_holds_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\ntime.sleep(60)\n")
    worker = math_process.Worker()
    with monkeypatch.context() as patched:
        patched.setattr(math_process, "__file__", str(hangs))
        patched.setattr(math_process, "START_S", 0.2)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"math-verify did not start, or not within 0\.2 s"):
                worker.same("x+y", "y+x")
        assert time.monotonic() - start < 30
    # Another one is started at the next question.
    assert worker.same("x+y", "y+x")
    worker._stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="forking a threaded test process warns")
def test_a_forked_child_has_a_comparer_of_its_own() -> None:
    assert verdict_by_type("b+a", "a+b", "latex").correct
    child = os.fork()
    if child == 0:
        os._exit(
            0
            if verdict_by_type("c+a", "a+c", "latex").correct
            and not verdict_by_type("c+a", "a-c", "latex").correct
            else 1
        )
    assert os.waitpid(child, 0)[1] == 0
    assert verdict_by_type("d+a", "a+d", "latex").correct


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("B) Vitamin C.", "B"), ("(C) 5 apples", "C"),
        ("The answer is B", "B"), ("The answer is (C).", "C"), ("answer: D\nbecause (A) fails", "D"),
        ("**D**", "D"), (r"\boxed{\text{(J)}}", "J"),
        ("True", "True"), ("false.", "False"), ("The statement is false.", "False"),
        ("", None), ("K", None), ("A dog", None), ("I think so", None), ("(A) or (B)", None), ("A. x B. y", None),
        ("It is not true", None), ("true or false", None), ("Because", None), ("AB", None),
        # What is denied or joined is not chosen.
        ("The answer is not (B)", None), ("It can't be (B)", None), ("None of (B)", None), ("It cannot be true", None),
        ("It is never true", None), ("(B) not enough information", "B"), ("B) and C)", None), ("(B) or C", None), ("A, B. x", None),
        ("D) A and B", "D"), ("(D) Both A and B", "D"), ("D. None of these", "D"), ("(B) I cannot say", "B"),
        # A letter on the first line is the answer, an initial is none.
        ("B\nBecause A. is wrong", "B"), ("D\n\nbecause (A) fails", "D"), ("B.\nA. is wrong", "B"), ("B\nA", None), ("A.\nB.\nC.", None),
        ("(B) Franklin D. Roosevelt", "B"), ("B. George H. W. Bush", "B"), ("Franklin D. Roosevelt", None), ("John F. Kennedy", None),
        ("Option B. Rome", "B"), ("Option B", "B"), ("The answer is option B", "B"), ("The correct choice is (C).", "C"),
        ("**B**", "B"), ("B。", "B"), ("(B) Vitamin A, C and E", "B"), ("B. Vitamins A, C", "B"), (r"\text{B. Rome}", "B"),
        # A list of all options chooses none.
        ("A. Paris B. Rome C. Berlin D. Madrid", None), ("A. Paris\nB. Rome\nC. Berlin", None), ("A. 5, B. 6, C. 7", None),
        ("A) 5, B) 6", None), ("A: 5, B: 6", None), ("A. $5$\nB. $6$", None), ("A. Yes\nB. No", None), ("(A) Yes (B) No", None),
        ("A. New York, B. Rome", None), ("A. $5$", "A"), ("B. John D. Rockefeller", "B"),
        # Names with initials, behind a label and later; words and formulas in LaTeX.
        ("(B) E. coli", "B"), ("B. E. coli", "B"), ("B. C. elegans", "B"), ("B. H. pylori", "B"), ("B. George C. Marshall", "B"),
        ("(B) George C. Marshall", "B"), (r"\(B. 5\)", "B"), (r"\[B. 5\]", "B"), (r"\text{B}. \text{Rome}", "B"),
        (r"\boxed{\text{B}. \text{Rome}}", "B"), (r"\boxed{\textbf{B}. 5}", "B"), (r"$\mathrm{B}.\ 5$", "B"),
        (r"\boxed{B. \text{E. coli}}", "B"),
    ],
)  # fmt: skip
def test_choices_are_read(text: str, choice: str | None) -> None:
    assert extract(text, "choice") == choice


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("Tom is a lempus.", True),
        ("tom is  a LEMPUS", True),
        ("The answer is: Tom is a lempus.", True),
        ("### Tom is a lempus.", False),
        ("Tom is a scrompus.", False),
        ("Tom is a lempus. Tom is a scrompus.", False),
        ("", False),
        ("Ｔｏｍ is a\u00a0lempus．", True),
        ("“Tom is a lempus”", True),
        ("'Tom is a lempus'.", True),
        ("**Tom is a lempus**.", True),
        ("**Answer:** Tom is a lempus.", True),
        ("The answer is **Tom is a lempus.**", True),
        ("Tom is a lempus。", True),
    ],
)
def test_texts_compare(completion: str, correct: bool) -> None:
    assert verdict_by_type(completion, "Tom is a lempus.", "text").correct is correct


@pytest.mark.parametrize(
    ("completion", "gold", "answer_type"),
    [
        ("caf\u00e9", "cafe\u0301", "text"), ("It isn’t", "it isn't", "text"), ("a—b", "a-b", "text"), ("co\u00adop", "coop", "text"),
        ("１，２３４", "1234", "number"), ("‑12", "-12", "number"), ("12\u00a0km", "12", "number"), ("\ufeff12", "12", "number"),
        ("（Ｂ）", "B", "choice"), ("Ｔｒｕｅ", "True", "choice"), ("x²", "x^2", "latex"), ("−½", r"-\frac{1}{2}", "latex"),
    ],
)  # fmt: skip
def test_characters_that_look_alike_are_one(completion: str, gold: str, answer_type: str) -> None:
    assert verdict_by_type(completion, gold, answer_type).correct  # type: ignore[arg-type]


def test_raised_and_circled_digits_are_not_digits() -> None:
    """NFKC alone would make 10⁶ 106 and 5① 51."""
    for text in ("10⁶", "5①"):
        for answer_type in TYPES:
            assert not verdict_by_type(text, "106", answer_type).correct  # type: ignore[arg-type]
            assert not verdict_by_type(text, "51", answer_type).correct  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 5])
def test_no_gold_of_math_is_right_with_another_digit(real_data: Path, step: int) -> None:
    """A sample of them: the golds with a subscript, a unit, a factorial or a power, where such a change has passed."""
    golds = {example.answer for example in load_examples("math", "test", data_dir=real_data)}
    risky = sorted(
        gold for gold in golds if re.search(r"[0-9]_|[0-9]!|(?:text|mbox)\{.*\^|\^\{?[0-9]{2}", gold)
    )
    assert len(risky) > 30
    for gold in risky[step % 2 :: 2]:
        assert verdict_by_type(rf"\boxed{{{gold}}}", gold, "latex").correct
        for place in re.finditer("[0-9]", gold):
            other = str((int(place[0]) + step) % 10)
            changed = gold[: place.start()] + other + gold[place.end() :]
            assert not verdict_by_type(rf"\boxed{{{changed}}}", gold, "latex").correct, (gold, changed)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        ValueError, match="answer_type must be one of number, latex, choice, text, got 'float'"
    ):
        verdict_by_type("1", "1", "float")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["9" * 10_000, "1" + " " * 100_000 + "2", "-" * 100_000, "answer is " * 10_000, "1,000" * 20_000, "{" * 50_000,
     r"\frac{" * 10_000, "1e999999999", "1e-999999999", "=" * 100_000, "(A) " * 20_000, r"\boxed{" * 10_000,
     "$" * 50_000, r"\(" * 30_000, "1/" * 30_000, "\n" * 100_000, r"\boxed" + " " * 100_000],
)  # fmt: skip
@pytest.mark.parametrize("answer_type", TYPES)
def test_long_garbage_is_judged_fast(text: str, answer_type: str) -> None:
    start = time.monotonic()
    assert not verdict_by_type(text, "7", answer_type).correct  # type: ignore[arg-type]
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("answer_type", TYPES)
@pytest.mark.parametrize(
    "written",
    ["{}", "-{}", "#### {}", "${}", "{}.5", "0.{}", "{}/3", "3/{}", "1 1/{}", r"\frac{{3}}{{{}}}", "1e{}", "6*7 = {}",
     r"\boxed{{{}}}", r"1.5 \times 10^{{{}}}"],
)  # fmt: skip
def test_a_number_of_thousands_of_digits_is_a_wrong_answer(written: str, answer_type: str) -> None:
    """Python makes no number of more than 4,300 digits; nor is such a gold ever met."""
    long = written.format("7" * 5000)
    assert not verdict_by_type(long, "42", answer_type).correct  # type: ignore[arg-type]
    assert not verdict_by_type("42", long, answer_type).correct  # type: ignore[arg-type]
    assert verdict_by_type(long, "42", "number").parsed is None


@given(st.integers(min_value=-(10**40), max_value=10**40))
def test_an_integer_is_right_in_every_spelling_and_its_neighbour_is_wrong(n: int) -> None:
    gold = str(n)
    for text in (gold, f"{n:,}", f"{n}.0", f"The answer is {n:,}.", rf"\boxed{{{n}}}", f"{n} apples"):
        assert verdict_by_type(text, gold, "number") == Verdict(correct=True, parsed=gold)
        assert not verdict_by_type(text, str(n + 1), "number").correct


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30))
def test_a_float_is_right_as_it_prints(value: float) -> None:
    assert verdict_by_type(repr(value), repr(value), "number").correct
    assert read_number(repr(value)) == Fraction(repr(value))


@given(st.fractions(max_denominator=10_000))
def test_the_canonical_spelling_reads_back_to_the_same_value(value: Fraction) -> None:
    assert Fraction(canonical(value)) == value
    assert read_number(canonical(value)) == value


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.sampled_from(TYPES[2:] + TYPES[:1]))
def test_any_text_is_judged(text: str, answer_type: str) -> None:
    verdict = verdict_by_type(text, text, answer_type)  # type: ignore[arg-type]
    assert verdict.correct == (verdict.parsed is not None)  # what can be read is itself


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=r"\{}^_$()[]<=>.,+-*/ 019abx", max_size=20))
def test_any_latex_is_judged(text: str) -> None:
    verdict = verdict_by_type(text, text, "latex")
    assert verdict.correct == (verdict.parsed is not None)
    assert not verdict_by_type(text, r"\text{no}", "latex").correct


@given(st.text(min_size=1, max_size=40).filter(str.strip))
def test_a_text_answer_is_right_however_it_is_spaced_and_cased(text: str) -> None:
    assert verdict_by_type(text, text, "text").correct
    assert verdict_by_type(f"  {'  '.join(text.split())}\n", text, "text").correct
