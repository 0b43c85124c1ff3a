"""Networks that let only some things through: training goes on, exchanges resume, nobody restarts
anything."""

from pathlib import Path

import pytest
from laboratory import Host, Lab
from nat import Block, Nat
from residents import START, Resident, Swarm
from shaping import Link

from helpers.processes import until_exchanged
from helpers.waiting import until

# What CI sees of this is in test_holes.py, without training.
pytestmark = [pytest.mark.net, pytest.mark.soak, pytest.mark.timeout(900)]
HOME = Link(delay=0.01)
RESUMES = 120.0
"""Seconds: libp2p takes half a minute to notice that a connection over QUIC is dead."""


def steps_of(node: Resident) -> int:
    """Inner steps that it has taken."""
    return node.until(lambda status: status["trainer"]["steps"], "steps are taken")["trainer"][
        "steps"
    ]


def test_a_public_node_and_one_at_home_exchange(lab: Lab, tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    swarm.serve(lab.public("server"))
    nodes = [swarm.node(lab.public("carol")), swarm.node(lab.home("alice", link=HOME))]
    until_exchanged(nodes, 3, START + 60)
    until(
        lambda: nodes[1].route() == "direct", 60, "the node at home calls the public one directly"
    )
    until(lambda: nodes[0].route() == "punched", 60, "the public one reaches it without a relay")


def test_nodes_that_have_ipv6_alone_exchange(lab: Lab, tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    swarm.serve(lab.public("server", ip=(6,)), version=6)
    nodes = [swarm.node(lab.home(name, ip=(6,), link=HOME)) for name in ("alice", "bob")]
    until_exchanged(nodes, 3, START + 60)
    until(
        lambda: [node.route() for node in nodes] == ["punched"] * 2,
        60,
        "holes in firewalls are punched",
    )


def two_homes(lab: Lab, folder: Path) -> tuple[Swarm, list[Host]]:
    """A swarm with a public server, and two homes whose NATs let holes be punched."""
    swarm = Swarm(folder)
    swarm.serve(lab.public("server"))
    return swarm, [lab.home(name, nat=Nat.PORT_RESTRICTED, link=HOME) for name in ("alice", "bob")]


def test_where_udp_is_blocked_all_goes_over_tcp(lab: Lab, tmp_path: Path) -> None:
    swarm, homes = two_homes(lab, tmp_path)
    homes[0].router.block(Block("udp"))
    nodes = [swarm.node(host) for host in homes]
    until_exchanged(nodes, 3, START + 60)
    assert homes[0].router.refused(), "QUIC was tried"
    until(lambda: [node.route() for node in nodes] == ["relay"] * 2, 60, "no hole is punched")


def test_udp_that_is_blocked_later_costs_exchanges_and_no_more(lab: Lab, tmp_path: Path) -> None:
    swarm, homes = two_homes(lab, tmp_path)
    nodes = [swarm.node(host) for host in homes]
    until_exchanged(nodes, 3, START + 60)
    until(lambda: [node.route() for node in nodes] == ["punched"] * 2, 60, "a hole is punched")
    homes[0].router.block(Block("udp"))
    steps = [steps_of(node) for node in nodes]
    until(lambda: homes[0].router.refused(), 60, "packets are refused")
    until(
        lambda: all(steps_of(node) > before for node, before in zip(nodes, steps, strict=True)),
        60,
        "training goes on",
    )
    until(lambda: "relay" in [node.route() for node in nodes], RESUMES, "the relay is used instead")
    until_exchanged(nodes, 3, RESUMES, "exchanges resume over TCP")


def test_where_tcp_is_blocked_all_goes_over_udp(lab: Lab, tmp_path: Path) -> None:
    swarm, homes = two_homes(lab, tmp_path)
    homes[0].router.block(Block("tcp"))
    nodes = [swarm.node(host) for host in homes]
    until_exchanged(nodes, 3, START + 60)
    assert homes[0].router.refused(), "TCP was tried"
    until(lambda: [node.route() for node in nodes] == ["punched"] * 2, 60, "a hole is punched")
