"""A browser that looks at the page of a node, and what it must never do there."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from helpers.waiting import until

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
WIDE: ViewportSize = {"width": 1100, "height": 1700}
PHONE: ViewportSize = {"width": 360, "height": 740}
REBOUND = "evil.example"
"""A name that somebody else has made to mean this machine."""
DEADLINE = 60.0
"""Seconds for anything to show."""


def find_browser() -> str:
    """The program. Skips the test with the remedy where there is none, which fails in CI."""
    for command in COMMANDS:
        if found := shutil.which(command):
            return found
    pytest.skip(f"none of {', '.join(COMMANDS)} is installed: `make test-tools`, as root on Debian")


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(),
            # Root has no sandbox in containers, and /dev/shm is small there.
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--disable-gpu",
                f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page, with all that it asked for and complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.bytes = 0
        self.complaints: list[str] = []
        page.set_default_timeout(1000 * DEADLINE)
        page.on("request", lambda one: self.requests.append(one.url))
        page.on("response", self._count)
        page.on("console", lambda one: self._complain(one.type, one.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _count(self, answer: Any) -> None:
        self.bytes += int(answer.headers.get("content-length", 0))

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def open(self, link: str) -> None:
        """Go there, and wait for the first word of the node."""
        self.page.goto(link)
        self.wait("Number(document.body.dataset.states) > 0")
        self.wait("document.querySelector('[data-figure=uptime]').dataset.value")

    def unfold(self) -> None:
        """Open all that is folded."""
        self.page.evaluate("document.querySelectorAll('.fold').forEach(one => { one.open = true })")

    def wait(self, condition: str) -> None:
        """Until an expression of JavaScript is true."""
        # wait_for_function would have the page evaluate text, which its policy forbids.
        until(lambda: self.page.evaluate(condition), DEADLINE, condition)

    def figures(self) -> dict[str, tuple[Any, str, str]]:
        """Value, text and format of every figure, by its path."""
        told = self.page.evaluate(
            "[...document.querySelectorAll('[data-figure]')].map(one => [one.dataset.figure, "
            "one.dataset.value, one.textContent, one.dataset.format ?? ''])"
        )
        return {path: (json.loads(value), text, kind) for path, value, text, kind in told}

    def text(self, selector: str) -> str:
        """What is written there."""
        return self.page.locator(selector).inner_text()

    def overflowing(self) -> list[str]:
        """What reaches beyond the window, where the page can be scrolled sideways."""
        return self.page.evaluate(
            "(() => {"
            "const edge = document.documentElement.clientWidth;"
            "if (document.documentElement.scrollWidth <= edge) return [];"
            "const wide = one => one.getBoundingClientRect().right > edge"
            " && !one.closest('.wide, .chart');"
            "return [...document.querySelectorAll('body *')].filter(wide)"
            ".map(one => one.outerHTML.slice(0, 120));"
            "})()"
        )

    def faults(self) -> list[str]:
        """What axe finds that keeps people out: serious or worse."""
        spec = find_spec("axe_playwright_python")
        assert spec and spec.origin
        self.page.evaluate(Path(spec.origin).with_name("axe.min.js").read_text())
        told = self.page.evaluate("axe.run()")
        return [
            f"{one['id']}: {node['html'][:200]}"
            for one in told["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


@contextmanager
def visiting(browser: Browser, **options: Any) -> Iterator[Visit]:
    """A new window of somebody who has never been there."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    try:
        yield Visit(context.new_page())
    finally:
        context.close()
