"""The runs that shares.py measures. To add one, add a `Row` to `ROWS`: its name says what differs,
``bytes_share`` under which heading it stands, and nothing else needs to know of it.

Seeds 0 to 2 choose settings and 3 to 5 confirm them: no setting is chosen on the seeds that its
figures are reported for.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

CHOOSE, CONFIRM = (0, 1, 2), (3, 4, 5)
PEERS = (4, 8, 16, 32)
STEPS, LONG = 1000, 2800
"""Inner steps of a run, and of one for what is exchanged rarely: every 69 steps 40 times."""
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
PROGRESS = {"consensus": 0.0}
"""Nothing pulls slow weights together."""
GAIN = {"outer_lr": 1.25, "momentum": 0.0, "memory": 0.0}
RARELY = {"outer_lr": 0.7, "momentum": 0.3, "memory": 0.0}
"""What pairs were given until they had a memory: often, and from every 21 steps on."""


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
    pair(60, "mod3", 4, GAIN, "gain 1.25", seeds=CHOOSE),
    pair(220, "mod4", 21, RARELY, "momentum .3", seeds=CHOOSE),
    pair(550, "mod4", 52, RARELY, "momentum .3", seeds=CHOOSE),
    *REMEMBERING,
    # All-reduce sends more, the more peers there are, up to a third: so may pairs.
    pair(60, "mod4", 4, remembering(0.5, 0.9), "momentum .5, memory .9", peers=(8, 16, 32)),
)

TRYING: dict[str, Any] = {"peers": (4,), "seeds": (0,)}
TRIED = (
    pair(220, "mod4", 21, remembering(0.5, 0.9), "momentum .5, memory .9", **TRYING),
    pair(220, "mod4", 21, remembering(0.7, 0.7), "momentum .7, memory .7", **TRYING),
    pair(550, "mod4", 52, remembering(0.7, 0.5), "momentum .7, memory .5", **TRYING),
    pair(550, "mod6", 52, remembering(0.5, 0.3), "momentum .5, memory .3", **TRYING),
    # Slow weights that nothing pulls together part, and pairs realign: nearly each of these
    # exchanges averages weights in fp32.
    pair(
        220,
        "fp32",
        5,
        PROGRESS | remembering(0.5, 0.9),
        "momentum .5, memory .9, progress alone",
        **TRYING,
    ),
)
"""Seen once, and not chosen or not measured further."""

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
TRIED_GROUPS = (
    *(remembering_group(60, 4, *both, **TRYING) for both in ((0.4, 0.9), (0.6, 0.9), (0.5, 0.95))),
    replace(
        remembering_group(60, 4, 0.5, 0.9, **TRYING),
        name="groups, q2 every 4, momentum .5, memory .9, mix .25",
        sync=GROUPS[0].sync | {"merge": "mix", "mix": 0.25},
    ),
    *(remembering_group(220, 14, 0.4, memory, **TRYING) for memory in (0.72, 0.85)),
    *(remembering_group(220, 14, 0.5, memory, **TRYING) for memory in (0.72, 0.9)),
    remembering_group(220, 14, 0.7, 0.72, **TRYING),
    # With more peers means are less noisy: whether they bear a longer momentum.
    *(
        remembering_group(60, 4, *both, **TRYING | {"peers": (16,)})
        for both in ((0.6, 0.9), (0.7, 0.9))
    ),
)
"""Seen once, like `TRIED`."""
KEPT_ROUNDS = 32
SLICES = tuple(
    replace(
        GROUPS[0],
        name=f"groups of {size} for {KEPT_ROUNDS} rounds, q2 every 4, momentum .5, memory .9",
        sync=GROUPS[0].sync | {"group": size, "slice_rounds": KEPT_ROUNDS},
        peers=(16,),
        seeds=CHOOSE,
    )
    for size in (4, 8)
)
"""Of a swarm that is larger than its groups, which change now and then."""


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
LONGER_OFTEN = tuple(
    replace(row, **LONG_RUN | {"peers": (4,)})
    for row in (REMEMBERING[0], REMEMBERING[1], GROUPS[0], GROUPS[4])
)
"""Whether a longer run lets frequent exchanges keep more, too: no points of a plan, which compares
runs of 1,000 steps."""
ROWS = (
    *BASELINES,
    *PAIRS,
    *TRIED,
    *GROUPS,
    *TRIED_GROUPS,
    *SLICES,
    *LIMITS,
    *LONGER,
    *LONGER_OFTEN,
)


def jobs(rows: tuple[Row, ...] = ROWS) -> Iterator[Job]:
    """All runs, row by row."""
    for row in rows:
        for peers in row.peers:
            for seed in row.seeds:
                yield Job(row, peers, seed, row.steps)
