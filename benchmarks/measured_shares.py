"""Writes what `lowcomm-node plan` knows of methods: node/lowcomm_node/planner/measured.json, from
the results of shares.py and convergence.py.

    python benchmarks/measured_shares.py

Of several rows of one method, interval, number of peers and length of the run the one that keeps
most is taken, on the seeds that they have in common: a mean over fewer seeds may be high by luck.
Without any in common, the one with more seeds. Short runs have room for few rare exchanges, so a
row is left out where a longer run kept clearly more with exchanges as rare or rarer. A test keeps
it up to date.
"""

import json
from collections.abc import Iterator
from statistics import mean
from typing import Any

import kit
from convergence import ALLREDUCE, PARTS, SINGLE, gained, measured, under_the_same
from shares import GROUPS as GROUP_ROWS
from shares import LONGER as LONG_ROWS
from shares import PAIRS as PAIR_ROWS

from lowcomm_node.planner.pace import contents
from lowcomm_node.trainer.memory import count_parameters
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import SyncSettings

OUT = kit.ROOT / "node" / "lowcomm_node" / "planner" / "measured.json"
STEPS = 1000
WHOLE = ("gossip", "diloco", "noloco", "lowcomm mod4, every 100")
FROM_METHODS = {"muon": WHOLE, "adamw": (*WHOLE, "lowcomm mod4", "streaming-diloco q2")}
"""Rows of the part ``methods`` that are no worse in another part, by inner optimizer."""
OF_AN_INTERVAL = ("interval", "min_steps", "fragments", "group", "method")
PAIRS = {"fragments": 4, "overlap": 1, "group": 2, "outer": "noloco", "consensus": 1.0}
GROUPS = {"fragments": 4, "overlap": 1, "group": 8, "outer": "nesterov", "consensus": 0.0}
WAS: dict[str, dict[str, Any]] = {
    "lowcomm": PAIRS
    | {"interval": 4, "codec": "mod3", "outer_lr": 1.25, "momentum": 0.0}
    | {"pattern": "strided", "pairing": "hypercube", "merge": "shift", "mix": 0.0},
    "streaming-diloco": GROUPS
    | {"interval": 4, "codec": "q2", "error_feedback": True, "outer_lr": 1.0, "momentum": 0.5}
    | {"pattern": "strided", "merge": "mix", "mix": 0.25},
}
"""Presets as they were when convergence.py measured them: its rows name only what differs."""


def content() -> str:
    """The file."""
    parameters = count_parameters(TransformerSettings())
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in [*of_shares(), *of_convergence()]:
        name = tuple(str(one[key]) for key in ORDER)
        if name not in best or keeps_more(one["shares"], best[name]["shares"]):
            best[name] = one
    kept = [one for _, one in sorted(best.items()) if not any(beats(o, one) for o in best.values())]
    points = [one | {"shares": list(one["shares"].values())} for one in kept]
    lines = ",\n".join(f"  {json.dumps(point)}" for point in points)
    return f'{{\n "parameters": {parameters},\n "points": [\n{lines}\n ]\n}}\n'


ALIKE = ("optimizer", "method", "peers")
ORDER = (*ALIKE, "interval", "steps")
Shares = dict[int, float]
"""Of all-reduce's gain, by seed."""


def keeps_more(one: Shares, other: Shares) -> bool:
    """Whether the first row is to be taken."""
    if both := one.keys() & other.keys():
        ours, theirs = (mean(row[seed] for seed in both) for row in (one, other))
        return (ours, len(one)) > (theirs, len(other))
    return len(one) > len(other)


CLEARLY = 0.05
"""Of all-reduce's gain: the mean of a few seeds is no surer."""


def beats(longer: dict[str, Any], one: dict[str, Any]) -> bool:
    """Whether a longer run is better evidence: it kept clearly more with exchanges that
    were no more frequent."""
    return (
        all(longer[key] == one[key] for key in ALIKE)
        and longer["steps"] > one["steps"]
        and longer["interval"] >= one["interval"]
        and mean(longer["shares"].values()) > mean(one["shares"].values()) + CLEARLY
    )


def of_convergence() -> Iterator[dict[str, Any]]:
    """Points of the parts ``wire`` and ``methods`` of convergence.py."""
    results = kit.read(kit.RESULTS / "convergence.json")
    jobs = [job for part in ("wire", "methods") for job in PARTS[part]()]
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
            seeds = rows[SINGLE].keys() & rows[ALLREDUCE].keys() & row.keys()
            if shares := dict(zip(sorted(seeds), gained(rows, label), strict=True)):
                sync = WAS.get(job.row.method, PRESETS[job.row.method].sync) | job.row.sync
                yield point(
                    job.row.method, sync, optimizer, peers, steps, shares, list(row.values())
                )


def of_shares() -> Iterator[dict[str, Any]]:
    """Points of shares.py: a key names all settings; of all-reduce's rates the best on seed 0."""
    runs: dict[int, dict[tuple[str, int], dict[int, Any]]] = {}
    for key, result in kit.read(kit.RESULTS / "shares.json").items():
        name, peers, steps, seed, settings = key.split("/", 4)
        row = name if name.startswith(BASELINES) else settings
        runs.setdefault(int(steps), {}).setdefault((row, int(peers)), {})[int(seed)] = result
    for steps, of_length in runs.items():
        yield from of_runs(of_length, steps)


def of_runs(runs: dict[tuple[str, int], dict[int, Any]], steps: int) -> Iterator[dict[str, Any]]:
    """Points of runs of one length, by row, peers and seed."""
    alone = next((row for (name, _), row in runs.items() if name == BASELINES[0]), {})
    for (settings, peers), row in runs.items():
        rates = [
            one
            for (name, count), one in runs.items()
            if name.startswith(BASELINES[1]) and count == peers and 0 in one
        ]
        if settings.startswith(BASELINES) or not rates:
            continue
        full = min(rates, key=lambda one: one[0]["loss"])
        shares = {
            seed: (alone[seed]["loss"] - one["loss"]) / (alone[seed]["loss"] - full[seed]["loss"])
            for seed, one in sorted(row.items())
            if seed in alone and seed in full
        }
        method, sync, _ = json.loads(settings)
        if shares and (settings, steps) in PROPOSED:
            yield point(method, sync, "muon", peers, steps, shares, list(row.values()))


PROPOSED = {
    (json.dumps([row.method, row.sync, row.train], sort_keys=True), row.steps)
    for row in (*PAIR_ROWS, *GROUP_ROWS, *LONG_ROWS)
}
"""Settings of shares.py that a run may be given, and the length at which they were measured; others
show what limits these."""
NEWER = {"memory"}
"""Settings that came after convergence.py had measured."""
BASELINES = ("single", "all-reduce")


def point(
    method: str,
    sync: dict[str, Any],
    optimizer: str,
    peers: int,
    steps: int,
    shares: Shares,
    results: list[Any],
) -> dict[str, Any]:
    """One of the file (``planner/plan.py``); ``sync``: all settings that may differ."""
    preset = PRESETS[method].sync
    # A setting that is newer than a row had its default then.
    was = {name: SyncSettings.model_fields[name].default for name in NEWER & preset.keys()} | sync
    changed = {
        name: value
        for name, value in was.items()
        if name not in OF_AN_INTERVAL
        and value != preset.get(name, SyncSettings.model_fields[name].default)
    }
    return {
        "method": method,
        "optimizer": optimizer,
        "peers": peers,
        "interval": sync.get("interval", preset["interval"]),
        "sync": changed,
        "steps": steps,
        "shares": {seed: round(share, 3) for seed, share in shares.items()},
        "resent": round(max(1.0, resent(method, sync, peers, results)), 3),
    }


def resent(method: str, sync: dict[str, Any], peers: int, results: list[Any]) -> float:
    """Bytes that were sent for each that coding takes where no block wraps."""
    spec = RunSpec.model_validate({"run": {"name": "a"}, "sync": {"method": method} | sync})
    values = round(count_parameters(spec.model) / spec.sync.fragments)
    once = contents(spec.sync, values, min(spec.sync.group, peers))
    sent = sum(one["bytes_sent"] for one in results)
    exchanges = sum(one["applied"] for one in results) / peers
    return sent / (exchanges * once)


if __name__ == "__main__":
    kit.parser(__doc__).parse_args()
    OUT.write_text(content())
