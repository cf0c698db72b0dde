"""Programs as chains of equations: straight-line Python (PAL, TinyGSM) and MathQA's formulas. Nothing is executed.

    apples = 7                                    multiply(n0,n1)|add(#0,const_3)
    total = apples * 6          <<7*6=42>>        <<7*6=42>> <<42+3=45>>
    return total + 3            <<42+3=45>>

Each assignment of an expression is one equation, its variables replaced by their values. Equations have the
operators of GSM8k-Aug, + - * /: an exact `//` is written as a division, a small power as a product, and a program that
drops a remainder or rounds is rejected. Repeated equations, and those that the answer does not use, are left out.

Parsers of rows that hold a program, each named after its data set:

| rows | chain | given answer |
|---|---|---|
| TinyGSM | a Python function in the answer of a language model | none |
| MathQA | `linear_formula` | the correct option |
| MathCAMPS | `[[var y = (162 / 18)]] [[question g = ['y']]]` | `answer` |
| DMath | Python, one operation per line | `answer_en` |
| MAWPS | `X=(88.0-6.0)` | `lSolutions` |

A row is read if its program is straight-line and its result equals the given answer by the judge's rule. Otherwise its
parser raises `NotStraight` with the reason.
"""

import ast
import contextlib
import math
import operator
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from colar.checks import is_number
from colar.data.example import Fields, answer_of, named_fields, text_of
from colar.data.judge.numbers import decimal_text, decimals_of, read_number, same_number

Term = tuple[Fraction, str, int]
"""Value of an expression, its text, and how tightly that text binds."""

OPERATORS: dict[type, tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("/", operator.truediv),
}
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
ATOM = 3
CASTS: dict[str, Callable[[Fraction, int], Fraction]] = {
    "int": lambda value, _: Fraction(math.trunc(value)),
    "float": lambda value, _: value,
    "round": round,
    "abs": lambda value, _: abs(value),
}
"""Functions that are allowed only if they leave their argument unchanged: equations cannot express a change."""
INVERSES = {
    ast.Add: ("{0} - {1}", "{0} - {1}"), ast.Sub: ("{0} + {1}", "{1} - {0}"),
    ast.Mult: ("{0} / {1}", "{0} / {1}"), ast.Div: ("{0} * {1}", "{1} / {0}"),
}  # fmt: skip
"""Operation -> its first and its second operand, each computed from the result {0} and the other operand {1}."""
ANSWERS = ("result", "answer", "ans")
"""Variables that hold the answer of a program without a return."""
DECIMALS = 4
"""Most decimals of a value: one with more cannot be written in an equation that is true."""
MOST_BITS = 128
"""Size of the largest numerator and denominator, because a chain of powers would fill any memory."""
MOST_CHARACTERS = 10_000
"""Length of the longest program."""
EQUATION_CHARACTERS = 50
"""Characters of the longest equation, as in GSM8k-Aug."""
MOST_FACTORS = 4
"""Exponent of the largest power."""
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
FUNCTION = re.compile(r"^(def .*:\n)((?s:.*))", re.MULTILINE)
FORMULA = re.compile(r"([a-z_]+)\(\s*([^(),]*?)\s*,\s*([^(),]*?)\s*\)")
CONSTANT = re.compile(r"const_(\d+(?:[_.]\d+)?)")
BINARY = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "power": "**"}


class NotStraight(ValueError):
    """A program that is more than assignments of arithmetic, or whose values cannot be written."""


@dataclass(frozen=True)
class Solution:
    """Equations, and the value of the last one."""

    steps: tuple[str, ...]
    value: Fraction

    @property
    def answer(self) -> str:
        return written(self.value)


def of_python(code: str) -> Solution:
    """The equations of a Python program: assignments, then `return`, `print` or a variable called `result`."""
    body = _parsed(code)
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if len(functions) == 1:
        body = functions[0].body
    values: dict[str, Term] = {}
    behind: dict[str, set[str]] = {}
    """Variable -> the equations that its value depends on."""
    equations: dict[str, Fraction] = {}
    answer, used_by_answer = Fraction(0), set[str]()
    for node in body:
        name, expression = _assigned(node)
        if expression is None:
            continue
        try:
            value, text, rank = _walk(expression, values)
        except RecursionError as error:
            raise NotStraight("an expression that is nested too deeply") from error
        used = {equation for each in _names(expression) for equation in behind.get(each, ())}
        plain = rank == ATOM
        if not plain and _is_short(value):
            equation = f"<<{text}={written(value)}>>"
            equations[equation] = value
            used.add(equation)
            text, rank = written(value), ATOM
        if name is not None:
            # A value that cannot be written (1/3) stays an expression in the equations that use it.
            values[name], behind[name] = (value, text, rank), used
        if name is None or not plain or name in ANSWERS:
            answer, used_by_answer = value, used
        if isinstance(node, ast.Return):
            break
    else:
        if functions:
            # A truncated answer of a model has computed an intermediate value, not the result.
            raise NotStraight("a function without a return")
    # Raises for an answer that cannot be written: this reason takes precedence over those below.
    written(answer)
    steps = tuple(equation for equation in equations if equation in used_by_answer)
    if not steps:
        raise NotStraight("no equation")
    if equations[steps[-1]] != answer:
        raise NotStraight("an answer that is not the last result")
    return Solution(steps, answer)


def _parsed(code: str) -> list[ast.stmt]:
    """The statements of a program, which may stand between ``` marks, its function's body not indented."""
    fenced = FENCE.search(code)
    text = textwrap.dedent(fenced[1] if fenced else code).strip()
    if len(text) > MOST_CHARACTERS:
        raise NotStraight("a program that is too long")
    function = FUNCTION.search(text)
    spellings = [text, *([function[1] + textwrap.indent(function[2], " ")] if function else ())]
    for spelling in spellings:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            statements: list[ast.stmt] = ast.parse(spelling).body
            return statements
    raise NotStraight("not Python, or cut off")


def _assigned(node: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The variable that a statement assigns, if any, and the expression that it computes, if any."""
    match node:
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
            return name, value
        case ast.Assign() | ast.AnnAssign(value=ast.expr()):
            raise NotStraight("an assignment to more than one variable")
        case ast.Return(ast.expr() as value) | ast.Expr(ast.Call(ast.Name("print"), [value])):
            return None, value
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant(str())):
            return None, None
    raise NotStraight(f"a statement that is no assignment of arithmetic: {type(node).__name__}")


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _walk(node: ast.expr, values: dict[str, Term]) -> Term:
    """The value of an expression, its text with numbers for variables, and how tightly that text binds."""
    number = node.value if isinstance(node, ast.Constant) else None
    if is_number(number) and abs(number) < 1e15:
        exact = Fraction(str(number))
        return exact, written(exact), ATOM
    if isinstance(node, ast.Name):
        if node.id not in values:
            raise NotStraight(f"a variable without a value: {node.id}")
        return values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value, text, rank = _walk(node.operand, values)
        return (-value, written(-value), ATOM) if rank == ATOM else (-value, f"-({text})", PRECEDENCE["*"])
    if isinstance(node, ast.BinOp):
        return _operation(node, values)
    match node:
        case ast.Call(ast.Name(name), [inner], []) if name in CASTS:
            places = 0
        case ast.Call(ast.Name("round" as name), [inner, ast.Constant(int(places))], []):
            pass
        case _:
            raise NotStraight(f"more than arithmetic: {ast.unparse(node)[:40]}")
    value, text, rank = _walk(inner, values)
    if not 0 <= places <= DECIMALS or CASTS[name](value, places) != value:
        raise NotStraight(f"{name}() changes a value")
    return value, text, rank


def _operation(node: ast.BinOp, values: dict[str, Term]) -> Term:
    """`_walk` for an operation with two operands."""
    left, left_text, left_rank = _walk(node.left, values)
    right, right_text, right_rank = _walk(node.right, values)
    sign, compute = OPERATORS.get(type(node.op), ("", None))
    if isinstance(node.op, ast.Pow) and right in range(2, MOST_FACTORS + 1):
        sign, value = "*", left ** int(right)
        factor = left_text if left_rank == ATOM and left >= 0 else f"({left_text})"
        text = "*".join([factor] * int(right))
    elif compute is None:
        raise NotStraight(f"an operation other than + - * /: {type(node.op).__name__}")
    elif sign == "/" and right == 0:
        raise NotStraight("a division by 0")
    else:
        value = compute(left, right)
        left_text = f"({left_text})" if left_rank < PRECEDENCE[sign] else left_text
        # a - (b - c) and a / (b / c) need their brackets; a negative number behind a sign is put in brackets, too.
        closed = right_rank <= PRECEDENCE[sign] or right_text.startswith("-")
        text = f"{left_text}{sign}({right_text})" if closed else f"{left_text}{sign}{right_text}"
    if isinstance(node.op, ast.FloorDiv) and value.denominator != 1:
        raise NotStraight("// drops a remainder")
    largest = max(abs(value.numerator), value.denominator)
    if largest.bit_length() > MOST_BITS or len(text) > EQUATION_CHARACTERS:
        raise NotStraight("a number or an equation that is too long")
    return value, text, PRECEDENCE[sign]


def written(value: Fraction) -> str:
    """Write a number as in equations: 42, 2.5. NotStraight for one with more than `DECIMALS` decimals."""
    if not _is_short(value):
        raise NotStraight("a value that has too many decimals to be written")
    return decimal_text(value)


def _is_short(value: Fraction) -> bool:
    places = decimals_of(value)
    return places is not None and places <= DECIMALS


def solved(known: str, side: str, unknown: str) -> str:
    """The program that solves `known = side` for an unknown that occurs once: `s = 24 / 12` for 24 and `s * 12`."""
    try:
        node = ast.parse(side.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotStraight("not Python, or cut off") from error
    lines = [f"{unknown} = {known}"]
    while isinstance(node, ast.BinOp) and type(node.op) in INVERSES:
        in_left, in_right = unknown in _names(node.left), unknown in _names(node.right)
        if in_left == in_right:
            break
        inverse = INVERSES[type(node.op)][in_right]
        other, node = (node.left, node.right) if in_right else (node.right, node.left)
        lines.append(f"{unknown} = {inverse.format(unknown, f'({ast.unparse(other)})')}")
    if not isinstance(node, ast.Name) or node.id != unknown:
        raise NotStraight("an unknown in more than + - * /, or more than once")
    return "\n".join(lines)


def of_formula(formula: str, problem: str) -> Solution:
    """The equations of MathQA's `linear_formula`; n0, n1, ... are the numbers of the problem in order.

    NotStraight for formulas that compute constants from constants, or use less than half of the numbers, because they
    hit the answer by chance.
    """
    numbers = [Fraction(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", problem)]
    used = set()

    def argument(text: str) -> str:
        constant = CONSTANT.fullmatch(text)
        if constant:
            return constant[1].replace("_", ".")
        if text[:1] == "n" and text[1:].isdigit() and int(text[1:]) < len(numbers):
            used.add(numbers[int(text[1:])])
            return written(numbers[int(text[1:])])
        return text.replace("#", "result_")

    lines = []
    for index, part in enumerate(filter(None, formula.strip().split("|"))):
        match = FORMULA.fullmatch(part.strip())
        if match is None or match[1] not in BINARY:
            raise NotStraight(f"an operation that is no arithmetic: {part.partition('(')[0][:20]}")
        if CONSTANT.fullmatch(match[2]) and CONSTANT.fullmatch(match[3]):
            raise NotStraight("a formula that computes constants from constants")
        lines.append(f"result_{index} = {argument(match[2])} {BINARY[match[1]]} {argument(match[3])}")
    if 2 * len(used) < len(set(numbers)):
        raise NotStraight("a formula that leaves out most numbers of the problem")
    return of_python("\n".join(lines))


# Rows that hold a program

# Text that some of the models wrote before the question that they were to make up.
_PREAMBLE = re.compile(
    r"^\W*(?:(?:student|result|(?:s?ome )?(?:possible )?(?:new |math |python |additional )*questions"
    r"(?: and (?:python )?programs)?(?: are)?)\s*:\s*)+",
    re.IGNORECASE,
)
_OPTION = re.compile(r"([a-e])\s*\)\s*(?:\1\s*\)\s*)?(.+?)(?=\s*,\s*[a-e]\s*\)|$)")
_RUPEES = re.compile(r"\brs\s*\.?\s*")
_SPACES = re.compile(r"\s+(?=[.,?!;:](?!\d))|(?<=\d)\s+(?=%)")
_DEFINED = re.compile(r"\[\[var (\w+) = (.*)\]\]")
_UNKNOWN = re.compile(r"\[\[question \w+ = \['(\w+)'\]\]\]")
_PRINT = re.compile(r"print\(.*?\b(var_\w+)\b.*\)\s*$")


def checked(question: str, solution: Solution, gold: Any, key: str | None = None) -> Fields:
    """The fields of a program. NotStraight if its value differs from the row's answer `gold`; None skips this check."""
    if gold is not None:
        answer = read_number(str(gold))
        if answer is None:
            raise NotStraight("a given answer that is no number")
        if not same_number(answer, solution.value):
            raise NotStraight("its program gives another answer than the row")
    return Fields(question, solution.steps, solution.answer, key, "number")


def tinygsm(raw: Any) -> Fields:
    """Parse TinyGSM: `question` and `code` on the Hub, `user` and `assistant` in TinyGSM-Filter's files."""
    row = named_fields(raw)
    names = ("user", "assistant") if "user" in row else ("question", "code")
    question, code = (text_of(row, name) for name in names)
    return checked(_PREAMBLE.sub("", question), of_python(code), None)


def mathqa(raw: Any) -> Fields:
    """Parse MathQA: the correct option is the given answer; spaces before punctuation are removed."""
    row = named_fields(raw)
    problem = text_of(row, "Problem")
    solution = of_formula(text_of(row, "linear_formula"), problem)
    options = dict(_OPTION.findall(str(row.get("options", ""))))
    right = options.get(str(row.get("correct", "")).strip(), "")
    gold = _RUPEES.sub("", right) if "options" in row else None
    return checked(_SPACES.sub("", problem), solution, gold)


def mathcamps(raw: Any) -> Fields:
    """Parse the first problem of a MathCAMPS dialogue; its follow-ups cannot be understood without it."""
    row = named_fields(raw[0] if isinstance(raw, list) and raw else raw)
    program = text_of(row, "symbolic-struct")
    unknown = _UNKNOWN.search(program)
    if unknown is None:
        raise NotStraight("several unknowns, or one that stands more than once")
    lines = []
    for name, expression in _DEFINED.findall(program):
        # A number in place of a name: the equation is solved for the unknown of the question.
        lines.append(solved(name, expression, unknown[1]) if name.isdigit() else f"{name} = {expression}")
    solution = of_python("\n".join([*lines, f"result = {unknown[1]}"]))
    return checked(text_of(row, "statement"), solution, answer_of(row, "answer"))


def dmath(raw: Any) -> Fields:
    """Parse the English half of DMath; its programs end in a print of the result, in one of several formats."""
    row = named_fields(raw)
    code = _PRINT.sub(r"result = \1", text_of(row, "solution_code_en"))
    return checked(text_of(row, "question_en"), of_python(code), answer_of(row, "answer_en"))


def mawps(raw: Any) -> Fields:
    """Parse MAWPS: rows of one equation, in which the unknown occurs once."""
    row = named_fields(raw)
    equations: list[str] = row.get("lEquations") or []
    solutions: list[Any] = row.get("lSolutions") or []
    if len(equations) != 1 or len(solutions) != 1:
        raise NotStraight("a system of equations, or none")
    left, _, right = equations[0].partition("=")
    unknown, *others = re.findall(r"[A-Za-z_]\w*", equations[0]) or [""]
    if others or not unknown:
        raise NotStraight("several unknowns, or one that stands more than once")
    known, side = (left, right) if unknown in right else (right, left)
    question = _SPACES.sub("", text_of(row, "sQuestion"))
    return checked(question, of_python(solved(known, side, unknown)), solutions[0])
