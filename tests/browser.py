"""The Chromium in which pages are tested; tests that import this skip where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright_api = pytest.importorskip(
    "playwright.sync_api",
    reason="SKIPPED LOUDLY: the page is tested in Chromium, and playwright is not installed",
)
# The shell draws the same page without the processes of a window: a third of the time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = os.environ.get("COLAR_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
if not CHROMIUM:
    pytest.skip("SKIPPED LOUDLY: no chromium on this machine (or in COLAR_CHROMIUM)", allow_module_level=True)


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """A running browser."""
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]  # fmt: skip
    with playwright_api.sync_playwright() as engine:
        running = engine.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()
