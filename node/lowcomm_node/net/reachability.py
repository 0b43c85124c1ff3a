"""Where we can be dialed: at our own addresses, where a NAT lets others see us, and through relays.

own addresses ── p2pd ─────────────────────────────┐
as others see us ── named peers, or two others ────┼─► addresses: in our record, and for --peers
places at relays ── see relay.py ──────────────────┘
"""

import asyncio
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
        first, *others = [
            *sorted(self.announced or (*self.visible, *self._observed), key=_preference),
            "",
        ]
        # A record has room for a few addresses. Those of many interfaces must not displace the
        # place at a relay.
        dials = filter(None, [first, *self._places.dials, *others])
        entries = (
            EntryPoint(self._peer_id, dial) for dial in sorted(dials, key=lambda dial: -reach(dial))
        )
        return tuple(str(entry) for entry in entries if entry.fits)

    def seen_at(self) -> tuple[str, ...]:
        """Addresses at which others may reach us, also those that only hole punching makes
        reachable."""
        return (
            *self._observed,
            *sorted(self.announced or self.visible, key=lambda dial: "/udp/" not in dial),
        )

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

        Raises LinkLost.
        """
        if not self._wants_places:
            return
        if not self.announced:
            await self._ask_others()
        await self._places.keep(self._control(), list(self._entry_points))

    async def _ask_others(self) -> None:
        control = self._control()
        connected = {connection.peer_id for connection in await control.connections()}
        named, learned = (
            [
                entry.peer_id
                for entry in entries
                if entry.peer_id in connected and entry.relay is None
            ]
            for entries in (self._entry_points.named, self._entry_points.learned)
        )
        asked = list(dict.fromkeys(named or learned))[:MAX_OBSERVERS]
        answers = await asyncio.gather(*(observed(control, peer_id) for peer_id in asked))
        told = [dial for dial in answers if dial is not None]
        if not named:
            told = self._believable(told)
        self._observed = tuple(dict.fromkeys(dial for dial in told if dial not in self.visible))

    def _believable(self, told: Sequence[str]) -> list[str]:
        """The reported addresses whose host we know ourselves, or that two peers report."""
        hosts, known = (
            [host_of(dial) for dial in told],
            {host_of(dial) for dial in (*self.visible, *self._observed)},
        )
        return [
            dial
            for dial, host in zip(told, hosts, strict=True)
            if host in known or hosts.count(host) > 1
        ]


def _preference(dial: str) -> tuple[int, bool]:
    """Addresses that reach further come first, of those TCP, which every network lets through."""
    return -reach(dial), "/udp/" in dial
