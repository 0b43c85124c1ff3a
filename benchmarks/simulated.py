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

Writes each result to benchmarks/results/simulated.json, skips those that are there, and makes
simulated.md of all.
"""

import gc
import resource
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import kit

from helpers.quadratic import Swarm, spec_of
from lowcomm_node.simulation.network import Conditions
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


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "hour-pairs": partial(swarm, 1000, 3600.0, views=True),
    "hour-pairs-knowing-all": partial(swarm, 1000, 3600.0),
    "hour-groups-knowing-all": partial(swarm, 1000, 3600.0, "diloco", 4),
    "churn-pairs": partial(swarm, 1000, 3600.0, views=True, churn=0.5, homes=True),
    **{f"rounds-{peers}": partial(swarm, peers, 450.0, views=True) for peers in SIZES},
    **{f"rounds-{peers}-knowing-all": partial(swarm, peers, 450.0) for peers in (1000, 10_000)},
}
COLUMNS = {
    "peers": "peers",
    "virtual_seconds": "virtual s",
    "met_in_round": "find a partner in a round",
    "calls_a_pair": "calls a pair",
    "spread": "spread of weights",
    "spread_alone": "without exchanges",
    "cpu_seconds": "CPU s",
}


def report(results: dict[str, dict[str, Any]]) -> str:
    """All results as a table."""
    rows = [(key, *(_text(one[name]) for name in COLUMNS)) for key, one in results.items()]
    return kit.table(("", *COLUMNS.values()), rows) + "\n"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if 0 < value < 0.1 else f"{value:g}"


def main() -> int:
    """Measure what is missing."""
    kit.measure_missing(kit.parser(__doc__), JOBS, OUT)
    OUT.with_suffix(".md").write_text(report(kit.read(OUT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
