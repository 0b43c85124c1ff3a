"""``ping PEER``: measures latency and rate of each route to a peer, and answers the pings of
others.

    caller: Ping, Ping, ... ──► direct, then the tunnel ──► callee: Pong, Pong, ...

Both sides keep to their owners' bandwidth limits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import grpc
from grpc import aio

from lowcomm_node.errors import ConfigError, LinkLost, NoPeers
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.measuring import OVERHEAD, TOO_MUCH, Speed, answer_to, measure_speed
from lowcomm_node.net.stream import explain
from lowcomm_node.system.quota import Allowed, Quota, prefixes_of
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.probes import check_ping
from lowcomm_protocol.peers.records import PeerInfo

GIVEN = Allowed(each=512_000_000, all=4_000_000_000, seconds=86_400.0)
"""Bytes of contents for peers of the run, per day."""
MAX_AT_ONCE = 4
BUSY_SECONDS = 5.0
"""Seconds of traffic queued at our own limits; beyond that a ping would measure the limits."""
CALL_SECONDS = 60.0
REFUSE_DEADLINE = 5.0
WHY_SECONDS = 2.0
"""For gRPC to report how a call ended."""


def match_peer(text: str, peers: Iterable[PeerInfo]) -> PeerInfo:
    """The peer whose id is given, or begins or ends as given, as ``peers`` prints it.

    Raises ConfigError if several match, NoPeers if none does.
    """
    found = [info for info in peers if info.peer_id.startswith(text) or info.peer_id.endswith(text)]
    if len(found) > 1:
        names = ", ".join(info.peer_id for info in found[:4])
        raise ConfigError(
            f"{text[:64]!r} can mean {len(found)} peers: give more of its id, such as one of "
            f"{names}."
        )
    if not found:
        raise NoPeers(
            f"No peer of this run that is alive is called {text[:64]!r}: `lowcomm-node peers` "
            "lists them."
        )
    return found[0]


class Echo:
    """The callee's side."""

    def __init__(
        self,
        bandwidth: Bandwidth | None = None,
        given: Allowed = GIVEN,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._bandwidth = bandwidth or Bandwidth()
        self._given = Quota(given)
        self._clock = clock
        self._calls: Counter[str] = Counter()

    async def answer(self, peer: str, stream: Any) -> None:
        """Answer the pings of one call on its ``CalleeStream``. Raises ProtocolViolation,
        LinkLost."""
        if self._calls[peer] or self._calls.total() >= MAX_AT_ONCE:
            await _refuse(stream, "another ping is being answered: try again in a moment")
            return
        self._calls[peer] += 1
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._answer(peer, stream)
        except TimeoutError:
            await _refuse(stream, f"one call may ping for {CALL_SECONDS:.0f} s")
        finally:
            del self._calls[peer]

    async def _answer(self, peer: str, stream: Any) -> None:
        # Identities are free, so the quota counts by address.
        caller = prefixes_of(stream.place)[0] if stream.place else peer
        while (ping := await stream.receive()) is not None:
            check_ping(ping)
            if not self._given.take(
                caller, len(ping.content) + ping.wanted + OVERHEAD, self._clock()
            ):
                await _refuse(stream, TOO_MUCH)
                return
            up, down = self._bandwidth.up, self._bandwidth.down
            if max(up.debt, down.debt) > BUSY_SECONDS:
                await _refuse(
                    stream, "its link is busy, as its owner limits it: measure again later"
                )
                return
            await down.pass_(len(ping.content))
            await up.pass_(ping.wanted)
            await stream.send(answer_to(ping))


async def _refuse(stream: Any, reason: str) -> None:
    """Send the reason, then read what is under way: gRPC gives no reason to a caller that can't
    write.

    Raises LinkLost.
    """
    try:
        async with asyncio.timeout(REFUSE_DEADLINE):
            await stream.send(pb.Pong(refused=reason))
    except TimeoutError:
        raise LinkLost("does not read our answers") from None
    await stream.close()


class PingCall:
    """The caller's side: a Carrier of pings in a gRPC call."""

    def __init__(self, call: Any, bandwidth: Bandwidth) -> None:
        self._call = call
        self._bandwidth = bandwidth

    async def send(self, ping: pb.Ping) -> None:
        await self._bandwidth.up.pass_(len(ping.content))
        # Pay for the pong before asking for it, so that the measured time is the peer's alone.
        await self._bandwidth.down.pass_(ping.wanted)
        try:
            await self._call.write(ping)
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise LinkLost(await self._why()) from None

    async def receive(self) -> pb.Pong:
        try:
            pong = await self._call.read()
        except grpc.RpcError:
            raise LinkLost(await self._why()) from None
        if not isinstance(pong, pb.Pong):
            raise LinkLost(await self._why())
        return pong

    async def _why(self) -> str:
        try:
            async with asyncio.timeout(WHY_SECONDS):
                code, details = await self._call.code(), await self._call.details()
        except TimeoutError:
            return "broke off"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return "answers no pings: its release is too old"
        return explain(code, details)


async def measure_channel(
    channel: aio.Channel, metadata: tuple[tuple[str, bytes], ...], bandwidth: Bandwidth
) -> Speed:
    """Latency and rates over a connected channel. Raises LinkLost, ProtocolViolation."""
    call = ExchangeStub(channel).Ping(metadata=metadata, timeout=CALL_SECONDS)
    try:
        speed = await measure_speed(PingCall(call, bandwidth))
        await call.done_writing()
        return speed
    except (grpc.RpcError, asyncio.InvalidStateError):
        raise LinkLost("broke off") from None
    finally:
        call.cancel()
