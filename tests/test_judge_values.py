"""The judge of numbers on expressions of known value: it says the value or "unparsable", and never another value."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.data.judge import extract, verdict_by_type
from colar.data.judge.numbers import read_number

Expression = tuple[str, Fraction | None]
"""A text and its value; None where it has none, or none that is rational."""

RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
FULL_WIDTH = str.maketrans("0123456789-.", "０１２３４５６７８９－．")
VULGAR = {"½": Fraction(1, 2), "⅓": Fraction(1, 3), "¾": Fraction(3, 4), "⅝": Fraction(5, 8)}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12, "bn": 10**9}
DASHES = "-−–‑‐－"


def power(base: Fraction, exponent: int) -> Fraction | None:
    return None if base == 0 and exponent < 0 else base**exponent


@st.composite
def numbers(draw: st.DrawFn) -> Expression:
    """A number without a sign, in one of its spellings."""
    whole = draw(st.integers(0, 9999))
    text = draw(st.sampled_from([str(whole), f"{whole:,}", f"{whole}.0", str(whole).translate(FULL_WIDTH)]))
    if draw(st.integers(0, 3)) == 0:
        tenths = draw(st.integers(0, 99))
        return f"{whole}.{tenths:02}", Fraction(whole * 100 + tenths, 100)
    return text, Fraction(whole)


@st.composite
def fractions(draw: st.DrawFn) -> Expression:
    top, bottom = draw(st.integers(0, 30)), draw(st.integers(1, 30))
    form = draw(st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"\dfrac{{{}}}{{{}}}", "{}⁄{}"]))
    return form.format(top, bottom), Fraction(top, bottom)


@st.composite
def mixed(draw: st.DrawFn) -> Expression:
    whole = draw(st.integers(1, 30))
    sign, part = draw(st.sampled_from(sorted(VULGAR.items())))
    form = draw(
        st.sampled_from(
            [f"{whole}{sign}", f"{whole} {part}", rf"{whole}\frac{{{part.numerator}}}{{{part.denominator}}}"]
        )
    )
    return form, whole + part


@st.composite
def powers(draw: st.DrawFn) -> Expression:
    base, exponent = draw(st.integers(0, 20)), draw(st.integers(-5, 9))
    form = draw(st.sampled_from([
        f"{base}^{{{exponent}}}", f"{base}^{exponent}", f"{base}**{exponent}", f"{base}{str(exponent).translate(RAISED)}",
        f"{base} ^ {exponent}", f"({base})^{{{exponent}}}",
    ]))  # fmt: skip
    return form, power(Fraction(base), exponent)


@st.composite
def scientific(draw: st.DrawFn) -> Expression:
    text, value = draw(numbers())
    exponent = draw(st.integers(-4, 6))
    form = draw(
        st.sampled_from(
            [r"{} \times 10^{{{}}}", "{} · 10^{}", "{} x 10^{}", "{}×10^{{{}}}", r"{} \cdot 10^{{{}}}"]
        )
    )
    return form.format(text, exponent), value * Fraction(10) ** exponent


@st.composite
def wrapped(draw: st.DrawFn, inner: st.SearchStrategy[Expression]) -> Expression:
    """An expression around another one. The text keeps its value, or becomes one that nobody may read as a number."""
    text, value = draw(inner)
    if text[-1].isalpha():
        text = f"({text})"
    kind = draw(
        st.sampled_from(["-()", "minus", "abs", "root", "function", "variable", "scale", "half", "call"])
    )
    if kind == "-()":
        return f"-({text})", None if value is None else -value
    if kind == "minus":
        sign = draw(st.sampled_from([*DASHES, "minus ", "negative ", "- ", "--"]))
        if "(" in text:  # the sign is that of the whole expression
            text = f"({text})"
        return sign + text, None if value is None else value if sign == "--" else -value
    if kind == "abs":
        form = draw(st.sampled_from(["|{}|", r"\left|{}\right|"]))
        return form.format(text), None if value is None else abs(value)
    if kind == "root":
        n = draw(st.integers(0, 40))
        form = draw(st.sampled_from([r"\sqrt{{{}}}", "√{}", "sqrt({})", "{}^(1/2)", r"\sqrt[2]{{{}}}"]))
        return form.format(n * n), Fraction(n)
    if kind == "function":
        return draw(
            st.sampled_from(["log {}", r"\log {}", "ln({})", r"\sin {}", "f({})", "sqrt {} + x"])
        ).format(text), None
    if kind == "variable":
        form = draw(st.sampled_from(["{}x", "{} x", "x {}", "{}i", "{}xy", "{} θ", r"{}\pi", "{}π", "{} \\cdot y", "x/{}", "{}/x", "x - {}", "{} - y",
                                     "2x = {}", "-x = {}", "x^2 = {}", "x > {}", "≥ {}", "{} ± 1", r"\neq {}", "not {}"]))  # fmt: skip
        return form.format(text), None
    if kind == "scale":
        scale = draw(st.sampled_from(sorted(SCALES)))
        return f"{text} {scale}", None if value is None else value * SCALES[scale]
    if kind == "half":
        return draw(
            st.sampled_from(["half of {}", "twice {}", "{} squared", "{} and a half", "{}%  of {}"])
        ).format(text, text), None
    beside = ["2({})", "({})({})", "{}({})", "({}, {})", "{}:{}", "{}!"]
    if text[0].isdigit():  # "-5 -5" is a difference
        beside.append("{} {}")
    return draw(st.sampled_from(beside)).format(text, text), None


@st.composite
def combined(draw: st.DrawFn, inner: st.SearchStrategy[Expression]) -> Expression:
    left, first = draw(inner)
    right, second = draw(inner)
    sign = draw(st.sampled_from(["+", " - ", "*", r" \cdot ", " × ", "/"]))
    if first is None or second is None:
        return f"({left}){sign}({right})", None
    operations = {"+": first + second, "-": first - second, "/": first / second if second else None}
    return f"({left}){sign}({right})", operations.get(sign.strip(), first * second)


ATOMS = st.one_of(numbers(), fractions(), mixed(), powers(), scientific())
EXPRESSIONS = st.one_of(
    ATOMS, wrapped(ATOMS), combined(ATOMS), wrapped(wrapped(ATOMS)), wrapped(combined(ATOMS))
)
PLACES = ["{}", "The answer is {}.", "{} ", "#### {}", r"\boxed{{{}}}", "${}$", "x = {}", "{} dollars", "{} cm", "{} m^2",
          "So it is ${}$", "**{}**"]  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(EXPRESSIONS, st.sampled_from(PLACES))
def test_an_expression_is_read_as_its_value_or_not_at_all(expression: Expression, place: str) -> None:
    text, value = expression
    read = extract(place.format(text), "number")
    assert read is None or (value is not None and read_number(read) == value), (text, value)


@settings(max_examples=100, deadline=None)
@given(st.one_of(numbers(), fractions(), mixed(), scientific()), st.sampled_from(PLACES[:7]))
def test_single_numbers_are_read(expression: Expression, place: str) -> None:
    """The other half: a judge that reads nothing would pass the test above."""
    text, _ = expression
    assert extract(place.format(text), "number") is not None, text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3½", Fraction(7, 2)), ("‑12", -12), ("－１２", -12), ("minus 12", -12), ("1.2 · 10^3", 1200), ("90^\\circ", 90),
        (r"5\text{ cm}^2", 5), ("5 m²", 5), ("5 m2", 5), ("6 feet 2 inches", None), ("6 feet 2", None), ("3 m 2", None), ("12 p.m.", 12), ("12\u00a0345", None), ("12\u202fapples", 12), ("5 million", None), ("5k", None), ("5 k", None),
        ("—12", None), ("٥٣ 5", None), ("5万", None), ("①", None), ("5①", None), ("4210₇", None), ("2xy", None), ("5 e", None),
        ("at least 5", None), ("more than 5", None), ("isn't 5", None), ("5, 5", None), ("5 or more", 5), ("0.333...", None),
        ("9^{9^{9}}", None), (r"\sqrt{2}", None), ("(-8)^{1/3}", None), ("0^{-1}", None), ("2^{99999999}", None), ("5++3", None),
        ("10^{6}", None), ("10⁶", None), (r"\sqrt{16}", None), ("√16", None), ("-(-5)", None), ("|-5|", None), (r"\frac{2^{3}}{4}", None),
    ],
)  # fmt: skip
def test_notations(text: str, value: Fraction | int | None) -> None:
    assert read_number(text) == value
    if value is not None:
        assert verdict_by_type(text, str(Fraction(value)), "number").correct
