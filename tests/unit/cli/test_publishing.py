"""What a run's creator signs reaches others, follows on what they have, and stays in the home."""

from pathlib import Path
from time import time

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.cli import creator
from lowcomm_node.cli.creator import publish_amendment, publish_removals, publish_run
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_node.errors import NoPeers
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.paths import Paths
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run

CREATOR = Identity(b"c" * 32)
RUN = sign_run(parse_toml('[run]\nname = "a"\nsteps = 100\nadmission = "invite"\n'), CREATOR)
FIRST, SECOND = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
SERVER = f"/ip4/203.0.113.7/tcp/31337/p2p/{FIRST}"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    """A DHT with one other peer, in which commands open their own."""
    network = MemoryNetwork(time, peers={"somebody"})
    monkeypatch.setattr(creator, "open_discovery", lambda *_, **__: MemoryDiscovery("we", network))
    monkeypatch.setattr(creator, "ASK_EVERY", 0.0)
    return network


async def test_a_run_is_published_and_servers_that_do_not_answer_are_named(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    kept = await publish_run(NodeSettings(home=tmp_path, peers=(SERVER,)), CREATOR, RUN)
    assert {peer: keeping.kept for peer, keeping in kept.items()} == {FIRST: False}
    assert await MemoryDiscovery("other", network).lookup(RUNS_KEY) == {RUN.run_id: RUN.to_bytes()}


async def test_each_removal_adds_to_the_last_and_undo_takes_back(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    settings = NodeSettings(home=tmp_path, peers=(SERVER,))
    await publish_removals(settings, CREATOR, RUN, frozenset({FIRST}), undo=False)
    second = await publish_removals(settings, CREATOR, RUN, frozenset({SECOND}), undo=False)
    assert (second.version, second.ids) == (2, {FIRST, SECOND})
    third = await publish_removals(settings, CREATOR, RUN, frozenset({FIRST}), undo=True)
    assert third.ids == {SECOND}
    assert Paths(tmp_path).removals(RUN.fingerprint).read_bytes() == third.data


async def test_an_amendment_follows_on_those_that_other_homes_have_published(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    here, elsewhere = (
        NodeSettings(home=tmp_path / name, peers=(SERVER,)) for name in ("here", "elsewhere")
    )
    await publish_amendment(elsewhere, CREATOR, RUN, 40, {"run.steps": 200})
    chain = await publish_amendment(here, CREATOR, RUN, None, {"run.description": "longer"})
    assert [(link.number, link.at) for link in chain.links] == [(1, 40), (2, 40)]


async def test_what_nobody_else_holds_is_not_published_but_kept(
    network: MemoryNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.peers.clear()
    monkeypatch.setattr(creator, "PUBLISH_DEADLINE", 0.01)
    with pytest.raises(
        NoPeers, match=r"It is kept in .*removals, and the node of this home will publish it"
    ):
        await publish_removals(
            NodeSettings(home=tmp_path, peers=(SERVER,)),
            CREATOR,
            RUN,
            frozenset({FIRST}),
            undo=False,
        )
    assert Paths(tmp_path).removals(RUN.fingerprint).exists()
    with pytest.raises(NoPeers, match="is the bootstrap server closed to new runs"):
        await publish_run(NodeSettings(home=tmp_path, peers=(SERVER,)), CREATOR, RUN)
