"""Programs as chains of equations, the published rows that hold them, and the sources that these rows make."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renumber import new_rows

from colar.data import programs, sources
from colar.data.catalogue import SOURCES
from colar.data.example import Fields
from colar.data.judge import verdict_by_type

FUNCTION = 'def f() -> int:\n    """Seven bags of six."""\n    bags, each = 7, 6\n'
SOLVED = "import math\n\ndef f():\n    pens = 7 * 6\n    lost = 2\n    return pens - lost\n\nprint(f())"


@pytest.mark.parametrize(
    ("code", "steps", "answer"),
    [
        ("a = 3\nb = a * 4\nresult = b - (a - 1)\nprint(result)", ("<<3*4=12>>", "<<12-(3-1)=10>>"), "10"),
        ("a = 8\nx = a / (4 / 2)", ("<<8/(4/2)=4>>",), "4"),
        ("a = -3\nx = 2 - a", ("<<2-(-3)=5>>",), "5"),
        ("a = 3\nb = -a\nx = 2 - b", ("<<2-(-3)=5>>",), "5"),
        ("x = -(1 + 2) * 4", ("<<-(1+2)*4=-12>>",), "-12"),
        ("x = (1 + 2) * 3 / 2\nreturn_value = x\nresult = return_value", ("<<(1+2)*3/2=4.5>>",), "4.5"),
        ("x = (1 - 4) ** 2 + 2 ** 3", ("<<(1-4)*(1-4)+2*2*2=17>>",), "17"),
        ("x = int(9 // 3) + round(2.50, 1)", ("<<9/3+2.5=5.5>>",), "5.5"),
        ("a = 2 * 3\nb = 4 * 5\nc = a + 1\nd = 2 * 3\nresult = c + d", ("<<2*3=6>>", "<<6+1=7>>", "<<7+6=13>>"), "13"),
        ("third = 2 / 3\nsugar = third * 12\nresult = sugar", ("<<2/3*12=8>>",), "8"),
        ("rate = 1 / 12 + 1 / 18\nreturn_value = 1 / rate", ("<<1/(1/12+1/18)=7.2>>",), "7.2"),
        (SOLVED, ("<<7*6=42>>", "<<42-2=40>>"), "40"),
        (f"Think first.\n```python\n{SOLVED}\n```\nSo it is 40.", ("<<7*6=42>>", "<<42-2=40>>"), "40"),
        ("### Answer\ndef f():\nx = 2 + 3\nreturn x\nprint(f())", ("<<2+3=5>>",), "5"),
    ],
)  # fmt: skip
def test_a_straight_program_is_a_chain_of_equations(code: str, steps: tuple[str, ...], answer: str) -> None:
    found = programs.of_python(code)
    assert (found.steps, found.answer) == (steps, answer)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("for i in range(3): x = i + 1", "no assignment of arithmetic: For"),
        ("x = 1\nwhile x < 5: x = x * 2", "no assignment of arithmetic: While"),
        ("x = 2 + 1\nx += 1", "no assignment of arithmetic: AugAssign"),
        ("x = 5 if 2 > 1 else 4", "more than arithmetic"),
        ("x = max(2, 3) + 1", "more than arithmetic"),
        ("import math\nx = math.ceil(7 / 2)", "more than arithmetic"),
        (FUNCTION, "an assignment to more than one variable"),
        ("def f():\n  x = 2 * 3\n  y = 4", "a function without a return"),
        ("def f():\n  x = 2 *", "not Python, or cut off"),
        ("x = y + 1", "a variable without a value: y"),
        ("x = 1 / 3", "too many decimals"),
        ("x = 1 / 3\ny = x + 1", "too many decimals"),
        (
            "a = 1 / 3\nx = 30000 * a * a * a * a * a * a + 30000 * a * a * a",
            "a number or an equation that is too long",
        ),
        ("x = 1 / 0", "a division by 0"),
        ("x = int(7 / 2)", "int() changes a value"),
        ("x = round(1.25, 1) + 0", "round() changes a value"),
        ("x = round(1 + 1, 10 ** 9)", "more than arithmetic"),
        ("x = round(1 + 1, 1000000000)", "round() changes a value"),
        ("x = 7 // 2", "// drops a remainder"),
        ("x = 7 % 2", "other than + - * /: Mod"),
        ("x = 1.1 ** 12", "other than + - * /: Pow"),
        ("x = 9 ** 9 ** 9", "other than + - * /: Pow"),
        ("x = 7", "no equation"),
        ("a = 2 + 3\nresult = 6", "no equation"),
        ("a = 2 + 3\nresult = -a", "an answer that is not the last result"),
        ("x = True + 1", "more than arithmetic"),
        ("x = 1e999 + 1", "more than arithmetic"),
    ],
)
def test_another_program_is_left_out(code: str, reason: str) -> None:
    with pytest.raises(programs.NotStraight) as error:
        programs.of_python(code)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nx = os.system('touch {made}') + 1",
        "x = __import__('os').system('touch {made}') + 1",
        'x = eval(\'open("{made}", "w")\') + 1',
        "x: int = (open('{made}', 'w') and 1) + 1",
        "def f(y=open('{made}', 'w')):\n  return 1 + 1",
        "class int:\n  x = open('{made}', 'w')\nx = int(3) + 1",
        "print(open('{made}', 'w'))",
    ],
)
def test_nothing_is_executed(code: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with contextlib.suppress(programs.NotStraight):
        programs.of_python(code.format(made=made))
    assert not made.exists()


@pytest.mark.parametrize(
    "code",
    [
        "x = 9 * 9\n" + "x = x * x\n" * 60,
        "x = " + "(" * 90 + "2" + ")**4" * 90,
        "x = " + "(" * 90 + "1" + ")**4" * 90,
        "x = " + "-" * 9000 + "1",
        "x = 1" + "+1" * 4900,
        "x = 1" + "+1" * 10**6,
        "x = " + "9" * 5000 + " + 1",
        "x = 1e-300 * 1e-300",
    ],
)
def test_sizes_are_bounded(code: str) -> None:
    with pytest.raises(programs.NotStraight):
        programs.of_python(code)


LITERALS = st.integers(-30, 60).map(str) | st.sampled_from(["0.5", "2.25", "1_000"])
VARIABLES = st.sampled_from(["v0", "v1", "v2"])
EXPRESSIONS = st.recursive(
    LITERALS | VARIABLES,
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner)
        | st.builds("{}({})".format, st.sampled_from(["int", "round", "float", "abs", "-"]), inner)
        | st.builds("({}) ** {}".format, inner, st.integers(0, 5))
    ),
    max_leaves=5,
)


@given(st.lists(EXPRESSIONS, min_size=1, max_size=4))
def test_a_chain_ends_in_the_programs_own_result(expressions: list[str]) -> None:
    """Python agrees with both sides of each equation, and with the answer."""
    lines = ["v0 = 3", "v1 = 4", "v2 = 12", *(f"v{n % 3} = {text}" for n, text in enumerate(expressions))]
    code = "\n".join([*lines, f"result = v{(len(expressions) - 1) % 3}"])
    try:
        found = programs.of_python(code)
    except programs.NotStraight:
        return
    values: dict[str, Any] = {}
    exec(code, values)
    assert float(found.answer) == pytest.approx(values["result"])
    for step in found.steps:
        left, right = step.removeprefix("<<").removesuffix(">>").split("=")
        assert eval(left) == pytest.approx(float(right))
        assert not set(left) - set("0123456789.+-*/()")
        assert "//" not in left
        assert "**" not in left
    assert float(right) == pytest.approx(float(found.answer))


@given(
    st.integers(-9, 60),
    st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 30), st.booleans()), max_size=4),
)
def test_a_solved_equation_holds(unknown: int, operations: list[tuple[str, int, bool]]) -> None:
    side, value = "x", Fraction(unknown)
    for sign, number, first in operations:
        if sign == "/" and not first and value == 0:
            continue
        side = f"({side}) {sign} {number}" if first else f"{number} {sign} ({side})"
        value = eval(f"a {sign} b", {"a": value, "b": number} if first else {"a": number, "b": value})
    try:
        found = programs.of_python(programs.solved(f"{value.numerator} / {value.denominator}", side, "x"))
    except programs.NotStraight:
        return
    assert found.value == unknown


# --- rows --------------------------------------------------------------------------------------------------

MATHQA = {
    "Problem": "ann has 3 bags of 4 pens , and loses 20 % . how many pens are left ?",
    "linear_formula": "multiply(n0,n1)|subtract(const_100,n2)|multiply(#0,#1)|divide(#2,const_100)|",
    "options": "a ) rs . 9.6 , b ) 12 , c ) none of these , d ) d ) 10 , e ) 1 , 000",
    "correct": "a",
}
MATHCAMPS = [
    {
        "id": "3.OA-0-0",
        "symbolic-struct": "[[var a = (18 / 3)]]\n[[var b = (a + 4)]]\n[[question c = ['b']]]\ntheme: Pen",
        "statement": "Ann has a third of 18 pens and finds 4. How many?",
        "answer": "10.0000000000",
        "tag": "original problem",
    },
    {"id": "3.OA-0-1", "statement": "And now?", "symbolic-struct": "", "answer": "1", "tag": "follow up"},
]
DMATH = {
    "question_en": "Ann has 3.5 meters (m) of rope, and cuts it in 2. How long is a part?",
    "answer_en": "1.75",
    "solution_code_en": "var_a = 3.5\nvar_b = 2\nvar_c = var_a / var_b\nprint('{:.2f}'.format(round(var_c+1e-10,2)))",
}
MAWPS = {
    "sQuestion": " Ann has 9 pens , loses 4 . How many? ",
    "lEquations": ["X=(9.0-4.0)"],
    "lSolutions": [5.0],
}
TINYGSM = {"user": "Student: How many pens are 7 bags of 6 without 2?", "assistant": SOLVED}
ROWS: dict[str, tuple[Callable[[Any], Fields], Any, str, tuple[str, ...], str]] = {
    "TinyGSM's files": (
        programs.tinygsm, TINYGSM, "How many pens are 7 bags of 6 without 2?", ("<<7*6=42>>", "<<42-2=40>>"), "40",
    ),
    "TinyGSM on the Hub": (
        programs.tinygsm, {"question": "Some possible questions and programs are: A quiz has two kinds of "
        "questions: 7 * 6 pens and 2?", "code": SOLVED}, "A quiz has two kinds of questions: 7 * 6 pens and 2?",
        ("<<7*6=42>>", "<<42-2=40>>"), "40",
    ),
    "MathQA": (
        programs.mathqa, MATHQA, "ann has 3 bags of 4 pens, and loses 20%. how many pens are left?",
        ("<<3*4=12>>", "<<100-20=80>>", "<<12*80=960>>", "<<960/100=9.6>>"), "9.6",
    ),
    "MathQA, a letter twice": (
        programs.mathqa, {**MATHQA, "Problem": "6 and 4 ?", "linear_formula": "add(n0,n1)|", "correct": "d"},
        "6 and 4?", ("<<6+4=10>>",), "10",
    ),
    "MathCAMPS": (
        programs.mathcamps, MATHCAMPS, MATHCAMPS[0]["statement"], ("<<18/3=6>>", "<<6+4=10>>"), "10",
    ),
    "MathCAMPS, an equation": (
        programs.mathcamps, [{**MATHCAMPS[0], "answer": "10", "symbolic-struct":
        "[[var b = (2 * 30)]]\n[[var 100 = ((2 * a) + (80 - (b / b)) + 1)]]\n[[question c = ['a']]]"}],
        MATHCAMPS[0]["statement"],
        ("<<2*30=60>>", "<<100-1=99>>", "<<99-(80-60/60)=20>>", "<<20/2=10>>"), "10",
    ),
    "DMath": (programs.dmath, DMATH, DMATH["question_en"], ("<<3.5/2=1.75>>",), "1.75"),
    "MAWPS": (programs.mawps, MAWPS, "Ann has 9 pens, loses 4. How many?", ("<<9-4=5>>",), "5"),
    "MAWPS, the unknown last": (
        programs.mawps, {**MAWPS, "lEquations": ["9.0-(2.0*2.0)=pens"]}, "Ann has 9 pens, loses 4. How many?",
        ("<<9-2*2=5>>",), "5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_read(name: str) -> None:
    parser, row, question, steps, answer = ROWS[name]
    fields = parser(row)
    assert (fields.question, fields.steps, fields.answer, fields.key) == (question, steps, answer, None)


UNKNOWN = {**MATHCAMPS[0], "symbolic-struct": "[[var 24 = (s * s)]]\n[[question n = ['s']]]"}
SYSTEM = "[[var 9 = (a + b)]]\n[[var 1 = (a - b)]]\n[[question w = ['a', 'b']]]"
REFUSED: list[tuple[Callable[[Any], Fields], Any, str]] = [
    (programs.mathqa, {**MATHQA, "correct": "b"}, "its program gives another answer than the row"),
    (programs.mathqa, {**MATHQA, "correct": "c"}, "a given answer that is no number"),
    (programs.mathqa, {**MATHQA, "correct": "f"}, "a given answer that is no number"),
    (programs.mathqa, {**MATHQA, "linear_formula": "sqrt(n0)|"}, "an operation that is no arithmetic: sqrt"),
    (programs.mathqa, {**MATHQA, "linear_formula": "add(const_1,const_4)|add(n0,#0)|"}, "constants from constants"),
    (programs.mathqa, {**MATHQA, "linear_formula": "add(n0,const_4)|"}, "leaves out most numbers"),
    (programs.mathcamps, [UNKNOWN], "an unknown in more than + - * /, or more than once"),
    (programs.mathcamps, [{**UNKNOWN, "symbolic-struct": SYSTEM}], "several unknowns"),
    (programs.mathcamps, [{**UNKNOWN, "symbolic-struct": SYSTEM.replace(", 'b'", "")}], "a variable without a value"),
    (programs.mathcamps, [{**MATHCAMPS[0], "answer": "31/3"}], "another answer"),
    (programs.dmath, {**DMATH, "answer_en": "1.8"}, "another answer"),
    (programs.dmath, {**DMATH, "answer_en": "red"}, "a given answer that is no number"),
    (programs.mawps, {**MAWPS, "lEquations": ["a+b=3", "a=2"]}, "a system of equations, or none"),
    (programs.mawps, {"sQuestion": "q", "lSolutions": [5.0]}, "a system of equations, or none"),
    (programs.mawps, {**MAWPS, "lEquations": ["2*x=10+x"]}, "one that stands more than once"),
    (programs.mawps, {**MAWPS, "lEquations": ["2+3=5"]}, "several unknowns, or one"),
    (programs.mawps, {**MAWPS, "lEquations": ["x**2=25"]}, "an unknown in more than + - * /"),
    (programs.mawps, {**MAWPS, "lSolutions": [5.5]}, "another answer"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "row", "reason"), REFUSED)
def test_a_row_whose_chain_does_not_end_in_its_answer_is_refused(
    parser: Callable[[Any], Fields], row: Any, reason: str
) -> None:
    with pytest.raises(programs.NotStraight) as error:
        parser(row)
    assert reason in str(error.value)


# --- sources -----------------------------------------------------------------------------------------------

LOOP = {"user": "How many?", "assistant": "for i in x: y = 1"}
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "tinygsm": ({"a/gpt.json": [TINYGSM, LOOP, LOOP], "b/other.json": [{**TINYGSM, "user": "7 bags of 6, less 2?"}]}, 2),
    "mathqa": ({"dev.json": [MATHQA], "test.json": [{**MATHQA, "correct": "b"}]}, 1),
    "mathcamps": ({"3.OA.json": [MATHCAMPS], "4.OA.json": [[UNKNOWN]]}, 1),
    "dmath": ({"test.json": {"1": DMATH, "2": {**DMATH, "answer_en": "2"}}}, 1),
    "mawps": ({"questions.json": [MAWPS, {**MAWPS, "lEquations": []}]}, 1),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (contents, _) in FILES.items():
        for file, rows in contents.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_source_counts_the_rows_that_it_leaves_out(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents, n = FILES[name]
    rows = sources.load_examples(name, "train", data_dir=folder)
    assert len(rows) == n
    assert rows == sorted(rows, key=lambda row: row.id)
    total = sum(len(rows) for rows in contents.values())
    told = capsys.readouterr().err
    assert f"{name}/train: read {n} of {total} rows" in told
    assert f"left out {total - n}: " in told
    # The same in whatever order, and with a limit.
    assert sources.load_examples(name, "train", data_dir=folder, limit=1) == rows[:1]
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("name", FILES)
def test_published_rows(real_data: Path, name: str) -> None:
    rows = sources.load_examples(name, "train", data_dir=real_data)
    assert len(rows) == KEPT[name]
    for row in rows:
        assert verdict_by_type(row.answer, row.answer, "number").correct
        assert row.steps[-1].endswith(f"={row.answer}>>")
    new = new_rows.renumbered(rows[:12], 1, 0)
    assert len(new.examples) > 3


KEPT = {"tinygsm": 8428, "mathqa": 2775, "mathcamps": 3646, "dmath": 903, "mawps": 437}


def test_sources_of_programs_are_only_trained_on() -> None:
    for name in FILES:
        assert list(SOURCES[name].splits) == ["train"]
