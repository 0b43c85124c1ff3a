"""Groups beyond 8: how many exchanges of a swarm without a consensus term are realignments, and
what it learns, in simulation.

    python benchmarks/groups.py            the table, after measuring what is missing
    python benchmarks/groups.py --report   what has been measured

Demo model, Muon, ``streaming-diloco``; held-out loss. Churn: two peers leave, one comes late. The
liar sends ten times its progress, flipped. Results: benchmarks/results/groups.json."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import kit

CACHE = kit.OUT / "data"
OUT = kit.RESULTS / "groups.json"


@dataclass(frozen=True)
class Run:
    """One swarm."""

    peers: int
    group: int
    keep: int = 1
    """Rounds for which slices stay."""
    scene: str = "calm"
    steps: int = 100
    seed: int = 3

    @property
    def key(self) -> str:
        """Its name in the results."""
        return json.dumps(asdict(self), sort_keys=True)


RUNS = [
    Run(16, 16),
    Run(16, 8, keep=8),
    Run(16, 8),
    Run(16, 16, scene="churn"),
    Run(16, 16, scene="liar"),
    Run(12, 12),
]


def members(run: Run) -> list[Any]:
    """Who takes part."""
    from lowcomm_node.simulation import Member

    honest = [Member()] * run.peers
    match run.scene:
        case "churn":
            late, leaving = Member(joins=run.steps / 3), Member(leaves=run.steps / 2)
            return [*honest[3:], leaving, leaving, late]
        case "liar":
            return [*honest[1:], Member(attack="flipped-huge")]
        case _:
            return honest


def measure(run: Run) -> dict[str, Any]:
    """Simulate one."""
    import torch

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import Conditions, Replica
    from lowcomm_node.simulation.swarm import Swarm
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "groups", "seed": run.seed, "steps": run.steps},
            "sync": {"method": "streaming-diloco", "group": run.group, "slice_rounds": run.keep},
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    swarm = Swarm(spec, dataset, members(run), Conditions(), Replica, False, 0)
    swarm.network.run()
    result = swarm.result()
    realigned = sum(peer.realigned for peer in swarm.peers)
    return asdict(result) | {"loss": result.loss, "realigned": realigned}


def main() -> int:
    """Measure what is missing and print the table."""
    parser = kit.parser(__doc__)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    results = kit.read(OUT)
    for run in () if arguments.report else RUNS:
        if run.key not in results:
            results[run.key] = measure(run)
            kit.write(OUT, results, indent=None)
            print(line(run, results[run.key]), file=sys.stderr, flush=True)
    print("| peers | group | slices stay | scene | realigned | loss | MB sent |")
    print("|---|---|---|---|---|---|---|")
    for run in RUNS:
        if one := results.get(run.key):
            print(line(run, one))
    return 0


def line(run: Run, one: dict[str, Any]) -> str:
    """A row of the table."""
    share = one["realigned"] / (one["applied"] + one["failed"])
    return (
        f"| {run.peers} | {run.group} | {run.keep} | {run.scene} | {one['realigned']} of "
        f"{one['applied'] + one['failed']}, {share:.1%} | {one['loss']:.4f} | "
        f"{one['bytes_sent'] / 1e6:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
