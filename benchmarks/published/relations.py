"""The runs that learning.py measures, those first that decide most; and the relations C1 to C9 from
what was measured: the paper's, ours, and whether they agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
from kit import table

MISSING = "not measured"
SIZES = {
    "0.06M": {"width": 32, "feed_forward": 88},
    "0.23M": {},
    "0.9M": {"width": 128, "feed_forward": 352},
}
SEEDS = (0, 1, 2)
START_STEPS, STEPS = 400, 400
BATCH = 8
"""Sequences of each of two peers in a step."""
WARMUP = 20
LOOKS = 20
"""How often the spread of the weights is looked at during a run."""


@dataclass(frozen=True)
class Row:
    """A method with its settings, and who takes part."""

    name: str
    method: str
    sync: dict[str, Any] = field(default_factory=dict)
    peers: int = 2
    kind: str = ""
    """A replica of `KINDS`; empty: as shipped."""


H30, H100 = {"interval": 30}, {"interval": 100}
DP, DILOCO30, STREAMING30, STREAMING100 = (
    "DP",
    "DiLoCo, H 30",
    "Streaming, H 30",
    "Streaming, H 100",
)
ROWS = {
    row.name: row
    for row in (
        Row(DP, "local", kind="data-parallel"),
        Row(DILOCO30, "diloco-paper"),
        Row(STREAMING30, "streaming-diloco-paper", H30),
        Row(STREAMING100, "streaming-diloco-paper"),
        Row("tau 0", "streaming-diloco-paper", {"overlap": 0}),
        Row("tau 5", "streaming-diloco-paper", {"overlap": 5}),
        Row("tau 10", "streaming-diloco-paper", {"overlap": 10}),
        Row("one peer 5 steps late", "streaming-diloco-paper", kind="late"),
        Row("sequential", "streaming-diloco-paper", {"pattern": "sequential"}),
        Row("1 fragment", "streaming-diloco-paper", {"fragments": 1}),
        Row("4 fragments", "streaming-diloco-paper", {"fragments": 4}),
        Row("fp32", "streaming-diloco-paper", {"codec": "fp32"}),
        Row("half dropped", "streaming-diloco-paper", {"codec": "fp32"}, kind="half"),
        Row("4 peers, H 30", "streaming-diloco-paper", H30, peers=4),
        Row("NoLoCo, H 50", "noloco-paper", peers=4),
        Row("NoLoCo, H 100", "noloco-paper", H100, peers=4),
        Row("DiLoCo .7/.3, H 100", "diloco", H100 | {"outer_lr": 0.7, "momentum": 0.3}, peers=4),
        Row(
            "DiLoCo .7/.3, H 50",
            "diloco",
            {"interval": 50, "outer_lr": 0.7, "momentum": 0.3},
            peers=4,
        ),
        Row("as shipped: streaming-diloco", "streaming-diloco", peers=4),
        Row("as shipped: lowcomm", "lowcomm", peers=4),
    )
}
MAIN = (DP, DILOCO30, STREAMING30, STREAMING100)


@dataclass(frozen=True)
class Job:
    """One run."""

    size: str
    row: Row
    seed: int
    steps: int = STEPS

    @property
    def key(self) -> str:
        """Its name in the results: all that could change them."""
        row = self.row
        settings = ",".join(f"{name}={value}" for name, value in sorted(row.sync.items()))
        return (
            f"{self.size}/{row.name}/{row.method}/{settings}/{row.peers}/{self.steps}/{self.seed}"
        )


def jobs() -> Iterator[Job]:
    """All runs, seed by seed, those first that decide most."""
    for seed in SEEDS:
        yield from (Job("0.23M", row, seed) for row in ROWS.values())
        yield from (Job("0.06M", ROWS[name], seed) for name in MAIN)
        yield from (Job("0.9M", ROWS[name], seed) for name in (DP, STREAMING30))
        # C4: four times the tokens
        yield from (Job("0.23M", ROWS[name], seed, 4 * STEPS) for name in (DP, STREAMING30))
        yield from (Job("0.9M", ROWS[name], seed) for name in (DILOCO30, STREAMING100))


Results = Mapping[str, Any]
MAIN_SIZE = "0.23M"


@dataclass(frozen=True)
class Runs:
    """What was measured of one row, seed by seed."""

    by_seed: Mapping[int, Mapping[str, Any]]

    def mean(self, of: str = "average") -> float:
        """Over the seeds."""
        return mean(float(np.mean(one[of])) for one in self.by_seed.values())


def runs(results: Results, name: str, size: str = MAIN_SIZE, steps: int = STEPS) -> Runs:
    """Those of a row."""
    found = results.get("learning", {})
    keys = {seed: Job(size, ROWS[name], seed, steps).key for seed in SEEDS}
    return Runs({seed: found[key] for seed, key in keys.items() if key in found})


def beside(results: Results, name: str, other: str, of: str = "average", **more: Any) -> float:
    """By how much the loss of a row is above another's, in percent, over the seeds of both.

    Raises KeyError where no seed has both.
    """
    one, two = runs(results, name, **more), runs(results, other, **more)
    both = [seed for seed in one.by_seed if seed in two.by_seed]
    if not both:
        raise KeyError(name)
    ratios = [np.mean(one.by_seed[seed][of]) / np.mean(two.by_seed[seed][of]) for seed in both]
    return 100 * (float(np.mean(ratios)) - 1)


def correlation(results: Results, name: str = "NoLoCo, H 50") -> float:
    """Of the spread with the inner learning rate over a run, from its second quarter on: before,
    the peers still come apart."""
    found = []
    for one in runs(results, name).by_seed.values():
        curve = np.array(one["curve"])
        later = curve[curve[:, 0] >= STEPS / 4]
        found.append(float(np.corrcoef(later[:, 1], later[:, 2])[0, 1]))
    if not found:
        raise KeyError(name)
    return mean(found)


def told(percents: Mapping[str, float]) -> str:
    """Each with its name."""
    return "; ".join(f"{name} {percent:+.2f} %" for name, percent in percents.items())


def within(most: float) -> Callable[[Sequence[float]], bool]:
    """Whether all are at most so far from 0."""
    return lambda percents: all(abs(one) <= most for one in percents)


@dataclass(frozen=True)
class Relation:
    """What the paper prints, what is asked of ours, and what came of it."""

    name: str
    paper: str
    asked: str
    measure: Callable[[Results], Mapping[str, float]]
    """Figures with their names, in percent. Raises KeyError where runs are missing."""
    holds: Callable[[Sequence[float]], bool] | None
    """None: printed, nothing is claimed."""
    rows: tuple[str, ...]
    """Whose seeds count."""


def _order(results: Results) -> dict[str, float]:
    return {
        f"{name} beside {other}": beside(results, name, other)
        for name, other in ((DILOCO30, DP), (STREAMING30, DILOCO30), (STREAMING100, STREAMING30))
    }


def _sizes(results: Results) -> dict[str, float]:
    return {size: beside(results, STREAMING30, DP, size=size) for size in SIZES}


def _slow(results: Results) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in (DILOCO30, STREAMING30, STREAMING100):
        one = runs(results, name)
        if not one.by_seed:
            raise KeyError(name)
        for of in ("average", "slow"):
            found[f"{name}, {of}"] = 100 * (one.mean(of) / one.mean("losses") - 1)
    return found


def _tokens(results: Results) -> dict[str, float]:
    return {
        f"{times} times the tokens": beside(results, STREAMING30, DP, steps=times * STEPS)
        for times in (1, 4)
    }


def _against(other: str, *names: str) -> Callable[[Results], dict[str, float]]:
    return lambda results: {name: beside(results, name, other) for name in names}


def _nine(results: Results) -> dict[str, float]:
    return {
        "NoLoCo H 50 beside DiLoCo H 100": beside(results, "NoLoCo, H 50", "DiLoCo .7/.3, H 100"),
        "both at H 50": beside(results, "NoLoCo, H 50", "DiLoCo .7/.3, H 50"),
        "both at H 100": beside(results, "NoLoCo, H 100", "DiLoCo .7/.3, H 100"),
    }


LATE = ("tau 0", "tau 5", "tau 10", "one peer 5 steps late")
CUTS = ("sequential", "1 fragment", "4 fragments")
RELATIONS = (
    Relation(
        "C1",
        "35M: DP 3.51, DiLoCo 3.54, Streaming 3.53, H 100 3.56",
        "same order; Streaming within 0.5 % of DiLoCo or better",
        _order,
        lambda found: found[0] >= 0 and found[1] <= 0.5 and found[2] >= 0,
        MAIN,
    ),
    Relation(
        "C1, sizes",
        "gap to DP falls: 0.6 % at 35M, 0 at 500M",
        "gap of Streaming H 30 to DP falls over the sizes",
        _sizes,
        lambda found: found[0] >= found[1] >= found[2],
        (DP, STREAMING30),
    ),
    Relation(
        "C2",
        "2 to 4 replicas: +2.0 % at 35M, +0.8 % at 1B",
        "4 peers 0 to 3 % worse than 2",
        _against(STREAMING30, "4 peers, H 30"),
        lambda found: 0 <= found[0] <= 3,
        ("4 peers, H 30", STREAMING30),
    ),
    Relation(
        "C3",
        "first replica 2.77, average 2.68, outer weights 2.67",
        "average and slow weights at most the mean of the replicas",
        _slow,
        lambda found: max(found) <= 0,
        (DILOCO30, STREAMING30, STREAMING100),
    ),
    Relation(
        "C4",
        "gap of 2 replicas to DP: -0.4, -0.4, 0 % at 1, 4, 10 times the tokens",
        "gap shrinks",
        _tokens,
        lambda found: found[1] <= found[0],
        (DP, STREAMING30),
    ),
    Relation(
        "C5",
        "tau to 10 costs under 0.2 %; robust below 5 if workers differ",
        "within 1 % of tau 1",
        _against(STREAMING100, *LATE),
        within(1.0),
        (STREAMING100, *LATE),
    ),
    Relation(
        "C6",
        "strided, sequential and the number of fragments make little difference",
        "within 1 % of strided in 2 fragments",
        _against(STREAMING100, *CUTS),
        within(1.0),
        (STREAMING100, *CUTS),
    ),
    Relation(
        "C7",
        "4 bits cost nothing; dropping half the values costs more",
        "e3m0 within 0.5 % of fp32; half dropped worse than e3m0",
        lambda results: {
            "e3m0 beside fp32": beside(results, STREAMING100, "fp32"),
            "half dropped beside e3m0": beside(results, "half dropped", STREAMING100),
        },
        lambda found: abs(found[0]) <= 0.5 and found[1] > 0,
        (STREAMING100, "fp32", "half dropped"),
    ),
    Relation(
        "C8",
        "spread follows the learning rate",
        "correlation at least 0.8",
        lambda results: {"correlation, in percent,": 100 * correlation(results)},
        lambda found: found[0] >= 80,
        ("NoLoCo, H 50",),
    ),
    Relation(
        "C9",
        "NoLoCo up to 4 % better than DiLoCo, at 50 and 100 steps",
        "no claim",
        _nine,
        None,
        ("NoLoCo, H 50", "NoLoCo, H 100", "DiLoCo .7/.3, H 100", "DiLoCo .7/.3, H 50"),
    ),
)


def relations(results: Results) -> str:
    """The relations, one a row."""
    rows = []
    for one in RELATIONS:
        try:
            found = one.measure(results)
        except KeyError:
            rows.append([one.name, one.paper, one.asked, MISSING, ""])
            continue
        least = min(len(runs(results, name).by_seed) for name in one.rows)
        some = "" if least == len(SEEDS) else f" ({least} of {len(SEEDS)} seeds)"
        verdict = "" if one.holds is None else "yes" if one.holds([*found.values()]) else "**no**"
        rows.append([one.name, one.paper, one.asked, told(found) + some, verdict])
    return table(["", "the paper", "asked here", "measured", "holds"], rows)
