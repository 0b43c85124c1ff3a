"""Writes what `lowcomm-node plan` knows of methods: node/lowcomm_node/planner/measured.json, from
the results of convergence.py.

    python benchmarks/measured_shares.py [--check]

A test keeps it up to date. ``--check`` writes nothing, and is 1 if it is stale.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import kit
from convergence_jobs import ALLREDUCE, PARTS, SINGLE, Job
from convergence_report import gained, measured, under_the_same

OUT = kit.ROOT / "node" / "lowcomm_node" / "planner" / "measured.json"
STEPS = 1000
WHOLE = ("gossip", "diloco", "noloco", "lowcomm mod4, every 100")
FROM_METHODS = {"muon": WHOLE, "adamw": (*WHOLE, "lowcomm mod4", "streaming-diloco q2")}
"""Rows of the part ``methods`` that are no worse in another part, by inner optimizer."""
OF_AN_INTERVAL = ("interval", "min_steps")


def main() -> int:
    """Write it; 1 if it was to be checked and is stale."""
    parser = kit.parser(__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = content()
    if arguments.check:
        return int(OUT.read_text() != wanted)
    OUT.write_text(wanted)
    return 0


def content() -> str:
    """The file."""
    from lowcomm_node.trainer.memory import count_parameters
    from lowcomm_protocol.spec.transformer import TransformerSettings

    parameters = count_parameters(TransformerSettings())
    points = sorted(of_convergence(), key=lambda one: [str(one[key]) for key in ORDER])
    lines = ",\n".join(f"  {json.dumps(point)}" for point in points)
    head = f'{{\n "parameters": {parameters},\n "steps": {STEPS},\n "points": [\n'
    return f"{head}{lines}\n ]\n}}\n"


ORDER = ("optimizer", "method", "peers", "interval")


def of_convergence() -> Iterator[dict[str, Any]]:
    """Points of the parts ``wire`` and ``methods`` of convergence.py."""
    results = kit.read(kit.RESULTS / "convergence.json")
    jobs = [job for part in ("wire", "methods") for job in PARTS[part](False)]
    for (part, optimizer, peers, steps), group in under_the_same(jobs).items():
        if steps != STEPS:
            continue
        rows = measured(group, results)
        for label, row in rows.items():
            if label in (SINGLE, ALLREDUCE, "local"):
                continue
            if part == "methods" and label not in FROM_METHODS[optimizer]:
                continue
            job = next(job for job in group if job.label == label)
            shares = gained(rows, label)
            if shares:
                yield point(job, optimizer, peers, shares, list(row.values()))


def point(
    job: Job, optimizer: str, peers: int, shares: list[float], results: list[Any]
) -> dict[str, Any]:
    """One of the file: see ``planner/shares.py``."""
    from lowcomm_protocol.spec.presets import PRESETS

    preset = PRESETS[job.row.method].sync
    interval = job.row.sync.get("interval", preset["interval"])
    sync = {
        name: value
        for name, value in job.row.sync.items()
        if name not in OF_AN_INTERVAL and value != preset.get(name, False)
    }
    return {
        "method": job.row.method,
        "optimizer": optimizer,
        "peers": peers,
        "interval": interval,
        "sync": sync,
        "shares": [round(share, 3) for share in shares],
        "resent": round(max(1.0, resent(job, peers, results)), 3),
    }


def resent(job: Job, peers: int, results: list[Any]) -> float:
    """Bytes that were sent for each that coding takes where no block wraps."""
    from lowcomm_node.planner.volume import contents, fragment_sizes, members_of
    from lowcomm_protocol.spec.run import RunSpec

    sync = {"method": job.row.method} | job.row.sync
    spec = RunSpec.model_validate({"run": {"name": "a"}, "sync": sync})
    sizes, members = fragment_sizes(spec), members_of(spec.sync, peers)
    once = sum(contents(spec.sync, size, members) for size in sizes) / len(sizes)
    sent = sum(one["bytes_sent"] for one in results)
    exchanges = sum(one["applied"] for one in results) / peers
    return sent / (exchanges * once)


if __name__ == "__main__":
    sys.exit(main())
