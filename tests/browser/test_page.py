"""The page in a real browser, over a real server.

After each test: no request has left the server's origin, and nothing was printed to the console.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.chromium import BROWSER, NO_SANDBOX
from tests.live import Server, serving

pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="THE PAGE IS NOT TESTED: no chromium was found; install one, or name it: LLAMASLOT_BROWSER",
)
KEY = "the administrators'"
ATTACK = (
    "**bold** <script>document.title = 'owned'</script>"
    "<img src=http://192.0.2.1/a.png onerror=\"document.title = 'owned'\">"
    "<svg onload=\"document.title = 'owned'\"></svg>"
    "<style>body { background: url(http://192.0.2.1/b.png) }</style>"
    "<iframe src=http://192.0.2.1></iframe>"
    "![image](http://192.0.2.1/c.png) [link](javascript:document.title='owned')"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=NO_SANDBOX)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "-c", "16384", "-np", "4", "-n", "24", "--ignore-eos") as server:
        yield server


@pytest.fixture(scope="module")
def attacked(folder: Path) -> Iterator[Server]:
    """A server with a key, whose model writes HTML."""
    own = folder / "attacked"
    own.mkdir()
    text = ATTACK.replace("\\", "\\\\").replace('"', '\\"')
    (own / "attack.gbnf").write_text(f'root ::= "{text}"')
    with serving(own, "-c", "4096", "-np", "1", "--api-key", KEY, "--grammar-file", own / "attack.gbnf") as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server; `options` are those of a browser's context."""
    problems: list[str] = []
    with ExitStack() as contexts:

        def open_page(url: str, **options: Any) -> Page:
            context = contexts.enter_context(browser.new_context(base_url=url, **options))
            context.set_default_timeout(20_000)
            page = context.new_page()
            page.on("request", lambda sent: None if sent.url.startswith(url) else problems.append(sent.url))
            page.on("pageerror", lambda error: problems.append(str(error)))
            # The browser itself reports each reply with an error's status.
            page.on(
                "console",
                lambda line: None if "Failed to load resource" in line.text else problems.append(line.text),
            )
            page.goto("/")
            return page

        yield open_page
    assert not problems


def send(page: Page, text: str) -> None:
    """Send a message and wait for the whole reply."""
    n = page.locator("article").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(n + 2)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def reused(page: Page) -> str:
    """What the bar under the last reply says."""
    return page.locator("article").last.locator(".reuse").get_attribute("aria-label") or ""


def test_a_chat_streams_and_its_next_turn_and_its_branches_reuse_the_prefix(
    server: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page(server.url)
    send(page, "A first question, of some words, that the next turn repeats.")
    expect(page.locator("article.assistant .body")).not_to_be_empty()
    send(page, "And a second one")
    assert re.search(r"[1-9]\d* .*KV pool", reused(page)), reused(page)
    page.get_by_role("button", name="Try again").last.click()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.get_by_role("button", name="Edit and branch").last.click()
    page.get_by_label("Edited message").fill("Another second one")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert re.search(r"[1-9]\d* .*KV pool", reused(page)), reused(page)
    page.get_by_role("button", name="Previous branch").click()
    expect(page.get_by_text("And a second one")).to_be_visible()
    page.reload()
    expect(page.get_by_text("And a second one")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Delete A first question")).click()
    expect(page.locator("article")).to_have_count(0)


@pytest.mark.slow
def test_a_reply_that_is_stopped_stays_and_frees_its_slot(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("Max tokens").fill("12000")
    page.get_by_label("Max tokens").press("Tab")
    page.get_by_label("Message", exact=True).fill("Go on for ever")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .body")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.locator("article.assistant .body")).not_to_be_empty()
    page.get_by_role("link", name="Cache").click()
    expect(page.get_by_text("0 of 4 slots run")).to_be_visible()


def test_with_a_key_html_and_scripts_of_a_model_do_nothing(
    attacked: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page(attacked.url)
    key = page.get_by_label("Key of this server")
    expect(key).to_be_visible()
    key.fill("a wrong one")
    key.press("Enter")
    expect(page.get_by_role("status").first).to_contain_text("Invalid API Key")
    key.fill(KEY)
    key.press("Enter")
    expect(page.locator("#model")).not_to_be_empty()
    send(page, "Attack")
    body = page.locator("article.assistant .body")
    expect(body.locator("strong")).to_have_text("bold")
    assert body.locator("script, img, svg, style, iframe").count() == 0
    expect(body).to_contain_text("<script>document.title = 'owned'</script><img src=")
    body.get_by_text("link").click()
    assert page.title() == "llamaslot"


@pytest.mark.slow
def test_the_cache_shows_requests_and_prefixes_and_clears_them(
    server: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page(server.url)
    send(page, "One question for the view of the cache")
    page.get_by_role("link", name="Cache").click()
    expect(page.locator("#requests tbody tr").first).to_be_visible()
    expect(page.locator("#tree button").first).to_be_visible()
    expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile("slot 3 idle"))
    n = page.locator("#requests tbody tr").count()
    page.get_by_label("Id contains").fill("no such id")
    expect(page.locator("#requests tbody tr")).to_have_count(0)
    page.get_by_label("Id contains").fill("")
    expect(page.locator("#requests tbody tr")).to_have_count(n)
    for name in ("Clear KV pool", "Clear RAM"):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#cleared")).to_contain_text("tokens dropped")
    expect(page.locator("#tree button")).to_have_count(0)


@pytest.mark.slow
def test_the_page_goes_on_after_the_server_was_started_again(folder: Path, open_page: Callable[..., Page]) -> None:
    own = folder / "restarted"
    own.mkdir()
    with serving(own, "-c", "2048", "-np", "2", "-n", "8") as server:
        page = open_page(server.url)
        page.get_by_role("link", name="Cache").click()
        expect(page.get_by_text("0 of 2 slots run")).to_be_visible()
        server.stop()
        expect(page.get_by_role("status").first).to_contain_text("trying again")
    port = server.url.rpartition(":")[2]
    with serving(own, "-c", "2048", "-np", "2", "-n", "8", "--port", port):
        expect(page.get_by_role("status").first).to_be_empty()
        page.get_by_role("link", name="Chat").click()
        send(page, "Hello again")
        page.get_by_role("link", name="Cache").click()
        expect(page.locator("#requests tbody tr")).to_have_count(1)


@pytest.mark.slow
def test_the_advice_names_what_made_prompts_be_computed_again(
    server: Server, open_page: Callable[..., Page]
) -> None:
    rules = " ".join(
        f"Rule {i}: {i * i} is the square of {i}, and {i * 7} is seven times as much." for i in range(20)
    )
    for minute in range(10, 13):
        system = f"The time is 2026-11-27 14:{minute}:00. {rules}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "session_id": "dated"})
    page = open_page(server.url)
    page.get_by_role("link", name="Cache").click()
    summary = page.locator("#advice summary").first
    expect(summary).to_contain_text("a date or time in the system prompt")
    summary.click()
    expect(page.get_by_text("Have the client put the date into its last message")).to_be_visible()
    expect(page.locator("#advice pre")).to_have_count(0)


@pytest.mark.slow
def test_a_server_that_embeds_texts_offers_the_view_of_its_cache_alone(
    folder: Path, open_page: Callable[..., Page]
) -> None:
    own = folder / "embedding"
    own.mkdir()
    with serving(own, "-c", "1024", "-np", "1", "--embeddings", "--pooling", "last") as server:
        page = open_page(server.url)
        expect(page.get_by_text("embeds texts and does not chat")).to_be_visible()
        expect(page.get_by_role("link", name="Chat")).to_have_count(0)
        server.post("/v1/embeddings", {"input": "A text to embed"})
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        page.goto("/#/chat")
        expect(page.get_by_label("Message", exact=True)).to_be_hidden()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_views_are_accessible(server: Server, open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme)
    send(page, "A question")
    for view in ("Chat", "Cache"):
        page.get_by_role("link", name=view).click()
        page.wait_for_timeout(1500)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    send(page, "A question")
    for view in ("Chat", "Cache"):
        page.get_by_role("link", name=view).click()
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_a_tree_of_2000_prefixes_is_drawn_and_zoomed_by_keyboard(
    server: Server, open_page: Callable[..., Page]
) -> None:
    def compute(i: int) -> None:
        group, own = divmod(i, 25)
        head = [256 + group, *range(300, 330)]
        body = {"prompt": [*head, 400 + own, *range(500, 504)], "n_predict": 0}
        server.post("/completion", body)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compute, range(2000)))
    page = open_page(server.url)
    page.get_by_role("link", name="Cache").click()
    expect(page.locator("#tree-info")).to_contain_text("2,000 prefixes")
    boxes = page.locator("#tree button")
    first = boxes.first
    first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
    expect(boxes).to_have_count(26)
    page.get_by_role("button", name="Zoom out").click()
    expect(page.get_by_role("button", name="Zoom out")).to_be_hidden()
