"""An outage, and an address that changes, in the middle of a run: training never stops, and nobody
restarts anything."""

from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from laboratory import Host, Lab
from residents import Resident, Swarm
from shaping import Link

from helpers.processes import until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.net, pytest.mark.timeout(600)]
START = 120.0
BACK = 120.0
"""Seconds for an exchange after all is well again: p2pd and gRPC wait longer and longer between two
dials."""


def started(folder: Path, hosts: Sequence[Host], version: int = 4) -> list[Resident]:
    """A bootstrap server that relays for nobody on the first host, nodes on the others."""
    swarm = Swarm(folder, method="noloco")
    swarm.serve(hosts[0], "--relay-peers", "0", version=version, deadline=START)
    return [swarm.node(host, "--record-life", "15") for host in hosts[1:]]


def steps(node: Resident) -> int:
    return node.until(lambda s: s["trainer"]["steps"], "steps")["trainer"]["steps"]


def told(node: Resident, other: str) -> dict[str, Any]:
    return next((peer for peer in node.peers() if peer["peer_id"] == other), {})


@pytest.mark.soak  # a minute each
@pytest.mark.parametrize("seconds", [8, 30])
def test_training_outlives_an_outage_and_a_change_of_address(
    lab: Lab, tmp_path: Path, seconds: int
) -> None:
    near = lab.public("near", link=Link())
    a, b = started(tmp_path, [lab.public("server"), near, lab.public("far")])
    until_exchanged((a, b), 1, START)
    a_id = a.until(bool, "answering")["peer_id"]

    before = steps(a)
    near.link.outage(True)
    cut = monotonic()
    a.until(lambda s: s["swarm"]["state"] == "lost", "it sees that it is alone", 60)
    # It says that nobody answers as soon as it knows, and why and when it tries again once an
    # attempt has failed.
    a.until(
        lambda s: "no peer answers" in (s["swarm"]["reason"] or ""), "it says that nobody answers"
    )
    a.until(
        lambda s: "next attempt in" in (s["swarm"]["reason"] or ""), "it says when it tries again"
    )
    until(lambda: monotonic() - cut > seconds, seconds + 60, "the outage lasts")
    during = steps(a)
    assert during > before, "training goes on"
    near.link.outage(False)
    a.until_completed(1, BACK)
    a.until(lambda s: s["swarm"]["state"] == "connected", "in the swarm", BACK)

    new = lab.move(near)
    a.until(
        lambda s: any(new in entry for entry in s["entry_points"]), "it tells its new address", BACK
    )
    assert a.until(bool, "answering")["addresses"][0].startswith(f"{new}:")
    a.until_completed(2, BACK)
    until(
        lambda: (told(b, a_id).get("address") or "").startswith(new),
        BACK,
        "the other knows the new address",
    )
    b.until_completed(1, BACK)
    assert a.child.poll() is None and b.child.poll() is None
    assert steps(a) > during
    assert a.events("addresses.changed")
