"""How much of all-reduce's gain over one replica alone pairs and groups keep, at a given share of
its bytes: in simulation, with the protocol's own objects, on held-out text.

    python benchmarks/shares.py                     all runs, many hours of a core; resumes
    python benchmarks/shares.py --only "pairs.*/4/"  those whose key matches a regular expression
    python benchmarks/shares.py --report            what has been measured so far

To add a run, add a `Row` to `ROWS`: its name says what differs, and ``bytes_share`` under which
heading it stands. Seeds 0 to 2 choose settings and 3 to 5 confirm them: no setting is chosen on the
seeds that its figures are reported for. All-reduce has its learning rate tuned for each number of
peers.

Bytes are those of contents that one peer sends, blocks that are sent again included; beside them
with control: the frames that agree on an exchange, without what HTTP/2 and TLS add. All-reduce
counts as a ring: 2 (n - 1) / n times the fp32 gradient a step. Writes
benchmarks/results/shares.json."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import kit

CHOOSE, CONFIRM = (0, 1, 2), (3, 4, 5)
PEERS = (4, 8, 16, 32)
STEPS, LONG = 1000, 2800
"""Inner steps of a run, and of a run with rare exchanges."""
SINGLE, ALLREDUCE = "single", "all-reduce"
ALONE = 4
"""Replicas that never meet, whose mean loss is that of one alone: single ones differ by more than
what slow lines leave of the gain."""
BYTES_SHARES = (60, 220, 550, 2000)
"""Parts of all-reduce's bytes that rows are compared at, about."""


@dataclass(frozen=True)
class Row:
    """A method with its settings: ``sync`` and ``train`` are what differs from those of ``method``,
    a preset."""

    name: str
    bytes_share: int = 0
    """It sends about 1 / bytes_share of all-reduce's bytes: of `BYTES_SHARES`; 0 of a baseline."""
    method: str = "local"
    sync: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    peers: tuple[int, ...] = PEERS
    seeds: tuple[int, ...] = CHOOSE + CONFIRM
    steps: int = STEPS


@dataclass(frozen=True)
class Job:
    """One run to measure."""

    row: Row
    peers: int
    seed: int
    steps: int

    @property
    def key(self) -> str:
        """Its name in the results: all that could change them."""
        settings = json.dumps([self.row.method, self.row.sync, self.row.train], sort_keys=True)
        return f"{self.row.name}/{self.peers}/{self.steps}/{self.seed}/{settings}"


MUON = {"optimizer": "muon"}
# Of one replica and of all-reduce the momentum was tuned, too.
STEADY = {"muon_momentum": 0.8}
RATES = (0.02, 0.03)
"""Learning rates of all-reduce. With each number of peers the one that ended lowest on seed 0 is
the baseline of all rows."""
BASELINES = (
    Row(SINGLE, train=STEADY, peers=(ALONE,)),
    *(Row(f"{ALLREDUCE}, {rate}", train=STEADY | {"learning_rate": rate}) for rate in RATES),
)

# Settings are written out, so that a preset that changes leaves what was measured as it is.
PAIR = {"fragments": 4, "overlap": 1, "consensus": 1.0, "merge": "shift", "mix": 0.0}


def pair(
    bytes_share: int, codec: str, interval: int, outer: dict[str, float], what: str, **more: Any
) -> Row:
    """A row of pairs."""
    name = f"pairs, {codec} every {interval}, {what}"
    sync = PAIR | outer | {"codec": codec, "interval": interval}
    return Row(name, bytes_share, "lowcomm", sync, **more)


def remembering(momentum: float, memory: float) -> dict[str, float]:
    """Quasi-global momentum (2102.04761)."""
    return {"outer_lr": 1.0, "momentum": momentum, "memory": memory}


REMEMBERING = (
    pair(60, "mod4", 5, remembering(0.5, 0.9), "momentum .5, memory .9"),
    pair(220, "mod4", 21, remembering(0.5, 0.6), "momentum .5, memory .6"),
    pair(550, "mod4", 52, remembering(0.5, 0.3), "momentum .5, memory .3"),
)
"""What pairs are given now; ``plan`` takes its figures from these."""
PAIRS = (
    *REMEMBERING,
    # All-reduce sends more, the more peers there are, up to a third: so may pairs.
    pair(60, "mod4", 4, remembering(0.5, 0.9), "momentum .5, memory .9", peers=(8, 16, 32)),
)

GROUP = {"fragments": 4, "overlap": 1, "codec": "q2", "error_feedback": True, "consensus": 0.0}
GROUP |= {"outer_lr": 1.0}
NESTEROV = {"outer": "nesterov", "memory": 0.0, "merge": "mix", "mix": 0.25}
"""What groups were given until they had a memory; at longer intervals they are still."""


def group(bytes_share: int, interval: int, momentum: float = 0.5, **more: Any) -> Row:
    """A row of groups as they were; ``momentum``: 0.5 goes without saying."""
    name = f"groups, q2 every {interval}"
    name += f", momentum {momentum}".replace("0.", ".") if momentum != 0.5 else ""
    sync = GROUP | NESTEROV | {"interval": interval, "momentum": momentum}
    return Row(name, bytes_share, "streaming-diloco", sync, **more)


def remembering_group(
    bytes_share: int, interval: int, momentum: float, memory: float, **more: Any
) -> Row:
    """A row of groups with quasi-global momentum."""
    told = f"momentum {momentum}, memory {memory}".replace("0.", ".")
    outer = remembering(momentum, memory) | {"outer": "noloco", "merge": "shift", "mix": 0.0}
    sync = GROUP | outer | {"interval": interval}
    return Row(
        f"groups, q2 every {interval}, {told}", bytes_share, "streaming-diloco", sync, **more
    )


GROUPS = (
    remembering_group(60, 4, 0.5, 0.9),
    group(60, 4, seeds=CHOOSE),
    group(220, 14, seeds=CHOOSE),
    group(220, 14, 0.6, seeds=CHOOSE),
    group(220, 14, 0.7),
    group(550, 34, seeds=CHOOSE),
    group(550, 34, 0.7),
    group(2000, 125),
)
"""At each interval ``plan`` takes the row that keeps most."""
MANY = (64, 128)
"""More peers than a group holds."""
AMONG_MANY: dict[str, Any] = {"seeds": (0,), "steps": 400}
WITH_MANY = (
    replace(BASELINES[0], **AMONG_MANY | {"peers": (ALONE,)}),
    replace(BASELINES[2], **AMONG_MANY | {"peers": MANY}),  # the rate that is best from 8 peers on
    replace(PAIRS[-1], **AMONG_MANY | {"peers": MANY}),
    *(
        replace(
            GROUPS[0],
            name=f"groups in {cells} cells, q2 every 4, momentum .5, memory .9",
            sync=GROUPS[0].sync | {"cells": cells},
            **AMONG_MANY | {"peers": (peers,)},
        )
        for peers, cells in ((64, 4), (128, 8))
    ),
)


def limits(row: Row, *peers: int) -> Iterator[Row]:
    """A row without what may limit it, on the first seed: without coding, then not in pairs but
    all together, too."""
    told = row.name.replace("mod4", "fp32").replace("q2", "fp32")
    sync = row.sync | {"codec": "fp32"}
    sync.pop("error_feedback", None)
    changed = [(told, sync)]
    if told.startswith("pairs"):
        together = told.replace("pairs", "all together by the rule of pairs")
        changed.append((together, sync | {"group": max(PEERS)}))
    for name, settings in changed:
        yield replace(row, name=name, sync=settings, peers=peers, seeds=CHOOSE[:1])


LIMITS = (  # of what plan names
    *limits(REMEMBERING[0], 4, 8),
    *(one for row in REMEMBERING[1:] for one in limits(row, 4)),
    *(one for row in (GROUPS[1], GROUPS[4], GROUPS[6]) for one in limits(row, 4)),
)

LONG_RUN: dict[str, Any] = {"peers": (4, 8), "seeds": (0, *CONFIRM), "steps": LONG}
"""Of the seeds that chose settings, in shorter runs, only that which chooses the rate of
all-reduce."""
LONGER = (
    *(replace(row, **LONG_RUN) for row in BASELINES if row.name != SINGLE),
    *(replace(row, **LONG_RUN | {"peers": (ALONE,)}) for row in BASELINES if row.name == SINGLE),
    pair(550, "mod4", 69, remembering(0.5, 0.3), "momentum .5, memory .3", **LONG_RUN),
    pair(2000, "mod4", 250, remembering(0.5, 0.3), "momentum .5, memory .3", **LONG_RUN),
    group(550, 34, 0.7, **LONG_RUN),
    group(2000, 125, 0.7, **LONG_RUN),
)
ROWS = (
    *BASELINES,
    *PAIRS,
    *GROUPS,
    *WITH_MANY,
    *LIMITS,
    *LONGER,
)


def jobs(rows: tuple[Row, ...] = ROWS) -> Iterator[Job]:
    """All runs, row by row."""
    for row in rows:
        for peers in row.peers:
            for seed in row.seeds:
                yield Job(row, peers, seed, row.steps)


# The report

Results = dict[str, Any]
"""What came of each run, by the key of its job."""
HEAD = (
    "method",
    "peers",
    "% of the gain, seeds 0 to 2",
    "seeds 3 to 5",
    "averaged",
    "spread",
    "of all-reduce's bytes",
    "with control",
)


class Measured(NamedTuple):
    """A run beside its baselines."""

    job: Job
    result: Any
    single: float
    """Loss of one replica alone."""
    allreduce: Any

    def share(self, loss: str = "loss") -> float:
        """How much of all-reduce's gain over one replica alone is kept."""
        return (self.single - self.result[loss]) / (self.single - self.allreduce["loss"])

    @property
    def sent(self) -> float:
        """Bytes of contents as a share of all-reduce's."""
        return self.result["bytes_sent"] / self.allreduce["bytes_sent"]

    @property
    def sent_in_all(self) -> float | None:
        """The same with control; None where that was not counted."""
        control = self.result.get("control_sent")
        every = self.allreduce["bytes_sent"]
        return None if control is None else (self.result["bytes_sent"] + control) / every


class Baselines:
    """One replica alone, and all-reduce with the rate that ended lowest on seed 0."""

    def __init__(self, jobs: Sequence[Job], results: Results) -> None:
        self._there = {
            (job.row.name, job.peers, job.seed, job.steps): results[job.key]
            for job in jobs
            if not job.row.bytes_share and job.key in results
        }
        self._rates = sorted({name for name, *_ in self._there if name.startswith(ALLREDUCE)})

    def allreduce(self, peers: int, seed: int, steps: int) -> Any:
        """The result of ``peers`` peers; None if it was not measured."""
        tried = [rate for rate in self._rates if (rate, peers, 0, steps) in self._there]
        if not tried:
            return None
        best = min(tried, key=lambda rate: self._there[rate, peers, 0, steps]["loss"])
        return self._there.get((best, peers, seed, steps))

    def beside(self, job: Job, result: Any) -> Measured | None:
        """A run beside its baselines; None if one of them was not measured."""
        full = self.allreduce(job.peers, job.seed, job.steps)
        alone = self._there.get((SINGLE, ALONE, job.seed, job.steps))
        return Measured(job, result, alone["loss"], full) if full and alone else None

    def table(self) -> str:
        """Losses of the baselines."""
        rows: list[list[Any]] = []
        every = {(steps, name, peers) for name, peers, _, steps in self._there}
        for steps, name, peers in sorted(every):
            losses = {
                seed: one["loss"]
                for (other, count, seed, length), one in sorted(self._there.items())
                if (length, other, count) == (steps, name, peers)
            }
            told = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items())
            rows.append([name, 1 if name == SINGLE else peers, f"{steps:,}", told])
        return kit.table(("baseline", "peers", "steps", "loss by seed"), rows)


def tables(jobs: Sequence[Job], results: Results) -> str:
    """Markdown: the baselines, and a table for each share of all-reduce's bytes."""
    baselines = Baselines(jobs, results)
    parts = [baselines.table()]
    for bytes_share, steps in product(BYTES_SHARES, sorted({job.steps for job in jobs})):
        of_share = [job for job in jobs if (job.row.bytes_share, job.steps) == (bytes_share, steps)]
        if rows := list(_rows(of_share, results, baselines)):
            length = "" if steps == STEPS else f", {steps:,} steps"
            heading = f"**About 1/{bytes_share} of all-reduce's bytes{length}**"
            parts.append(f"{heading}\n\n{kit.table(HEAD, rows)}")
    return "\n\n".join(parts)


def _rows(jobs: Sequence[Job], results: Results, baselines: Baselines) -> Iterator[list[str]]:
    rows = dict.fromkeys(job.row.name for job in jobs)
    for peers in (*PEERS, *MANY):
        for name in rows:
            there = [
                beside
                for job in jobs
                if (job.row.name, job.peers) == (name, peers) and job.key in results
                if (beside := baselines.beside(job, results[job.key])) is not None
            ]
            if there:
                yield _row(name, peers, there)


def _row(name: str, peers: int, there: Sequence[Measured]) -> list[str]:
    every = [one.sent_in_all for one in there]
    counted = [one for one in every if one is not None]
    return [
        name,
        str(peers),
        _told([one.share() for one in there if one.job.seed in CHOOSE]),
        _told([one.share() for one in there if one.job.seed in CONFIRM]),
        f"{100 * mean(one.share('average_loss') for one in there):.1f}",
        f"{mean(one.result['spread'] for one in there):.1e}",
        f"1/{1 / mean(one.sent for one in there):.0f}",
        f"1/{1 / mean(counted):.0f}" if counted else "",
    ]


def _told(shares: Sequence[float]) -> str:
    """The mean of some seeds, and each of them."""
    if not shares:
        return ""
    each = " / ".join(f"{100 * share:.0f}" for share in shares)
    return f"{100 * mean(shares):.1f} ({each})"


# Measuring


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    from baselines import measured

    row = job.row
    content = {
        "run": {"name": "shares", "seed": job.seed, "steps": job.steps},
        "train": {"optimizer": "muon"} | row.train,
        "sync": {"method": row.method} | row.sync,
    }
    return measured(content, job.peers, "allreduce" if row.name.startswith(ALLREDUCE) else "swarm")


def main() -> None:
    """Measure what is missing and print the tables."""
    every = list(jobs())
    # The baselines first, and of the rest what is short: a killed run loses one job at most.
    every.sort(key=lambda one: (one.seed, bool(one.row.bytes_share), one.peers))
    _, out = kit.measure_all(__doc__, measure, every, kit.RESULTS / "shares.json")
    print(f"{kit.machine()}; means over the seeds.\n\n{tables(list(jobs()), kit.read(out))}")


if __name__ == "__main__":
    main()
