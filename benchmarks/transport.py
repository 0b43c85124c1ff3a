"""Bytes a second, and seconds of CPU a GB, of every way in which contents could go from peer to
peer, on loopback.

    python benchmarks/transport.py [--quick] [--only tunnel-tcp ...]

One call of the Exchange service carries 512 MB one way (128 MB with --quick), in chunks of 1 MiB,
and ends with a word of the callee that it has got all. Each end is a process of its own, with p2pd
where there is one; CPU is that of all of them, *p2pd* what both p2pds take of it. Medians of
several runs; everything into out/transport.json, a table to the terminal."""

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import kit
import uvloop
from ends import End, Ends, add_roles, ask, cpu_of, end_all, forever, record_of, say, set_up

CHUNK = 2**20
TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
DEAD = "/ip4/127.0.0.1/tcp/1"
"""What ends announce that shall find each other only through the relay."""
DEADLINE = 600.0
WAYS = (
    "raw-tcp",
    "raw-tls",
    "grpc",
    "direct-tls",
    "tunnel-tcp",
    "tunnel-quic",
    "tunnel-relay",
    "hivemind",
)
GOALS = {"direct-tls": "0.2 of raw TCP, 2.0 s/GB", "tunnel-tcp": "230 MB/s, 6 s/GB"}


def main() -> None:
    """Measure and print; with --role, be one end of a measurement."""
    parser = kit.parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="128 MB and 3 runs instead of 512 MB and 5"
    )
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    add_roles(parser, "callee", "caller", "relay")
    arguments = parser.parse_args()
    if arguments.role:
        uvloop.run(play(arguments.role, arguments.told["way"], arguments.told))
        return
    megabytes, runs = (128, 3) if arguments.quick else (512, 5)
    figures = {way: measure(way, megabytes * 2**20, runs) for way in arguments.only}
    load = os.getloadavg()[0]
    about = {"machine": kit.machine(), "load": load, "bytes": megabytes * 2**20}
    kit.write(kit.OUT / "transport.json", {**about, "ways": figures})
    show(figures, f"{kit.machine()}; {megabytes} MB, {runs} runs; load {load:.1f}")


def show(figures: dict[str, dict[str, Any]], title: str) -> None:
    """The table."""
    raw = figures.get("raw-tcp", {}).get("rate")
    print(f"{title}\n{'way':14} {'MB/s':>8} {'of raw':>7} {'CPU s/GB':>9} {'p2pd':>6}   goal")
    for way, figure in figures.items():
        share = f"{figure['rate'] / raw:7.2f}" if raw else f"{'-':>7}"
        print(
            f"{way:14} {figure['rate'] / 1e6:8.0f} {share} {figure['cpu']:9.2f} "
            f"{figure['p2pd']:6.2f}   {GOALS.get(way, '')}"
        )


# Measuring: the processes of both ends


def measure(way: str, size: int, runs: int) -> dict[str, Any]:
    """Median rate (bytes a second) and CPU (seconds a GB) of one way, and all runs."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        ends = Ends(__file__, folder)
        try:
            told: dict[str, Any] = {"folder": folder, "way": way}
            if way == "tunnel-relay":
                told |= ends.start("relay", told)[1]
            told |= ends.start("callee", told)[1]
            caller, _ = ends.start("caller", told)
            ask(caller, {"bytes": min(size, 32 * CHUNK)})  # warm
            done = [one_run(caller, ends.pids, size) for _ in range(runs)]
        finally:
            end_all(ends.children)
    return {
        "rate": median(size / one["seconds"] for one in done),
        "cpu": median(one["cpu_seconds"] / (size / 1e9) for one in done),
        "p2pd": median(one["p2pd_cpu_seconds"] / (size / 1e9) for one in done),
        "runs": done,
    }


def one_run(caller: subprocess.Popen[str], pids: list[int], size: int) -> dict[str, float]:
    """Seconds, and seconds of CPU of all processes and of p2pd alone."""
    every, p2pd = cpu_of(pids), cpu_of(pids, "p2pd")
    seconds = ask(caller, {"bytes": size})["seconds"]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_of(pids) - every,
        "p2pd_cpu_seconds": cpu_of(pids, "p2pd") - p2pd,
    }


# Playing: one end

Send = Callable[[int], Awaitable[None]]
"""Sends so many bytes, and waits for the word of the other end."""


async def play(role: str, way: str, told: dict[str, Any]) -> None:
    """Be one end: tell the other where we are, then do what is asked, line by line."""
    set_up()
    async with AsyncExitStack() as stack:
        if role == "relay":
            say({"relay": await stack.enter_async_context(relaying(told))})
            await forever()
        if role == "callee":
            say(await stack.enter_async_context(CALLEES[way](told, way)))
            await forever()
        send: Send = await stack.enter_async_context(CALLERS[way](told, way))
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            began = perf_counter()
            async with asyncio.timeout(DEADLINE):
                await send(json.loads(line)["bytes"])
            say({"seconds": perf_counter() - began})


# Raw TCP: blocking sockets on threads, the most that this machine can do


@asynccontextmanager
async def raw_callee(told: dict[str, Any], way: str) -> AsyncIterator[dict[str, Any]]:
    """Reads what comes, 8 bytes of length first, and answers with one byte; "raw-tls": by OpenSSL,
    which all of it must pass."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        if way == "raw-tls":
            connection = _tls_server().wrap_socket(connection, server_side=True)
        buffer = memoryview(bytearray(CHUNK))
        while size := connection.recv_into(buffer, 8):
            while size < 8:
                size += connection.recv_into(buffer[size:], 8 - size)
            missing = int.from_bytes(buffer[:8])
            while missing:
                got = connection.recv_into(buffer, min(CHUNK, missing))
                if not got:
                    raise ConnectionError("the other end has gone")
                missing -= got
            connection.sendall(b"!")

    serving = asyncio.create_task(asyncio.to_thread(serve))
    yield {"port": listener.getsockname()[1]}
    serving.cancel()


@asynccontextmanager
async def raw_caller(told: dict[str, Any], way: str) -> AsyncIterator[Send]:
    """Sends chunks."""
    connection, chunk = socket.create_connection(("127.0.0.1", told["port"])), os.urandom(CHUNK)
    if way == "raw-tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = (
            False,
            ssl.CERT_NONE,
        )  # who answers is not what is measured
        connection = await asyncio.to_thread(context.wrap_socket, connection)

    def send(size: int) -> None:
        connection.sendall(size.to_bytes(8))
        for _ in range(size // CHUNK):
            connection.sendall(chunk)
        assert connection.recv(1) == b"!"

    yield lambda size: asyncio.to_thread(send, size)


def _tls_server() -> ssl.SSLContext:
    """A context with a certificate as nodes have them."""
    from lowcomm_node.net.tls import make_certificate

    context, certificate = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        make_certificate(),
    )
    with tempfile.NamedTemporaryFile() as file:  # it can be read from a file only
        file.write(certificate.private_pem + certificate.pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


# gRPC, plain and as our service


async def swallow(stream: Any) -> None:
    """The callee's side of a call: take everything, then say so."""
    from lowcomm_protocol.messages import exchange_pb2 as pb

    frame = await stream.receive()
    missing = frame.content.size
    while missing:
        missing -= len((await stream.receive()).chunk.data)
    await stream.send(pb.Frame(confirm=pb.Confirm()))
    while await stream.receive() is not None:
        pass


async def pour(stream: Any, size: int) -> None:
    """The caller's side."""
    from lowcomm_node.net.stream import ChunkFrame
    from lowcomm_protocol.messages import exchange_pb2 as pb

    data = memoryview(os.urandom(CHUNK))
    await stream.send(pb.Frame(content=pb.Content(size=size)))
    for offset in range(0, size, CHUNK):
        await stream.send(ChunkFrame(offset, data))
    assert (await stream.receive()).WhichOneof("kind") == "confirm"
    await stream.close()


@asynccontextmanager
async def grpc_callee(told: dict[str, Any], way: str) -> AsyncIterator[dict[str, Any]]:
    """The same messages, without TLS and without our service."""
    from grpc import aio

    from lowcomm_node.net.stream import CalleeStream
    from lowcomm_protocol.messages.exchange_pb2_grpc import (
        ExchangeServicer,
        add_ExchangeServicer_to_server,
    )

    class Plain(ExchangeServicer):
        async def Swap(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
            await swallow(CalleeStream(context))

    server = aio.server(options=(("grpc.max_receive_message_length", -1),))
    add_ExchangeServicer_to_server(Plain(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield {"port": port}
    await server.stop(0)


@asynccontextmanager
async def grpc_caller(told: dict[str, Any], way: str) -> AsyncIterator[Send]:
    """See grpc_callee."""
    from grpc import aio

    from lowcomm_node.net.channels import stub_of
    from lowcomm_node.net.stream import CallerStream

    async with aio.insecure_channel(f"127.0.0.1:{told['port']}") as channel:
        yield lambda size: pour(CallerStream(stub_of(channel).Swap()), size)


class Node(End):
    """An end of the route that is measured."""

    def __init__(self, role: str, told: dict[str, Any], way: str) -> None:
        listen = {"direct-tls": (), "tunnel-quic": (QUIC,)}.get(way, (TCP,))
        relayed: dict[str, Any] = (
            {"announce": [DEAD], "wants_places": True} if way == "tunnel-relay" else {}
        )
        entries = told.get("relay", ())
        super().__init__(
            role, Path(told["folder"]), listen, initial_peers=entries, punching=False, **relayed
        )

    async def swap(self, peer: str, stream: Any) -> None:
        """See End."""
        await swallow(stream)


@asynccontextmanager
async def our_callee(told: dict[str, Any], way: str) -> AsyncIterator[dict[str, Any]]:
    """A node that is called."""
    node = Node("callee", told, way)
    try:
        await node.start()
        entries = list(node.discovery.addresses()) if way != "direct-tls" else []
        certificate = node.certificate.public_key.hex()
        yield {
            "peer": node.identity.peer_id,
            "port": node.port,
            "certificate": certificate,
            "entries": entries,
        }
    finally:
        await node.close()


@asynccontextmanager
async def our_caller(told: dict[str, Any], way: str) -> AsyncIterator[Send]:
    """A node that calls, by the route that is measured and no other."""
    from lowcomm_node.net.stream import CallerStream

    node = Node("caller", told, way)
    address = f"127.0.0.1:{told['port'] if way == 'direct-tls' else 1}"
    info = record_of(
        told,
        [address],
        [entry for entry in told["entries"] if way != "tunnel-relay" or "circuit" in entry],
    )

    async def send(size: int) -> None:
        stub = await node.channels.stub(info)
        await pour(CallerStream(stub.Swap(metadata=node.channels.metadata(info.peer_id))), size)
        route = node.channels.describe(info.peer_id).route
        assert {"direct-tls": "direct", "tunnel-relay": "relay"}.get(way, "punched") == (
            route and route.split()[0]
        ), route

    try:
        await node.start()
        yield send
    finally:
        await node.close()


@asynccontextmanager
async def relaying(told: dict[str, Any]) -> AsyncIterator[list[str]]:
    """A relay; where it can be dialed."""
    from lowcomm_node.dht.hivemind import DhtSettings, HivemindDiscovery
    from lowcomm_node.net.p2pd import RelayLimits
    from lowcomm_node.storage.files import load_or_create_identity

    key = Path(told["folder"]) / "relay.key"
    limits = RelayLimits(bytes=64 * 2**30)
    discovery = HivemindDiscovery(
        load_or_create_identity(key), key, DhtSettings(listen=[TCP], relay=limits)
    )
    try:
        await discovery.start()
        yield list(discovery.addresses())
    finally:
        await discovery.close()


# hivemind's own streams of protobuf messages, over TCP


@asynccontextmanager
async def hivemind_callee(told: dict[str, Any], way: str) -> AsyncIterator[dict[str, Any]]:
    """Swallows a stream of messages."""
    from hivemind.p2p import P2P
    from hivemind.proto import runtime_pb2

    async def swallow_messages(messages: AsyncIterator[Any], context: Any) -> Any:
        async for _ in messages:
            pass
        return runtime_pb2.ExpertResponse()

    p2p = await P2P.create(startup_timeout=60)
    await p2p.add_protobuf_handler(
        "pour", swallow_messages, runtime_pb2.ExpertRequest, stream_input=True
    )
    yield {
        "maddrs": [str(address) for address in await p2p.get_visible_maddrs()],
        "peer": p2p.peer_id.to_base58(),
    }
    await p2p.shutdown()


@asynccontextmanager
async def hivemind_caller(told: dict[str, Any], way: str) -> AsyncIterator[Send]:
    """See hivemind_callee."""
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import runtime_pb2

    from lowcomm_node.net.addresses import EntryPoint

    p2p = await P2P.create(startup_timeout=60)
    peer, data = PeerID.from_base58(told["peer"]), os.urandom(CHUNK)
    entries = [
        EntryPoint(told["peer"], address.rpartition("/p2p/")[0]) for address in told["maddrs"]
    ]
    await p2p._client.connect(peer, entries)

    async def send(size: int) -> None:
        async def messages() -> AsyncIterator[Any]:
            for _ in range(size // CHUNK):
                yield runtime_pb2.ExpertRequest(metadata=data)

        await p2p.call_protobuf_handler(peer, "pour", messages(), runtime_pb2.ExpertResponse)

    yield send
    await p2p.shutdown()


_TUNNELS = ("direct-tls", "tunnel-tcp", "tunnel-quic", "tunnel-relay")
CALLEES = {
    "raw-tcp": raw_callee,
    "raw-tls": raw_callee,
    "grpc": grpc_callee,
    "hivemind": hivemind_callee,
} | dict.fromkeys(_TUNNELS, our_callee)
CALLERS = {
    "raw-tcp": raw_caller,
    "raw-tls": raw_caller,
    "grpc": grpc_caller,
    "hivemind": hivemind_caller,
} | dict.fromkeys(_TUNNELS, our_caller)


if __name__ == "__main__":
    main()
