"""inspect.json and chains made by hand, without a model: what the page of `colar inspect` is tested on."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

HOSTILE = '</script><img src=x onerror="window.hit=1"><!-- & "quotes"'


def data_of(page: str) -> dict[str, Any]:
    """Questions and chains, as the page's script reads them."""
    packed = page.split('id="data">')[1].split("</script>")[0]
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def mean(value: float, half: float) -> dict[str, Any]:
    return {"mean": value, "interval": [value - half, value + half]}


def outcome(right: list[bool], length: float, seconds: float) -> dict[str, Any]:
    share = sum(right) / len(right)
    return {
        "n": len(right),
        "accuracy": {"mean": share, "interval": [max(0, share - 0.1), min(1, share + 0.1)]},
        "length": length,
        "forward_passes": length + 4,
        "seconds": seconds,
        "right": right,
    }


def thought(index: int, c: float, mark: str | None, text: str, neighbours: int = 10) -> dict[str, Any]:
    """A latent whose nearest token is `text`."""
    near = [{"id": 7, "text": text, "cosine": 0.91}]
    for i in range(1, neighbours):
        near.append({"id": i, "text": f"n{(index * 7 + i) % 200}", "cosine": round(0.8 - 0.05 * i, 3)})
    size = min(-int(-c // 1), len(near))
    return {
        "index": index,
        "text": text,
        "kind": "latent",
        "ordered": False,
        "tokens": [{**token, "logprob": None} for token in near[:size]],
        "neighbours": near,
        "sigma": 0.08,
        "stop_probability": 0.013,
        "low_confidence": False,
        "mark": mark,
        "reference": [] if mark in (None, "extra") else [
            {"text": "<<", "said": True},
            {"text": str(index), "said": mark == "right"},
        ],
    }  # fmt: skip


def chain(question: int, c: float, length: int, right: bool, neighbours: int = 10) -> dict[str, Any]:
    """A chain of `length` thoughts; a wrong one goes wrong at its second thought and lacks a group."""
    thoughts = []
    for k in range(length):
        mark = "right" if right or k == 0 else "wrong" if k == 1 else "after"
        thoughts.append(thought(k, c, mark, "<<", neighbours))
    missing = [] if right else [[{"text": ">>", "said": False}]]
    return {
        "id": f"sums/{question}",
        "answer": str(question) if right else "13",
        "right": right,
        "cause": "right" if right else "wrong result",
        "length": length,
        "forward_passes": length + 4,
        "seconds": 0.01 * length,
        "truncated": False,
        "reference_length": length + len(missing),
        "thoughts": thoughts,
        "missing": missing,
    }


def question(number: int) -> dict[str, Any]:
    return {
        "id": f"sums/{number}",
        "question": f"Mia has {number} beads and finds 5 packs of 5. How many beads has she?",
        "steps": ["<<5*5=25>>", f"<<25+{number}={25 + number}>>"],
        "answer": str(number),
        "answer_type": "number",
    }


def system(model: str, c: float, chains: list[dict[str, Any]]) -> dict[str, Any]:
    right = [each["right"] for each in chains]
    length = sum(each["length"] for each in chains) / len(chains)
    none_right = [False] * len(right)
    own = outcome(right, length, 0.01 * length)
    cost = {
        "outcomes": {
            "own": own,
            "shuffled": outcome(none_right, length, 0.01 * length),
            "zeroed": outcome(none_right, length, 0.01 * length),
            "none": outcome(none_right, 0, 0.004),
        },
        "differences": {kind: mean(own["accuracy"]["mean"], 0.1) for kind in ("shuffled", "zeroed", "none")},
    }
    answers = [
        {key: value for key, value in each.items() if key not in ("thoughts", "missing")} for each in chains
    ]
    n = len(chains)
    diagnosis = {"n": n, "read": 0.9, "write": 0.8, "whole_chain": 0.6, "stop": 1.0}
    key = {"model": model, "params": {"compression_factor": c}}
    return {**key, "n": n, "diagnosis": diagnosis, "cost": cost, "answers": answers}


def inspected(
    n: int = 40,
    models: tuple[str, ...] = ("colar",),
    factors: tuple[float, ...] = (1, 2, 5),
    tokens: int = 20,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """inspect.json, the questions and the chains: every third question is wrong, and two at c = 5."""
    questions = [question(number) for number in range(n)]
    systems, chains = [], []
    for m, model in enumerate(models):
        for c in factors:
            of_system = []
            for number in range(n):
                right = (number + m) % 3 != 0 and (c != 5 or number % 2 == 0)
                of_system.append(chain(number, c, max(2, int(tokens // c)), right))
            chains.append(of_system)
            systems.append(system(model, c, of_system))
    whole = {
        "asked": {"data": "sums", "split": "test", "limit": n},
        "provenance": {"command": "colar inspect ...", "versions": {"colar": "0"}},
        "systems": systems,
    }
    return whole, questions, chains
