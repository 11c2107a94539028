"""Waiting for a page in Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeps import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page


def wait_for_page(page: Page, condition: str) -> None:
    """Wait until a condition in JavaScript is true.

    Playwright's wait_for_function calls eval in the page from its second look on, which the page's policy forbids.
    """
    wait_until(lambda: page.evaluate(condition), 30)
