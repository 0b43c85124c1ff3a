"""Where we can be dialed: at our own addresses, where a NAT lets others see us, and through relays.
Reservations at relays, and the limits of our own relay (libp2p's circuit relay v2).

    we ── hop stream: RESERVE ──► relay      others reach us through it while we are connected
    we ◄── STATUS, expiry, limits ── relay   bytes and seconds of one circuit

p2pd's own ``-autoRelay`` does not hear of relays found later, and does not report their limits. So
we ask for places ourselves.

p2pd's relay does not reliably keep its limits (seen with hivemind 1.1.12): it starts two relay
services, one with our limits and one with libp2p's own (128 KiB a circuit), in no fixed order, and
the later one serves. With one thread about every second start goes well, with more threads hardly
any. Hence a check of what a start gives.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, time

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import (
    CIRCUIT,
    EntryPoint,
    EntryPoints,
    circuit,
    decode,
    host_of,
    is_dialable,
    parse_announced,
    reach,
    valid_entries,
)
from lowcomm_node.net.control import Control, read_message, send_message
from lowcomm_node.net.hivemind_client import CALL_DEADLINE
from lowcomm_node.net.p2pd import P2pDaemon, RelayLimits
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import in_time

HOP = "/libp2p/circuit/relay/0.2.0/hop"
DEADLINE = 5.0
MAX_MESSAGE = 4096
MAX_RELAYS = 2
"""Places that we keep: one more than needed, so that a relay may go."""
REFRESH = 20.0
"""Seconds before a place is renewed. A relay forgets it when the connection breaks, without
notice."""
REFRESH_USELESS = 900.0
"""The same for a relay whose limits are too low: it may have been restarted with others."""
USEFUL_BYTES = 64 * 1024**2
"""The least limit per circuit with which an exchange gets through. p2pd's accidental relays give
128 KiB."""
_RESERVE = b"\x08\x00"  # type = RESERVE
_STATUS, _OK = 2, 100
_REFUSALS = {
    200: "refuses places",
    201: "has no place left",
    202: "does not give us a place",
    400: "does not understand us",
    401: "does not understand us",
}


@dataclass(frozen=True)
class Reservation:
    """A reservation at a relay."""

    relay: EntryPoint
    expires: float
    """Unix time, seconds, by the relay's clock."""
    bytes: int | None
    """Of one circuit, per direction; None: no limit."""
    seconds: int | None
    """Of one circuit; None: no limit."""

    @property
    def useful(self) -> bool:
        """Whether an exchange gets through."""
        return self.bytes is None or self.bytes >= USEFUL_BYTES


class Places:
    """Our places at relays: the first useful ones among the candidates."""

    def __init__(self, peer_id: str) -> None:
        """``peer_id``: ours."""
        self._peer_id = peer_id
        self._held: dict[str, Reservation] = {}
        self._due: dict[str, float] = {}

    @property
    def dials(self) -> tuple[str, ...]:
        """Our addresses through relays."""
        now = time()
        valid = (place for place in self._held.values() if place.useful and place.expires > now)
        return tuple(circuit(place.relay) for place in valid)

    async def keep(self, control: Control, relays: list[EntryPoint]) -> None:
        """Ask for missing places, and renew due ones; takes seconds at most. Never raises: what
        fails is tried again."""
        try:
            connected = {connection.peer_id for connection in await control.connections()}
        except LinkLost:
            return
        known = connected & {relay.peer_id for relay in relays}
        self._held = {peer_id: place for peer_id, place in self._held.items() if peer_id in known}
        self._due = {peer_id: due for peer_id, due in self._due.items() if peer_id in known}
        own = self._peer_id
        first = {
            relay.peer_id: relay
            for relay in reversed(relays)
            # Others must be able to dial it, and the address to fit into our record.
            if relay.peer_id in known and not relay.relay and EntryPoint(own, circuit(relay)).fits
        }
        candidates = list(reversed(first.values()))
        end = monotonic() + DEADLINE
        while due := self._due_now(candidates):
            await asyncio.gather(*(self._ask(control, relay) for relay in due))
            # The others are asked at the next call: nobody shall hold us up by silence
            if monotonic() >= end:
                return

    def _due_now(self, relays: list[EntryPoint]) -> list[EntryPoint]:
        """The relays whose place is due, and as many others as places are missing."""
        now = monotonic()
        due = [relay for relay in relays if now >= self._due.get(relay.peer_id, 0.0)]
        due.sort(key=lambda relay: self._due.get(relay.peer_id, 0.0))
        useful = {peer_id for peer_id, place in self._held.items() if place.useful}
        ours = [relay for relay in due if relay.peer_id in useful]
        others = [relay for relay in due if relay.peer_id not in useful]
        return [*ours, *others[: max(0, MAX_RELAYS - len(useful))]]

    async def _ask(self, control: Control, relay: EntryPoint) -> None:
        try:
            place = await reserve(control, relay)
        except LinkLost as error:
            self._held.pop(relay.peer_id, None)
            self._due[relay.peer_id] = monotonic() + REFRESH
            log.debug("relay.no_place", relay=relay.peer_id, reason=str(error))
            return
        if relay.peer_id not in self._held:
            log.debug("relay.place", relay=relay.peer_id, bytes=place.bytes, seconds=place.seconds)
        self._held[relay.peer_id] = place
        self._due[relay.peer_id] = monotonic() + (REFRESH if place.useful else REFRESH_USELESS)


MAX_OBSERVERS = 2
"""Peers that are asked where they see us."""
IDENTIFY = "/ipfs/id/1.0.0"
_OBSERVED = 4
"""The field of libp2p's Identify message with the address that the other end sees."""
MAX_IDENTIFY = 64 * 1024
MAX_DIAL = 127
"""Bytes of one address in a message of hole punching."""


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
        # Without those that no other node can use.
        entries = valid_entries(f"{address}/p2p/{self._peer_id}" for address in found)
        self.visible = tuple(entry.dial for entry in entries)

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


async def observed(control: Control, peer_id: str) -> str | None:
    """The public address at which a connected peer sees us; None if there is none. Takes DEADLINE
    at most."""
    try:
        async with asyncio.timeout(DEADLINE):
            stream = await control.open_stream(peer_id, IDENTIFY, DEADLINE)
            with stream.socket:
                if stream.address.endswith(CIRCUIT):
                    return None  # it sees the relay
                message = await read_message(stream.socket, MAX_IDENTIFY)
        seen = dict(fields(message)).get(_OBSERVED)
    except (LinkLost, OSError, TimeoutError):
        return None
    dial = decode(seen) if isinstance(seen, bytes) and len(seen) <= MAX_DIAL else None
    return dial if dial is not None and is_public_dial(dial) else None


def is_public_dial(dial: str) -> bool:
    """Whether it is a public address by number. A name could be made to mean any host."""
    return (
        len(dial) <= MAX_DIAL
        and dial.startswith(("/ip4/", "/ip6/"))
        and is_dialable(dial)
        and reach(dial) == 2
    )


async def reserve(control: Control, relay: EntryPoint) -> Reservation:
    """Take or renew a place at a connected relay, within DEADLINE. Raises LinkLost with the relay's
    reason."""
    async with in_time(DEADLINE):
        stream = await control.open_stream(relay.peer_id, HOP, DEADLINE)
        with stream.socket:
            await send_message(stream.socket, _RESERVE)
            answer = await read_message(stream.socket, MAX_MESSAGE)
    return read_place(answer, relay)


def read_place(answer: bytes, relay: EntryPoint) -> Reservation:
    """Decode a relay's answer to RESERVE (a HopMessage). Raises LinkLost if it is no place."""
    answered = dict(fields(answer))
    status = answered.get(5)
    if answered.get(1) != _STATUS or status != _OK:
        raise LinkLost(
            _REFUSALS.get(status, "gives no place") if isinstance(status, int) else "gives no place"
        )
    reservation, limit = answered.get(3), answered.get(4)
    expires = dict(fields(reservation)).get(1) if isinstance(reservation, bytes) else None
    limits = dict(fields(limit)) if isinstance(limit, bytes) else {}
    if not isinstance(expires, int):
        raise LinkLost("gives a place without an expiry")
    seconds, size = ((limits.get(number) or None) for number in (1, 2))
    return Reservation(
        relay,
        float(expires),
        size if isinstance(size, int) else None,
        seconds if isinstance(seconds, int) else None,
    )


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message. Raises LinkLost if it is malformed."""
    try:
        parsed = UnknownFieldSet(Empty.FromString(message))
    except DecodeError:
        raise LinkLost("answered with something else") from None
    for field in parsed:
        if isinstance(field.data, int | bytes):
            yield field.field_number, field.data


MAX_STARTS = 12
"""About every second start goes well."""
LOOKS = 3
LOOK_AGAIN = 0.2
"""Seconds. The service with our limits may begin a moment after p2pd reports to be ready."""


async def start_as_relay(make: Callable[[], P2pDaemon], limits: RelayLimits) -> P2pDaemon:
    """A running p2pd that keeps to ``limits``; after MAX_STARTS the last one, with a warning.
    Raises what ``P2pDaemon.start`` does."""
    probe = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"])
    await probe.start()
    try:
        attempt = 0
        while True:
            attempt += 1
            daemon = make()
            await daemon.start()
            try:
                if await _keeps_to(daemon, probe, limits):
                    return daemon
            except BaseException:
                await daemon.stop()
                raise
            if attempt == MAX_STARTS:
                reason = "p2pd relays only 128 KiB a circuit; start again to try again"
                log.warning("relay.limited", reason=reason)
                return daemon
            await daemon.stop()
    finally:
        await probe.stop()


async def _keeps_to(daemon: P2pDaemon, probe: P2pDaemon, limits: RelayLimits) -> bool:
    relay, asker = Control(daemon.control), Control(probe.control)
    try:
        own, addresses = await asker.identify()
        me, _ = await relay.identify()
        # In this direction, because the relay's announced addresses need not show where it listens.
        await relay.connect(own, [EntryPoint(own, address) for address in addresses], 10.0)
    except LinkLost as error:
        log.debug("relay.not_asked", reason=str(error))
        return False
    for _ in range(LOOKS):
        with suppress(LinkLost):
            place = await reserve(asker, EntryPoint(me, ""))
            if (place.bytes, place.seconds) == (limits.bytes, limits.seconds):
                return True
        await asyncio.sleep(LOOK_AGAIN)
    return False
