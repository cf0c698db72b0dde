"""The folders and files that a recipe names: the same weights and rows are the same input, whatever their path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INPUTS = ("model.backbone", "model.init_from", "data.source", "data.validation_source")
"""Keys that name a folder or a file of the user's, if they do not name one of ours or of the Hub."""
PIECE, PIECES = 1 << 18, 64
"""Bytes of a piece of a file that are digested, and the number of pieces."""


def named(flat: dict[str, Any]) -> dict[str, str]:
    """The keys that may name a folder or file of the user's, and do not say null."""
    of_mixed = [key for key in flat if key.startswith("data.mixed_in.") and key.endswith(".source")]
    return {key: flat[key] for key in (*INPUTS, *of_mixed) if isinstance(flat.get(key), str)}


def is_same(before: str, now: str, digest: str | None) -> bool:
    """Whether two texts name one folder or file, or two with the same weights or rows.

    `digest` is that of `before` when the run began; without one it is made now, if `before` is still there.
    """
    if os.path.normpath(before) == os.path.normpath(now):
        return True
    found = fingerprint(now)
    return found is not None and found == (digest or fingerprint(before))


def fingerprint(path: str | Path) -> str | None:
    """16 hex digits of a file, or of the weights in a folder, or where it has none of its files; None for no path.

    A file of more than 16 MiB by its size and 64 pieces of it: a model of 8B parameters takes a second.
    """
    path = Path(path)
    paths = [path] if path.is_file() else []
    if path.is_dir():
        # The settings of a checkpoint name when it was written, and a run that is finished may publish it again.
        paths = [*path.glob("*.safetensors"), *path.glob("*.bin")] or [
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        ]
    if not paths:
        return None
    digest = hashlib.sha256()
    for file in sorted(paths):
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        starts: Iterable[int] = range(0, size, PIECE)
        if size > PIECES * PIECE:
            starts = [(size - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
        with open(file, "rb") as stream:
            for start in starts:
                stream.seek(start)
                digest.update(stream.read(PIECE))
    return digest.hexdigest()[:16]
