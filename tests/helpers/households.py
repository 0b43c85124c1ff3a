"""Machines of a household on loopback: a lender in the loop of a test, homes of heads, the sockets
of their daemons, and real processes as workers."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from helpers.waiting import until_async
from lowcomm_node.household.borrowing import Borrowing
from lowcomm_node.household.lender import Lender, listen
from lowcomm_node.household.link import pair
from lowcomm_node.household.machines import Household
from lowcomm_node.net.local import address_of

DEADLINE = 30.0
WORKER = '''
"""A worker, which does what the first line says."""
import os, socket, sys, time

_, pids, settings, end = sys.argv
sock = socket.socket(fileno=int(end))
print(os.getpid(), file=open(pids, "a"), flush=True)
do = b""
while not do.endswith(b"\\n"):
    do += sock.recv(1)
match do.decode().strip():
    case "tell":
        sock.sendall(settings.encode())
        sock.recv(1)
    case "echo":
        while data := sock.recv(65536):
            sock.sendall(data)
    case "fill":
        count = os.open(pids + ".written", os.O_CREAT | os.O_RDWR)
        for number in range(1, 10**9):
            sock.sendall(bytes(65536))
            os.pwrite(count, str(65536 * number).encode(), 0)
    case "ignore":
        time.sleep(1000)  # a worker that hangs; the test ends it by its id
    case "fail":
        sock.sendall(b"last words" * 100_000)
        sys.exit("the reason why")
    case "leave":
        if os.fork() == 0:
            time.sleep(60)  # a child, which holds the socket open
        sock.sendall(b"last words" * 1_000_000)
        open(pids + ".done", "w").close()
    case "grow":
        held = b"x" * 300_000_000
        sock.recv(1)
'''


def worker(folder: Path) -> list[str]:
    """A command line whose processes write their ids into a file, ``pids`` in a folder."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script), str(folder / "pids")]


def pids(folder: Path) -> list[int]:
    """The workers that have begun."""
    path = folder / "pids"
    return list(map(int, path.read_text().split())) if path.exists() else []


def written(folder: Path) -> int:
    """Bytes that a worker which fills its socket has written."""
    path = folder / "pids.written"
    return int(path.read_text() or 0) if path.exists() else 0


class Lending:
    """A lender that runs in this loop."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.household = Household(folder / "lender")
        self.told: list[tuple[str, str]] = []
        options.setdefault("command", worker(folder))
        self.lender = Lender(self.household, lambda *news: self.told.append(news), **options)
        self.listener = listen(0, "127.0.0.1")
        self.port = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    @property
    def codes(self) -> list[str]:
        """All codes that it has shown."""
        return [text for event, text in self.told if event == "code"]

    def events(self, name: str) -> list[str]:
        """What it has told of one kind."""
        return [text for event, text in self.told if event == name]

    async def until_told(self, name: str, count: int = 1) -> str:
        """The newest of ``count`` sentences."""

        async def told() -> bool:
            return len(self.events(name)) >= count

        await until_async(told, DEADLINE, f"{name}, {count} times")
        return self.events(name)[-1]


@asynccontextmanager
async def lending(
    folder: Path, heads: Sequence[Path] = (), **options: Any
) -> AsyncIterator[Lending]:
    """A lender that runs, paired with the homes of ``heads``."""
    one = Lending(folder, **options)
    running = asyncio.create_task(one.lender.run(one.listener))
    try:
        for home in heads:
            one.lender.codes.renew(time.monotonic())
            await pair(one.address, home, one.codes[-1])
        yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        one.listener.close()


@asynccontextmanager
async def linked(lender: Lending, home: Path, do: str) -> AsyncIterator[socket.socket]:
    """The socket to a worker, as the trainer of a head gets it from its daemon."""
    borrowing = Borrowing(home, [lender.address], os.getpid)
    ((_, path),) = borrowing.open()
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(DEADLINE)
            asked.connect(address_of(path))
            text, ends, _, _ = await asyncio.to_thread(socket.recv_fds, asked, 1000, 1)
        assert ends, text.decode()
        with socket.socket(fileno=ends[0]) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(sock, f"{do}\n".encode())
            yield sock
    finally:
        await borrowing.close()
