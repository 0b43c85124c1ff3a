"""What must hold while anybody stores records of peers that are not there: exchanges go on, newcomers get in."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from dht import Dht, free_port
from kit import Node, Swarm
from sybils import silent_door, store_sybils

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
STEPS = 400
"""Swarm steps in which exchanges are counted."""


def counted(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Swarm step of each node, and how many exchanges it has completed."""

    def of(status: dict[str, Any]) -> tuple[int, int]:
        return status["trainer"]["swarm_step"] or 0, status["exchanges"]["completed"]

    return [of(node.until(bool, "an answer")) for node in nodes]


def exchanges(nodes: Sequence[Node], steps: int = STEPS) -> float:
    """Exchanges that a node completes in ``steps`` swarm steps, on the mean of all."""
    before = counted(nodes)
    for node, (step, _) in zip(nodes, before, strict=True):
        node.until(lambda s, step=step: s["trainer"]["swarm_step"] >= step + steps, f"{steps} steps more", 120)
    after = counted(nodes)
    rates = [steps * (c1 - c0) / (s1 - s0) for (s0, c0), (s1, c1) in zip(before, after, strict=True)]
    return sum(rates) / len(rates)


@pytest.mark.parametrize(
    ("method", "count", "peers"),
    [("noloco", 330, 3), *(pytest.param(one, 330, 4, marks=pytest.mark.soak) for one in ("noloco", "diloco"))],
)
async def test_records_of_peers_that_are_dead_or_silent_stop_no_exchange(
    swarm: Swarm, dht: Dht, method: str, count: int, peers: int
) -> None:
    def begin() -> tuple[list[Node], float]:
        swarm.bootstrap("--run", str(swarm.spec(method, start_peers=peers)))
        nodes = [swarm.node(name) for name in "abcdef"[:peers]]
        for node in nodes:
            node.until_completed(2)
        return nodes, exchanges(nodes)

    nodes, before = await asyncio.to_thread(begin)
    run_id = (await asyncio.to_thread(nodes[0].until, bool, "an answer"))["run"]["run_id"]
    client = await dht.peer([swarm.address])
    with silent_door() as silent:
        doors = [f"127.0.0.1:{silent if number % 2 else free_port()}" for number in range(count)]
        assert await store_sybils(client, run_id, doors) >= 0.9 * count
        after = await asyncio.to_thread(exchanges, nodes)
        print(f"{method}: {before:.1f} exchanges of a node in {STEPS} steps before, {after:.1f} with {count} records")
        assert after >= 0.9 * before
        late = swarm.node("late")
        await asyncio.to_thread(late.until_completed, 3)
