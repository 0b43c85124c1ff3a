"""Whether a node keeps to its owner's limits on traffic, as the kernel counts the bytes of its
sockets.

    python benchmarks/limits.py

Two nodes on loopback, over TLS or through p2pd; contents go one way as fast as the limited node
lets them, over one stream or four, two of which the limited node has called itself. Every quarter
of a second the kernel is asked (``ss``) how many bytes the sockets of the limited node have
carried. *First* counts the 10 s from the first call on, *worst* is the stretch of 10 s that is
furthest off. Those bytes hold contents, messages, HTTP/2 and TLS, or libp2p's own
encryption."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter, time
from typing import Any

import kit
import uvloop
from blake3 import blake3
from ends import TCP, scratch

from helpers.tunnelling import End
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.net.bandwidth import Bandwidth, flow_options
from lowcomm_node.net.stream import CalleeStream, Stream
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.net.unsent import keep_little_unsent
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.sync.link import Incoming, Link
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.machine import keep_freed_memory
from lowcomm_node.system.units import read_rate, write_rate
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

RUN = "ab" * 32
"""The id of a run that does not exist."""
SECONDS, TICK = 10.0, 0.25
RATES = ("5Mbit", "20Mbit", "100Mbit")
RESULT = kit.RESULTS / "limits.json"
TO_CALLEE, TO_CALLER = 0, 1
"""Which way contents go in a call; it is told in the place of the fragment."""


class Flow(Link):
    """Contents one way, one after the other, without an end."""

    async def pour(self, size: int) -> None:
        """Send."""
        data = os.urandom(size)
        digest = blake3(data).digest()
        while True:
            await self.send_content(memoryview(data), digest)

    async def drain(self, size: int) -> None:
        """Receive."""
        into = memoryview(bytearray(size))
        while (frame := await self._receive()) is not None:
            if frame.WhichOneof("kind") == "content":
                self._expect(Incoming(frame.content, into, size))
            else:
                self._take(frame.chunk)


class Node(End):
    """The transport of a node that keeps to limits."""

    def __init__(self, folder: Path, name: str, route: str) -> None:
        key = folder / f"{name}.key"
        identity = load_or_create_identity(key)
        listen = [TCP] if route == "tunnel" else []
        self.discovery = Discovery(identity, key, DhtSettings(listen=listen, punching=False))
        super().__init__(identity, self.discovery, make_certificate())
        self.bandwidth, self.route = Bandwidth(), route
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, with gRPC's options by the limit on what comes, as the daemon does."""
        self._watching = asyncio.create_task(keep_little_unsent())
        if self.route == "tunnel":
            await self.discovery.start()
            await self.discovery.revive()
        flow = flow_options(self.bandwidth.down.rate)
        await self.channels.renew(flow)
        await self.server.renew(flow)
        await super().start()

    async def close(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
        await super().close()
        await self.discovery.close()

    def record(self) -> PeerInfo:
        """Its record."""
        port = self.port if self.route == "direct" else 1
        entries = self.discovery.addresses() if self.route == "tunnel" else ()
        return self.info(
            addresses=(f"127.0.0.1:{port}",), entry_points=entries, expires=time() + 600
        )

    async def pour(self, other: "Node", way: int, size: int) -> None:
        """Call another, and carry contents until cancelled."""
        stream = await self.call(other.record())
        await stream.send(pb.Frame(hello=pb.Offer(fragment=way, tokens=size)))
        await self._carry(other.peer_id, stream, way == TO_CALLEE, size)

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer a call of another."""
        hello = (await stream.receive()).hello
        await self._carry(peer, stream, hello.fragment == TO_CALLER, hello.tokens)

    async def _carry(self, peer: str, stream: Stream, sends: bool, size: int) -> None:
        flow = Flow(peer, stream, self.bandwidth)
        try:
            await (flow.pour(size) if sends else flow.drain(size))
        except LowcommError:
            return
        finally:
            stream.cancel()


def carried(limited: Node, other: Node) -> dict[str, int]:
    """Bytes that the sockets of the limited node have carried so far, each way."""
    if limited.route == "tunnel":
        daemon = limited.discovery._daemon
        assert daemon is not None
        mine = sockets(f"pid={daemon.pid},")
        return {"up": sum(sent for sent, _ in mine), "down": sum(received for _, received in mine)}
    called, calling = sockets(f":{limited.port} "), sockets(f":{other.port} ")
    return {
        "up": sum(sent for sent, _ in called) + sum(received for _, received in calling),
        "down": sum(received for _, received in called) + sum(sent for sent, _ in calling),
    }


def sockets(mark: str) -> list[tuple[int, int]]:
    """Bytes acknowledged and received by the TCP sockets whose line, up to the far address, has a
    mark."""
    told = subprocess.run(
        ["ss", "-tinpHO"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    found = []
    for line in told.splitlines():
        state, _, _, near, _, *rest = line.split()
        if state == "ESTAB" and (mark in f"{near} " or ("pid=" in mark and mark in " ".join(rest))):
            count = {
                name: int(value)
                for name, value in re.findall(r"bytes_(acked|received):(\d+)", line)
            }
            found.append((count.get("acked", 0), count.get("received", 0)))
    return found


async def measure(route: str, way: str, limit: str, streams: int) -> dict[str, Any]:
    """One row."""
    rate = read_rate(limit)
    assert rate is not None
    async with pouring(route, way, rate, streams) as (limited, other, tasks):
        row = await _watch(limited, other, way, rate, tasks)
    named = {"route": route, "way": way, "streams": streams, "limit": limit}
    return row | named | {"load": os.getloadavg()[0]}


@asynccontextmanager
async def pouring(
    route: str, way: str, rate: float, streams: int
) -> AsyncIterator[tuple[Node, Node, list[asyncio.Task[None]]]]:
    """Two nodes, the first one limited, with contents under way."""
    with scratch() as folder:
        limited, other = Node(folder, "limited", route), Node(folder, "other", route)
        getattr(limited.bandwidth, way).allow(rate)
        async with AsyncExitStack() as stack:
            for node in (limited, other):
                stack.push_async_callback(node.close)
                await node.start()
            # Both directions are connected before, so that this counts no handshake.
            await limited.channels.stub(other.record())
            await other.channels.stub(limited.record())
            size = int(min(8e6, rate * 2))
            tasks = [
                asyncio.create_task(_one(limited, other, way, number, size))
                for number in range(streams)
            ]
            stack.push_async_callback(_end, tasks)
            yield limited, other, tasks


async def _one(limited: Node, other: Node, way: str, number: int, size: int) -> None:
    """Streams are called by the other end and by the limited one in turn."""
    caller, callee = (limited, other) if number % 2 else (other, limited)
    await caller.pour(
        callee, TO_CALLEE if (way == "up") == (caller is limited) else TO_CALLER, size
    )


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    limited: Node, other: Node, way: str, allowed: float, tasks: list[asyncio.Task[None]]
) -> dict[str, Any]:
    began = perf_counter()
    samples = [(0.0, (await asyncio.to_thread(carried, limited, other))[way])]
    while samples[-1][0] < 1.5 * SECONDS:
        await asyncio.sleep(TICK)
        count = (await asyncio.to_thread(carried, limited, other))[way]
        samples.append((perf_counter() - began, count))
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a stream ended before its time")
    first = next(_rate(samples[0], sample) for sample in samples if sample[0] >= SECONDS)
    windows = [
        _rate(begin, end)
        for begin in samples
        for before, end in pairwise(samples)
        if before[0] - begin[0] < SECONDS <= end[0] - begin[0]
    ]
    worst = max(windows, key=lambda rate: abs(rate - allowed))
    return {
        "asked": allowed,
        "first": first,
        "first_error": first / allowed - 1,
        "worst": worst,
        "worst_error": worst / allowed - 1,
        "samples": samples,
    }


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    print(
        f"{row['route']:8} {row['way']:5} {row['streams']:7} {row['limit']:>8} "
        f"{write_rate(row['first']):>12} {row['first_error']:+8.1%} "
        f"{write_rate(row['worst']):>12} {row['worst_error']:+8.1%} "
        f"{row['load']:5.1f}",
        flush=True,
    )


def main() -> None:
    """Measure, print, write."""
    kit.parser(__doc__).parse_args()
    configure_logs(-1)
    keep_freed_memory()
    print(f"{kit.machine()}; load {os.getloadavg()[0]:.1f}")
    print(
        f"{'route':8} {'way':5} {'streams':>7} {'limit':>8} {'first 10 s':>12} {'off':>8} "
        f"{'worst 10 s':>12} {'off':>8}  load"
    )
    rows: list[dict[str, Any]] = []
    for case in product(("direct", "tunnel"), ("up", "down"), RATES, (1, 4)):
        rows.append(uvloop.run(measure(*case)))
        show(rows[-1])
    lines = ",\n  ".join(json.dumps(row) for row in rows)  # a line a row: samples are many
    about = {"machine": kit.machine(), "measured": f"{datetime.now(UTC):%Y-%m-%d}", "rows": []}
    RESULT.write_text(json.dumps(about, indent=1).replace("[]", f"[\n  {lines}\n ]"))


if __name__ == "__main__":
    main()
