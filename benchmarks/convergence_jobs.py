"""The runs that convergence.py measures: each method with its settings, who takes part, and the
name of a run in the results."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SEEDS = (0, 1, 2)
SINGLE, ALLREDUCE = "single", "allreduce"
QUICK_STEPS = 24


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


def methods(quick: bool) -> Iterator[Job]:
    """The matrix of methods; 8 peers over 1000 steps are left to ``wire``, for with them it took
    over 4 hours."""
    for seed in (0,) if quick else SEEDS:
        for peers, steps in ((2, QUICK_STEPS),) if quick else ((4, 400), (4, 1000), (8, 400)):
            for optimizer in ("adamw",) if quick else ("adamw", "muon"):
                for row in METHODS:
                    if not quick or row.name in (
                        SINGLE,
                        ALLREDUCE,
                        "streaming-diloco q2",
                        "lowcomm mod4",
                    ):
                        yield Job("methods", row, optimizer, peers, steps, seed)
                if steps == 1000:
                    yield Job("methods", RARELY, optimizer, peers, steps, seed)


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


def wire(quick: bool) -> Iterator[Job]:
    """The presets, and the same with longer intervals, against all-reduce."""
    for peers in (2,) if quick else (4, 8):
        for seed in (0,) if quick else SEEDS:
            for optimizer in ("muon",) if quick else ("muon", "adamw"):
                for row in WIRE[optimizer][: 4 if quick else None]:
                    yield Job("wire", row, optimizer, peers, QUICK_STEPS if quick else 1000, seed)


OFTEN = {"codec": "mod4", "interval": 5, "outer_lr": 1.0, "momentum": 0.5, "memory": 0.9}
TOGETHER = OFTEN | {"codec": "q2", "interval": 4, "outer": "noloco", "merge": "shift", "mix": 0.0}
BY_SCENE = (
    Row("streaming-diloco e3m0", "streaming-diloco", STREAMING | {"codec": "e3m0"}),
    Row("lowcomm mod4", "lowcomm", LOWCOMM | {"codec": "mod4"}),
    Row("lowcomm mod4, every 5, memory", "lowcomm", OFTEN),
    Row("streaming-diloco q2, every 4, memory", "streaming-diloco", TOGETHER),
)


def attacks(quick: bool) -> Iterator[Job]:
    """Three honest peers alone, and with a fourth that lies; one with a liar alone, and with one
    and a third that is late."""
    for row in BY_SCENE[1:2] if quick else BY_SCENE:
        for seed in (0,) if quick else SEEDS:
            for scene in (
                ("huge",)
                if quick
                else ("three honest", "nan", "huge", "flipped", "flipped-huge", "stale")
            ):
                yield Job("attacks", row, "adamw", 4, QUICK_STEPS if quick else 400, seed, scene)
            yield from outvoted(row, quick, seed)
    for seed in () if quick else SEEDS:
        yield from outvoted(DILOCO, quick, seed)


HONEST = "honest"
LIES = ("nan", "huge", "flipped", "flipped-huge", "stale", "clock", "shapes", "endless")
OF_TWO, ONE_LATE = " of two", " of three, one late"
DILOCO = Row("diloco", "diloco", WHOLE_20)
"""Shift keeps nothing of the own weights: what a liar does to the slow ones is felt most."""


def outvoted(row: Row, quick: bool, seed: int) -> Iterator[Job]:
    """Where nobody can outvote a liar, and the same with an honest peer in its place."""
    steps = QUICK_STEPS if quick else 400
    if row is BY_SCENE[1]:
        for peers in (2,) if quick else (2, 3):
            yield Job("attacks", Row(SINGLE), "adamw", peers, steps, seed)
    lies = ("huge", "flipped", "stale") if row is DILOCO else LIES
    for lie in ("flipped",) if quick else (HONEST, *lies):
        yield Job("attacks", row, "adamw", 2, steps, seed, lie + OF_TWO)
        if row.method != "lowcomm":
            yield Job("attacks", row, "adamw", 3, steps, seed, lie + ONE_LATE)


CHURN = {
    "undisturbed": 1.0,
    "one late": 12 / 11,
    "one leaves": 8 / 7,
    "one of half speed": 8 / 7,
    "two of half speed": 4 / 3,
}
"""How much longer a run is than an undisturbed one, so that the swarm trains on the same tokens."""


def churn(quick: bool) -> Iterator[Job]:
    """Four peers, of whom some come late, leave, or are slow."""
    for row in BY_SCENE[1:2] if quick else BY_SCENE:
        for seed in (0,) if quick else SEEDS:
            for scene in ("one late",) if quick else tuple(CHURN):
                yield Job("churn", row, "adamw", 4, QUICK_STEPS if quick else 400, seed, scene)


def pairing(quick: bool) -> Iterator[Job]:
    """Pairs across a hypercube, and drawn anew each time."""
    for peers in (2,) if quick else (4, 8):
        for seed in (0,) if quick else SEEDS:
            for drawn in ("hypercube", "random"):
                row = Row(f"noloco, {drawn}", "noloco", WHOLE_20 | {"pairing": drawn})
                yield Job("pairing", row, "adamw", peers, QUICK_STEPS if quick else 400, seed)


PARTS = {"methods": methods, "wire": wire, "attacks": attacks, "churn": churn, "pairing": pairing}


def members(job: Job) -> list[Any]:
    """Who takes part in a scene."""
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
