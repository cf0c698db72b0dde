"""Prose uses the field's words: docstrings open with a noun or a verb, and pages, comments and messages avoid a list."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "colar").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("results/*/README.md"),
]
OPENINGS = re.compile(r"(What|Whether|How|Where|Who|Which|When)\b")
WORDS = {
    r"unsure": "low confidence",
    r"(who|what)ever|nobody": "the thing itself",
    r"remembered": "cached",
    r"goes before (the|a|an) (option|flag|recipe|value)": "takes precedence",
    r"falling (learning )?rate": "decaying rate",
    r"taken for halves": "bisected",
    r"so many": "N",
}
"""Pattern -> the word that readers search for."""


def opening_faults(text):
    """Strings that stand as statements (docstrings of modules, functions and fields) and open with a question word."""
    statements = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    texts = [
        each.value for each in statements if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return [found for found in texts if OPENINGS.match(found)]


def word_faults(text):
    return [
        f"{found.group()}: write {better}"
        for pattern, better in WORDS.items()
        for found in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE)
    ]


def prose(text):
    """Comments and strings of a module."""
    kinds = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_a_module_uses_the_fields_words(path):
    text = path.read_text(encoding="utf-8")
    assert opening_faults(text) == []
    assert word_faults(prose(text)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_uses_the_fields_words(path):
    assert word_faults(path.read_text(encoding="utf-8")) == []


def test_faults_are_found():
    assert opening_faults('def f():\n    """Whether it is so."""') == ["Whether it is so."]
    assert opening_faults('class A:\n    x: int\n    """How many."""') == ["How many."]
    assert opening_faults('x = "What?"\n"""Number of rows."""') == []
    assert word_faults(prose("x = 1  # Nobody knows\nunsure = 2")) == ["Nobody: write the thing itself"]
    assert word_faults("a falling rate of so many rows") == [
        "falling rate: write decaying rate",
        "so many: write N",
    ]
