"""Ask others how they see us. Helpers are bootstrap servers and peers; each does what ``probing`` allows.

our libp2p ── to up to MAX_HELPERS ── look                 which address, whose clock
           ── to each of them      ── dial back            our ports, called from there
scouts     ── over UDP, over IPv6 and over TCP             (scouts.py)
our libp2p ── to the first one     ── ping                 bandwidth; last, for it may use up what we are given
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from lowcomm_node.doctor.machine import outward_host
from lowcomm_node.doctor.scouts import ask_back, scout_ipv6, scout_packets, scout_udp
from lowcomm_node.doctor.sights import Helper, Subject, Survey
from lowcomm_node.errors import ConfigError
from lowcomm_node.libp2p.interface import Streams
from lowcomm_node.libp2p.multiaddress import EntryPoint, host_of, parse_entry_point
from lowcomm_node.probing.asker import CONNECT_DEADLINE, Asker
from lowcomm_node.probing.measuring import Speed, measure_speed
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.probes import PROTOCOL

MAX_HELPERS = 3
MAX_TRIED = 8
"""Entry points that are tried to find helpers."""
SPEED_DEADLINE = 30.0


async def survey(streams: Streams, subject: Subject, entries: Iterable[str]) -> Survey:
    """Ask whoever answers at ``entries`` (multiaddresses), the first ones first. Never raises for what others do."""
    async with AsyncExitStack() as stack:
        askers, silent = await _find_helpers(stack, streams, distinct(entries, subject.peer_id))
        helpers = [helper for _, helper in askers]
        if not askers:
            return Survey(silent=silent)
        called, udp, ipv6, packets = await asyncio.gather(
            asyncio.gather(*(_called_back(asker, helper, subject) for asker, helper in askers)),
            scout_udp(askers, subject),
            scout_ipv6(helpers, subject),
            scout_packets(helpers, subject),
        )
        speed, no_speed = await _speed(streams, helpers[0].entry)
        return Survey(
            helpers=tuple(called),
            silent=silent,
            udp=udp,
            ipv6=ipv6,
            speed=speed,
            no_speed=no_speed,
            packets=packets,
            outward=outward_host(helpers[0].host),
        )


async def _find_helpers(
    stack: AsyncExitStack, streams: Streams, entries: Sequence[EntryPoint]
) -> tuple[list[tuple[Asker, Helper]], tuple[tuple[str, str], ...]]:
    answers = await asyncio.gather(*(_meet(stack, streams, entry) for entry in entries))
    askers, silent = list[tuple[Asker, Helper]](), list[tuple[str, str]]()
    for entry, answer in zip(entries, answers, strict=True):
        if isinstance(answer, str):
            silent.append((str(entry), answer))
        else:
            askers.append(answer)
    return choose_helpers(askers), tuple(silent)


def choose_helpers(askers: Sequence[tuple[Asker, Helper]]) -> list[tuple[Asker, Helper]]:
    """One at each address. Who is in our own network can call us in any case: he counts only if there is nobody else."""
    outside = [pair for pair in askers if pair[1].is_outside]
    by_host: dict[str, tuple[Asker, Helper]] = {}
    for pair in outside or askers:
        by_host.setdefault(pair[1].host, pair)
    return list(by_host.values())[:MAX_HELPERS]


def distinct(entries: Iterable[str], own_peer_id: str) -> list[EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for text in entries:
        try:
            entry = parse_entry_point(text)
        except ConfigError:
            continue
        if entry.relay is None and entry.peer_id != own_peer_id:
            found.setdefault(entry.peer_id, entry)
    return list(found.values())[:MAX_TRIED]


async def _meet(stack: AsyncExitStack, streams: Streams, entry: EntryPoint) -> tuple[Asker, Helper] | str:
    """A stream of probes and the first look, or why there is none."""
    asker: Asker | None = None
    try:
        await streams.connect(entry.peer_id, [str(entry)], CONNECT_DEADLINE)
        asker = stack.enter_context(await _open(streams, entry))
        seen, offset = await asker.look()
        host = host_of(asker.address)
        if host is not None:
            return asker, Helper(entry, host, seen, offset)
        reason = "is reached through a relay only, so it does not see our address"
    except LowcommError as error:
        reason = str(error) if asker is None else f"answers, but not to probes ({error}): its release may be older"
    if asker is not None:
        asker.close()
    return reason


async def _called_back(asker: Asker, helper: Helper, subject: Subject) -> Helper:
    version = 6 if ":" in helper.sees else 4
    reached, refused = await ask_back(asker, subject.peer_id, subject.targets(version))
    return replace(helper, reached=reached, refused=refused)


async def _speed(streams: Streams, entry: EntryPoint) -> tuple[Speed | None, str]:
    try:
        async with asyncio.timeout(SPEED_DEADLINE):
            # A stream of its own: where a ping is refused, the answers to others stay in it.
            with await _open(streams, entry) as asker:
                return await measure_speed(asker), ""
    except TimeoutError:
        return None, f"took longer than {SPEED_DEADLINE:.0f} s"
    except LowcommError as error:
        return None, str(error)


async def _open(streams: Streams, entry: EntryPoint) -> Asker:
    """A stream of probes to a peer that we are connected to. Raises LinkLost."""
    return Asker(await streams.open_stream(entry.peer_id, PROTOCOL, CONNECT_DEADLINE))
