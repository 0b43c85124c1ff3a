"""Free identities: signed records of peers that are not there, stored in the real DHT by one
client."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time

from helpers.dht_peers import Peer
from lowcomm_node.dht.keys import peers_key
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record

AT_ONCE = 8
"""Records that are on their way to the DHT together."""


@contextmanager
def silent_door(host: str = "127.0.0.1") -> Iterator[int]:
    """A port where connections are accepted and nothing is ever said."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen(1024)
        yield listening.getsockname()[1]


async def store_sybils(
    peer: Peer,
    run_id: str,
    addresses: Sequence[str],
    life: float = 300.0,
    entry_points: bool = False,
) -> int:
    """Publish one training peer for each address (``host:port``), of an identity of its own; how
    many were taken.

    ``entry_points``: whether they say to be there as peers of the DHT, too.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def store(number: int, address: str) -> bool:
        identity, now = Identity(b"sybil" + number.to_bytes(27)), time()
        info = PeerInfo(
            peer_id=identity.peer_id,
            run_id=run_id,
            phase=Phase.TRAINING,
            issued=now,
            expires=now + life,
            addresses=(address,),
            certificate=bytes(32),
            swarm_step=0,
            entry_points=(multiaddress(address, identity.peer_id),) if entry_points else (),
        )
        async with slots:
            return await peer.publish(
                peers_key(run_id), identity.peer_id, write_record(info, identity), life
            )

    taken = await asyncio.gather(
        *(store(number, address) for number, address in enumerate(addresses))
    )
    return sum(taken)


def multiaddress(address: str, peer_id: str) -> str:
    """Of a peer of the DHT at ``host:port``."""
    host, _, port = address.rpartition(":")
    return f"/ip4/{host}/tcp/{port}/p2p/{peer_id}"
