"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published data sets, laid out as `colar.data.catalogue` names them."""
    folder = os.environ.get("COLAR_DATA_DIR")
    if not folder:
        pytest.skip("needs the published data sets: set COLAR_DATA_DIR to their folder")
    return Path(folder)
