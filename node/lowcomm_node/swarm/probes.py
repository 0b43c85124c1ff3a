"""Probes, both ends: how others see this machine, whether they can call it, what a server keeps.

    asker ─ stream of libp2p ─ look ──────► where it comes from, our time        anybody
                             ─ dial back ─► calls to that address, no other      a few an hour
                             ─ keep ──────► is the run kept? (bootstrap server)  counts as a call

Our own libp2p may be connected already, and remembers addresses. So each call back to libp2p comes
from a p2pd of its own, which lives as long as the call.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from time import monotonic, time
from typing import Self

from lowcomm_node.errors import LinkLost, NodeError
from lowcomm_node.net.addresses import EntryPoint, host_of, place_in
from lowcomm_node.net.control import Control, OpenStream, Streams, read_message, send_message
from lowcomm_node.net.hivemind_client import load_hivemind
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Allowed, Quota, prefixes_of
from lowcomm_node.system.tasks import Tasks, in_time
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import (
    MAX_ENTRY_POINTS,
    MAX_MESSAGE,
    PROTOCOL,
    Keeping,
    ProbeKind,
    Seen,
    check_dial_back,
    read_kept,
    read_probe,
    read_probed,
    read_seen,
)

CONNECT_DEADLINE, LOOK_DEADLINE, KEEP_DEADLINE, DIAL_BACK_DEADLINE = 6.0, 6.0, 20.0, 40.0
"""Seconds. For calls back others may be served first, and each takes a few."""
DIAL_DEADLINE = 5.0
"""Seconds for TCP and TLS, or QUIC: the second SYN goes out after one, the third after three."""
MAX_STREAMS = 64
MAX_STREAMS_PER_CALLER = 8
"""A household may have several nodes: each needs up to two, and a ``doctor`` four."""
STREAM_SECONDS = 120.0
IDLE_SECONDS = 45.0
"""A peer that asks several waits for the slowest of them."""
MAX_PROBES = Allowed(each=1000, all=30_000, seconds=3600.0)
FOR_A_BOOTSTRAP = Allowed(each=32, all=1000, seconds=3600.0)
"""Ports that are called back."""
FOR_A_NODE = Allowed(each=16, all=100, seconds=3600.0)
"""A node trains: it helps where there is no bootstrap server, and as a second pair of eyes."""
_RELAYED = "relayed"
_TRANSPORTS = {ProbeKind.TCP: "tcp/{}", ProbeKind.QUIC: "udp/{}/quic-v1"}

Keep = Callable[[str, str | None], Awaitable[Keeping]]


# asking


class Asker:
    """A stream of probes, as a context manager, for one question after the other."""

    def __init__(self, stream: OpenStream) -> None:
        self._stream = stream
        self.address = stream.address
        """Where we see the other end, as a multiaddress."""

    @classmethod
    async def open(cls, streams: Streams, peer_id: str) -> Self:
        """Ask a peer that we are connected to. Raises LinkLost."""
        return cls(await streams.open_stream(peer_id, PROTOCOL, CONNECT_DEADLINE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.socket.close()

    async def look(self, clock: Callable[[], float] = time) -> tuple[Seen, float]:
        """How we are seen, and how many seconds the peer's clock is ahead of ours. The offset is as
        exact as the delay allows. Raises LinkLost, ProtocolViolation."""
        asked = clock()
        seen = read_seen((await self._ask(pb.Probe(look=pb.Look()), "seen", LOOK_DEADLINE)).seen)
        # The answer was written between the two: whatever lies in there is no offset.
        return seen, seen.time - min(max(seen.time, asked), clock())

    async def dial_back(self, peer_id: str, targets: Sequence[pb.Target]) -> tuple[bool, ...]:
        """Which of these ports of ours the peer can call. Raises LinkLost, also if the peer
        refuses, ProtocolViolation."""
        request = pb.DialBack(peer_id=peer_id, targets=targets)
        probed = await self._ask(pb.Probe(dial_back=request), "dialed_back", DIAL_BACK_DEADLINE)
        reached = tuple(probed.dialed_back.reached)
        if len(reached) != len(targets):
            raise ProtocolViolation(
                f"reported on {len(reached)} calls where {len(targets)} were asked for"
            )
        return reached

    async def keeps(self, run_id: str, only_tell: bool = False) -> Keeping:
        """Whether a bootstrap server keeps a run. It adopts the run unless it shall ``only_tell``.
        Raises LinkLost, also if the peer is no bootstrap server, ProtocolViolation."""
        keep = pb.Keep(run_id=bytes.fromhex(run_id), only_tell=only_tell)
        return read_kept((await self._ask(pb.Probe(keep=keep), "kept", KEEP_DEADLINE)).kept)

    async def _ask(self, probe: pb.Probe, wanted: str, seconds: float) -> pb.Probed:
        try:
            async with in_time(seconds, f"did not answer within {seconds:.0f} s"):
                await send_message(self._stream.socket, probe.SerializeToString())
                data = await read_message(self._stream.socket, MAX_MESSAGE)
        except BaseException:
            # A late answer would be taken for that to the next question.
            self._stream.socket.close()
            raise
        probed = read_probed(data, wanted)
        if probed.WhichOneof("kind") == "refused":
            raise LinkLost(in_words(probed.refused))
        return probed


# answering


class Prober:
    """Answers probes (lowcomm_protocol.peers.probes) until it is closed."""

    def __init__(
        self,
        streams: Streams,
        entry_points: Callable[[], tuple[str, ...]],
        calls: Allowed,
        keep: Keep | None = None,
    ) -> None:
        """``entry_points``: where we can be dialed; ``calls``: what strangers may have dialed.

        ``keep``: says whether a run is kept, and adopts it for the place in which it was published.
        """
        self._streams = streams
        self._entry_points = entry_points
        self._keep = keep
        self._calls = Quota(calls)
        self._probes = Quota(MAX_PROBES)
        self._open: Counter[str] = Counter()
        self._dialing = asyncio.Lock()
        """One request is dialed for at a time: each costs up to MAX_TARGETS processes."""
        self._tasks = Tasks()
        self._closed = False

    async def serve(self) -> None:
        """Answer from now on. Raises LinkLost."""
        await self._streams.serve_streams(PROTOCOL, self._take)

    async def close(self) -> None:
        """Stop answering."""
        self._closed = True
        await self._tasks.cancel()

    def _take(self, stream: OpenStream) -> None:
        host = host_of(stream.address)
        # Identities are free, and a relay hides addresses: all that come through relays are one.
        caller = prefixes_of(host)[0] if host else _RELAYED
        is_full = self._open[caller] >= MAX_STREAMS_PER_CALLER or self._open.total() >= MAX_STREAMS
        if self._closed or is_full:
            stream.socket.close()
            return
        self._open[caller] += 1
        self._tasks.start(self._serve(stream, host, caller))

    async def _serve(self, stream: OpenStream, host: str | None, caller: str) -> None:
        try:
            async with asyncio.timeout(STREAM_SECONDS):
                while True:
                    async with asyncio.timeout(IDLE_SECONDS):
                        data = await read_message(stream.socket, MAX_MESSAGE)
                    probe = read_probe(data)
                    if not self._probes.take(caller, 1, monotonic()):
                        return
                    probed = await self._answer(probe, stream.address, host, caller)
                    await send_message(stream.socket, probed.SerializeToString())
        except (LowcommError, TimeoutError) as error:
            log.debug("probe.ended", peer=stream.peer_id, reason=str(error) or "took too long")
        finally:
            self._open -= Counter([caller])
            with suppress(OSError):
                stream.socket.close()

    async def _answer(
        self, probe: pb.Probe, address: str, host: str | None, caller: str
    ) -> pb.Probed:
        match probe.WhichOneof("kind"):
            case "look":
                own = self._entry_points()[:MAX_ENTRY_POINTS]
                now = round(time() * 1000)
                return pb.Probed(seen=pb.Seen(address=address, time_ms=now, entry_points=own))
            case "keep":
                if self._keep is None:
                    return pb.Probed(
                        refused="is a node: only bootstrap servers keep runs of others"
                    )
                if not self._calls.take(caller, 1, monotonic()):
                    return pb.Probed(refused="runs were asked for too often: ask again in an hour")
                place = None if probe.keep.only_tell else place_in(address)
                return pb.Probed(
                    kept=(await self._keep(probe.keep.run_id.hex(), place)).to_message()
                )
            case "dial_back":
                return await self._dial_back(probe.dial_back, host, caller)
            case kind:
                return pb.Probed(refused=f"answers no {kind}")

    async def _dial_back(self, message: pb.DialBack, host: str | None, caller: str) -> pb.Probed:
        check_dial_back(message)
        if host is None:
            return pb.Probed(refused="you come through a relay: your own address is not seen")
        if not self._calls.take(caller, len(message.targets), monotonic()):
            return pb.Probed(refused="too many calls were asked for: ask again in an hour")
        async with self._dialing:
            calls = (is_reached(host, message.peer_id, target) for target in message.targets)
            return pb.Probed(dialed_back=pb.DialedBack(reached=await asyncio.gather(*calls)))


# calling back


async def is_reached(host: str, peer_id: str, target: pb.Target) -> bool:
    """Whether a fresh connection to a port of ``host``, an IP address, leads to the named peer.
    Takes DIAL_DEADLINE at most; for libp2p also the start of a process."""
    if target.kind == pb.Target.DIRECT:
        return await _shows_certificate(host, target)
    caller = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"], punching=False)
    entry = EntryPoint(peer_id, multiaddress(host, ProbeKind(target.kind), target.port))
    try:
        await asyncio.gather(caller.start(), load_hivemind())
        await Control(caller.control).connect(peer_id, [entry], DIAL_DEADLINE)
    except NodeError:
        return False
    finally:
        await caller.stop()
    return True


def multiaddress(host: str, kind: ProbeKind, port: int) -> str:
    """Where libp2p is dialed."""
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/{_TRANSPORTS[kind].format(port)}"


async def _shows_certificate(host: str, target: pb.Target) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # its digest is compared instead
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(DIAL_DEADLINE):
            _, writer = await asyncio.open_connection(
                host, target.port, ssl=context, server_hostname="lowcomm"
            )
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown is not None and sha256(shown).digest() == target.certificate
