"""Asks others how they see us. Helpers are bootstrap servers and peers.

our libp2p ── to up to MAX_HELPERS ── look          which address, over what, whose clock
           ── to each of them      ── dial back     our ports, called from there
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from lowcomm_node.doctor.findings import Helper, Subject, Survey
from lowcomm_node.net.addresses import EntryPoint, also_over_quic, host_of, valid_entries
from lowcomm_node.net.control import Streams
from lowcomm_node.net.targets import outward_address
from lowcomm_node.swarm.probes import CONNECT_DEADLINE, Asker
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.probes import ProbeKind

MAX_HELPERS = 3
MAX_TRIED = 8
"""Entry points that are tried to find helpers."""


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
        calls = (_called_back(asker, helper, subject) for asker, helper in askers)
        return Survey(
            subject=subject,
            helpers=tuple(await asyncio.gather(*calls)),
            silent=silent,
            outward=outward_address(askers[0][1].host),
        )


def choose_helpers(askers: Sequence[tuple[Asker, Helper]]) -> list[tuple[Asker, Helper]]:
    """One helper at each address. A helper in our own network can call us in any case: it counts
    only if there is no other."""
    outside = [pair for pair in askers if pair[1].is_outside]
    by_host: dict[str, tuple[Asker, Helper]] = {}
    for pair in outside or askers:
        by_host.setdefault(pair[1].host, pair)
    return list(by_host.values())[:MAX_HELPERS]


def distinct(entries: Iterable[str], own_peer_id: str) -> list[EntryPoint]:
    """One address of each peer, ours and those through relays left out; MAX_TRIED at most."""
    found: dict[str, EntryPoint] = {}
    for entry in valid_entries(entries):
        if entry.relay is None and entry.peer_id != own_peer_id:
            found.setdefault(entry.peer_id, entry)
    return list(found.values())[:MAX_TRIED]


async def _meet(
    stack: AsyncExitStack, streams: Streams, entry: EntryPoint
) -> tuple[Asker, Helper] | str:
    """A stream of probes and the first look, or why there is none."""
    asker: Asker | None = None
    try:
        addresses = [str(one) for one in also_over_quic([entry])]
        await streams.connect(entry.peer_id, addresses, CONNECT_DEADLINE)
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
    """The helper, with which of our ports it reaches, or why it tried none."""
    targets = subject.targets(6 if ":" in helper.sees else 4)
    if not targets:
        return replace(helper, refused="there is no port of ours to call")
    try:
        reached = await asker.dial_back(subject.peer_id, targets)
    except LowcommError as error:
        return replace(helper, refused=str(error))
    kinds = (ProbeKind(target.kind) for target in targets)
    return replace(helper, reached=dict(zip(kinds, reached, strict=True)))
