"""What must hold for searches in the DHT: however many peers there are, few of them are asked."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lowcomm_node.dht.keys import Provenances, pack
from lowcomm_node.dht.records import REPLICAS, SEARCHED, Records
from lowcomm_node.libp2p.hivemind_parts import DHTID, DHTLocalStorage, DHTNode, MSGPackSerializer

KEY = "peers"


class Network:
    """Peers that know each other, around one whose protocol this is; it counts their calls."""

    bucket_size = SEARCHED
    serializer, record_validator = MSGPackSerializer, None

    def __init__(self, peers: int) -> None:
        self.near = {DHTID.generate(source=str(number)): str(number) for number in range(peers)}
        self.storage, self.cache = DHTLocalStorage(), DHTLocalStorage()
        self.routing_table = SimpleNamespace(
            get_nearest_neighbors=lambda *_, **__: list(self.near.items())
        )
        self.asked, self.stored = Counter[str](), Counter[str]()

    async def call_find(self, peer: str, keys: list[DHTID]) -> Any:
        self.asked[peer] += 1
        return dict.fromkeys(keys, (None, self.near))

    async def call_store(self, peer: str, keys: list[DHTID], **_: Any) -> list[bool]:
        self.stored[peer] += 1
        return [True] * len(keys)


class Nobody(set[str]):
    """A blacklist."""

    def register_success(self, peer: str) -> None:
        """Ignored."""


def searching(peers: int) -> tuple[Network, Records]:
    """A network of so many others, and the requests of the one in its middle."""
    network, node = Network(peers), DHTNode(_initialized_with_create=True)
    node.node_id, node.protocol, node.peer_id = DHTID.generate(source="me"), network, "me"
    node.num_replicas, node.num_workers, node.chunk_size = REPLICAS, 4, 16
    node.cache_locally = node.cache_on_store = node.reuse_get_requests = False
    node.cache_nearest = node.cache_refresh_before_expiry = 0
    node.blacklist = Nobody()
    return network, Records(lambda: node, Provenances(None))


@pytest.mark.parametrize("peers", [3, 8, 16, 40])
async def test_a_search_asks_the_nearest_peers_alone(peers: int) -> None:
    network, records = searching(peers)
    assert await records.lookup(KEY) == {}
    assert len(network.asked) == min(peers, SEARCHED)
    place = DHTID.generate(source=KEY)
    nearest = sorted(network.near, key=place.xor_distance)[:SEARCHED]
    assert set(network.asked) == {network.near[one] for one in nearest}


@pytest.mark.parametrize("peers", [8, 40])
async def test_a_record_goes_to_its_replicas_after_such_a_search(peers: int) -> None:
    network, records = searching(peers)
    assert await records.publish(KEY, "me", b"record", 30.0)
    assert network.asked.total() <= SEARCHED
    ours = network.storage.get(DHTID.generate(source=KEY)) is not None
    assert network.stored.total() + ours == REPLICAS


async def test_to_see_whether_a_record_has_arrived_one_answer_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, records = searching(16)
    answers = list[str]()
    entry = SimpleNamespace(value=MSGPackSerializer.dumps(pack(KEY, b"ours")))

    async def find_at(_: Records, peer: str, place: Any) -> dict[str, Any]:
        answers.append(peer)
        return {"me": entry} if held else {}

    monkeypatch.setattr(Records, "_find_at", find_at)
    valid = SimpleNamespace(key=KEY, order=1)
    monkeypatch.setattr(records, "_provenances", SimpleNamespace(check=lambda *_: valid))
    for held, newest, asked in ((True, False, 1), (True, True, REPLICAS), (False, False, None)):
        answers.clear()
        found = await records.held_by_others(KEY, "me", newest)
        assert found == (b"ours" if held else None)
        assert len(answers) == (asked or 1 + REPLICAS)
