"""Where we can be dialed: at our own addresses, where a NAT lets others see us, and through relays.

own addresses ── p2pd ─────────────────────────────┐
as others see us ── named peers, or two others ────┼─► addresses: in our record, and for --peers
places at relays ── see relay.py ──────────────────┘
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import (
    EntryPoint,
    EntryPoints,
    host_of,
    parse_announced,
    parse_entry_point,
    reach,
)
from lowcomm_node.net.control import Control
from lowcomm_node.net.hivemind_client import CALL_DEADLINE
from lowcomm_node.net.punching import observed
from lowcomm_node.net.relays import Places

MAX_OBSERVERS = 2
"""Peers that are asked where they see us."""


class Reachability:
    """The addresses of one peer. They change with networks and NATs."""

    def __init__(
        self,
        peer_id: str,
        entry_points: EntryPoints,
        control: Callable[[], Control],
        announce: Sequence[str],
        wants_places: bool,
    ) -> None:
        """``control``: of the running p2pd; raises LinkLost while there is none. ``announce``:
        addresses given by the owner.

        ``wants_places``: whether we may be unreachable, and need relays. Raises ConfigError for a
        malformed address.
        """
        self._peer_id = peer_id
        self._entry_points = entry_points
        self._control = control
        self.announced = tuple(parse_announced(text, peer_id) for text in announce)
        self._wants_places = wants_places
        self._places = Places(peer_id)
        self.visible: tuple[str, ...] = ()
        """Where p2pd says that it can be dialed."""
        self._observed: tuple[str, ...] = ()
        """Where others see us behind a NAT: addresses other than our own."""

    def addresses(self) -> tuple[str, ...]:
        """Where others can dial us, the widest reach first; at most what a record takes."""
        own = self.announced or (*self.visible, *self._observed)
        # Of those that reach as far TCP, which every network lets through.
        own = sorted(own, key=lambda dial: (-reach(dial), "/udp/" in dial))
        # A record has room for a few addresses. Those of many interfaces must not displace the
        # place at a relay.
        dials = sorted((*own[:1], *self._places.dials, *own[1:]), key=lambda dial: -reach(dial))
        entries = (EntryPoint(self._peer_id, dial) for dial in dials)
        return tuple(str(entry) for entry in entries if entry.fits)

    def seen_at(self) -> tuple[str, ...]:
        """Addresses at which others may reach us, also those that only hole punching makes
        reachable."""
        own = sorted(self.announced or self.visible, key=lambda dial: "/udp/" not in dial)
        return (*self._observed, *own)

    async def look_at_ourselves(self) -> None:
        """Learn at which addresses p2pd can be reached. Raises LinkLost."""
        _, found = await self._control().identify(CALL_DEADLINE)
        dials: list[str] = []
        for address in found:
            with suppress(ConfigError):  # those that no other node can use
                dials.append(parse_entry_point(f"{address}/p2p/{self._peer_id}").dial)
        self.visible = tuple(dials)

    async def look_from_outside(self) -> None:
        """Learn where others see us, which tells the NAT's port, and keep our places at relays.
        Raises LinkLost."""
        if not self._wants_places:
            return
        if not self.announced:
            await self._ask_others()
        await self._places.keep(self._control(), list(self._entry_points))

    async def _ask_others(self) -> None:
        control = self._control()
        connected = {connection.peer_id for connection in await control.connections()}
        named, learned = (
            [it.peer_id for it in entries if it.peer_id in connected and it.relay is None]
            for entries in (self._entry_points.named, self._entry_points.learned)
        )
        asked = list(dict.fromkeys(named or learned))[:MAX_OBSERVERS]
        answers = await asyncio.gather(*(observed(control, peer_id) for peer_id in asked))
        dials = [dial for dial in answers if dial is not None]
        if not named:  # then our own knowledge of the host counts, or two peers that agree
            known = {host_of(dial) for dial in (*self.visible, *self._observed)}
            hosts = Counter(map(host_of, dials))
            dials = [dial for dial in dials if host_of(dial) in known or hosts[host_of(dial)] > 1]
        self._observed = tuple(dict.fromkeys(dial for dial in dials if dial not in self.visible))
