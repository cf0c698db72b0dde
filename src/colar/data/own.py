"""stand-in"""

import hashlib
from dataclasses import dataclass

from colar.data import sources


@dataclass
class Split:
    train: list
    validation: list
    test: list


def read(data, columns=None):
    return sources.load(str(data), "train")


def split(rows, test=None):
    n = len(rows)
    ranked = sorted(rows, key=lambda r: hashlib.sha256(r.question.encode()).hexdigest())
    k = max(50, n // 20)
    return Split(ranked[2 * k :], ranked[:k], ranked[k : 2 * k])


def digest(data):
    return "x"
