"""The web page at `/` in a real browser, over real workers. Needs Chromium (Debian: chromium)."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.deployment import HANG_SECONDS, Deployment, until

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)"),
]
MILLISECONDS = HANG_SECONDS * 1000
CLICK_STOP_AT_FIRST_PIECE = """() => {
  const stop = document.querySelector("button[name=stop]");
  const click = (_, observer) => {
    if (document.querySelector("#messages li.assistant > span").textContent === "") return;
    observer.disconnect();
    stop.click();
  };
  new MutationObserver(click).observe(
    document.querySelector("#messages"), { childList: true, subtree: true }
  );
}"""
"""From within the page: the whole answer may take less time than a click from outside."""


async def without_end(route: playwright.Route) -> None:
    """What the page asks, but for an answer that does not end by itself, as a random one may at
    once."""
    await route.continue_(post_data=route.request.post_data_json | {"ignore_eos": True})


class Browser:
    """One page, and what went wrong on it."""

    def __init__(self, page: playwright.Page, folder: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self._folder = folder
        page.set_default_timeout(MILLISECONDS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_console)

    def _on_console(self, message: playwright.ConsoleMessage) -> None:
        # A refused request is logged by the browser itself; the page shows it to the user.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    async def screenshot(self, name: str) -> Path:
        path = self._folder / f"{name}.png"
        await self.page.screenshot(path=path, full_page=True)
        return path

    async def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        await playwright.expect(self.page.locator(selector)).to_contain_text(
            text, timeout=MILLISECONDS
        )

    async def say(self, text: str) -> None:
        await self.page.get_by_label("Message").fill(text)
        await self.page.keyboard.press("Enter")


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as started, asyncio.timeout(2 * HANG_SECONDS):
        chromium = await started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await chromium.new_page(viewport={"width": 1360, "height": 900})
        made = Browser(page, tmp_path)
        yield made
        await chromium.close()
    assert not made.errors


def is_picture(path: Path) -> bool:
    """A PNG with something on it: a blank page of this size has far fewer bytes."""
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 20_000


async def test_workers_pages_and_a_chat(tiny_up: Deployment, browser: Browser) -> None:
    page = browser.page
    await page.goto(tiny_up.url)
    await playwright.expect(page.get_by_role("status")).to_have_text("ready", timeout=MILLISECONDS)
    workers = {worker["role"]: worker["worker"] for worker in tiny_up.workers()}
    for worker in workers.values():
        bar = page.locator(f'[data-worker="{worker}"] .pages')
        await playwright.expect(bar).to_have_attribute(
            "aria-label", re.compile(r"free [1-9]\d+"), timeout=MILLISECONDS
        )
    await playwright.expect(page.locator("#map svg path")).to_have_count(1)
    await browser.say("Hello, <b>you</b>!")
    await browser.shows("#messages li.user", "Hello, <b>you</b>!")
    await browser.shows("#messages small", f"prefill {workers['prefill'][:8]}")
    await browser.shows("#messages small", f"decode {workers['decode'][:8]}")
    await browser.shows("#messages small", "from the cache")
    await browser.shows("#ttft-figures", re.compile(r"p50 .* n [1-9]"))
    assert is_picture(await browser.screenshot("chat"))


async def test_a_chat_that_is_stopped_gives_everything_back(
    tiny_up: Deployment, browser: Browser
) -> None:
    await browser.page.route("**/v1/chat/completions", without_end)
    await browser.page.goto(tiny_up.url)
    await browser.page.evaluate(CLICK_STOP_AT_FIRST_PIECE)
    await browser.say("Go on and on.")
    await browser.shows("#messages small", "stopped")
    await until(lambda: not tiny_up.troubles(), "whole pools")


async def test_a_gateway_that_has_gone_is_shown(tiny_up: Deployment, browser: Browser) -> None:
    page = browser.page
    await page.goto(tiny_up.url)
    await playwright.expect(page.get_by_role("status")).to_have_text("ready", timeout=MILLISECONDS)
    await page.route("**/status", lambda route: route.abort())
    await browser.shows("header", "not reachable")
    await page.unroute("**/status")
    await playwright.expect(page.get_by_role("status")).to_have_text("ready", timeout=MILLISECONDS)
