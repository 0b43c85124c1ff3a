"""Rate and processor time of the ways in which contents travel between peers, on loopback.

    python benchmarks/transport.py [--only direct pipe-tcp ...]

One call carries 512 MB one way in chunks of 1 MiB, and ends with a word of the callee. Each end is
a process of its own, with p2pd where the way needs it. Blocking TCP sockets stand beside. Processor
time is that of all processes, *p2pd* the part of both p2pds. Medians; writes out/transport.json and
prints a table."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import kit
from ends import QUIC, TCP, Answer, EndProcess, cpu_seconds, relay, scratch, transport, unasked

from lowcomm_node.net.stream import CallerStream, ChunkFrame, Stream
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

CHUNK = 2**20
SIZE, RUNS = 512 * CHUNK, 5
DEAD = "/ip4/127.0.0.1/tcp/1"
"""Announced where only the relay shall lead to an end."""
LISTEN = {"direct": (), "pipe-tcp": (TCP,), "pipe-quic": (QUIC,), "relay": (TCP,)}
WAYS = ("raw", *LISTEN)


@asynccontextmanager
async def callee(folder: Path, way: str, relays: list[str]) -> AsyncIterator[tuple[Any, Answer]]:
    """A node that takes what comes; introduces itself by its record."""
    options = {"announce": [DEAD], "wants_places": True} if way == "relay" else {}
    async with transport(folder, "callee", LISTEN[way], initial_peers=relays, **options) as end:

        async def swallow(peer: str, stream: Stream) -> None:
            frame = await stream.receive()
            assert frame is not None
            missing = frame.content.size
            while missing:
                frame = await stream.receive()
                assert frame is not None
                missing -= len(frame.chunk.data)
            await stream.send(pb.Frame(confirm=pb.Confirm()))
            await stream.receive()

        end.swapping = swallow
        port = end.port if way == "direct" else 1
        info = end.info(addresses=(f"127.0.0.1:{port}",))
        if way != "direct":
            entries = [one for one in end.streams.addresses() if way != "relay" or "circuit" in one]
            info = replace(info, entry_points=tuple(entries))
        yield info, unasked


@asynccontextmanager
async def caller(
    folder: Path, way: str, relays: list[str], info: PeerInfo
) -> AsyncIterator[tuple[None, Answer]]:
    """A node that sends as many bytes as it is asked to; answers with the seconds."""
    data = memoryview(os.urandom(CHUNK))
    async with transport(folder, "caller", LISTEN[way], initial_peers=relays) as end:

        async def pour(size: int) -> float:
            began = perf_counter()
            stub = await end.channels.stub(info)
            stream = CallerStream(stub.Swap(metadata=end.channels.metadata(info.peer_id)))
            await stream.send(pb.Frame(content=pb.Content(size=size)))
            for offset in range(0, size, CHUNK):
                await stream.send(ChunkFrame(offset, data))
            frame = await stream.receive()
            assert frame is not None and frame.WhichOneof("kind") == "confirm"
            await stream.close()
            route = end.channels.describe(info.peer_id).route or "no route"
            assert route.startswith({"direct": "direct", "relay": "relay"}.get(way, "punched")), (
                route
            )
            return perf_counter() - began

        yield None, pour


@asynccontextmanager
async def raw_callee(*_: Any) -> AsyncIterator[tuple[int, Answer]]:
    """Reads what comes over a blocking socket: 8 bytes of length first, one byte in answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        buffer = memoryview(bytearray(CHUNK))
        while length := connection.recv(8, socket.MSG_WAITALL):
            missing = int.from_bytes(length)
            while missing:
                missing -= connection.recv_into(buffer, min(CHUNK, missing))
            connection.sendall(b"!")

    serving = asyncio.create_task(asyncio.to_thread(serve))
    yield listener.getsockname()[1], unasked
    serving.cancel()


@asynccontextmanager
async def raw_caller(*settings: Any) -> AsyncIterator[tuple[None, Answer]]:
    """Sends chunks over a blocking socket."""
    connection, chunk = socket.create_connection(("127.0.0.1", settings[-1])), os.urandom(CHUNK)

    def send(size: int) -> float:
        began = perf_counter()
        connection.sendall(size.to_bytes(8))
        for _ in range(size // CHUNK):
            connection.sendall(chunk)
        assert connection.recv(1) == b"!"
        return perf_counter() - began

    yield None, lambda size: asyncio.to_thread(send, size)
    connection.close()


def measure(way: str) -> dict[str, Any]:
    """Median rate (bytes a second), processor time (seconds a GB), and all runs of one way."""
    called, calling = (raw_callee, raw_caller) if way == "raw" else (callee, caller)
    ends: list[EndProcess] = []
    with scratch() as folder:
        try:
            relays: list[str] = []
            if way == "relay":
                ends.append(EndProcess(relay, folder))
                relays = ends[0].introduction
            ends.append(EndProcess(called, folder, way, relays))
            ends.append(EndProcess(calling, folder, way, relays, ends[-1].introduction))
            ends[-1].ask(32 * CHUNK)  # opens the route
            done = []
            for _ in range(RUNS):
                before, p2pd = cpu_seconds(ends), cpu_seconds(ends, "p2pd")
                seconds = ends[-1].ask(SIZE)
                cpu, of_p2pd = cpu_seconds(ends) - before, cpu_seconds(ends, "p2pd") - p2pd
                done.append((SIZE / seconds, cpu / SIZE * 1e9, of_p2pd / SIZE * 1e9))
        finally:
            for end in reversed(ends):
                end.close()
    rate, cpu, of_p2pd = (median(column) for column in zip(*done, strict=True))
    return {"rate": rate, "cpu": cpu, "p2pd": of_p2pd, "runs": done}


def main() -> None:
    """Measure, print, write."""
    parser = kit.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    print(f"{kit.loaded_machine()}; {SIZE // CHUNK} MiB, {RUNS} runs")
    print(f"{'way':10} {'MB/s':>7} {'CPU s/GB':>9} {'p2pd':>6}")
    ways = {}
    for way in arguments.only:
        ways[way] = row = measure(way)
        print(f"{way:10} {row['rate'] / 1e6:7.0f} {row['cpu']:9.2f} {row['p2pd']:6.2f}", flush=True)
    kit.write(kit.OUT / "transport.json", {"machine": kit.machine(), "bytes": SIZE, "ways": ways})


if __name__ == "__main__":
    main()
