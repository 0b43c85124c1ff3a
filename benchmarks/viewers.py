"""Viewers of a swarm's page, for `bootstrap.py`: so many requests a second, over connections that
stay. A browser that has the figures asks whether they are still the same: so do nine in ten here.

    python benchmarks/viewers.py PORT RATE SECONDS

Prints JSON: seconds that each answer took, and how many there were by status.
"""

import asyncio
import json
import sys
from collections import Counter
from time import monotonic

import kit  # noqa: F401 - a script is a claim

CONNECTIONS = 100
NEW = 10
"""Of so many requests one is somebody's first."""
PATH = "/api/v1/swarms.json"


class Viewer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._tag = ""
        self._asked = 0

    async def ask(self) -> int:
        """One request; the status of its answer."""
        self._asked += 1
        known = f"If-None-Match: {self._tag}\r\n" if self._tag and self._asked % NEW else ""
        asked = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n{known}\r\n"
        self._writer.write(asked.encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        told = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
        self._tag = told.get("etag", self._tag)
        await self._reader.readexactly(int(told.get("content-length", 0)))
        return status


async def view(port: int, rate: float, seconds: float) -> dict[str, object]:
    """Ask as often as that, evenly."""
    viewers = [
        Viewer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(CONNECTIONS)
    ]
    took: list[float] = []
    statuses: Counter[int] = Counter()
    began = monotonic()

    async def live(place: int, viewer: Viewer) -> None:
        due = began + place / rate
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - monotonic()))
            asked = monotonic()
            statuses[await viewer.ask()] += 1
            took.append(monotonic() - asked)
            due += CONNECTIONS / rate

    await asyncio.gather(*(live(place, one) for place, one in enumerate(viewers)))
    return {"took": took, "statuses": statuses}


if __name__ == "__main__":
    told = asyncio.run(view(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
    print(json.dumps(told))
