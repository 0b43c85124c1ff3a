"""Whether a node keeps to its owner's limits on traffic, as the kernel counts the bytes of its
sockets.

    python benchmarks/limits.py

Two nodes on loopback, over TLS or through p2pd; contents go one way as fast as the limited node
lets them, over one stream or four, two of which the limited node has called itself. Every quarter
of a second the kernel is asked (``ss``) how many bytes the sockets of the limited node have
carried. *Worst* is the stretch of 10 s that is furthest off the limit, *mean* the rate of all 15 s.
Those bytes hold contents, messages, HTTP/2 and TLS, or libp2p's own encryption. Without a limit the
mean is what a route carries with both nodes in one process; CPU seconds are those of both nodes."""

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise, product
from math import inf
from pathlib import Path
from time import perf_counter, time
from typing import Any

import kit
import uvloop
from blake3 import blake3

from helpers.tunnelling import End
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.net.bandwidth import Bandwidth, flow_options
from lowcomm_node.net.stream import CalleeStream, Stream
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.net.unsent import keep_little_unsent
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.sync.link import ContentLink, Incoming
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.machine import keep_freed_memory
from lowcomm_node.system.units import read_rate
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

SECONDS, TICK = 10.0, 0.25
RATES = ("5Mbit", "20Mbit", "100Mbit", "none")
RESULT = kit.RESULTS / "limits.json"
TO_CALLEE, TO_CALLER = 0, 1
"""Which way contents go in a call; it is told in the place of the fragment."""


class Flow(ContentLink):
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
        listen = ["/ip4/127.0.0.1/tcp/0"] if route == "tunnel" else []
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
    command = ["ss", "-tinpHO"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    found = []
    for line in shown.splitlines():
        state, _, _, near, _, *rest = line.split()
        if state == "ESTAB" and (mark in f"{near} " or ("pid=" in mark and mark in " ".join(rest))):
            count = dict(re.findall(r"bytes_(acked|received):(\d+)", line))
            found.append((int(count.get("acked", 0)), int(count.get("received", 0))))
    return found


async def measure(route: str, way: str, limit: str, streams: int) -> dict[str, Any]:
    """One row."""
    rate = None if limit == "none" else read_rate(limit)
    async with pouring(route, way, rate, streams) as (limited, other, tasks):
        row = await _watch(limited, other, way, rate, tasks)
    named = {"route": route, "way": way, "streams": streams, "limit": limit}
    return row | named | {"load": os.getloadavg()[0]}


@asynccontextmanager
async def pouring(
    route: str, way: str, rate: float | None, streams: int
) -> AsyncIterator[tuple[Node, Node, list[asyncio.Task[None]]]]:
    """Two nodes, the first one limited, with contents under way."""
    with kit.scratch() as folder:
        limited, other = Node(folder, "limited", route), Node(folder, "other", route)
        getattr(limited.bandwidth, way).allow(rate)
        async with AsyncExitStack() as stack:
            for node in (limited, other):
                stack.push_async_callback(node.close)
                await node.start()
            # Both directions are connected before, so that this counts no handshake.
            await limited.channels.stub(other.record())
            await other.channels.stub(limited.record())
            size, tasks = int(min(8e6, (rate or inf) * 2)), list[asyncio.Task[None]]()
            for number in range(streams):  # called by the other end and by the limited one in turn
                caller, callee = (limited, other) if number % 2 else (other, limited)
                to = TO_CALLEE if (way == "up") == (caller is limited) else TO_CALLER
                tasks.append(asyncio.create_task(caller.pour(callee, to, size)))
            stack.push_async_callback(_end, tasks)
            yield limited, other, tasks


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    limited: Node, other: Node, way: str, allowed: float | None, tasks: list[asyncio.Task[None]]
) -> dict[str, Any]:
    began, cpu = perf_counter(), kit.cpu_of(os.getpid())
    samples = [(0.0, (await asyncio.to_thread(carried, limited, other))[way])]
    while samples[-1][0] < 1.5 * SECONDS:
        await asyncio.sleep(TICK)
        count = (await asyncio.to_thread(carried, limited, other))[way]
        samples.append((perf_counter() - began, count))
    cpu = kit.cpu_of(os.getpid()) - cpu
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a stream ended before its time")
    windows = [
        _rate(begin, end)
        for begin in samples
        for before, end in pairwise(samples)
        if before[0] - begin[0] < SECONDS <= end[0] - begin[0]
    ]
    mean = _rate(samples[0], samples[-1])
    worst = max(windows, key=lambda rate: abs(rate - (allowed or mean)))
    return {
        "mean": mean,
        "worst": worst,
        "worst_error": worst / allowed - 1 if allowed else None,
        "cpu_seconds_a_gigabyte": cpu / (samples[-1][1] - samples[0][1]) * 1e9,
    }


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def main() -> None:
    """Measure, print, write."""
    kit.parser(__doc__).parse_args()
    configure_logs(-1)
    keep_freed_memory()
    print(kit.loaded_machine())
    rows: list[dict[str, Any]] = []
    for case in product(("direct", "tunnel"), ("up", "down"), RATES, (1, 4)):
        rows.append(uvloop.run(measure(*case)))
        print(" ".join(f"{name} {figure}" for name, figure in rows[-1].items()), flush=True)
    measured = f"{datetime.now(UTC):%Y-%m-%d}"
    kit.write(RESULT, {"machine": kit.machine(), "measured": measured, "rows": rows})


if __name__ == "__main__":
    main()
