"""A thousand simulated peers for an hour of virtual time: what the decisions of a peer cost.

    python benchmarks/thousand.py [--peers 1000] [--hours 1.0] [--method noloco|diloco]

The peers run the production machine over the virtual network of the simulator. Their model is
quadratic, so training costs nothing (tests/helpers/quadratic.py). noloco: random pairs; diloco:
groups of 4. It prints the seconds of CPU, how exchanges ended, and how far the weights of peers are
apart, beside those of as many peers that never exchange. Writes out/thousand.json; 1 if those that
exchange are not closer together.
"""

import resource
import sys
from time import process_time
from typing import Any

import kit

from helpers import quadratic
from lowcomm_node.simulation.network import Conditions
from lowcomm_protocol.exchange.events import Outcome

METHODS: dict[str, dict[str, Any]] = {
    "noloco": {"interval": 50},
    "diloco": {"interval": 50, "group": 4},
}
LOSS = 0.01
"""Probability that a stream breaks."""


def main() -> int:
    """Simulate; 1 if exchanges do not keep the peers together."""
    parser = kit.parser(__doc__)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--method", action="append", choices=list(METHODS))
    arguments = parser.parse_args()
    rows = [measure(name, arguments.peers, arguments.hours) for name in arguments.method or METHODS]
    kit.write(kit.OUT / "thousand.json", {"machine": kit.machine(), "runs": rows})
    return int(any(row["spread"] >= row["spread_alone"] for row in rows))


def measure(method: str, peers: int, hours: float) -> dict[str, Any]:
    """One run."""
    before = process_time()
    spec = quadratic.spec_of(method, **METHODS[method])
    swarm = quadratic.Swarm(spec, peers, 3600.0 * hours, Conditions(loss=LOSS)).run()
    row = {
        "method": method,
        "peers": peers,
        "group": spec.sync.group,
        "interval": spec.sync.interval,
        "virtual_seconds": 3600.0 * hours,
        "cpu_seconds": round(process_time() - before, 1),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "network_events": swarm.network.events,
        "applied": swarm.outcomes[Outcome.APPLIED],
        "failed": swarm.outcomes[Outcome.FAILED],
        "no_partner": swarm.outcomes[Outcome.NO_PARTNER],
        "held_against_peers": swarm.told["Penalty"],
        "spread": swarm.spread,
        "spread_alone": swarm.spread_alone,
    }
    print(
        f"{method}: {peers} peers, {3600.0 * hours:.0f} virtual s: {row['cpu_seconds']} s of CPU,"
        f" at most {row['peak_megabytes']} MB so far"
    )
    print(
        f"  exchanges, counted at each end: {row['applied']} applied, {row['failed']} failed,"
        f" {row['no_partner']} without a partner"
    )
    print(f"  spread of the weights: {swarm.spread:.5f}, of peers alone: {swarm.spread_alone:.5f}")
    print(f"  {kit.loaded_machine()}")
    return row


if __name__ == "__main__":
    sys.exit(main())
