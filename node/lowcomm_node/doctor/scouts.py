"""Scouts: each a p2pd with a throw-away identity, for ours is connected already, by whatever came first.

a scout ── QUIC, to the first helper ── look              does UDP get out
           the second helper, whom the scout has not called, calls it: does UDP get in
        ── QUIC, to the others       ── look              does the router show the same port to all
a scout ── IPv6, to one              ── look, dial back   our own ports, over IPv6
two     ── TCP, to all               ── ping              do large packets get out (one scout), and in (the other)
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from lowcomm_node.doctor.line import large_ping
from lowcomm_node.doctor.nat import Sight, is_public
from lowcomm_node.doctor.sights import Helper, Packets, Scouting, Subject, place_of
from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.libp2p.control import Control
from lowcomm_node.libp2p.multiaddress import EntryPoint, host_of, parse_entry_point, port_of
from lowcomm_node.libp2p.p2pd import P2pDaemon, has_ipv6
from lowcomm_node.probing.asker import Asker
from lowcomm_node.probing.dialing import multiaddress
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.peers.probes import PROTOCOL, Kind, Target

SCOUT_DEADLINE = 60.0
"""Seconds for all that one scout does."""
CALL_DEADLINE = 5.0
_ANY = {4: "0.0.0.0", 6: "::"}


async def scout_udp(askers: Sequence[tuple[Asker, Helper]], subject: Subject) -> Scouting | None:
    """Whether UDP gets out and in; None if the first helper has none. Never raises."""
    first, *others = [helper for _, helper in askers]
    entry, is_told = over_quic(first)
    if ":" in first.host:
        return None
    try:
        async with asyncio.timeout(SCOUT_DEADLINE), _scout(4, subject.loopback, "udp") as control:
            found = await _scout_over_quic(control, askers, entry, others)
    except (NodeError, TimeoutError):
        return None  # p2pd could not be started, or others took their time
    return found if found.gets_out or is_told else None


async def _scout_over_quic(
    control: Control, askers: Sequence[tuple[Asker, Helper]], entry: EntryPoint, others: Sequence[Helper]
) -> Scouting:
    asker = await _call(control, entry)
    if asker is None:
        return Scouting(False, helper=str(entry))
    with asker:
        try:
            sight = await _sight(asker)
            peer_id, _ = await control.identify()
        except LowcommError:
            return Scouting(True, helper=str(entry))
        # Somebody else who calls the same address, if there is one: who was called may be let in where others are not.
        stranger = next((other for other, helper in askers[1:] if helper.sees == sight.host), None)
        called, _ = await ask_back(stranger or asker, peer_id, [Target(Kind.QUIC, sight.port)])
    sights = [sight]
    for helper in others:
        if (another := await _call(control, over_quic(helper)[0])) is not None:
            with another:
                try:
                    sights.append(await _sight(another))
                except LowcommError:
                    continue
    gets_in = called[0][1] if called else None
    return Scouting(True, tuple(sights), gets_in, stranger is not None, helper=str(entry))


async def scout_ipv6(helpers: Sequence[Helper], subject: Subject) -> Scouting | None:
    """Whether IPv6 gets out and in; None if no helper has it. Never raises."""
    entry = next((found for helper in helpers if (found := over_ipv6(helper, subject.loopback)) is not None), None)
    if entry is None or not has_ipv6():
        return None
    try:
        async with asyncio.timeout(SCOUT_DEADLINE), _scout(6, subject.loopback, "tcp") as control:
            asker = await _call(control, entry)
            if asker is None:
                return Scouting(False, helper=str(entry))
            with asker:
                reached, _ = await ask_back(asker, subject.peer_id, subject.targets(6))
                return Scouting(True, reached=reached, helper=str(entry))
    except (NodeError, TimeoutError):
        return None


async def _call(control: Control, entry: EntryPoint) -> Asker | None:
    try:
        await control.connect(entry.peer_id, [entry], CALL_DEADLINE)
        return Asker(await control.open_stream(entry.peer_id, PROTOCOL, CALL_DEADLINE))
    except LowcommError:
        return None


async def _sight(asker: Asker) -> Sight:
    """How the other end sees a scout. Raises LinkLost, ProtocolViolation."""
    seen, _ = await asker.look()
    place = place_of(seen.address)
    if place is None:
        raise ProtocolViolation("does not see our address")
    return Sight(host_of(asker.address) or "", "scout", *place)


async def scout_packets(helpers: Sequence[Helper], subject: Subject) -> tuple[Packets, ...]:
    """Whether large packets get through over TCP, to each helper that it can be told of. Never raises."""
    # What one direction loses holds up all that follows over the same connection.
    # So each direction has a connection of its own.
    sent = (_large_pings(helpers, subject.loopback, out) for out in (True, False))
    outs, ins = await asyncio.gather(*sent)
    return tuple(
        Packets(helper.entry, out, into)
        for helper, out, into in zip(helpers, outs, ins, strict=True)
        if out is not None and into is not None
    )


async def _large_pings(helpers: Sequence[Helper], loopback: bool, out: bool) -> Sequence[bool | None]:
    found: list[bool | None] = [None] * len(helpers)
    with suppress(NodeError, TimeoutError):
        async with asyncio.timeout(SCOUT_DEADLINE), _scout(4, loopback, "tcp") as control:
            found = list(await asyncio.gather(*(_large_ping(control, helper, out) for helper in helpers)))
    return found


async def _large_ping(control: Control, helper: Helper, out: bool) -> bool | None:
    if ":" in helper.host or "/tcp/" not in helper.entry.dial:
        return None
    try:
        await control.connect(helper.entry.peer_id, [helper.entry], CALL_DEADLINE)
    except LowcommError:
        return None
    return await large_ping(control, helper.entry, out)


def over_quic(helper: Helper) -> tuple[EntryPoint, bool]:
    """Where a helper is dialed over QUIC, and whether he says so; else at the port that he serves over TCP, as bootstrap
    servers do."""
    told = next((dial for dial in _dials(helper) if "/udp/" in dial and host_of(dial) == helper.host), None)
    dial = told or multiaddress(helper.host, Kind.QUIC, port_of(helper.entry.dial) or 0)
    return EntryPoint(helper.entry.peer_id, dial), told is not None


def over_ipv6(helper: Helper, loopback: bool) -> EntryPoint | None:
    """Where a helper says that he is dialed over IPv6; None if nowhere on the internet: what he calls his inner network is
    not ours. With ``loopback`` all of us are on this machine."""
    dials = (dial for dial in _dials(helper) if dial.startswith("/ip6/") and "/tcp/" in dial)
    dial = next((dial for dial in dials if loopback or is_public(host_of(dial) or "::")), None)
    return EntryPoint(helper.entry.peer_id, dial) if dial is not None else None


def _dials(helper: Helper) -> Iterable[str]:
    """Where a helper says that he can be dialed: a stranger's word, so only what leads to himself, and without a relay."""
    for text in (str(helper.entry), *helper.seen.entry_points):
        try:
            entry = parse_entry_point(text)
        except ConfigError:
            continue
        if entry.peer_id == helper.entry.peer_id and entry.relay is None:
            yield entry.dial


async def ask_back(asker: Asker, peer_id: str, targets: Sequence[Target]) -> tuple[tuple[tuple[Kind, bool], ...], str]:
    """Which of these ports of ours are reached, and why nobody tried if nobody did."""
    if not targets:
        return (), "there is no port of ours to call"
    try:
        reached = await asker.dial_back(peer_id, targets)
    except LowcommError as error:
        return (), str(error)
    return tuple((target.kind, ok) for target, ok in zip(targets, reached, strict=True)), ""


@asynccontextmanager
async def _scout(version: int, loopback: bool, transport: str) -> AsyncIterator[Control]:
    host = {4: "127.0.0.1", 6: "::1"}[version] if loopback else _ANY[version]
    # Only the transport that is looked at: libp2p would choose for itself else.
    listen = f"/ip{version}/{host}/{transport}/0{'/quic-v1' if transport == 'udp' else ''}"
    daemon = P2pDaemon(None, [listen], punching=False)
    await daemon.start()
    try:
        yield Control(daemon.control)
    finally:
        await daemon.stop()
