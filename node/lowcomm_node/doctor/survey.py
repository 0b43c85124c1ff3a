"""Asks others how they see us. Helpers are bootstrap servers and peers.

our libp2p ── to up to MAX_HELPERS ── look          which address, whose clock
           ── to each of them      ── dial back     our ports, called from there
a p2pd of UDP alone, with a throw-away identity, since our libp2p is connected already:
           ── QUIC, to the first helper ── look     does UDP get out
           the second helper, which was not called, calls back: does UDP get in
           ── QUIC, to the others       ── look     does the router show all the same port
"""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from lowcomm_node.doctor.findings import (
    Helper,
    ObservedAddress,
    Subject,
    Survey,
    UdpProbe,
    place_of,
)
from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.net.addresses import EntryPoint, host_of, parse_entry_point, port_of
from lowcomm_node.net.control import Control, Streams
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_node.swarm.probes import CONNECT_DEADLINE, Asker, multiaddress
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.peers.probes import ProbeKind, Target

MAX_HELPERS = 3
MAX_TRIED = 8
"""Entry points that are tried to find helpers."""
UDP_DEADLINE, CALL_DEADLINE = 60.0, 5.0
"""Seconds for the probe of UDP, and for a call in it."""


async def ask_others(streams: Streams, subject: Subject, entries: Iterable[str]) -> Survey:
    """Ask the peers at ``entries`` (multiaddresses), the first ones first. Never raises."""
    async with AsyncExitStack() as stack:
        tried = distinct(entries, subject.peer_id)
        met = await asyncio.gather(*(_meet(stack, streams, entry) for entry in tried))
        answers = list(zip(tried, met, strict=True))
        silent = {str(entry): answer for entry, answer in answers if isinstance(answer, str)}
        askers = choose_helpers([answer for answer in met if not isinstance(answer, str)])
        if not askers:
            return Survey(subject=subject, silent=silent)
        called, udp = await asyncio.gather(
            asyncio.gather(*(_called_back(asker, helper, subject) for asker, helper in askers)),
            probe_udp(askers, subject.loopback),
        )
        return Survey(
            subject=subject,
            helpers=tuple(called),
            silent=silent,
            udp=udp,
            outward=_outward_host(askers[0][1].host),
        )


def choose_helpers(askers: Sequence[tuple[Asker, Helper]]) -> list[tuple[Asker, Helper]]:
    """One helper at each address.

    A helper in our own network can call us in any case: it counts only if there is no other.
    """
    outside = [pair for pair in askers if pair[1].is_outside]
    by_host: dict[str, tuple[Asker, Helper]] = {}
    for pair in outside or askers:
        by_host.setdefault(pair[1].host, pair)
    return list(by_host.values())[:MAX_HELPERS]


def distinct(entries: Iterable[str], own_peer_id: str) -> list[EntryPoint]:
    """One address of each peer, ours and those through relays left out; MAX_TRIED at most."""
    found: dict[str, EntryPoint] = {}
    for text in entries:
        with suppress(ConfigError):
            entry = parse_entry_point(text)
            if entry.relay is None and entry.peer_id != own_peer_id:
                found.setdefault(entry.peer_id, entry)
    return list(found.values())[:MAX_TRIED]


async def _meet(
    stack: AsyncExitStack,
    streams: Streams,
    entry: EntryPoint,
) -> tuple[Asker, Helper] | str:
    """A stream of probes and the first look, or why there is none."""
    asker: Asker | None = None
    try:
        await streams.connect(entry.peer_id, [str(entry)], CONNECT_DEADLINE)
        asker = stack.enter_context(await Asker.open(streams, entry.peer_id))
        seen, offset = await asker.look()
    except LowcommError as error:
        if asker is None:
            return str(error)
        return f"answers, but not to probes ({error}): its release may be older"
    host = host_of(asker.address)
    if host is None:
        return "is reached through a relay only, so it does not see our address"
    return asker, Helper(entry, host, seen, offset)


async def _called_back(asker: Asker, helper: Helper, subject: Subject) -> Helper:
    targets = subject.targets(6 if ":" in helper.sees else 4)
    reached, refused = await ask_back(asker, subject.peer_id, targets)
    return replace(helper, reached=reached, refused=refused)


async def ask_back(
    asker: Asker,
    peer_id: str,
    targets: Sequence[Target],
) -> tuple[dict[ProbeKind, bool], str]:
    """Which of these ports of ours are reached, and why none was tried."""
    if not targets:
        return {}, "there is no port of ours to call"
    try:
        reached = await asker.dial_back(peer_id, targets)
    except LowcommError as error:
        return {}, str(error)
    return {target.kind: ok for target, ok in zip(targets, reached, strict=True)}, ""


def _outward_host(towards: str) -> str:
    """Which of our addresses packets to an IP address leave from; empty if there is no way there.

    Sends nothing.
    """
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
    except OSError:
        return ""


# UDP


async def probe_udp(askers: Sequence[tuple[Asker, Helper]], loopback: bool) -> UdpProbe | None:
    """Whether UDP gets out and in; None if the first helper has none. Never raises."""
    entry, is_announced = over_quic(askers[0][1])
    if ":" in askers[0][1].host:
        return None
    daemon = P2pDaemon(
        None, [f"/ip4/{'127.0.0.1' if loopback else '0.0.0.0'}/udp/0/quic-v1"], punching=False
    )
    try:
        async with asyncio.timeout(UDP_DEADLINE):
            await daemon.start()
            found = await _probe_quic(Control(daemon.control), askers, entry)
    except (NodeError, TimeoutError):
        return None  # p2pd could not be started, or others took their time
    finally:
        await daemon.stop()
    return found if found.gets_out or is_announced else None


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
        own = [Target(ProbeKind.QUIC, first.port)]
        called, refused = await ask_back(stranger or asker, peer_id, own)
    observed = [first]
    for _, helper in askers[1:]:
        with suppress(LowcommError), await _call(control, over_quic(helper)[0]) as another:
            observed.append(await _observed(another))
    gets_in = called.get(ProbeKind.QUIC)
    return UdpProbe(str(entry), True, tuple(observed), gets_in, stranger is not None, refused)


async def _observed(asker: Asker) -> ObservedAddress:
    """How the other end sees us. Raises LinkLost, ProtocolViolation."""
    seen, _ = await asker.look()
    place = place_of(seen.address)
    if place is None:
        raise ProtocolViolation("does not see our address")
    return ObservedAddress(host_of(asker.address) or "", "probe", *place)


def over_quic(helper: Helper) -> tuple[EntryPoint, bool]:
    """Where a helper is dialed over QUIC, and whether it says so.

    If it does not, that is the port that it serves over TCP, as bootstrap servers do.
    """
    dials = (dial for dial in helper.dials if "/udp/" in dial and host_of(dial) == helper.host)
    announced = next(dials, None)
    dial = announced or multiaddress(helper.host, ProbeKind.QUIC, port_of(helper.entry.dial) or 0)
    return EntryPoint(helper.entry.peer_id, dial), announced is not None


async def _call(control: Control, entry: EntryPoint) -> Asker:
    """A stream of probes. Raises LinkLost."""
    await control.connect(entry.peer_id, [entry], CALL_DEADLINE)
    return await Asker.open(control, entry.peer_id)
