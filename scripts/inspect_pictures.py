"""The picture of a page of `colar inspect` for docs: one question at several speeds.

python scripts/inspect_pictures.py inspect.html docs/images
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

FLAGS = ["--no-sandbox", "--disable-gpu"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="inspect.html")
    parser.add_argument("output", type=Path, help="folder for the picture")
    parser.add_argument("--question", help="id of the question that is open (else: where systems disagree)")
    args = parser.parse_args()

    from playwright.sync_api import sync_playwright

    args.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"), args=FLAGS
        )
        page = browser.new_page(
            viewport={"width": 1280, "height": 900},
            color_scheme="light",
            reduced_motion="reduce",  # not in the middle of an animation
        )
        page.goto(args.page.resolve().as_uri())
        # The page unpacks its data first.
        page.wait_for_selector("#list .item")
        if args.question:
            page.evaluate("id => { location.hash = `#q=${encodeURIComponent(id)}`; }", args.question)
        elif page.locator("#outcome option[value=disagree]").count():
            page.locator("#outcome").select_option("disagree")
            items = page.locator("#list .item")
            if items.count():
                items.first.click()
        page.evaluate("document.activeElement.blur()")
        path = args.output / "inspect-light-wide.png"
        page.locator("#questions").screenshot(path=path)
        print(path)
        browser.close()


if __name__ == "__main__":
    main()
