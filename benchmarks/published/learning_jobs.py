"""The runs that learning.py measures: each method with its settings, those first that decide
most."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
