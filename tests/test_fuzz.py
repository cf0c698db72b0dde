"""What users give, mutated: recipes, rows, checkpoint folders, requests, values in Python, arguments of commands.

Nothing but a result or an error of ours (`fuzzing.failure`) may come of a case. Each surface draws COLAR_FUZZ_CASES
cases from COLAR_FUZZ_SEED; what longer searches found is in `FOUND`, and runs always:

    COLAR_FUZZ_CASES=2000 COLAR_FUZZ_SEED=1 pytest tests/test_fuzz.py
"""

from __future__ import annotations

import os
from random import Random

import pytest
from fuzz_requests import SURFACES

CASES = int(os.environ.get("COLAR_FUZZ_CASES", "0"))
SEED = int(os.environ.get("COLAR_FUZZ_SEED", "0"))
USUAL = {"recipe": 25, "rows": 200, "folder": 60, "request": 150, "python": 120, "command": 60}
"""Cases of each surface, where the environment does not say."""

FOUND: list[tuple[str, list[object]]] = [
    # method, reinforced?, key, value
    ("recipe", ["cot", False, "training.seed", -1]),
    ("recipe", ["cot", False, "training.seed", 2**32]),
    ("recipe", ["cot", False, "training.max_steps", 10**400]),
    ("recipe", ["cot", False, "training.adam_beta2", 10**400]),
    ("recipe", ["coconut", False, "method.n_stages", 1e308]),
    ("recipe", ["coconut", False, "method.n_stages", 2**63]),
    ("recipe", ["distill", False, "method.align_weight", 10**30]),
    ("recipe", ["cot", False, "training.num_train_epochs", float("inf")]),
    ("recipe", ["cot", False, "training.num_train_epochs", 1e308]),
    ("recipe", ["cot", False, "data.options", {"max_number": 2**64}]),
    ("recipe", ["cot", False, "validation.limits", []]),
    ("recipe", ["cot", False, "validation.limits", "x"]),
    ("recipe", ["cot", False, "model.lora.target_modules", "-1"]),
    ("recipe", ["cot", False, "model.lora.target_modules", []]),
    ("recipe", ["cot", False, "model.backbone", "a\nb"]),
    ("recipe", ["no_cot", False, "method.name", [["x"]]]),
    ("recipe", ["cot", False, "training.dataloader_num_workers", 2**31]),
    # format, content
    ("rows", ["own.jsonl", "[" * 100_000, None]),
    ("rows", ["own.json", "[" * 100_000, None]),
    ("rows", ["questions.jsonl", "[" * 100_000, None]),
    ("rows", ["gsm8k/test.jsonl", "[" * 100_000, None]),
    # checkpoint, file, content or values of its keys, use
    ("folder", ["full", "config.json", "[]", "load"]),
    ("folder", ["full", "config.json", "1.5", "export"]),
    ("folder", ["full", "config.json", "[" * 100_000, "load"]),
    ("folder", ["full", "config.json", {"vocab_size": "1e-4"}, "load"]),
    ("folder", ["full", "config.json", {"hidden_size": 2**70}, "load"]),
    ("folder", ["full", "config.json", {"hidden_size": 64}, "load"]),
    ("folder", ["full", "config.json", {"rope_parameters.rope_type": 7}, "load"]),
    ("folder", ["full", "config.json", {"rms_norm_eps": [1]}, "load"]),
    ("folder", ["full", "tokenizer.json", '"x"', "load"]),
    ("folder", ["full", "tokenizer.json", "{}", "load"]),
    ("folder", ["full", "tokenizer.json", {"truncation": 2}, "load"]),
    ("folder", ["full", "tokenizer_config.json", "false", "load"]),
    ("folder", ["full", "tokenizer_config.json", {"eos_token": [0]}, "load"]),
    ("folder", ["full", "template.json", "null", "load"]),
    ("folder", ["full", "template.json", {"question": 2}, "load"]),
    ("folder", ["full", "template.json", {"separator": []}, "load"]),
    ("folder", ["full", "template.json", {"eos_id": "a\nb"}, "load"]),
    ("folder", ["full", "colar.json", {"method.name": {}}, "load"]),
    ("folder", ["full", "colar.json", {"method": []}, "load"]),
    ("folder", ["full", "colar.json", {"weights": "both"}, "load"]),
    ("folder", ["full", "colar.json", {"run": 3}, "export"]),
    ("folder", ["adapter", "colar.json", {"backbone": 7}, "load"]),
    ("folder", ["adapter", "colar.json", {"tokenizer": 2}, "merge"]),
    ("folder", ["adapter", "adapter_config.json", "[]", "load"]),
    ("folder", ["adapter", "adapter_config.json", "0.5", "train"]),
    ("folder", ["adapter", "adapter_config.json", {"task_type": "x"}, "load"]),
    ("folder", ["adapter", "adapter_config.json", {"eva_config": 7}, "load"]),
    ("folder", ["adapter", "adapter_config.json", {"target_modules": "x"}, "load"]),
    ("folder", ["adapter", "README.md", "# \xc3ar", "merge"]),
    # name, argument, value, model
    ("python", ["Engine", "max_batch", "x", 0]),
    ("python", ["Engine", "token_budget", [], 0]),
    ("python", ["Engine", "max_waiting", {}, 0]),
    ("python", ["save_pretrained", "run", {"metrics": float("nan")}, 0]),
    ("python", ["save_pretrained", "run", {"metrics": {1, 2}}, 0]),
    ("python", ["save_pretrained", "run", [], 0]),
    ("python", ["Example", "steps", None, 0]),
    ("python", ["Example", "steps", [1], 0]),
]
"""What mutations ended in a traceback, or in several lines, and their like."""


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory):
    made = {}

    def surface(name):
        # Not `setdefault`, which would make a surface for every case: its checkpoints take half a second.
        if name not in made:
            made[name] = SURFACES[name](tmp_path_factory.mktemp(name))
        return made[name]

    yield surface
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
        if found:
            failures.append(f"{found}\n    of case {number}: {repr(case)[:2000]}")
            if "COLAR_FUZZ_LOG" in os.environ:
                with open(os.environ["COLAR_FUZZ_LOG"], "a") as log:
                    log.write(f"{name} {number} {found} {repr(case)[:400]!r}\n")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("name", "case"), FOUND, ids=lambda each: str(each)[:60])
def test_what_was_found_ends_well_or_in_an_error_of_ours(surfaces, name, case, monkeypatch):
    surface = surfaces(name)
    monkeypatch.chdir(surface.folder)
    assert surface.failure(case) is None
