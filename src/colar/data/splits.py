"""Which split a generated problem belongs to: a function of what it says, so that no problem stands in two of them."""

from __future__ import annotations

import hashlib


def split_by_hash(problem: str) -> str:
    """One tenth test, one tenth validation, the rest train.

    `problem` is the text of what makes two problems the same one.
    """
    # Not `hash()`: Python salts it anew in every process.
    digest = hashlib.sha256(problem.encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 10
    if bucket == 0:
        return "test"
    if bucket == 1:
        return "validation"
    return "train"
