"""Answers probes (lowcomm_protocol.peers.probes) within what the owner gives to strangers.

stream of libp2p ── look ──────► where it comes from, our time         anybody
                 ── dial back ─► calls to that address, no other       a few an hour, one at a time
                 ── keep ──────► is the run kept? (bootstrap server)   counts as a call
                 ── ping ──────► as many bytes as it wants             by day and at a limited rate
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Protocol

from lowcomm_node.net.addresses import host_of, place_in
from lowcomm_node.net.control import OpenStream, Streams
from lowcomm_node.net.measuring import OVERHEAD, TOO_MUCH, answer_to
from lowcomm_node.probing.asker import receive_message, send_message
from lowcomm_node.probing.dialing import is_reached
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Allowed, Quota, network_of
from lowcomm_node.system.tasks import start
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import (
    MAX_ENTRY_POINTS,
    PROTOCOL,
    Keeping,
    Target,
    check_ping,
    read_dial_back,
    read_keep,
    read_probe,
)

MAX_STREAMS = 64
MAX_STREAMS_PER_CALLER = 8
"""A household may have several nodes: each needs up to two, and a ``doctor`` four."""
MAX_DIALING = 1
"""Requests dialed for at once: each costs up to MAX_TARGETS processes for a moment."""
STREAM_SECONDS = 120.0
IDLE_SECONDS = 45.0
"""A peer that asks several waits for the slowest of them."""
_RELAYED = "relayed"
HOUR, DAY = 3600.0, 86_400.0


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    """What this machine gives to those that probe it."""

    calls: Allowed
    """Ports that are called."""
    bytes: Allowed
    rate: float
    """Bytes a second of all pings together."""


FOR_A_BOOTSTRAP = ProbeLimits(
    calls=Allowed(each=32, all=1000, seconds=HOUR),
    bytes=Allowed(each=256_000_000, all=8_000_000_000, seconds=DAY),
    rate=12.5e6,
)
FOR_A_NODE = ProbeLimits(
    calls=Allowed(each=16, all=100, seconds=HOUR),
    bytes=Allowed(each=32_000_000, all=256_000_000, seconds=DAY),
    rate=2.5e6,
)
"""A node trains: it helps where there is no bootstrap server, and as a second pair of eyes."""

Dial = Callable[[str, str, Target], Awaitable[bool]]
Keep = Callable[[str, str | None], Awaitable[Keeping]]


class Paced(Protocol):
    """One direction of a link that its owner limits."""

    async def pass_(self, count: int) -> None:
        """Wait until so many bytes may pass."""
        ...


class Prober:
    """Answers probes until it is closed."""

    def __init__(
        self,
        streams: Streams,
        entry_points: Callable[[], tuple[str, ...]],
        limits: ProbeLimits,
        dial: Dial = is_reached,
        clock: Callable[[], float] = monotonic,
        keep: Keep | None = None,
    ) -> None:
        """``entry_points``: where we can be dialed.

        ``keep``: says whether a run is kept, and adopts it for the place in which it was published.
        """
        self._streams = streams
        self._entry_points = entry_points
        self._dial = dial
        self._clock = clock
        self._keep = keep
        self._calls = Quota(limits.calls)
        self._bytes = Quota(limits.bytes)
        self._paces: list[Paced] = [Pace(limits.rate, clock)]
        self._open: Counter[str] = Counter()
        self._dialing = asyncio.Semaphore(MAX_DIALING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def serve(self) -> None:
        """Answer from now on. Raises LinkLost."""
        await self._streams.serve_streams(PROTOCOL, self._take)

    def keep_to(self, *paces: Paced) -> None:
        """Keep pings within these limits as well."""
        self._paces += paces

    async def close(self) -> None:
        """Answer no more."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, stream: OpenStream) -> None:
        host = host_of(stream.address)
        # Identities are free, and a relay hides addresses: all that come through relays are one.
        caller = network_of(host) if host else _RELAYED
        is_full = self._open[caller] >= MAX_STREAMS_PER_CALLER or self._open.total() >= MAX_STREAMS
        if self._closed or is_full:
            stream.socket.close()
            return
        self._open[caller] += 1
        task = start(self._serve(stream, host, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: OpenStream, host: str | None, caller: str) -> None:
        try:
            async with asyncio.timeout(STREAM_SECONDS):
                while True:
                    async with asyncio.timeout(IDLE_SECONDS):
                        data = await receive_message(stream.socket)
                    probe = read_probe(data)
                    if not self._bytes.take(caller, OVERHEAD, self._clock()):
                        return
                    probed = await self._answer(probe, stream.address, host, caller)
                    await send_message(stream.socket, probed.SerializeToString())
        except (LowcommError, TimeoutError) as error:
            log.debug("probe.ended", peer=stream.peer_id, reason=str(error) or "took too long")
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]
            with suppress(OSError):
                stream.socket.close()

    async def _answer(
        self,
        probe: pb.Probe,
        address: str,
        host: str | None,
        caller: str,
    ) -> pb.Probed:
        match probe.WhichOneof("kind"):
            case "look":
                told = self._entry_points()[:MAX_ENTRY_POINTS]
                now = round(time() * 1000)
                return pb.Probed(seen=pb.Seen(address=address, time_ms=now, entry_points=told))
            case "keep":
                return await self._kept(probe.keep, address, caller)
            case "dial_back":
                return await self._dial_back(probe.dial_back, host, caller)
            case _:
                return await self._pong(probe.ping, host, caller)

    async def _kept(self, message: pb.Keep, address: str, caller: str) -> pb.Probed:
        run_id = read_keep(message)
        if self._keep is None:
            return _refused("is a node: only bootstrap servers keep runs of others")
        if not self._calls.take(caller, 1, self._clock()):
            return _refused("runs were asked for too often lately: ask again in an hour")
        place = None if message.only_tell else place_in(address)
        return pb.Probed(kept=(await self._keep(run_id, place)).to_message())

    async def _dial_back(self, message: pb.DialBack, host: str | None, caller: str) -> pb.Probed:
        wanted = read_dial_back(message)
        if host is None:
            return _refused("you come through a relay: your own address is not seen")
        if not self._calls.take(caller, len(wanted.targets), self._clock()):
            return _refused("too many calls were asked for lately: ask again in an hour")
        async with self._dialing:
            calls = (self._dial(host, wanted.peer_id, target) for target in wanted.targets)
            return pb.Probed(dialed_back=pb.DialedBack(reached=await asyncio.gather(*calls)))

    async def _pong(self, ping: pb.Ping, host: str | None, caller: str) -> pb.Probed:
        check_ping(ping)
        size = len(ping.content) + ping.wanted
        if host is None:
            return _refused("you come through a relay, which is not there to be measured")
        if not self._bytes.take(caller, size, self._clock()):
            return _refused(TOO_MUCH)
        for pace in self._paces:
            await pace.pass_(size)
        return pb.Probed(pong=answer_to(ping))


def _refused(reason: str) -> pb.Probed:
    return pb.Probed(refused=reason)


class Pace:
    """Passes so many bytes a second.

    The node's own limits (transport.bandwidth) can do more, but stand above this room: a bootstrap
    server answers probes, too, and carries no exchanges.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._free = 0.0

    async def pass_(self, count: int) -> None:
        """See Paced."""
        begins = max(self._clock(), self._free)
        self._free = begins + count / self._rate
        if (seconds := begins - self._clock()) > 0:
            await asyncio.sleep(seconds)
