"""Pictures of the pages of `colar serve` (a comparison of speeds) and `colar inspect` (one question), for the docs.

    colar serve sequential=runs/demo/sequential/best cot=runs/demo/cot/best &
    python scripts/pictures.py docs/images --serve http://127.0.0.1:8000
    python scripts/pictures.py docs/images --inspect inspect.html

Needs playwright, and a Chromium (the one on the PATH). The server's times are in its picture: take it on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 120_000
"""Milliseconds that all answers may take."""


def of_serve(page: Any, url: str, path: Path) -> None:
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    # Twice: the first forward passes of a process are slow.
    for _ in range(2):
        page.get_by_role("button", name="Compare speeds").click()
        # The click itself has enabled "Stop", perhaps for less time than passes between two looks at the page.
        page.locator("#stop:disabled").wait_for(timeout=PATIENCE)
    # A thought in the middle, with its neighbours.
    chains = page.locator(".chain")
    chains.nth(chains.count() // 2).locator("button").nth(1).click()
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=path, full_page=True)


def of_inspect(page: Any, file: Path, path: Path) -> None:
    """A question where systems disagree, if there is one."""
    page.goto(file.resolve().as_uri())
    # The page unpacks its data first.
    page.wait_for_selector("#list .item")
    if page.locator("#outcome option[value=disagree]").count():
        page.locator("#outcome").select_option("disagree")
        items = page.locator("#list .item")
        if items.count():
            items.first.click()
    page.evaluate("document.activeElement.blur()")
    page.locator("#questions").screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder for the pictures")
    parser.add_argument("--serve", metavar="URL", help="address of a running server")
    parser.add_argument("--inspect", metavar="FILE", type=Path, help="inspect.html")
    args = parser.parse_args()

    from playwright.sync_api import sync_playwright

    args.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"), args=FLAGS
        )
        for draw, given, name in ((of_serve, args.serve, "serve"), (of_inspect, args.inspect, "inspect")):
            if given:
                page = browser.new_page(
                    viewport={"width": 1280, "height": 900},
                    color_scheme="light",
                    reduced_motion="reduce",  # not in the middle of an animation
                )
                path = args.output / f"{name}-light-wide.png"
                draw(page, given, path)
                print(path)
        browser.close()


if __name__ == "__main__":
    main()
