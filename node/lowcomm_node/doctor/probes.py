"""Probes over connections of their own: our libp2p is connected already, by whatever came first.

Each is a p2pd with a throw-away identity and one transport:

UDP      ── QUIC, to the first helper ── look           does UDP get out
         the second helper, which was not called, calls back: does UDP get in
         ── QUIC, to the others       ── look           does the router show all the same port
packets  ── TCP, to all               ── ping           do large packets get out, and in
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from lowcomm_node.doctor.observations import (
    Helper,
    LargePackets,
    ObservedAddress,
    UdpProbe,
    place_of,
)
from lowcomm_node.errors import NodeError
from lowcomm_node.net.addresses import EntryPoint, host_of, port_of
from lowcomm_node.net.control import Control
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_node.probing.asker import Asker
from lowcomm_node.probing.dialing import multiaddress
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import Kind, Target

PROBE_DEADLINE = 60.0
"""Seconds for all that one p2pd is used for."""
CALL_DEADLINE = 5.0
PING_DEADLINE = 6.0
SMALL, LARGE = 64, 8192
"""Bytes: what fits into any packet, and several packets full."""


async def ask_back(
    asker: Asker,
    peer_id: str,
    targets: Sequence[Target],
) -> tuple[dict[Kind, bool], str]:
    """Which of these ports of ours are reached, and why nobody tried if nobody did."""
    if not targets:
        return {}, "there is no port of ours to call"
    try:
        reached = await asker.dial_back(peer_id, targets)
    except LowcommError as error:
        return {}, str(error)
    return {target.kind: ok for target, ok in zip(targets, reached, strict=True)}, ""


async def probe_udp(askers: Sequence[tuple[Asker, Helper]], loopback: bool) -> UdpProbe | None:
    """Whether UDP gets out and in; None if the first helper has none. Never raises."""
    entry, is_told = over_quic(askers[0][1])
    if ":" in askers[0][1].host:
        return None
    try:
        async with asyncio.timeout(PROBE_DEADLINE), _p2pd("udp/0/quic-v1", loopback) as control:
            found = await _probe_quic(control, askers, entry)
    except (NodeError, TimeoutError):
        return None  # p2pd could not be started, or others took their time
    return found if found.gets_out or is_told else None


async def _probe_quic(
    control: Control,
    askers: Sequence[tuple[Asker, Helper]],
    entry: EntryPoint,
) -> UdpProbe:
    try:
        asker = await _call(control, entry)
    except LowcommError:
        return UdpProbe(str(entry), gets_out=False)
    with asker:
        try:
            first = await _observed(asker)
            peer_id, _ = await control.identify()
        except LowcommError as error:
            return UdpProbe(str(entry), gets_out=True, refused=str(error))
        # A router may let in whom we have called. So another helper that sees the same address
        # calls; the one that was called does only if there is none.
        stranger = next((other for other, helper in askers[1:] if helper.sees == first.host), None)
        own = [Target(Kind.QUIC, first.port)]
        called, refused = await ask_back(stranger or asker, peer_id, own)
    observed = [first]
    for _, helper in askers[1:]:
        with suppress(LowcommError), await _call(control, over_quic(helper)[0]) as another:
            observed.append(await _observed(another))
    gets_in = called.get(Kind.QUIC)
    return UdpProbe(str(entry), True, tuple(observed), gets_in, stranger is not None, refused)


async def _observed(asker: Asker) -> ObservedAddress:
    """How the other end sees us. Raises LinkLost, ProtocolViolation."""
    seen, _ = await asker.look()
    place = place_of(seen.address)
    if place is None:
        raise ProtocolViolation("does not see our address")
    return ObservedAddress(host_of(asker.address) or "", "probe", *place)


async def probe_packets(helpers: Sequence[Helper], loopback: bool) -> tuple[LargePackets, ...]:
    """Whether large packets get through over TCP, to each helper that can tell. Never raises."""
    # TCP holds up all that follows a lost packet: each direction has a connection of its own.
    large = pb.Ping(content=bytes(LARGE)), pb.Ping(wanted=LARGE)
    outs, ins = await asyncio.gather(*(_ping_all(helpers, loopback, ping) for ping in large))
    both = zip(outs, ins, strict=True)
    return tuple(LargePackets(a, b) for a, b in both if a is not None and b is not None)


async def _ping_all(
    helpers: Sequence[Helper],
    loopback: bool,
    ping: pb.Ping,
) -> Sequence[bool | None]:
    try:
        async with asyncio.timeout(PROBE_DEADLINE), _p2pd("tcp/0", loopback) as control:
            return await asyncio.gather(*(_large_ping(control, one, ping) for one in helpers))
    except (NodeError, TimeoutError):
        return [None] * len(helpers)


async def _large_ping(control: Control, helper: Helper, ping: pb.Ping) -> bool | None:
    """Whether a large ping is answered where a small one is; None if that can't be told."""
    entry = helper.entry
    if ":" in helper.host or "/tcp/" not in entry.dial:
        return None
    try:
        await control.connect(entry.peer_id, [entry], CALL_DEADLINE)
    except LowcommError:
        return None
    small = pb.Ping(content=bytes(SMALL), wanted=SMALL)
    is_there = await pinged(control, entry.peer_id, small)
    return await pinged(control, entry.peer_id, ping) if is_there else None


async def pinged(control: Control, peer_id: str, ping: pb.Ping) -> bool | None:
    """Whether a ping is answered, over a stream of its own; None if it is refused."""
    try:
        async with asyncio.timeout(PING_DEADLINE):
            with await Asker.open(control, peer_id) as asker:
                await asker.send(ping)
                pong = await asker.receive()
    except (TimeoutError, LowcommError):
        return False
    return None if pong.refused else len(pong.content) == ping.wanted


def over_quic(helper: Helper) -> tuple[EntryPoint, bool]:
    """Where a helper is dialed over QUIC, and whether it says so.

    If it does not, that is the port that it serves over TCP, as bootstrap servers do.
    """
    dials = (dial for dial in helper.dials if "/udp/" in dial and host_of(dial) == helper.host)
    told = next(dials, None)
    dial = told or multiaddress(helper.host, Kind.QUIC, port_of(helper.entry.dial) or 0)
    return EntryPoint(helper.entry.peer_id, dial), told is not None


async def _call(control: Control, entry: EntryPoint) -> Asker:
    """A stream of probes. Raises LinkLost."""
    await control.connect(entry.peer_id, [entry], CALL_DEADLINE)
    return await Asker.open(control, entry.peer_id)


@asynccontextmanager
async def _p2pd(transport: str, loopback: bool) -> AsyncIterator[Control]:
    """A p2pd of one transport: with several, libp2p would choose by itself."""
    listen = f"/ip4/{'127.0.0.1' if loopback else '0.0.0.0'}/{transport}"
    daemon = P2pDaemon(None, [listen], punching=False)
    await daemon.start()
    try:
        yield Control(daemon.control)
    finally:
        await daemon.stop()
