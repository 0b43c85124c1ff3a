"""A peer that can't be dialed exchanges all the same, and ``peers`` tells by which route."""

from typing import Any

import pytest

from helpers.processes import Node, Swarm, until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def told(node: Node, other: str) -> dict[str, Any]:
    """What a node tells of another; nothing before it knows it."""
    return next((peer for peer in node.peers() if peer["peer_id"] == other), {})


def id_of(node: Node) -> str:
    return node.until(bool, "answering")["peer_id"]


@pytest.mark.soak  # a minute; tunnels between homes are in tests/net/test_holes.py
def test_a_node_whose_address_is_dead_exchanges_through_tunnels_and_says_so(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec("noloco")))
    a, b = swarm.node("a"), swarm.node("b", "--announce", "127.0.0.1:1")
    until_exchanged((a, b), 3)
    to_b = until(
        lambda: (peer := told(a, id_of(b))).get("round_trip") and peer,
        60,
        "a has measured its route to b",
    )
    assert to_b["route"] == "punched", to_b
    assert "direct: " not in to_b["route"] and "can't be reached" in to_b["route_reason"]
    assert to_b["completed"] >= 3
    # The other way round the address is good. Which of the two calls is drawn by lot, so this may
    # take a while.
    to_a = until(
        lambda: (peer := told(b, id_of(a))).get("round_trip") and peer,
        60,
        "b has measured its route to a",
    )
    assert to_a["route"].startswith("direct 127.0.0.1:"), to_a
    assert to_a["route_reason"] is None
    rates = [peer[rate] for peer in (to_a, to_b) for rate in ("rate_up", "rate_down")]
    assert any(rates), "bytes a second of the last contents"
