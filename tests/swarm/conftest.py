"""Fixtures of the tests with real processes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from helpers.dht_peers import Dht
from helpers.processes import Notified, Swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the daemon runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser for all tests of a file."""
    from helpers.browser import browsing  # loads playwright, which most tests here do without

    with browsing() as browser:
        yield browser


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes take few steps: those of a model as `init` writes it would fill a core each."""
    monkeypatch.setenv("STEP_SECONDS", "0.5")


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[Notified]:
    """A service manager's socket; its watchdog bites after three seconds."""
    notified = Notified(tmp_path / "notify", watchdog=3.0)
    try:
        yield notified
    finally:
        notified.close()


@pytest.fixture
async def dht(tmp_path: Path, swarm: Swarm) -> AsyncIterator[Dht]:
    """Peers of the DHT beside a swarm; all are closed at the end."""
    dht = Dht(tmp_path / "dht")
    try:
        yield dht
    finally:
        await dht.close()
