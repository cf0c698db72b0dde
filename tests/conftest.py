"""Shared fixtures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published data sets, laid out as `colar.data.catalogue` names them."""
    folder = os.environ.get("COLAR_DATA_DIR")
    if not folder:
        pytest.skip("needs the published data sets: set COLAR_DATA_DIR to their folder")
    return Path(folder)


@pytest.fixture
def taken() -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Holds a folder's lock as another process would, inside the block."""
    fcntl = pytest.importorskip("fcntl")

    @contextlib.contextmanager
    def hold(folder: Path) -> Iterator[None]:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    return hold


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: equal means equal bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
