"""One liar of four, on real processes: it is refused, it is told why, and the others learn as if it
were not there."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from disguised import DisguisedNode, start
from liar import LIES

from helpers.processes import Node, Swarm, lonely_swarm, until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.swarm, pytest.mark.timeout(600)]

LIAR = Path(__file__).parent / "liar.py"
STEPS = 600
MOST = 5
"""Exchanges with a liar that an honest node may apply."""
REFUSED = tuple(lie for lie in LIES if lie != "flipped")
"""Progress of plausible norm that points elsewhere looks like that of an honest peer in a pair; it
only must not harm."""


def loss_at(node: Node, steps: int) -> float:
    """What a node measured at so many steps of its own."""

    def measured() -> list[dict[str, Any]]:
        return [event for event in node.events("evaluated") if event["steps"] >= steps]

    return float(until(measured, 240, f"held-out loss after {steps} steps")[0]["loss"])


def seen_by(node: Node, peer_id: str) -> dict[str, Any]:
    """What a node tells of a peer; nothing if it does not know it."""
    return next((peer for peer in node.peers() if peer["peer_id"] == peer_id), {})


def until_refused(node: Node, peer_id: str) -> dict[str, Any]:
    """Wait until a node has refused a peer, and says why."""

    def refused() -> dict[str, Any] | None:
        peer = seen_by(node, peer_id)
        return (
            peer if peer and peer["failed"] + peer["refused"] > 0 and peer["last_reason"] else None
        )

    found = until(refused, 120, f"{peer_id[-6:]} refused")
    assert found is not None
    return found


def run_with(swarm: Swarm, lie: str, check: Callable[[list[Node], str], None]) -> None:
    """Three honest nodes and a liar."""
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    honest = [swarm.node(name) for name in "abc"]
    liar = start(DisguisedNode, swarm, "liar", (LIAR, lie))
    peer_id = liar.until(lambda s: s["phase"] == "training", "the liar training")["peer_id"]
    until_exchanged(honest, 1)
    check(honest, peer_id)


@pytest.mark.parametrize(
    "lie",
    [pytest.param(lie, marks=[] if lie == "flipped-huge" else pytest.mark.soak) for lie in REFUSED],
)
def test_a_liar_is_refused_by_all_and_the_others_go_on(swarm: Swarm, lie: str) -> None:
    def check(honest: list[Node], liar: str) -> None:
        for node in honest:
            peer = until_refused(node, liar)
            assert peer["completed"] <= MOST, peer
        until_exchanged(honest, 5)
        for node in honest:
            assert seen_by(node, liar).get("completed", 0) <= MOST, (
                f"a liar ({lie}) is let in again and again"
            )

    run_with(swarm, lie, check)


@pytest.fixture(scope="module")
def loss_without(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of three honest nodes without a liar."""
    with lonely_swarm(tmp_path_factory.mktemp("honest")) as swarm:
        swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
        nodes = [swarm.node(name) for name in "abc"]
        return mean(loss_at(node, STEPS) for node in nodes)


@pytest.mark.soak
@pytest.mark.parametrize("lie", LIES)
def test_honest_nodes_end_within_three_per_cent_of_a_swarm_without_the_liar(
    swarm: Swarm, lie: str, loss_without: float
) -> None:
    def check(honest: list[Node], liar: str) -> None:
        assert mean(loss_at(node, STEPS) for node in honest) <= 1.03 * loss_without

    run_with(swarm, lie, check)
