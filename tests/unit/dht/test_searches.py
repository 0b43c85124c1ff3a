"""What must hold for requests to the DHT: however many peers there are, few are asked, and few
bytes travel; yet nobody who is there is missed."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.clock import Clock
from lowcomm_node.dht.keys import Provenances, pack
from lowcomm_node.dht.records import (
    ASKED,
    FOUND_FOR,
    LOOKS,
    REPLICAS,
    SEARCHED,
    DhtRecords,
)
from lowcomm_node.net.hivemind_parts import (
    DHTID,
    DHTLocalStorage,
    DHTNode,
    MSGPackSerializer,
)
from lowcomm_node.swarm.membership import REMOVALS_EVERY, look_pause
from lowcomm_node.swarm.rejoin import READ_BACK

KEY, FAR = "peers", 2e9
PLACE = DHTID.generate(source=KEY)
EACH_KEEPER = -(-REPLICAS // ASKED)
"""Looks in which each keeper is asked."""
NAME, RECORD = 58, 450
"""Bytes of a peer's place and id in an answer, and of a record."""


class Network:
    """Peers that know each other, around one whose protocol this is; it counts their calls."""

    bucket_size = SEARCHED
    serializer, record_validator = MSGPackSerializer, None

    def __init__(self, peers: int) -> None:
        self.near = {DHTID.generate(source=str(number)): str(number) for number in range(peers)}
        self.met = dict(self.near)
        self.kept = {peer: DHTLocalStorage() for peer in self.near.values()}
        self.storage, self.cache = DHTLocalStorage(), DHTLocalStorage()
        self.routing_table = SimpleNamespace(get_nearest_neighbors=self.nearest)
        self.silent = set[str]()
        self.named, self.asked, self.stored = Counter[str](), Counter[str](), Counter[str]()
        self.bytes = 0

    def nearest(self, place: DHTID, k: int, exclude: Any = None) -> list[tuple[DHTID, str]]:
        return sorted(self.met.items(), key=lambda one: place.xor_distance(one[0]))[:k]

    def keepers(self) -> set[str]:
        return {peer for _, peer in self.nearest(PLACE, REPLICAS)}

    def keep(self, subkey: str, value: bytes = b"record", keepers: Any = None) -> None:
        for peer in keepers or self.keepers():
            self.kept[peer].store_subkey(PLACE, subkey, stored(value), FAR)

    async def call_find(self, peer: str, keys: list[DHTID]) -> Any:
        [place] = keys
        (self.asked if place == PLACE else self.named)[peer] += 1
        if peer in self.silent:
            return None
        found: Any = self.kept[peer].get(place)
        records = len(list(found.value.items())) if found is not None else 0
        near = dict(self.nearest(place, self.bucket_size))
        self.bytes += NAME * len(near) + RECORD * records
        return {place: (found, near)}

    async def call_store(
        self, peer: str, keys: Any, values: Any, expires: Any, subkeys: Any
    ) -> list[bool] | None:
        if peer in self.silent:
            return None
        self.stored[peer] += 1
        self.bytes += RECORD
        return [self.kept[peer].store_subkey(keys[0], subkeys[0], values[0], expires[0])]


class Banned(set[str]):
    """A blacklist."""

    def register_success(self, peer: str) -> None:
        """Ignored."""

    def register_failure(self, peer: str) -> None:
        self.add(peer)


class Trusting(Provenances):
    """Believes everything; the order is the length of a value."""

    def check(self, stored: bytes, subkey: str, now: float) -> Any:
        return SimpleNamespace(key=KEY, order=len(stored))


def stored(value: bytes) -> bytes:
    return MSGPackSerializer.dumps(pack(KEY, value))


def node_of(network: Network) -> Any:
    node: Any = DHTNode(_initialized_with_create=True)
    node.node_id, node.protocol, node.peer_id = DHTID.generate(source="me"), network, "me"
    node.num_replicas, node.num_workers, node.chunk_size = REPLICAS, 4, 16
    node.blacklist = Banned()
    return node


def searching(peers: int) -> tuple[Network, DhtRecords, Clock]:
    """A network of so many others, and the requests of the one in its middle."""
    network, clock = Network(peers), Clock()
    records = DhtRecords(Trusting(), clock=clock)
    records.node = node_of(network)
    return network, records, clock


@pytest.mark.parametrize("peers", [3, 8, 16, 40])
async def test_a_search_asks_the_nearest_peers_alone(peers: int) -> None:
    network, records, _ = searching(peers)
    assert await records.lookup(KEY) == {}
    nearest = {peer for _, peer in network.nearest(PLACE, SEARCHED)}
    assert set(network.named) == nearest and network.named.total() == min(peers, SEARCHED)
    assert set(network.asked) <= network.keepers() and network.asked.total() <= REPLICAS


@pytest.mark.parametrize("honest", range(REPLICAS - 1))
async def test_one_honest_keeper_is_heard_within_few_looks_whatever_the_others_hide(
    honest: int,
) -> None:
    network, records, _ = searching(16)
    await records.lookup(KEY)
    keeper = list(network.asked)[honest]
    network.keep("hidden", keepers=[keeper])
    network.keep("held back", b"older", keepers=network.keepers() - {keeper})
    network.keep("held back", b"the newest", keepers=[keeper])
    looks = [await records.lookup(KEY) for _ in range(4 * LOOKS)]
    for first in range(len(looks) - EACH_KEEPER + 1):
        some = looks[first : first + EACH_KEEPER]
        assert any("hidden" in one for one in some), first
        assert any(one.get("held back") == b"the newest" for one in some), first


async def test_a_look_of_few_asks_two_keepers_and_each_of_them_some_time() -> None:
    network, records, clock = searching(40)
    await records.lookup(KEY)
    all_, heard = set(network.asked), set[str]()
    network.asked.clear()
    for _ in range(100):
        clock.now += FOUND_FOR  # so that each look searches
        await records.lookup(KEY, few=True)
        assert network.asked.total() == ASKED
        heard |= set(network.asked)
        network.asked.clear()
    assert heard == all_ and len(all_) > ASKED


@pytest.mark.parametrize("peers", [8, 40])
async def test_a_record_goes_to_its_replicas_and_the_next_one_there_without_a_search(
    peers: int,
) -> None:
    network, records, clock = searching(peers)
    for _ in range(3):
        assert await records.publish(KEY, "me", b"record", 30.0)
        assert network.named.total() <= SEARCHED
        ours = network.storage.get(PLACE) is not None
        assert network.stored.total() + ours == REPLICAS
        network.stored.clear()
    clock.now += FOUND_FOR
    network.named.clear()
    assert await records.publish(KEY, "me", b"record", 30.0)
    assert network.named.total() == min(peers, SEARCHED)


async def minutes(peers: int, count: int) -> Network:
    """What a node of a swarm, with a bootstrap server, does for some minutes."""
    network, records, clock = searching(peers)
    for number in range(peers - 1):
        network.keep(f"peer-{number}")
    pause = look_pause(2.0, 30.0, peers)
    due = {"look": 0.0, "publish": 0.0, "held": 0.0, "removals": 0.0}
    while clock.now < 60 * count:
        task = min(due, key=lambda name: due[name])
        clock.now = due[task]
        if task == "look":
            await records.lookup(KEY)
        elif task == "publish":
            await records.publish(KEY, "me", b"ours", 30.0)
        elif task == "held":
            await records.held_by_others(KEY, "me", newest=False)
        else:
            await records.lookup("removals")
            await records.lookup("amendments")
        due[task] += {
            "look": pause, "publish": 10.0, "held": READ_BACK, "removals": REMOVALS_EVERY
        }[task]  # fmt: skip
    return network


async def test_a_minute_costs_no_more_calls_and_bytes_in_a_swarm_of_sixteen_than_of_four() -> None:
    told = {peers: await minutes(peers, 10) for peers in (4, 8, 16)}
    sizes = {peers: network.bytes for peers, network in told.items()}
    calls = {
        peers: (network.asked + network.named + network.stored).total()
        for peers, network in told.items()
    }
    assert max(sizes.values()) < 1.15 * sizes[4], sizes
    assert max(calls.values()) < 1.15 * calls[4], calls
