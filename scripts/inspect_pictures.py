"""Pictures of a page of `colar inspect`, for README.md and docs: the opening and one question, wide and narrow.

python scripts/inspect_pictures.py inside.html docs/images
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

FLAGS = ["--no-sandbox", "--disable-gpu"]
PICTURES = {
    # name: colour scheme, width
    "inspect-light-wide": ("light", 1280),
    "inspect-dark-narrow": ("dark", 420),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="inside.html")
    parser.add_argument("output", type=Path, help="folder for the pictures")
    parser.add_argument("--question", help="id of the question that is open (else: where systems disagree)")
    args = parser.parse_args()

    from playwright.sync_api import sync_playwright

    args.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, (scheme, width) in PICTURES.items():
            page = browser.new_page(
                viewport={"width": width, "height": 900},
                color_scheme=scheme,
                reduced_motion="reduce",  # not in the middle of an animation
            )
            page.goto(args.page.resolve().as_uri())
            if args.question:
                page.evaluate("id => { location.hash = `#q=${encodeURIComponent(id)}`; }", args.question)
            elif page.locator("#outcome option[value=disagree]").count():
                page.locator("#outcome").select_option("disagree")
                items = page.locator("#list .item")
                if items.count():
                    items.first.click()
            page.evaluate("document.activeElement.blur()")
            path = args.output / f"{name}.png"
            page.locator("#questions").screenshot(path=path)
            print(path)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
