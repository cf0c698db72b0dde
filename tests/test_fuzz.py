"""What users give, mutated: recipes, rows, checkpoint folders, requests, values in Python, arguments of commands.

Nothing but a result or an error of ours (`fuzzing.failure`) may come of a case. Each surface draws COLAR_FUZZ_CASES
cases from COLAR_FUZZ_SEED; what longer searches found is in `FOUND`, and runs always:

    COLAR_FUZZ_CASES=2000 COLAR_FUZZ_SEED=1 pytest tests/test_fuzz.py
"""

from __future__ import annotations

import os
import re
from random import Random

import pytest
from surfaces import SURFACES

CASES = int(os.environ.get("COLAR_FUZZ_CASES", "0"))
SEED = int(os.environ.get("COLAR_FUZZ_SEED", "0"))
USUAL = {"recipe": 40, "rows": 120, "folder": 60, "request": 150, "python": 120, "command": 40}
"""Cases of each surface, where the environment does not say."""

KNOWN: list[tuple[str, str]] = []
"""Surface, and words of a failure that is being mended elsewhere."""

FOUND: list[tuple[str, object]] = []


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory):
    made = {}
    yield lambda name: made.setdefault(name, SURFACES[name](tmp_path_factory.mktemp(name)))
    for surface in made.values():
        surface.close()


@pytest.mark.parametrize("name", SURFACES)
def test_mutations_end_well_or_in_an_error_of_ours(surfaces, name, monkeypatch):
    surface = surfaces(name)
    monkeypatch.chdir(surface.folder)
    failures = []
    for number in range(CASES or USUAL[name]):
        case = surface.draw(Random(f"{name}/{SEED}/{number}"))
        found = surface.failure(case)
        if found and not any(name == of and re.search(words, found) for of, words in KNOWN):
            failures.append(f"{found}\n    of case {number}: {repr(case)[:2000]}")
            if "COLAR_FUZZ_LOG" in os.environ:
                with open(os.environ["COLAR_FUZZ_LOG"], "a") as log:
                    log.write(f"{name} {number} {found} {repr(case)[:400]!r}\n")
    assert not failures, "\n".join(failures)
