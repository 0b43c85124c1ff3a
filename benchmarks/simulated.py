"""Thousands of simulated peers that know each other by views: what the production engine decides,
and what it costs.

    python benchmarks/simulated.py [--only KEY ...]

The peers run the production machine over the virtual network of the simulator; their model is
quadratic, so training costs nothing (tests/helpers/quadratic.py, gossip.py, volunteers.py). All
take a step a second and exchange each 50, all at once, which is the hardest case for pairs.

    hour      an hour of 1,000 peers, in pairs and in groups of 4 (these know all peers)
    churn     the same in pairs, where half come and go in an hour, over home lines and NATs
    rounds    pairs of 10 to 10,000 peers over eight rounds: how many find a partner within one,
              calls a pair, and the spread of weights beside peers that know all
    views     links of 1,000 and 10,000 peers: their spread, what is left where half die at once,
              and a newcomer after 60 s

Writes each result to benchmarks/results/simulated.json, skips those that are there, and makes
simulated.md of all.
"""

import gc
import resource
import sys
from collections.abc import Callable
from functools import partial
from statistics import mean, pstdev
from time import process_time
from typing import Any

import kit

from helpers.gossip import Gossip, Member, in_degrees, largest_component
from helpers.quadratic import Swarm, spec_of
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_protocol.exchange.events import Outcome

OUT = kit.RESULTS / "simulated.json"
INTERVAL, LOSS = 50, 0.01
"""Steps between exchanges, and the probability that a stream breaks."""
SIZES = 10, 32, 100, 320, 1000, 3200, 10_000


def swarm(
    peers: int, seconds: float, method: str = "noloco", group: int = 2, **how: Any
) -> dict[str, Any]:
    """One run."""
    before = process_time()
    spec = spec_of(method, interval=INTERVAL, group=group)
    one = Swarm(spec, peers, seconds, Conditions(loss=LOSS), **how)
    gc.freeze()
    one.run()
    applied, rounds = one.outcomes[Outcome.APPLIED], seconds // INTERVAL - 1
    met = {(peer, at // INTERVAL) for at, peer, end, _ in one.story if end is Outcome.APPLIED}
    return {
        "peers": peers,
        "virtual_seconds": seconds,
        "cpu_seconds": round(process_time() - before, 1),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "outcomes": {outcome.value: one.outcomes[outcome] for outcome in Outcome},
        "met_in_round": round(len(met) / (peers * rounds), 4),
        "calls_a_pair": round(2 * one.effects["Dial"] / applied, 2) if group == 2 else None,
        "calls_to_gossip": one.gossip.calls if one.gossip else None,
        "held_against_peers": one.effects["Penalty"],
        "spread": one.spread,
        "spread_alone": one.spread_alone,
    }


def views(peers: int) -> dict[str, Any]:
    """Links, and what becomes of them."""
    before = process_time()
    gossip = Gossip(Network(0, Conditions()), peers)

    def join(number: int) -> Member:
        member = Member(gossip, f"peer-{number}")
        gossip.join(member, [f"10.{number >> 8}.{number & 255}.0/24"])
        return member

    for number in range(peers):
        join(number)
    gc.freeze()
    gossip.run(300.0)
    degrees = in_degrees(gossip.members.values()).values()
    newcomer = join(peers)
    gossip.run(60.0)
    knows = sum(newcomer.name in member.view for member in gossip.members.values())
    result = {
        "peers": peers,
        "in_degree": round(mean(degrees), 1),
        "in_degree_spread": round(pstdev(degrees) / mean(degrees), 3),
        "views_with_newcomer": knows,
        "links_of_newcomer": len(newcomer.view.active),
    }
    for peer in gossip.random.sample(list(gossip.members), peers // 2):
        gossip.remove(peer)
    result["component_of_half"] = largest_component(gossip.members.values())
    for minutes in (1, 2, 4):
        gossip.run(60.0 * max(1, minutes / 2))
        left = gossip.members.values()
        alive = mean(sum(peer in gossip.members for peer in one.view.active) for one in left)
        result[f"living_links_after_{minutes}_minutes"] = round(alive, 1)
    return result | {"cpu_seconds": round(process_time() - before, 1)}


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "hour-pairs": partial(swarm, 1000, 3600.0, views=True),
    "hour-pairs-knowing-all": partial(swarm, 1000, 3600.0),
    "hour-groups-knowing-all": partial(swarm, 1000, 3600.0, "diloco", 4),
    "churn-pairs": partial(swarm, 1000, 3600.0, views=True, churn=0.5, homes=True),
    **{f"rounds-{peers}": partial(swarm, peers, 450.0, views=True) for peers in SIZES},
    **{f"rounds-{peers}-knowing-all": partial(swarm, peers, 450.0) for peers in (1000, 10_000)},
    **{f"views-{peers}": partial(views, peers) for peers in (1000, 10_000)},
}


SWARM = {
    "peers": "peers",
    "virtual_seconds": "virtual s",
    "met_in_round": "find a partner in a round",
    "calls_a_pair": "calls a pair",
    "spread": "spread of weights",
    "spread_alone": "without exchanges",
    "cpu_seconds": "CPU s",
}
VIEWS = {
    "peers": "peers",
    "in_degree": "links",
    "in_degree_spread": "their spread",
    "links_of_newcomer": "a newcomer's after 60 s",
    "component_of_half": "of a half that stays, connected",
    "living_links_after_2_minutes": "its links after 2 minutes",
    "cpu_seconds": "CPU s",
}


def report(results: dict[str, dict[str, Any]]) -> str:
    """All results as tables."""
    tables = list[str]()
    for columns, own in ((SWARM, "spread"), (VIEWS, "in_degree")):
        kept = [(key, one) for key, one in results.items() if own in one]
        rows = [(key, *(_text(one[name]) for name in columns)) for key, one in kept]
        tables.append(kit.table(("", *columns.values()), rows))
    return "\n\n".join(tables) + "\n"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if 0 < value < 0.1 else f"{value:g}"


def main() -> int:
    """Measure what is missing."""
    kit.measure_missing(kit.parser(__doc__), JOBS, OUT)
    OUT.with_suffix(".md").write_text(report(kit.read(OUT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
