"""NAT hole punching: how two peers that only a relay connects get a connection of their own.

    we ── over the relay: the addresses that others see us at ──► they
    we ◄───────────────────── those of theirs ─────────────────── they
    both close the relayed connection and dial at once; if the relay reconnects first, they close it
    once more

An outgoing packet opens a NAT for answers. Over QUIC both ends dial from the port that they listen
on, so one of the two gets through, unless a NAT uses another port for each destination. If both
fail, they reconnect through a relay; an attempt costs a few seconds.

libp2p has this too (DCUtR). But in go-libp2p 0.32, which hivemind 1.1.12 brings, a peer takes part
only after four others at four addresses have observed the same address of it: with one bootstrap
server, never. And p2pd does not dial a peer to which it has a relayed connection, so that one must
be closed first.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import CIRCUIT, EntryPoint, place_in
from lowcomm_node.net.control import Control, OpenStream, read_message, send_message
from lowcomm_node.net.relays import MAX_DIAL, is_public_dial
from lowcomm_node.net.targets import Targets
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Shares
from lowcomm_node.system.tasks import Tasks
from lowcomm_protocol.peers.roster import Pauses

PROTOCOL = "/lowcomm/punch/2"
_NO = b"no"
"""The answer of a peer that does not take part."""
MAX_ADDRESSES = 4
DEADLINE = 5.0
"""Seconds for each answer of the other end, and for both to dial."""
SETTLE = 2.0
"""Seconds that the other end's dial may take after ours."""
LOOK_EVERY = 0.05
ATTEMPTS = 3
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 3600.0
"""Seconds before the next attempt after a failure: the first and the longest pause."""
MAX_HEARD = 32
"""Streams on which others may ask us, one per peer; an address or relay has a share of them."""
TAKE_EVERY = 1.0
"""Minimum seconds between accepted requests; limits how often others can make us dial third
parties."""


class Puncher:
    """Both ends of all attempts of this node."""

    def __init__(self, peer_id: str, seen_at: Callable[[], Sequence[str]]) -> None:
        """``seen_at``: addresses at which others may reach us, the most promising first."""
        self._peer_id = peer_id
        self._seen_at = seen_at
        self._pauses = Pauses(0, FIRST_PAUSE, LONGEST_PAUSE)
        """After failed attempts."""
        self._punching: set[str] = set()
        """Peers that we are asking."""
        self._heard: set[str] = set()
        """Peers that are asking us."""
        self._shares = Shares()
        """Of ``_heard``, by address or relay."""
        self._tasks = Tasks()
        self._last_taken = float("-inf")
        self.targets = Targets(dials=ATTEMPTS * MAX_ADDRESSES)
        """Limits the addresses that we dial, so that nobody can aim us at a third party."""

    # the end that asks

    async def improve(self, control: Control, peer_id: str, entries: Sequence[EntryPoint]) -> None:
        """Try to replace relayed connections to a peer by a direct one; ``entries`` lead to it in
        any case. Raises LinkLost if in the end it is not connected at all."""
        is_busy = peer_id in self._punching or not self._pauses.is_due(peer_id, monotonic())
        if is_busy or await _is_direct(control, peer_id) is not False:
            return
        self._punching.add(peer_id)
        try:
            for _ in range(ATTEMPTS):
                if not await self._attempt(control, peer_id, entries):
                    return
                if await _is_direct(control, peer_id):
                    self._pauses.pop(peer_id, None)
                    log.info("hole.punched", peer=peer_id)
                    return
                self._pauses.begin(peer_id, monotonic())
        except LinkLost:
            self._pauses.begin(peer_id, monotonic())
            raise
        finally:
            self._punching.discard(peer_id)
        reason = "a NAT between us lets no connection through: relays are used"
        log.info("hole.failed", peer=peer_id, reason=reason)

    async def _attempt(self, control: Control, peer_id: str, entries: Sequence[EntryPoint]) -> bool:
        """Make one attempt; whether the other end took part."""
        try:
            stream = await control.open_stream(peer_id, PROTOCOL, DEADLINE)
            with stream.socket:
                async with asyncio.timeout(DEADLINE):
                    await _send(stream.socket, self._own_dials())
                    theirs = await _receive(stream.socket)
        except (LinkLost, OSError, TimeoutError) as error:
            log.debug("hole.not_asked", peer=peer_id, reason=str(error))
            # Otherwise every connection to a silent peer would wait for this deadline.
            self._pauses.begin(peer_id, monotonic())
            return False
        if theirs is None:
            return False
        theirs = self.targets.admit(theirs, MAX_ADDRESSES)
        await control.disconnect(peer_id)
        dials = [EntryPoint(peer_id, dial) for dial in theirs]
        # It fails if, for example, the other end has closed the relayed connection meanwhile.
        with suppress(LinkLost):
            await control.connect(peer_id, list(dict.fromkeys([*dials, *entries])), DEADLINE)
        # Our dial has opened our NAT, even if the relay was faster. Now the other end dials.
        if not await _comes_direct(control, peer_id):
            await control.connect(peer_id, entries, DEADLINE)
        return True

    # the end that is asked

    def take(self, control: Control, stream: OpenStream) -> None:
        """Answer another peer's request for an attempt."""
        free, place = MAX_HEARD - len(self._heard), place_in(stream.address)
        if stream.peer_id in self._heard or free <= 0 or not self._shares.has_room(place, free):
            stream.socket.close()
            return
        self._heard.add(stream.peer_id)
        self._shares.take(place)
        task = self._tasks.start(self._take(control, stream, place))
        task.add_done_callback(lambda _: stream.socket.close())

    async def close(self) -> None:
        """Take part no more."""
        await self._tasks.cancel()

    async def _take(self, control: Control, stream: OpenStream, place: str) -> None:
        try:
            with suppress(LinkLost, OSError, TimeoutError):
                async with asyncio.timeout(DEADLINE):
                    theirs = await _receive(stream.socket)
                takes_part = theirs is not None and self._takes_part(stream)
                async with asyncio.timeout(DEADLINE):
                    await _send(stream.socket, self._own_dials() if takes_part else None)
                if takes_part:
                    await self._take_part(control, stream, theirs or [])
        finally:
            self._heard.discard(stream.peer_id)
            self._shares.give_back(place)

    async def _take_part(self, control: Control, stream: OpenStream, theirs: Sequence[str]) -> None:
        peer = stream.peer_id
        async with asyncio.timeout(DEADLINE):
            if await asyncio.get_running_loop().sock_recv(stream.socket, 1):
                return  # only the end is due: it shows that they have our answer
        if not theirs or await _is_direct(control, peer):
            return
        if admitted := self.targets.admit(theirs, MAX_ADDRESSES):
            await control.disconnect(peer)  # p2pd makes no other connection while there is one
            await control.connect(peer, [EntryPoint(peer, dial) for dial in admitted], DEADLINE)

    def _takes_part(self, stream: OpenStream) -> bool:
        """Whether to take part. If two peers ask each other, the one with the smaller peer id goes
        on."""
        now = monotonic()
        crosses = stream.peer_id in self._punching and self._peer_id < stream.peer_id
        # Only relayed connections need a better one.
        is_relayed = stream.address.endswith(CIRCUIT)
        if crosses or now < self._last_taken + TAKE_EVERY or not is_relayed:
            return False
        self._last_taken = now
        return True

    def _own_dials(self) -> list[str]:
        return [dial for dial in self._seen_at() if is_public_dial(dial)][:MAX_ADDRESSES]


async def _is_direct(control: Control, peer_id: str) -> bool | None:
    """Whether there is a connection without a relay; None: there is no connection."""
    addresses = [one.address for one in await control.connections() if one.peer_id == peer_id]
    return any(not address.endswith(CIRCUIT) for address in addresses) if addresses else None


async def _comes_direct(control: Control, peer_id: str) -> bool:
    """Whether a connection without a relay exists or comes within SETTLE."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE):
            # p2pd announces no new connections.
            while not await _is_direct(control, peer_id):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY)
            return True
    return False


async def _send(stream: socket.socket, dials: Sequence[str] | None) -> None:
    """Send our addresses; None: we don't take part. Raises LinkLost."""
    await send_message(stream, _NO if dials is None else "\n".join(dials).encode())


async def _receive(stream: socket.socket) -> list[str] | None:
    """Their addresses; None: they don't take part. Raises LinkLost."""
    message = await read_message(stream, MAX_ADDRESSES * (MAX_DIAL + 1))
    if message == _NO:
        return None
    dials = message.decode("ascii", "replace").split()
    if len(dials) > MAX_ADDRESSES or not all(map(is_public_dial, dials)):
        raise LinkLost(f"sent more than {MAX_ADDRESSES} addresses, or some that can't be dialed")
    return dials
