"""Take the pictures of the page in README.md, of a server that has just been started: `make screenshots`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.chromium import BROWSER, NO_SANDBOX
from tests.live import serving

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
"""Where the default model may be already."""
FLAGS = ("-m", "smollm2-135m", "-c", "8192", "-np", "4", "-s", "2")
DESKTOP = {"width": 1100, "height": 760}
PHONE = {"width": 390, "height": 780}


def main() -> None:
    """Chat in a light window while a dark one shows the cache; then show the chat on a phone."""
    assert BROWSER, "no chromium was found"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *FLAGS, environ={"XDG_CACHE_HOME": CACHE}, is_forked=False) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=BROWSER, args=NO_SANDBOX)
        cache = browser.new_page(viewport=DESKTOP, color_scheme="dark")
        cache.goto(f"{server.url}/#/cache")
        page = browser.new_page(viewport=DESKTOP)
        page.goto(server.url)
        chat(page)
        page.screenshot(path=IMAGES / "page-chat.png")
        phone = browser.new_page(viewport=PHONE, storage_state=page.context.storage_state())
        phone.goto(server.url)
        phone.screenshot(path=IMAGES / "page-phone.png")
        cache.wait_for_timeout(4000)
        cache.screenshot(path=IMAGES / "page-cache.png")
        browser.close()


def chat(page: Page) -> None:
    """Two questions, the second one asked again in another way."""
    ask(page, "What is the capital of France?")
    ask(page, "Name three famous sights there.")
    page.get_by_role("button", name="Edit and branch").last.click()
    page.get_by_label("Edited message").fill("And what is the capital of Italy?")
    page.get_by_role("button", name="Send as a branch").click()
    wait(page)


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the whole reply."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    wait(page)


def wait(page: Page) -> None:
    """Wait until a reply has begun and ended."""
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=120_000)


if __name__ == "__main__":
    main()
