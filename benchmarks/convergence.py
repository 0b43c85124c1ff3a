"""Convergence of every method, in simulation: the protocol's own objects, equal tokens a replica,
held-out text, 3 seeds.

    python benchmarks/convergence.py               all 489 runs, over 4 hours of two cores; resumes
    python benchmarks/convergence.py --only ^wire  those whose key matches a regular expression
    python benchmarks/convergence.py --report      what has been measured so far

``methods``  all methods with the same interval, AdamW and Muon
``wire``     how much of all-reduce's gain over one replica is left at a given share of its bytes
``attacks``  one peer in four lies; or one of two, or one of three of whom another is late
``churn``    peers come late, leave, or are slow
``pairing``  pairs across a hypercube, and drawn again each time

Bytes are payload bytes that one replica sends, blocks that are sent again included. All-reduce
counts as a ring: 2 (n - 1) / n times the fp32 gradient a step. Writes JSON and Markdown to
benchmarks/results."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import kit

# The runs

SEEDS = (0, 1, 2)
SINGLE, ALLREDUCE = "single", "allreduce"


@dataclass(frozen=True)
class Row:
    """A method with its settings, beside those of its preset in `AS_MEASURED`."""

    name: str
    method: str = "local"
    sync: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run to measure."""

    part: str
    row: Row
    optimizer: str
    peers: int
    steps: int
    seed: int
    scene: str = "calm"

    @property
    def key(self) -> str:
        """Its name in the results: all that could change them."""
        settings = json.dumps([self.row.method, self.row.sync, self.row.train], sort_keys=True)
        place = f"{self.part}/{self.scene}/{self.row.name}/{self.optimizer}"
        return f"{place}/{self.peers}/{self.steps}/{self.seed}/{settings}"

    @property
    def label(self) -> str:
        """Its row in a table."""
        return self.row.name if self.scene == "calm" else f"{self.row.name}, {self.scene}"


AS_MEASURED: dict[str, dict[str, Any]] = {
    "lowcomm": {
        "codec": "mod3",
        "interval": 4,
        "outer_lr": 1.25,
        "momentum": 0.0,
        "memory": 0.0,
    },
    "streaming-diloco": {"outer": "nesterov", "memory": 0.0, "merge": "mix", "mix": 0.25},
}
"""Settings of presets that have changed since: rows keep the ones that they were measured with."""
EVERY_20 = {"interval": 20, "fragments": 4, "overlap": 1, "min_steps": 5}
WHOLE_20 = {"interval": 20, "fragments": 1, "overlap": 0, "min_steps": 5}
STREAMING = EVERY_20 | {
    "outer_lr": 0.5,
    "momentum": 0.5,
    "merge": "mix",
    "mix": 0.5,
    "error_feedback": False,
}
LOWCOMM = EVERY_20 | {"outer_lr": 0.7, "momentum": 0.3, "merge": "mix", "mix": 0.5}
METHODS = (
    Row(SINGLE),
    Row("local"),
    Row(ALLREDUCE),
    Row("gossip", "gossip", WHOLE_20),
    Row("diloco", "diloco", WHOLE_20),
    Row("streaming-diloco fp32", "streaming-diloco", STREAMING | {"codec": "fp32"}),
    Row("streaming-diloco e3m0", "streaming-diloco", STREAMING | {"codec": "e3m0"}),
    Row(
        "streaming-diloco q2",
        "streaming-diloco",
        STREAMING | {"codec": "q2", "error_feedback": True},
    ),
    Row("noloco", "noloco", WHOLE_20),
    Row("lowcomm fp32", "lowcomm", LOWCOMM | {"codec": "fp32"}),
    Row("lowcomm mod8", "lowcomm", LOWCOMM | {"codec": "mod8"}),
    Row("lowcomm mod4", "lowcomm", LOWCOMM | {"codec": "mod4"}),
    Row("lowcomm mod3", "lowcomm", LOWCOMM | {"codec": "mod3"}),
)
RARELY = Row(
    "lowcomm mod4, every 100",
    "lowcomm",
    LOWCOMM | {"codec": "mod4", "interval": 100, "min_steps": 25},
)


def methods() -> Iterator[Job]:
    """The matrix of methods; 8 peers over 1000 steps are left to ``wire``, for with them it took
    over 4 hours."""
    for seed, (peers, steps) in product(SEEDS, ((4, 400), (4, 1000), (8, 400))):
        for optimizer in ("adamw", "muon"):
            rows = (*METHODS, RARELY) if steps == 1000 else METHODS
            for row in rows:
                yield Job("methods", row, optimizer, peers, steps, seed)


# Learning rate and momentum of Muon were tuned on seed 0 for each kind of row alike;
# the longer the interval, the further pairs are apart: 4 bits wrap less often than 3, and momentum
# begins to help.
RARE_PAIRS = {"codec": "mod4", "outer_lr": 0.7, "momentum": 0.3}
WIRE = {
    "muon": (
        Row(SINGLE, train={"muon_momentum": 0.8}),
        Row(ALLREDUCE, train={"muon_momentum": 0.8}),
        Row("streaming-diloco, 1/50", "streaming-diloco"),
        Row("lowcomm, 1/50", "lowcomm"),
        Row("streaming-diloco, 1/200", "streaming-diloco", {"interval": 14}),
        Row("lowcomm, 1/200", "lowcomm", RARE_PAIRS | {"interval": 21}),
        Row("streaming-diloco, 1/500", "streaming-diloco", {"interval": 34}),
        Row("lowcomm, 1/500", "lowcomm", RARE_PAIRS | {"interval": 52}),
    ),
    "adamw": (
        Row(SINGLE, train={"learning_rate": 3e-3}),
        Row(ALLREDUCE, train={"learning_rate": 6e-3}),
    ),
}


def wire() -> Iterator[Job]:
    """The presets, and the same with longer intervals, against all-reduce."""
    for peers, seed, optimizer in product((4, 8), SEEDS, ("muon", "adamw")):
        for row in WIRE[optimizer]:
            yield Job("wire", row, optimizer, peers, 1000, seed)


OFTEN = {"codec": "mod4", "interval": 5, "outer_lr": 1.0, "momentum": 0.5, "memory": 0.9}
TOGETHER = OFTEN | {"codec": "q2", "interval": 4, "outer": "noloco", "merge": "shift", "mix": 0.0}
BY_SCENE = (
    Row("streaming-diloco e3m0", "streaming-diloco", STREAMING | {"codec": "e3m0"}),
    Row("lowcomm mod4", "lowcomm", LOWCOMM | {"codec": "mod4"}),
    Row("lowcomm mod4, every 5, memory", "lowcomm", OFTEN),
    Row("streaming-diloco q2, every 4, memory", "streaming-diloco", TOGETHER),
)


def attacks() -> Iterator[Job]:
    """Three honest peers alone, and with a fourth that lies; one with a liar alone, and with one
    and a third that is late."""
    for row, seed in product(BY_SCENE, SEEDS):
        for scene in ("three honest", "nan", "huge", "flipped", "flipped-huge", "stale"):
            yield Job("attacks", row, "adamw", 4, 400, seed, scene)
        yield from outvoted(row, seed)
    for seed in SEEDS:
        yield from outvoted(DILOCO, seed)


HONEST = "honest"
LIES = ("nan", "huge", "flipped", "flipped-huge", "stale", "clock", "shapes", "endless")
OF_TWO, ONE_LATE = " of two", " of three, one late"
DILOCO = Row("diloco", "diloco", WHOLE_20)
"""Shift keeps nothing of the own weights: what a liar does to the slow ones is felt most."""


def outvoted(row: Row, seed: int) -> Iterator[Job]:
    """Scenes in which nobody can outvote a liar, and the same with an honest peer in its place."""
    if row is BY_SCENE[1]:
        for peers in (2, 3):
            yield Job("attacks", Row(SINGLE), "adamw", peers, 400, seed)
    lies = ("huge", "flipped", "stale") if row is DILOCO else LIES
    for lie in (HONEST, *lies):
        yield Job("attacks", row, "adamw", 2, 400, seed, lie + OF_TWO)
        if row.method != "lowcomm":
            yield Job("attacks", row, "adamw", 3, 400, seed, lie + ONE_LATE)


CHURN = {
    "undisturbed": 1.0,
    "one late": 12 / 11,
    "one leaves": 8 / 7,
    "one of half speed": 8 / 7,
    "two of half speed": 4 / 3,
}
"""How much longer a run is than an undisturbed one, so that the swarm trains on the same tokens."""


def churn() -> Iterator[Job]:
    """Four peers, of whom some come late, leave, or are slow."""
    for row, seed, scene in product(BY_SCENE, SEEDS, CHURN):
        yield Job("churn", row, "adamw", 4, 400, seed, scene)


def pairing() -> Iterator[Job]:
    """Pairs across a hypercube, and drawn again each time."""
    for peers, seed, drawn in product((4, 8), SEEDS, ("hypercube", "random")):
        row = Row(f"noloco, {drawn}", "noloco", WHOLE_20 | {"pairing": drawn})
        yield Job("pairing", row, "adamw", peers, 400, seed)


PARTS = {"methods": methods, "wire": wire, "attacks": attacks, "churn": churn, "pairing": pairing}


def members(job: Job) -> list[Any]:
    """Peers that take part in a scene."""
    from lowcomm_node.simulation import Member

    honest, steps = [Member()] * 3, length(job)
    match job.scene:
        case "calm":
            return [Member()] * job.peers
        case "undisturbed":
            return [*honest, Member()]
        case "three honest":
            return honest
        case "one late":
            return [*honest, Member(joins=steps / 3)]
        case "one leaves":
            return [*honest, Member(leaves=steps / 2)]
        case "one of half speed":
            return [*honest, Member(speed=0.5)]
        case "two of half speed":
            return [Member(), Member(), Member(speed=0.5), Member(speed=0.5)]
        case attack if attack.endswith(OF_TWO):
            return [Member(), Member(attack=_lie(attack.removesuffix(OF_TWO)))]
        case attack if attack.endswith(ONE_LATE):
            # Contributions count for 40 s, of which a step takes 25: what is late costs few steps.
            lie = _lie(attack.removesuffix(ONE_LATE))
            return [
                Member(speed=0.04),
                Member(speed=0.04, attack=lie),
                Member(speed=0.04, delay=20.0),
            ]
        case attack:
            return [*honest, Member(attack=attack)]


def _lie(name: str) -> str | None:
    return None if name == HONEST else name


def length(job: Job) -> int:
    """Steps of a run."""
    return round(job.steps * CHURN.get(job.scene, 1.0))


Results = dict[str, Any]
"""What came of each run, by the key of its job."""
Rows = dict[str, dict[int, Any]]
"""The same, by label and seed, of runs that can be compared."""
Circumstances = tuple[str, str, int, int]
"""Part, optimizer, number of peers and length."""


def under_the_same(jobs: Sequence[Job]) -> dict[Circumstances, list[Job]]:
    """Jobs that can be compared with each other."""
    groups: dict[Circumstances, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.part, job.optimizer, job.peers, job.steps), []).append(job)
    return groups


def measured(jobs: Sequence[Job], results: Results) -> Rows:
    """What is there of jobs that can be compared; rows in the order of the jobs, seeds in
    theirs."""
    rows: Rows = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        if job.key in results:
            rows.setdefault(job.label, {})[job.seed] = results[job.key]
    return {job.label: rows[job.label] for job in jobs if job.label in rows}


def together(*rows: dict[int, Any]) -> list[tuple[Any, ...]]:
    """Results of some rows side by side, of the seeds that all of them have."""
    return [
        tuple(row[seed] for row in rows) for seed in rows[0] if all(seed in row for row in rows)
    ]


def seeds_there(label: str, jobs: Sequence[Job], rows: Rows) -> str:
    """How many seeds there are of a row, if not all."""
    there, all_ = len(rows[label]), sum(job.label == label for job in jobs)
    return "" if there == all_ else f" ({there} of {all_} seeds)"


# Tables


def tables(jobs: Sequence[Job], results: Results) -> str:
    """Markdown: a table for each part, optimizer, number of peers and length; figures are means
    over the seeds."""
    groups = under_the_same(jobs).items()
    return "\n\n".join(
        table(title, group, rows) for title, group in groups if (rows := measured(group, results))
    )


HEAD = (
    "method",
    "loss: mean (min to max)",
    "averaged",
    "spread",
    "worst block",
    "MB sent",
    "of all-reduce",
)


def table(title: Circumstances, jobs: Sequence[Job], rows: Rows) -> str:
    """One table."""
    part, optimizer, peers, steps = title
    cells: list[list[str]] = []
    full = [one["bytes_sent"] for one in rows.get(ALLREDUCE, {}).values()]
    for label, row in rows.items():
        results = row.values()
        losses = [loss for one in results for loss in one["losses"]]
        sent = mean(one["bytes_sent"] for one in results)
        ratio = f"1/{mean(full) / sent:.1f}" if full and sent else ""
        loss = mean(one["loss"] for one in results)
        cells.append(
            [
                label + seeds_there(label, jobs, rows),
                f"{loss:.3f} ({min(losses):.3f} to {max(losses):.3f})",
                f"{mean(one['average_loss'] for one in results):.3f}",
                f"{mean(one['spread'] for one in results):.1e}",
                f"{max(one['worst_block'] for one in results):.1e}",
                f"{sent / 1e6:.2f}",
                ratio,
            ]
        )
    heading = f"**{part}, {optimizer}, {peers} peers, {steps} steps**"
    return f"{heading}\n\n{kit.table(HEAD, cells)}"


def shares(jobs: Sequence[Job], results: Results) -> str:
    """How much of all-reduce's gain over a single replica each row of ``wire`` leaves, and for how
    many of its bytes."""
    lines: list[str] = []
    for (part, optimizer, peers, _), group in sorted(under_the_same(jobs).items()):
        rows = measured(group, results) if part == "wire" else {}
        for label in rows:
            gains, bytes_ = gained(rows, label), sent(rows, label)
            if gains and label not in (SINGLE, ALLREDUCE):
                shares = " / ".join(f"{100 * gain:.0f}" for gain in gains)
                lines.append(
                    f"- {optimizer}, {peers} peers, {label}{seeds_there(label, group, rows)}: "
                    f"{100 * mean(gains):.1f} % ({shares}) of all-reduce's gain for "
                    f"1/{1 / mean(bytes_):.0f} of its bytes"
                )
    return "\n".join(lines)


def gained(rows: Rows, label: str) -> list[float]:
    """How much of all-reduce's gain over a single replica a row leaves, seed by seed."""
    return [
        (alone["loss"] - one["loss"]) / (alone["loss"] - full["loss"])
        for alone, full, one in together(
            rows.get(SINGLE, {}), rows.get(ALLREDUCE, {}), rows.get(label, {})
        )
    ]


def sent(rows: Rows, label: str) -> list[float]:
    """Bytes of a row as a share of all-reduce's, seed by seed."""
    return [
        one["bytes_sent"] / full["bytes_sent"]
        for one, full in together(rows.get(label, {}), rows.get(ALLREDUCE, {}))
    ]


# Claims


class Case(NamedTuple):
    """One run that was measured beside the others like it."""

    job: Job
    rows: Rows

    @property
    def result(self) -> Any:
        """What came of it."""
        return self.rows[self.job.label][self.job.seed]

    def beside(self, label: str) -> Any:
        """What came of another row with the same seed; None if it was not measured."""
        return self.rows.get(label, {}).get(self.job.seed)

    def above(self, label: str) -> float | None:
        """Loss above that of another row."""
        other = self.beside(label)
        return self.result["loss"] - other["loss"] if other else None

    @property
    def bytes_share(self) -> float | None:
        """Bytes as a share of all-reduce's."""
        full = self.beside(ALLREDUCE)
        return self.result["bytes_sent"] / full["bytes_sent"] if full else None


Claim = tuple[str, float | None, float]
"""What is claimed, its value (None: what it is compared with was not measured), and the most that
it may be."""


def claim(jobs: Sequence[Job], results: Results) -> int:
    """Print each claim with its worst case over all that was measured; 1 if one does not hold."""
    worst: dict[str, tuple[float, float]] = {}
    for what, value, most in _claims(jobs, results):
        if value is not None and (what not in worst or value > worst[what][0]):
            worst[what] = (value, most)
    print()
    for what, (value, most) in worst.items():
        print(f"{'holds' if value <= most else 'FAILS'}  {what}, at most {most:.4g}: {value:.4g}")
    return int(any(value > most for value, most in worst.values()))


def _claims(jobs: Sequence[Job], results: Results) -> Iterator[Claim]:
    groups = under_the_same(jobs)
    of_all = {circumstances: measured(group, results) for circumstances, group in groups.items()}
    about = {"methods": _of_methods, "attacks": _of_scenes, "churn": _of_scenes}
    for circumstances, group in groups.items():
        for job in group:
            if job.part in about and job.key in results:
                yield from about[job.part](Case(job, of_all[circumstances]))
    for (part, optimizer, peers, steps), rows in of_all.items():
        if part == "methods":
            yield from _of_e3m0(rows)
        if part == "wire" and optimizer == "muon":
            yield from _of_wire(peers, rows, of_all.get((part, "adamw", peers, steps), {}))


def _of_methods(case: Case) -> Iterator[Claim]:
    name, steps, result = case.job.row.name, case.job.steps, case.result
    if case.job.row.method == "local":
        return
    if name.endswith("every 100"):
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 500
        return
    gain = 0.03 if steps == 400 else 0.07
    yield f"{steps} steps, {name} above single: nats", case.above(SINGLE), -gain
    yield f"{steps} steps, {name} above local: nats", case.above("local"), -gain
    yield "averaged weights above replicas: nats", result["average_loss"] - result["loss"], 0.02
    yield f"{name}: weight spread", result["spread"], 6e-3
    if name == "lowcomm mod4":
        yield f"{name} above fp32: nats", case.above("lowcomm fp32"), 0.02
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 100
    if name == "streaming-diloco e3m0":
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 150


def _of_scenes(case: Case) -> Iterator[Claim]:
    part, name, result = case.job.part, case.job.row.name, case.result
    calm, bound = ("three honest", 1.03) if part == "attacks" else ("undisturbed", 1.02)
    if case.job.scene == calm or name == SINGLE:
        return
    alone = case.beside(SINGLE)
    yield (
        f"{part}, {name}: loss against alone",
        max(result["losses"]) / alone["loss"] if alone else None,
        1.01,
    )
    without = case.beside(f"{name}, {calm}")
    yield (
        f"{part}, {name}: loss against {calm}",
        result["loss"] / without["loss"] if without else None,
        bound,
    )
    if part == "attacks" and case.job.scene.endswith("one late"):
        # A refused member costs its group the shard that it owns, each time: there its members
        # part.
        yield f"{part}, {name}, one late: weight spread", result["spread"], 1e-2
    elif part == "attacks":
        yield f"{part}, {name}: weight spread", result["spread"], 6e-3


def _of_e3m0(rows: Rows) -> Iterator[Claim]:
    """Single seeds differ by more than what e3m0 costs, so their mean counts."""
    both = together(rows.get("streaming-diloco e3m0", {}), rows.get("streaming-diloco fp32", {}))
    cost = _mean(coded["loss"] - full["loss"] for coded, full in both)
    yield "streaming-diloco e3m0 above fp32, mean of seeds: nats", cost, 0.01


def _of_wire(peers: int, muon: Rows, adamw: Rows) -> Iterator[Claim]:
    for name, least in (("streaming-diloco, 1/50", 0.75), ("lowcomm, 1/50", 0.65)):
        what = f"{peers} peers, {name}"
        yield f"{what}: share of all-reduce's bytes", max(sent(muon, name), default=None), 1 / 50
        missing = _mean(1 - gain for gain in gained(muon, name))
        yield f"{what}: part of all-reduce's gain that is missing", missing, 1 - least
        both = together(muon.get(name, {}), adamw.get(ALLREDUCE, {}))
        above = _mean(one["loss"] - full["loss"] for one, full in both)
        yield f"{what}, Muon, above all-reduce with AdamW: nats", above, 0.0


def _mean(values: Iterator[float]) -> float | None:
    there = list(values)
    return mean(there) if there else None


# Measuring


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    from baselines import measured

    row = job.row
    content = {
        "run": {"name": "convergence", "seed": job.seed, "steps": length(job)},
        "train": {"optimizer": job.optimizer} | row.train,
        "sync": {"method": row.method} | AS_MEASURED.get(row.method, {}) | row.sync,
    }
    # A look at held-out text costs as much as 30 steps: few runs have a curve.
    looks = min(10, job.steps // 12) if job.part == "methods" and job.seed == 0 else 0
    return measured(content, members(job), row.name, evaluations=looks)


def main() -> int:
    """Measure what is missing and print the tables; 1 if a claim does not hold."""
    every = [job for part in PARTS.values() for job in part()]
    every.sort(key=lambda job: job.peers * job.steps)
    jobs, out = kit.measure_all(
        __doc__, measure, every, kit.RESULTS / "convergence.json", indent=None
    )
    results = kit.read(out)
    parts = (
        f"{kit.machine()}; means over the seeds.",
        tables(jobs, results),
        shares(jobs, results),
    )
    report = "\n\n".join(filter(None, parts))
    out.with_suffix(".md").write_text(report + "\n")
    print(report)
    return claim(jobs, results)


if __name__ == "__main__":
    sys.exit(main())
