"""Starts p2pd as a relay until it keeps its owner's limits; relay.py says why that takes several
starts."""

import asyncio
from collections.abc import Callable

from lowcomm_node.errors import LinkLost, NodeError
from lowcomm_node.net.control import Control
from lowcomm_node.net.multiaddress import EntryPoint
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_node.net.relay import Place, RelayLimits, reserve
from lowcomm_node.system.logs import log

MAX_STARTS = 12
"""About every second start goes well."""
LOOKS = 3
LOOK_AGAIN = 0.2
"""Seconds. The service with our limits may begin a moment after p2pd reports to be ready."""


async def start_as_relay(make: Callable[[], P2pDaemon], limits: RelayLimits) -> P2pDaemon:
    """A running p2pd that keeps to ``limits``; after MAX_STARTS the last one, with a warning.

    Raises what ``P2pDaemon.start`` does.
    """
    probe = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"])
    await probe.start()
    try:
        for attempt in range(1, MAX_STARTS + 1):
            daemon = make()
            await daemon.start()
            try:
                if await _keeps_to(daemon, probe, limits):
                    log.debug("relay.ready", starts=attempt)
                    return daemon
            except BaseException:
                await daemon.stop()
                raise
            if attempt == MAX_STARTS:
                log.warning(
                    "relay.limited",
                    reason="p2pd relays only 128 KiB a circuit; start again to try again",
                )
                return daemon
            await daemon.stop()
    finally:
        await probe.stop()
    raise NodeError("p2pd was not started: MAX_STARTS must be at least 1.")


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
        place = await _place(asker, EntryPoint(me, ""))
        if place is not None and (place.bytes, place.seconds) == (limits.bytes, limits.seconds):
            return True
        await asyncio.sleep(LOOK_AGAIN)
    return False


async def _place(asker: Control, relay: EntryPoint) -> Place | None:
    try:
        return await reserve(asker, relay)
    except LinkLost as error:
        log.debug("relay.no_place", relay=relay.peer_id, reason=str(error))
        return None
