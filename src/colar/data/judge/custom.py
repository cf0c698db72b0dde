"""A user's own judge of answers, named `module:function`: `function(question, gold, answer) -> bool`.

Evaluation, validation and the reward `accuracy` of GRPO call it in the place of the judges by answer type. It is named
on the command line, in a recipe or in Python, never in a row: a data file must not choose code that runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce

from colar.data.example import Example

Judge = Callable[[str, str, str], bool]
TRIED = 20
"""Rows whose gold answer the judge is tried on before any work."""


def name_of(judge: str | Judge | None) -> str | None:
    """`module:function` of a judge that may be given as the function itself. ValueError for a lambda or a closure."""
    if judge is None or isinstance(judge, str):
        return judge
    name = f"{getattr(judge, '__module__', None)}:{getattr(judge, '__qualname__', repr(judge))}"
    if "<" in name or not callable(judge):
        raise ValueError(f"judge must be a function of a module, or module:function, got {judge!r}")
    return name


@cache
def load_judge(name: str) -> Judge:
    """Import a judge; a module in the working directory is found too. ValueError where it is not there."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(
            f"judge {name!r}: give module:function, e.g. my_judge:same for same() in my_judge.py"
        )
    # The command's own folder is on the path, the user's is not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ValueError(f"judge {name}: {type(error).__name__}: {error} (in {os.getcwd()})") from error
    if not callable(function):
        raise ValueError(f"judge {name} is no function")
    return function


def applied(examples: Sequence[Example], name: str | None) -> list[Example]:
    """The examples with this judge; as they are without one.

    ValueError where it cannot be imported, fails, or finds none of the first gold answers right.
    """
    if name is None:
        return list(examples)
    judged = [replace(example, judge=name) for example in examples]
    tried = judged[:TRIED]
    if tried and not any(accepts(example.answer, example) for example in tried):
        raise ValueError(
            f"judge {name} finds no gold answer right, e.g. {tried[0].answer!r} of {tried[0].id}: "
            "it is called as function(question, gold, answer) and returns True or False"
        )
    return judged


def accepts(completion: str, example: Example) -> bool:
    """The verdict of the example's own judge. ValueError where it fails, or returns neither True nor False."""
    try:
        right = load_judge(example.judge)(example.question, example.answer, completion.strip())
    except Exception as error:
        raise ValueError(f"judge {example.judge} on {example.id}: {type(error).__name__}: {error}") from error
    # numpy's booleans and 0 and 1 count as well.
    if right is None or right not in (True, False):
        raise ValueError(f"judge {example.judge} on {example.id} returned {right!r}, expected True or False")
    return bool(right)
