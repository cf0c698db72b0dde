r"""The exact value of one number in mathematical notation: `10^{6}`, `\sqrt{16}`, `-(-5)`, `|-5|`, `\frac{2^3}{4}`.

The notation is rewritten as a Python expression, of which Python's own parser makes a tree; the tree is evaluated in
`Fraction`s. Nothing is executed. What Python would not read as one expression, a root that is not rational, and a
value too long to build have no value.

Departure from math-verify, which could compute it too: that takes 2(5) for the mixed number 7 and 2^3^2 for 64.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_BITS = 4000

_NOTATION: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,!;: ]"), ""),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])|[×·⋅]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|÷"), "/"),
    (re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])"), r"((\1)/(\2))"),
    (re.compile(r"√\s*([0-9]+)(?![0-9.])"), r"root(\1)"),
    (re.compile(r"\\?sqrt\s*\(|√\s*\("), "root("),
)
# What braces or bars hold, the innermost first.
_NESTED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\s*\{([^{}]+)\}"), r"root(\1)"),
    (re.compile(r"\\sqrt\s*\[([0-9])\]\s*\{([^{}]+)\}"), r"root(\2,\1)"),
    (re.compile(r"\^\s*\{([^{}]+)\}"), r"^(\1)"),
    (re.compile(r"\|([^|]+)\|"), r"abs(\1)"),
)
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_READABLE = re.compile(r"(?:[0-9()+\-*/^, ]|root(?=\()|abs(?=\())+")
# "2(5)" may be a product or a mixed number; "5++3" is no notation.
_SIDE_BY_SIDE = re.compile(r"[0-9)]\s*[(a-z]|\)\s*[0-9]|[0-9]\s+[0-9]|[-+]\s*\+|[-+]\s*-\s*-")


def closed_form(text: str) -> Fraction | None:
    """Compute the value of one expression; None where it is none, is not rational, or is too long to build."""
    if len(text) > MAX_LENGTH:
        return None
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = _DECIMAL.sub(_quotient, text)
    before = ""
    while text != before:
        before = text
        for pattern, replacement in _NESTED:
            text = pattern.sub(replacement, text)
    if not _READABLE.fullmatch(text) or _SIDE_BY_SIDE.search(text):
        return None
    try:
        tree = ast.parse(text.replace("^", "**").strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _quotient(decimal: re.Match[str]) -> str:
    """A decimal as the quotient that it is: Python would make a float of it, which is rounded."""
    return f"({int(decimal[1] + decimal[2])}/{10 ** len(decimal[2])})"


def _value(node: ast.expr) -> Fraction:
    """The value of a node. ValueError for anything that is not arithmetic of rational numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(Fraction(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _bounded(_combined(_value(node.left), node.op, _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        values = [_value(argument) for argument in node.args]
        if node.func.id == "abs" and len(values) == 1:
            return abs(values[0])
        if node.func.id == "root" and len(values) in (1, 2):
            return _root(values[0], int(values[1]) if len(values) == 2 else 2)
    raise ValueError("not arithmetic")


def _combined(left: Fraction, operator: ast.operator, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div):
        return left / right
    if isinstance(operator, ast.Pow):
        # Bounded before it is built.
        if abs(right.numerator) * _bits(left) > MAX_BITS:
            raise ValueError("too long")
        return _root(left, right.denominator) ** right.numerator
    raise ValueError("not arithmetic")


def _root(value: Fraction, degree: int) -> Fraction:
    """The root where it is rational. ValueError where it is not, or is not real."""
    if degree == 1:
        return value
    if not 2 <= degree <= MAX_BITS or value < 0:
        raise ValueError("no root")
    return Fraction(_whole_root(value.numerator, degree), _whole_root(value.denominator, degree))


def _whole_root(number: int, degree: int) -> int:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < number:
            low = middle + 1
        else:
            high = middle
    if low**degree != number:
        raise ValueError("not rational")
    return low


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("too long")
    return value
