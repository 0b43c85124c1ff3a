"""Detects another process with our identity: two peers with one key would take each other's
streams.

Asked before we start under an identity that an earlier process may have used or copied, from a p2pd
with a temporary one:

    temporary -> entry points: connect
    temporary -> our peer id:  connect by libp2p's routing; success means that another process has
    it
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from lowcomm_node.errors import RetryLater
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.hivemind_client import (
    DIAL_DEADLINE,
    attach,
    detach,
    dial,
    load_hivemind,
    wait_routing,
)
from lowcomm_node.net.p2pd import P2pDaemon

PREDECESSOR_SECONDS = 8.0
"""For a killed predecessor to disappear."""


async def refuse_duplicate_identity(peer_id: str, entries: Sequence[EntryPoint]) -> None:
    """Raise RetryLater if a peer with our id answers.

    Takes about a second, or as long as importing hivemind.
    """
    probe = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"])
    p2p = None
    try:
        await asyncio.gather(probe.start(), load_hivemind())
        p2p = await attach(probe)
        if not any(await asyncio.gather(*(dial(p2p, entry.peer_id, entry) for entry in entries))):
            return
        await wait_routing(p2p)
        end = monotonic() + PREDECESSOR_SECONDS
        while await dial(p2p, peer_id):
            if monotonic() > end:
                raise RetryLater(
                    f"Another peer of this swarm answers as {peer_id}: end that one, or start this "
                    "one with a --home of its own; a copied home needs its identity.key moved away."
                )
            await asyncio.sleep(0.5)
            # If this times out, the peer stays connected, and the next dial succeeds at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(DIAL_DEADLINE):
                    await p2p._client.disconnect(_peer(peer_id))
    finally:
        if p2p is not None:
            await detach(p2p)
        await probe.stop()


def _peer(peer_id: str) -> object:
    from lowcomm_node.net.hivemind_parts import PeerID

    return PeerID.from_base58(peer_id)
