"""Save the calculator's page as pictures, 400 and 1,400 pixels wide, to be looked at; git ignores their folder.

    python tools/calculator/pictures.py [--fragment 'gpus=8&device=H100&model=llama-3.1-8b'] [--file ds.json]

`study serve` makes the answers, so that the page needs no Python in the browser. It needs a Chromium of the
distribution.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from playwright.sync_api import sync_playwright

from study.advisor import serve
from study.config.places import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = REPOSITORY / "runs" / "calculator"
WIDTHS = (400, 1400)
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
FRAGMENT = "gpus=8&device=H100&model=llama-3.1-8b&seq_length=4096"
EXPLAINED = REPOSITORY / "tests" / "data" / "hook" / "wrong.json"
_TIMEOUT_MS = 120_000


def main() -> None:
    """Save a picture for each width and color scheme, and print their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fragment", default=FRAGMENT, help="the question of a link of the page")
    parser.add_argument("--file", type=Path, default=EXPLAINED, help="a file to explain; by default one with faults")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    # A container's root cannot have a sandbox.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with serve.make_server() as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        for file in save_pictures(browser, f"{server.url}#{options.fragment}", options.file):
            print(file)
        browser.close()
        server.shutdown()


def save_pictures(browser: Browser, address: str, explained: Path) -> Iterator[Path]:
    """Yield the picture of each width and color scheme."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.set_default_timeout(_TIMEOUT_MS)
            page.goto(address)
            fill_page(page, explained)
            file = FOLDER / f"{width}_{scheme}.png"
            page.screenshot(path=file, full_page=True)
            page.close()
            yield file


def fill_page(page: Page, explained: Path) -> None:
    """Wait for the answer, and ask for all that the page shows on request."""
    page.wait_for_selector("body[data-done]:not([data-done=''])")
    page.click("#what-if")
    page.wait_for_selector("#what-if:enabled")
    page.locator("#table button").first.click()
    page.wait_for_selector("#files pre")
    page.locator("details").evaluate_all("(all) => all.forEach((element) => { element.open = true; })")
    page.set_input_files("[name=files]", explained)
    page.wait_for_selector("#file-form[data-done]")
    page.fill("[name=release]", "0.19.5")
    page.click("#releases-form button")
    page.wait_for_selector("#faults li")


if __name__ == "__main__":
    main()
