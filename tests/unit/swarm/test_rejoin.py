"""What carries out the watchdog's decisions, on a DHT in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.hivemind import Knock
from lowcomm_node.swarm import rejoin
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.swarm.watchdog import AddressesChanged
from lowcomm_protocol.identity import Identity

ADA, BOOT, PEER = (Identity(seed * 32) for seed in (b"a", b"b", b"p"))


def address(peer: Identity) -> str:
    return f"/ip4/203.0.113.7/tcp/1/p2p/{peer.peer_id}"


class Discovery(MemoryDiscovery):
    """Counts what it is asked to do."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(ADA.peer_id, network)
        self.done: list[str] = []
        self.ahead = 0.0

    async def knock(self, doors: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        found = await super().knock(doors)
        return {peer: Knock(knock.reason, self.ahead) for peer, knock in found.items()}

    async def revive(self, restart: bool = False) -> bool:
        self.done += ["restart"] * restart
        return True

    async def find_neighbours(self) -> None:
        self.done.append("find")


class Node:
    """A lifeline, and what it tells."""

    def __init__(self, path: Path) -> None:
        self.network = MemoryNetwork(time)
        self.discovery = Discovery(self.network)
        self.events: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.addresses = ("192.0.2.1",)
        self.held: tuple[str, ...] = ()
        self.published = self.moved = 0
        self.known = RememberedPeers(path, time())
        self.rejoin = Rejoin(
            self.discovery,
            [address(BOOT)],
            self.known,
            self.events.append,
            self.warnings.append,
            withdraw=self.warnings.clear,
        )
        self.rejoin.publish_with(self._publish, None)
        self.rejoin.on_move = self._move

    async def _publish(self) -> None:
        self.published += 1

    def _move(self) -> None:
        self.moved += 1

    def told(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path / "doors.json")
    monkeypatch.setattr(rejoin, "own_addresses", lambda: node.addresses)
    monkeypatch.setattr(rejoin, "held_addresses", lambda: node.held or node.addresses)
    return node


async def test_a_change_of_address_is_told_and_restarts_p2pd(node: Node) -> None:
    node.network.peers.add(BOOT.peer_id)
    await node.rejoin.step()
    node.addresses = ("198.51.100.1",)
    await node.rejoin.step()
    assert node.moved == 1 and "restart" in node.discovery.done
    await node.rejoin.step()
    assert node.published == 2
    assert AddressesChanged(addresses=("198.51.100.1",)) in node.events


async def test_a_clock_that_is_off_is_warned_of_once_until_it_is_right_again(node: Node) -> None:
    async def knock() -> None:
        node.addresses = (*node.addresses, f"192.0.2.{len(node.addresses) + 1}")  # so it is due
        await node.rejoin.step()

    node.network.peers.add(BOOT.peer_id)
    node.discovery.ahead = 20.0
    await knock()
    await knock()
    assert len(node.warnings) == 1 and "20 s behind" in node.warnings[0]
    node.network.peers.clear()
    node.discovery.ahead = 0.0
    await knock()
    assert node.warnings, "nobody has answered"
    node.network.peers.add(BOOT.peer_id)
    await knock()
    assert not node.warnings
    node.discovery.ahead = 20.0
    await knock()
    assert node.warnings


async def test_an_address_of_ipv6_that_is_replaced_ends_no_connection_while_it_is_there(
    node: Node,
) -> None:
    node.network.peers.add(BOOT.peer_id)
    node.held = ("192.0.2.1", "198.51.100.1")
    await node.rejoin.step()
    node.addresses = ("198.51.100.1",)
    await node.rejoin.step()
    assert node.moved == 1 and node.published == 2
    assert "restart" not in node.discovery.done
