"""Who reaches whom: two real nodes and a public bootstrap server in network namespaces, behind NATs
and firewalls. Needs root.

    python benchmarks/reach.py [--exchanges 30] [--only port-restricted/symmetric ...]

Each home has a line of 100 Mbit/s and 10 ms each way. For every case: the route that each node
reports to the other, seconds until both have applied an exchange (from the start of the nodes'
processes, of which imports take most, and from when both train), the rate at which contents came
(median of both nodes and all exchanges), and what became of the exchanges. Exchanges carry 3.4 MB
each way (a model of 0.85 million parameters in full precision).

Writes benchmarks/results/reach.json, and prints a table.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from statistics import median
from time import time
from typing import Any

import kit
from laboratory import Host, Lab
from nat import Block, Nat
from residents import START, Resident, Swarm
from shaping import Link

from helpers.waiting import until

LINE = Link(rate=100e6, delay=0.01)
SPEC = """
[run]
name = "reach"
steps = {steps}
start_peers = {start_peers}
[model]
layers = 4
width = 128
heads = 4
feed_forward = 512
context = 32
[train]
batch = 2
evaluate_every = {evaluate_every}
[sync]
method = "{method}"
"""
PATIENCE = 240.0
"""Seconds for all exchanges of a case."""


@dataclass(frozen=True)
class Case:
    """Where the two nodes live."""

    name: str
    hosts: Callable[[Lab], list[Host]]
    version: int = 4


def pair(one: Nat, other: Nat) -> Case:
    """Two homes behind NATs."""

    def hosts(lab: Lab) -> list[Host]:
        return [lab.home("alice", nat=one, link=LINE), lab.home("bob", nat=other, link=LINE)]

    return Case(f"{one}/{other}", hosts)


def blocked(protocol: str) -> Case:
    """Two homes, one of which lets only TCP or only UDP through."""

    def hosts(lab: Lab) -> list[Host]:
        homes = pair(Nat.PORT_RESTRICTED, Nat.PORT_RESTRICTED).hosts(lab)
        assert homes[0].router is not None
        homes[0].router.block(Block(protocol))
        return homes

    return Case(f"{protocol} blocked", hosts)


CASES = {
    case.name: case
    for case in (
        *(pair(one, other) for one, other in combinations_with_replacement(Nat, 2)),
        Case(
            "public/port-restricted",
            lambda lab: [lab.public("carol", link=LINE), lab.home("bob", link=LINE)],
        ),
        Case(
            "IPv6 only, firewalls",
            lambda lab: [
                lab.home("alice", ip=(6,), link=LINE),
                lab.home("bob", ip=(6,), link=LINE),
            ],
            6,
        ),
        blocked("udp"),
        blocked("tcp"),
    )
}


def main() -> None:
    """Run the cases, print them, and write them down."""
    parser = kit.parser(__doc__)
    parser.add_argument(
        "--exchanges", type=int, default=30, help="that both nodes complete in each case"
    )
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    path = kit.RESULTS / "reach.json"
    known = kit.read(path).get("cases", {}) if len(arguments.only) < len(CASES) else {}
    for name in arguments.only:
        try:
            known[name] = measure(CASES[name], arguments.exchanges)
        except AssertionError as error:  # something did not happen in time
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        print(*row(name, known[name]), flush=True)
        cases = {name: known[name] for name in CASES if name in known}
        kit.write(path, {"machine": kit.machine(), "cases": cases})
    print(kit.table(HEAD, (row(*case) for case in known.items())))


COUNTS = "applied", "refused", "implausible", "lost", "load"
HEAD = "nodes", "route", "s to first exchange", "of these both training", "Mbit/s", *COUNTS


def row(name: str, case: dict[str, Any]) -> list[str]:
    """A line of the table."""
    rate = f"{case['rate'] * 8 / 1e6:.0f}" if case["rate"] else "-"
    route = " / ".join(dict.fromkeys(str(one) for one in case["routes"]))
    counts = (str(case[what]) for what in COUNTS)
    return [name, route, f"{case['first']:.0f}", f"{case['first_training']:.1f}", rate, *counts]


def measure(case: Case, exchanges: int) -> dict[str, Any]:
    """Start a swarm of two, and see what becomes of its exchanges; counts are of both nodes
    together."""
    with kit.laboratory() as (lab, folder):
        ip = (case.version,)
        swarm = Swarm(folder, SPEC, "noloco")
        swarm.serve(lab.public("server", ip=ip), version=case.version)
        hosts, began = case.hosts(lab), time()
        nodes = [swarm.node(host) for host in hosts]
        rates: dict[tuple[str, int], float] = {}

        def done() -> bool:
            for node in nodes:
                for number, rate in rates_of(node):
                    rates.setdefault((node.host.name, number), rate)
            return min(len(applied(node)) for node in nodes) >= exchanges

        # All are asked: one that has ended is told at once.
        first = lambda: min(len(applied(node)) for node in nodes)  # noqa: E731
        until(first, START + 60, f"{case.name}: a first exchange")
        until(done, PATIENCE, f"{case.name}: {exchanges} exchanges")
        return told(nodes, began) | {"rate": median(rates.values()) if rates else None}


def told(nodes: list[Resident], began: float) -> dict[str, Any]:
    """What the nodes say of their exchanges."""
    first = max(applied(node)[0]["time"] for node in nodes)
    training = max(
        event["time"]
        for node in nodes
        for event in node.events("phase")
        if event["phase"] == "training" and isinstance(event["time"], float)
    )
    exchanges = [entry for node in nodes for entry in node.exchanges()]
    reasons = Counter(entry["reason"] for entry in exchanges if entry["outcome"] == "failed")
    implausible = sum(count for reason, count in reasons.items() if "plausible" in reason)
    return {
        "routes": [node.route() for node in nodes],
        "first": first - began,
        "first_training": first - training,
        "applied": sum(entry["outcome"] == "applied" for entry in exchanges),
        "refused": sum(node.status()["exchanges"]["refused"] for node in nodes),
        "implausible": implausible,
        "lost": sum(reasons.values()) - implausible,
        "load": round(os.getloadavg()[0]),
        "reasons": dict(Counter(entry["reason"] for entry in exchanges if entry["reason"])),
    }


def applied(node: Resident) -> list[dict[str, Any]]:
    """Its exchanges that were applied, oldest first; none while it does not answer."""
    if node.status() is None:
        return []
    return [entry for entry in node.exchanges() if entry["outcome"] == "applied"]


def rates_of(node: Resident) -> list[tuple[int, float]]:
    """The number of the last exchange with the other, and the bytes a second at which its contents
    came."""
    return [
        (peer["completed"], peer["rate_down"])
        for peer in node.peers()
        if peer["completed"] and peer["rate_down"]
    ]


if __name__ == "__main__":
    main()
