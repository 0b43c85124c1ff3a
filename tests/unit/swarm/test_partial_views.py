"""Views of a swarm with more peers than links: real gRPC over TLS between nodes without trainers,
a DHT in memory, and small bounds in place of those of thousands of peers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import time

import pytest

from helpers.parties import Parties, Party, run_of
from helpers.waiting import until_async
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers import roster as roster_module
from lowcomm_protocol.peers import shards, view
from lowcomm_protocol.peers.records import Phase

PEERS = 12
LINKS = 4


@pytest.fixture
async def parties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parties]:
    for name, value in (("ACTIVE", LINKS), ("SLACK", 2), ("PASSIVE", 8)):
        monkeypatch.setattr(view, name, value)
    for name, value in (("LEAST", 2), ("MOST", 6), ("AT_DOOR", 8)):
        monkeypatch.setattr(shards, name, value)
    for name, value in (("REFRESH", 1.0), ("OF_LINK", 0.1), ("RETRY", 1.0), ("PROBE_EVERY", 0.2)):
        monkeypatch.setattr(roster_module, name, value)
    async with AsyncExitStack() as stack:
        yield Parties(run_of("open"), tmp_path, stack)


def links(parties: list[Party]) -> dict[str, set[str]]:
    return {party.peer_id: set(party.roster.view.active) for party in parties}


def reached(edges: dict[str, set[str]]) -> set[str]:
    """Peers that are reached from one of them over links."""
    seen, todo = set[str](), [next(iter(edges))]
    while todo:
        peer = todo.pop()
        if peer not in seen:
            seen.add(peer)
            todo += edges.get(peer, set())
    return seen


def are_whole(parties: list[Party]) -> bool:
    """Whether all have links enough, to peers that are there, in one component."""
    there, edges = {party.peer_id for party in parties}, links(parties)
    return (
        all(len(known) >= LINKS and known <= there for known in edges.values())
        and reached(edges) == there
    )


def knows_steps(party: Party, others: list[Party]) -> bool:
    """Whether a party knows the swarm step of each of its links."""
    steps = {other.peer_id: other.swarm_step for other in others}
    return all(info.swarm_step == steps[info.peer_id] for info in party.roster.alive(time()))


async def wait(condition: Callable[[], bool], what: str) -> None:
    await until_async(condition, 60, what)


async def test_a_swarm_with_few_links_a_peer_is_connected_and_heals_when_half_of_it_dies(
    parties: Parties,
) -> None:
    swarm = [await parties(Identity(number.to_bytes(32))) for number in range(1, PEERS + 1)]
    living = [asyncio.create_task(party.membership.run()) for party in swarm]
    try:
        await asyncio.gather(*(party.membership.announce(Phase.TRAINING) for party in swarm))
        await wait(lambda: are_whole(swarm), "all are linked")
        assert max(map(len, links(swarm).values())) <= LINKS + 2
        for party in swarm:
            party.membership.settings.__dict__["poll"] = 0.5
        await wait(lambda: all(one.membership.about[1] for one in swarm), "records are in shards")
        about = sorted(party.membership.about[0] for party in swarm)
        assert PEERS / 2 < about[PEERS // 2] < 2 * PEERS
        dead, rest = swarm[::2], swarm[1::2]
        for party, task in zip(dead, living[::2], strict=True):
            task.cancel()
            await party.server.close()
        await wait(lambda: are_whole(rest), "the rest is linked again")
        for party in rest:
            party.swarm_step = 7
        await wait(lambda: all(knows_steps(one, rest) for one in rest), "pulses bring all steps")
    finally:
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)
