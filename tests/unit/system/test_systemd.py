"""What must hold for what a service manager is told: over a real socket, in time, and nothing while
something is overdue."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import until_async
from lowcomm_node.system.systemd import (
    Condition,
    ServiceManager,
)

Listen = Callable[[str], socket.socket]
STARTING, READY = Condition(ready=False, line="joining"), Condition(ready=True, line="training")


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Makes a manager's socket at an address as systemd writes it."""
    sockets: list[socket.socket] = []

    def make(address: str) -> socket.socket:
        sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        sockets[-1].bind("\0" + address[1:] if address.startswith("@") else address)
        return sockets[-1]

    yield make
    for one in sockets:
        one.close()


def heard(manager: socket.socket) -> list[str]:
    """What it was told since it was asked last."""
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture
def told(
    listen: Listen, tmp_path: Path
) -> Callable[..., tuple[ServiceManager, Callable[[], list[str]]]]:
    """Makes a manager with a socket of its own, and what it was told."""

    def make(watchdog: float | None = None) -> tuple[ServiceManager, Callable[[], list[str]]]:
        sock = listen(str(tmp_path / "notify"))
        return ServiceManager(str(tmp_path / "notify"), watchdog), lambda: heard(sock)

    return make


@pytest.mark.parametrize("kind", ["a path", "an abstract name"])
def test_the_manager_that_the_environment_names_is_told_and_children_are_not(
    kind: str, listen: Listen, tmp_path: Path
) -> None:
    address = str(tmp_path / "notify") if kind == "a path" else f"@lowcomm-test-{os.getpid()}"
    sock = listen(address)
    environment = {
        "NOTIFY_SOCKET": address,
        "WATCHDOG_USEC": "8000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "b",
    }
    manager = ServiceManager.of(environment)
    assert environment == {"A": "b"}
    manager.tick(READY, 0.0)
    manager.stopping()
    assert heard(sock) == ["READY=1", "STATUS=training", "WATCHDOG=1", "STOPPING=1"]


def test_the_watchdog_is_fed_twice_a_period_unless_something_is_overdue(told: Any) -> None:
    manager, news = told(watchdog=20.0)
    fed = []
    for tick in range(41):
        manager.tick(READY, float(tick))
        fed += [tick] if "WATCHDOG=1" in news() else []
    assert max(after - before for before, after in pairwise(fed)) <= 10
    assert len(fed) <= 6
    for tick in range(41, 80):
        manager.tick(
            Condition(ready=True, line="training", overdue="the trainer hangs"), float(tick)
        )
    assert news() == ["STATUS=the trainer hangs"]
    manager.tick(READY, 80.0)
    assert "WATCHDOG=1" in news(), "it is over"


async def test_attending_goes_on_over_a_defect_and_ends_at_once_without_a_manager(
    told: Any,
) -> None:
    await ServiceManager().attend(lambda: pytest.fail("nobody is told anything"))
    manager, news = told(watchdog=0.2)
    conditions: Iterator[Condition | None] = iter([READY, None])
    heard_: list[str] = []

    def look() -> Condition:
        found = next(conditions, READY)
        if found is None:
            raise ValueError("a defect")
        return found

    async def fed() -> bool:
        heard_.extend(news())
        return heard_.count("WATCHDOG=1") >= 3

    task = asyncio.create_task(manager.attend(look))
    try:
        await until_async(fed, 20, "the watchdog is fed again and again")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert heard_.count("READY=1") == 1
