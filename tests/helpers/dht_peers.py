"""DHT peers in the process of a test, each with its own p2pd; what they start is always ended."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record

RUN_ID = "ab" * 32
KEY = peers_key(RUN_ID)


def record_of(peer: Identity, life: float = 60.0, step: int = 0) -> bytes:
    """A signed record, issued now."""
    now = time()
    return write_record(
        PeerInfo(
            peer_id=peer.peer_id,
            run_id=RUN_ID,
            phase=Phase.TRAINING,
            issued=now,
            expires=now + life,
            swarm_step=step,
        ),
        peer,
    )


class Peer(Discovery):
    """A DHT peer with a home of its own."""

    def __init__(
        self,
        home: Path,
        peers: Sequence[str] = (),
        port: int = 0,
        listen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.identity = load_or_create_identity(home / "identity.key")
        super().__init__(
            self.identity,
            home / "identity.key",
            DhtSettings(
                listen=listen or [f"/ip4/127.0.0.1/tcp/{port}"],
                initial_peers=peers,
                **options,
            ),
        )

    async def tell(self, life: float = 60.0, step: int = 0) -> bool:
        """Publish a record of ours."""
        return await self.publish(KEY, self.peer_id, record_of(self.identity, life, step), life)

    async def check_connection(self) -> int:
        """Have p2pd run, and knock at the owner's entry points: the DHT peers known then."""
        if await self.revive():
            await self.knock(by_peer([str(entry) for entry in self._entry_points.named]))
        return self.known_peers()

    async def sees(self) -> set[str]:
        """The peers of the run, as the DHT tells."""
        return set(await self.lookup(KEY))


class Dht:
    """Makes peers in folders of their own; ``close`` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers: list[Peer] = []

    async def peer(
        self, *peers: Sequence[str], home: str = "", port: int = 0, **options: Any
    ) -> Peer:
        """A started peer that enters at the addresses of others."""
        addresses = [address for addresses in peers for address in addresses]
        peer = Peer(self._folder / (home or secrets.token_hex(4)), addresses, port, **options)
        self._peers.append(peer)
        await peer.start()
        return peer

    async def close(self) -> None:
        """End everything."""
        for peer in self._peers:
            await peer.close()
