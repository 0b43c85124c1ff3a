"""A hostile client: floods one node in every way that is known to us, at a bounded rate, and prints
how its calls and connections ended.

    python tests/helpers/flooding.py HOST:PORT PEER_ID run.json --seconds 20 --calls 3000

At once: calls without a credential, with garbage, replayed, good ones, and those that say no hello;
TCP and TLS connections that go no further; streams that begin and say nothing; snapshots from
absurd offsets; connections to the port of the DHT. It is a peer of an open run, as anybody may be.
It says that it is ready, and begins when a line comes in."""

import argparse
import asyncio
import json
import os
import secrets
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from lowcomm_node.net.tls import CREDENTIAL_KEY, SERVER_NAME, Gatekeeper
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.spec.run import RunSpec, read_signed_run

PATH = "/lowcomm.v1.Exchange/"
AGAIN = 1.0
"""Seconds until what was turned away is tried again."""
MOST_CALLS = 4000
"""That wait for an answer at once; where connections are dropped unanswered, all wait for as long
as they may."""


class Flood:
    """One hostile peer, with one identity and as many connections as it likes."""

    def __init__(
        self,
        address: str,
        callee: str,
        spec: RunSpec,
        seconds: float,
        calls: int,
        certificate: str,
    ) -> None:
        self.address, self.callee, self.spec = address, callee, spec
        self.host, _, port = address.rpartition(":")
        self.port, self.seconds, self.calls = int(port), seconds, calls
        self.identity = Identity(secrets.token_bytes(32))
        self.keeper = Gatekeeper(self.identity, spec.run_id, time.time)
        self.ends: Counter[str] = Counter()
        self.until = time.monotonic() + seconds
        self._credentials = grpc.ssl_channel_credentials(certificate.encode())
        self._channels: list[aio.Channel] = []

    def channel(self) -> aio.Channel:
        """A connection of its own."""
        options = (
            ("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1), ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        )  # fmt: skip
        channel = aio.secure_channel(self.address, self._credentials, options)
        self._channels.append(channel)
        return channel

    def metadata(self) -> Any:
        """A good credential."""
        return self.keeper.credential_for(self.callee)

    @property
    def over(self) -> bool:
        """Whether it has lasted long enough."""
        return time.monotonic() >= self.until

    async def run(self, dht_port: int, connections: int) -> None:
        """Everything at once, until time is over."""
        works: list[Callable[[], Awaitable[None]]] = [
            self._calls, lambda: self._connect("tcp", self.port, connections, None),
            lambda: self._connect("tls", self.port, connections, _trusting()),
            self._half_open, self._fetch,
        ]  # fmt: skip
        if dht_port:
            works.append(lambda: self._connect("dht", dht_port, connections, None))
        tasks = [asyncio.create_task(self._insist(work)) for work in works]
        done, _ = await asyncio.wait(tasks, timeout=self.seconds)
        for task in done:
            task.result()  # raises what is a defect of this client

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin again after each refusal."""
        while not self.over:
            try:
                await work()
                return
            except (aio.AioRpcError, asyncio.InvalidStateError, OSError, RuntimeError) as error:
                self.ends[f"begun anew: {type(error).__name__}"] += 1
                await asyncio.sleep(AGAIN)

    async def _count(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await call()
            self.ends[f"{name}: taken"] += 1
        except aio.AioRpcError as error:
            self.ends[f"{name}: {error.code().name}"] += 1
        except (OSError, asyncio.InvalidStateError, aio.UsageError) as error:
            self.ends[f"{name}: {type(error).__name__}"] += 1

    async def _calls(self) -> None:
        """``calls`` calls of five kinds, evenly over time."""
        stub, began = ExchangeStub(self.channel()), time.monotonic()
        replayed = self.metadata()
        await self._count(
            "introduces itself",
            lambda: self._introduce(stub),
        )
        kinds: list[tuple[str, Callable[[], Any]]] = [
            ("no credential", lambda: ()),
            ("garbage", lambda: ((CREDENTIAL_KEY, secrets.token_bytes(200)),)),
            ("replayed", lambda: replayed),
            ("good", self.metadata),
        ]
        running: set[asyncio.Task[None]] = set()
        for number in range(self.calls):
            name, make = kinds[number % len(kinds)]
            if number % 5 == 4:
                work = self._count("no hello", lambda: self._no_hello(stub))
            else:
                work = self._count(
                    name,
                    lambda make=make: stub.Describe(pb.Introduction(), metadata=make(), timeout=10),
                )
            task = asyncio.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(
                max(0.0, began + number * self.seconds / self.calls * 0.9 - time.monotonic())
            )
            if len(running) > MOST_CALLS:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running:
            await asyncio.wait(running, timeout=5)

    async def _no_hello(self, stub: Any) -> None:
        call = stub.Swap(metadata=self.metadata(), timeout=10)
        await call.write(pb.Frame(confirm=pb.Confirm(members=bytes(32))))
        while await call.read() is not aio.EOF:
            pass
        if await call.code() is not grpc.StatusCode.OK:
            raise aio.AioRpcError(await call.code(), aio.Metadata(), aio.Metadata())

    async def _introduce(self, stub: Any) -> None:
        now = time.time()
        info = PeerInfo(
            peer_id=self.identity.peer_id, run_id=self.spec.run_id, phase=Phase.TRAINING,
            issued=now, expires=now + 300, swarm_step=1 << 50, steps=1 << 50,
        )  # fmt: skip
        record = pb.SignedRecord.FromString(write_record(info, self.identity))
        await stub.Describe(pb.Introduction(record=record), metadata=self.metadata(), timeout=10)

    async def _connect(
        self, name: str, port: int, count: int, context: ssl.SSLContext | None
    ) -> None:
        """Connections that go no further."""
        held: list[asyncio.StreamWriter] = []
        try:
            for _ in range(count):
                try:
                    async with asyncio.timeout(5):
                        _, writer = await asyncio.open_connection(
                            self.host,
                            port,
                            ssl=context,
                            server_hostname=SERVER_NAME if context else None,
                        )
                    held.append(writer)
                    self.ends[f"{name}: connected"] += 1
                except (OSError, TimeoutError) as error:
                    self.ends[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5 * self.seconds / count)
            await asyncio.sleep(self.seconds)
        finally:
            for writer in held:
                writer.transport.abort()

    async def _half_open(self) -> None:
        """Calls that begin and say nothing, with and without a credential, on connections of their
        own."""
        channel = self.channel()
        while not self.over:
            methods = [
                channel.stream_stream(PATH + method)
                for method in ("Describe", "Fetch", "Swap", "Ping")
            ]
            calls = [
                call(metadata=metadata) for call in methods for metadata in (None, self.metadata())
            ]
            for call in calls:
                self.ends[f"half-open: {(await call.code()).name}"] += 1
            await asyncio.sleep(0.2)

    async def _fetch(self) -> None:
        """Snapshots from absurd offsets, and those that nobody reads."""
        stub = ExchangeStub(self.channel())
        unread = []
        while not self.over:
            call = stub.Fetch(metadata=self.metadata(), timeout=30)
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(pb.FetchRequest(enter=pb.Enter()))
                await call.write(
                    pb.FetchRequest(wanted=pb.Wanted(piece=(1 << 32) - 1, offset=(1 << 64) - 1))
                )
                while isinstance(await call.read(), pb.FetchReply):
                    pass
            self.ends[f"absurd fetch: {(await call.code()).name}"] += 1
            if len(unread) < 30:
                unread.append(stub.Fetch(metadata=self.metadata(), timeout=60))
                with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await unread[-1].write(pb.FetchRequest(enter=pb.Enter()))
            await asyncio.sleep(0.5)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def certificate_of(address: str) -> str:
    """Certificate that a node shows to its callers, as PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=30)


def main() -> None:
    """Flood, tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("peer_id")
    parser.add_argument("run", type=Path, help="the run as its record in the DHT has it")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=1000, help="half-open, of each kind")
    parser.add_argument("--dht-port", type=int, default=0)
    arguments = parser.parse_args()
    spec = read_signed_run(arguments.run.read_bytes()).spec
    flood = Flood(
        arguments.address,
        arguments.peer_id,
        spec,
        arguments.seconds,
        arguments.calls,
        certificate_of(arguments.address),
    )
    print("ready", flush=True)
    sys.stdin.readline()
    flood.until = time.monotonic() + arguments.seconds
    asyncio.run(flood.run(arguments.dht_port, arguments.connections))
    print(
        json.dumps({"peer_id": flood.identity.peer_id, "ends": dict(sorted(flood.ends.items()))}),
        flush=True,
    )
    os._exit(0)  # as whoever floods would: nothing is said to the other end


if __name__ == "__main__":
    main()
