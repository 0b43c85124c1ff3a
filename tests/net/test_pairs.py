"""Two nodes behind NATs of all kinds, and a public bootstrap server: exchanges complete, by the
best route that there is."""

from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from laboratory import Lab
from nat import Nat
from residents import START, Swarm
from shaping import Link

from helpers.processes import until_exchanged
from helpers.waiting import until

# Four processes and minutes for each pair: what CI sees of them is in test_holes.py, without
# training.
pytestmark = [pytest.mark.net, pytest.mark.soak, pytest.mark.timeout(900)]

CONE = {Nat.FULL_CONE, Nat.PORT_RESTRICTED}
HOME = Link(delay=0.01)


def expected(one: Nat, other: Nat) -> str:
    """A hole can be punched where both keep their port, or one of the two lets everybody in."""
    return "punched" if {one, other} <= CONE or Nat.FULL_CONE in (one, other) else "relay"


def exchange(lab: Lab, folder: Path, one: Nat, other: Nat) -> None:
    """Have two homes exchange, until both tell the route that is expected."""
    swarm = Swarm(folder)
    swarm.serve(lab.public("server"))
    nodes = [
        swarm.node(lab.home("alice", nat=one, link=HOME)),
        swarm.node(lab.home("bob", nat=other, link=HOME)),
    ]
    until_exchanged(nodes, 3, START + 60, f"{one} and {other} exchange")
    route = expected(one, other)
    until(
        lambda: [node.route() for node in nodes] == [route] * 2,
        60,
        f"{one} and {other} are {route}",
    )
    until_exchanged(nodes, 3, 60, f"{one} and {other} go on exchanging")


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(Nat, 2)))
def test_nodes_behind_nats_exchange_by_the_best_route(
    lab: Lab, tmp_path: Path, one: Nat, other: Nat
) -> None:
    exchange(lab, tmp_path, one, other)
