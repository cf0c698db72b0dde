"""Programs as chains of equations: straight-line Python (PAL, TinyGSM) and MathQA's formulas. Nothing is executed.

    apples = 7                                    multiply(n0,n1)|add(#0,const_3)
    total = apples * 6          <<7*6=42>>        <<7*6=42>> <<42+3=45>>
    return total + 3            <<42+3=45>>

Each assignment of an expression is one equation, its variables replaced by their values.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from colar.data.judge.numbers import decimal_text, places_of

Number = Fraction

OPERATORS: dict[type, tuple[str, Callable[[Number, Number], Number]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", lambda a, b: Fraction(a // b)),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", lambda a, b: _power(a, b)),
}
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 3}
ATOM = 4
CASTS: dict[str, Callable[[Number], Number | int]] = {
    "int": math.trunc, "float": lambda value: value, "round": lambda value: value, "abs": abs,
}  # fmt: skip
ANSWERS = ("result", "answer", "ans")
"""Variables that hold the answer of a program without a return."""
DECIMALS = 4
"""The most decimals of a value: what has more cannot be written in an equation that is true."""
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
FORMULA = re.compile(r"([a-z_]+)\(\s*([^(),]*?)\s*,\s*([^(),]*?)\s*\)")
CONSTANT = re.compile(r"const_(\d+(?:[_.]\d+)?)")
BINARY = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "power": "**"}


class NotStraight(ValueError):
    """A program that is more than assignments of arithmetic, or whose values cannot be written."""


@dataclass(frozen=True)
class Solution:
    """Equations, and the value of the last one."""

    steps: tuple[str, ...]
    value: Number

    @property
    def answer(self) -> str:
        return written(self.value)


def of_python(code: str) -> Solution:
    """The equations of a Python program: assignments, then `return`, `print` or a variable called `result`."""
    body = _parsed(code)
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if len(functions) == 1:
        body = functions[0].body
    values: dict[str, Number] = {}
    steps: list[str] = []
    last: Number | None = None
    for node in body:
        value = _expression_of(node)
        if value is None:
            continue
        found, text, rank = _walk(value, values)
        plain = rank == ATOM
        if not plain:
            steps.append(f"<<{text}={written(found)}>>")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Name):
                raise NotStraight("an assignment to more than one variable")
            values[target.id] = found
            last = found if not plain or target.id in ANSWERS or last is None else last
        else:
            last = found
        if isinstance(node, ast.Return):
            break
    if last is None or not steps:
        raise NotStraight("no equation")
    return Solution(tuple(steps), last)


def _parsed(code: str) -> list[ast.stmt]:
    """The statements of a program, which may stand between a chat's ``` marks."""
    fenced = FENCE.search(code)
    text = textwrap.dedent(fenced[1] if fenced else code).strip()
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise NotStraight("not Python") from error


def _expression_of(node: ast.stmt) -> ast.expr | None:
    """The expression that a statement computes; None for a docstring or an import."""
    if isinstance(node, ast.Assign) and len(node.targets) != 1:
        raise NotStraight("an assignment to more than one variable")
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) and node.value is not None:
        return node.value
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
        return None
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return None
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[printed])):
            return printed
    raise NotStraight(f"a statement that is no assignment of arithmetic: {type(node).__name__}")


def _walk(node: ast.expr, values: dict[str, Number]) -> tuple[Number, str, int]:
    """The value of an expression, its text with numbers for variables, and how tightly that text binds."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found = Fraction(str(node.value))
        return found, written(found), ATOM
    if isinstance(node, ast.Name):
        if node.id not in values:
            raise NotStraight(f"a variable without a value: {node.id}")
        return values[node.id], written(values[node.id]), ATOM
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value, text, rank = _walk(node.operand, values)
        return -value, f"-{text}" if rank == ATOM else f"-({text})", ATOM if rank == ATOM else PRECEDENCE["*"]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sign, compute = OPERATORS[type(node.op)]
        left, left_text, left_rank = _walk(node.left, values)
        right, right_text, right_rank = _walk(node.right, values)
        rank = PRECEDENCE[sign]
        left_text = f"({left_text})" if left_rank < rank or (left < 0 and sign == "**") else left_text
        # a - (b - c) and a / (b / c) need their brackets; a negative number behind a sign has some, too.
        close = right_rank <= rank or right < 0
        right_text = f"({right_text})" if close else right_text
        try:
            return compute(left, right), f"{left_text}{sign}{right_text}", rank
        except (ZeroDivisionError, OverflowError) as error:
            raise NotStraight(f"{left_text}{sign}{right_text}: {error}") from error
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CASTS and node.args:
        value, text, rank = _walk(node.args[0], values)
        # Equations cannot say that a value changes.
        if CASTS[node.func.id](value) != value:
            raise NotStraight(f"{node.func.id}() changes a value")
        return value, text, rank
    raise NotStraight(f"more than arithmetic: {ast.unparse(node)[:40]}")


def _power(a: Number, b: Number) -> Number:
    if b.denominator != 1 or abs(b) > 20:
        raise NotStraight("a power that is no small whole number")
    return a**b.numerator


def written(value: Number) -> str:
    """A number as equations have it: 42, 2.5. NotStraight for one with more than `DECIMALS` decimals."""
    places = places_of(value)
    if places is None or places > DECIMALS:
        raise NotStraight("a value that has too many decimals to be written")
    return decimal_text(value)


def of_formula(formula: str, problem: str) -> Solution:
    """The equations of MathQA's `linear_formula`; n0, n1, ... are the numbers of the problem in order."""
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", problem)

    def argument(text: str) -> str:
        constant = CONSTANT.fullmatch(text)
        if constant:
            return constant[1].replace("_", ".")
        if text[:1] == "n" and text[1:].isdigit() and int(text[1:]) < len(numbers):
            return written(Fraction(numbers[int(text[1:])].replace(",", "")))
        return text.replace("#", "result_")

    lines = []
    for index, part in enumerate(filter(None, formula.strip().split("|"))):
        match = FORMULA.fullmatch(part.strip())
        if match is None or match[1] not in BINARY:
            raise NotStraight(f"an operation that is no arithmetic: {part.partition('(')[0][:20]}")
        left, right = argument(match[2]), argument(match[3])
        lines.append(f"result_{index} = {left} {BINARY[match[1]]} {right}")
    return of_python("\n".join(lines))
