"""Pictures of the page of `colar serve`, for the docs: the comparison of speeds on a wide screen.

    colar serve sequential=runs/demo/sequential/best cot=runs/demo/cot/best &
    python scripts/serve_pictures.py http://127.0.0.1:8000 docs/images

Needs playwright, and a Chromium (the one on the PATH). The page's times are in the pictures: take them on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

PICTURES = {
    # name: colour scheme, width, button
    "serve-light-wide": ("light", 1280, "Compare speeds"),
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 120_000
"""Milliseconds that all answers may take."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="address of a running server")
    parser.add_argument("output", type=Path, help="folder for the pictures")
    args = parser.parse_args()

    from playwright.sync_api import sync_playwright

    args.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as engine:
        browser = engine.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"), args=FLAGS
        )
        for name, (scheme, width, button) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(args.url)
            page.wait_for_selector("#model option", state="attached")
            # Twice: the first forward passes of a process are slow.
            for _ in range(2):
                answer(page, button)
            # A thought in the middle, with its neighbours.
            chains = page.locator(".chain")
            chains.nth(chains.count() // 2).locator("button").nth(1).click()
            page.evaluate("document.activeElement.blur()")
            path = args.output / f"{name}.png"
            page.screenshot(path=path, full_page=True)
            print(path)
            page.close()
        browser.close()


def answer(page: Any, button: str) -> None:
    """Press a button and wait for all its answers."""
    page.get_by_role("button", name=button).click()
    # The click itself has enabled "Stop", perhaps for less time than passes between two looks at the page.
    page.locator("#stop:disabled").wait_for(timeout=PATIENCE)


if __name__ == "__main__":
    main()
