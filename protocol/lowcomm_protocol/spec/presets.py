"""The methods of synchronization: each is a preset of the one engine's settings.

To add a method, add an entry to ``PRESETS``. The creator of a run can override each of its values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowcomm_protocol.spec.names import MAX_GROUP, Table


@dataclass(frozen=True)
class Preset:
    """One method."""

    purpose: str
    """What it is for, in one line."""
    sync: Mapping[str, Any]
    """Values of ``[sync]`` that hold unless the creator says otherwise."""
    optimizer: str = "adamw"
    """The inner optimizer, unless the creator says otherwise."""
    layers_a_fragment: int = 0
    """Where it is given, ``fragments`` follows from the layers of the model, if these are known."""
    even: bool = False
    """Cut fragments by rows where whole layers would leave them uneven."""

    def settings(self, layers: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """All values of ``[sync]`` for a model of so many layers; those ``given`` come first."""
        settings = dict(self.sync)
        if given.get("group") == 2:
            settings.pop("error_feedback", None)  # pairs have none
        if layers is None:
            return {**settings, **given}
        if self.layers_a_fragment:
            steps = given.get("interval")
            most = steps if isinstance(steps, int) else int(self.sync["interval"])
            # At most one fragment a step.
            settings["fragments"] = max(1, min(-(-layers // self.layers_a_fragment), most))
        fragments = given.get("fragments", settings["fragments"])
        if self.even and isinstance(fragments, int) and 0 < fragments < layers:
            settings["pattern"] = "even" if layers % fragments else settings["pattern"]
        return {**settings, **given}


_EXACT: dict[str, Any] = {"codec": "fp32", "merge": "shift", "mix": 0.0, "overlap": 0}
_WHOLE: dict[str, Any] = _EXACT | {"interval": 20, "fragments": 1, "pattern": "strided"}

# The gain lr / (1 - momentum) is 1: above it, short runs from scratch lose silently
# (benchmarks/methods.py).
_NOLOCO: dict[str, Any] = _WHOLE | {
    "group": 2,
    "pairing": "random",
    "outer": "noloco",
    "outer_lr": 0.7,
    "momentum": 0.3,
    "consensus": 1.0,
}

# 0.7 and 0.9 of the paper suit runs of 100,000 steps; here a gain lr / (1 - momentum) of 7 loses
# silently. With equal slow weights the consensus term vanishes and the rule is DiLoCo's; after a
# missed exchange it heals.
_DILOCO: dict[str, Any] = _WHOLE | {
    "group": 8,
    "outer": "nesterov",
    "outer_lr": 0.5,
    "momentum": 0.5,
    "consensus": 1.0,
}

# As Streaming DiLoCo's paper runs DiLoCo (2501.18512).
_DILOCO_PAPER: dict[str, Any] = _DILOCO | {"interval": 30, "outer_lr": 0.4, "momentum": 0.9}

# A quarter of the model at a time, as in Streaming DiLoCo, with quasi-global momentum:
# benchmarks/shares.py measures it at these intervals and at longer ones.
_QUARTERS: dict[str, Any] = {
    "fragments": 4,
    "overlap": 1,
    "outer": "noloco",
    "outer_lr": 1.0,
    "momentum": 0.5,
    "memory": 0.9,
}

PRESETS: Table[Preset] = Table(
    "method",
    {
        "lowcomm": Preset(
            "pairs, a quarter of the model at a time, in 4 bits, while it trains on: for a swarm "
            "of any size",
            _NOLOCO | _QUARTERS | {"pairing": "hypercube", "interval": 5, "codec": "mod4"},
            optimizer="muon",
            even=True,
        ),
        "noloco": Preset(
            "pairs drawn anew each time average what they learned; nobody waits for more than one "
            "peer",
            _NOLOCO,
        ),
        "gossip": Preset(
            "pairs average their weights; the simplest thing that works, without outer momentum",
            # NoLoCo without momentum: slow weights become the mean of both peers' fast weights.
            _NOLOCO | {"outer_lr": 1.0, "momentum": 0.0, "pairing": "hypercube"},
        ),
        "diloco": Preset(
            "a group of up to 8 averages the whole model every interval, in full precision", _DILOCO
        ),
        "streaming-diloco": Preset(
            "swarms of up to 32 average a quarter of the model at a time, in 2 bits: nearest to a "
            "cluster",
            # Every parameter often, in few bits: that leaves more of all-reduce's gain than more
            # bits more rarely (docs/measurements.md).
            _WHOLE
            | _QUARTERS
            | {"interval": 4, "codec": "q2", "error_feedback": True}
            | {"group": MAX_GROUP, "consensus": 0.0},
            optimizer="muon",
            even=True,
        ),
        "local": Preset(
            "no communication at all: the baseline that every method must beat",
            _NOLOCO | {"group": 1, "pairing": "hypercube"},
        ),
        "diloco-paper": Preset(
            "diloco every 30 steps, as the paper of streaming-diloco sets it, for comparison: "
            "for runs of many thousand steps",
            _DILOCO_PAPER,
        ),
        "streaming-diloco-paper": Preset(
            "streaming-diloco every 100 steps, as its paper sets it, for comparison: for runs of "
            "many thousand steps and at most 8 peers",
            _DILOCO_PAPER
            | {
                "interval": 100,
                "fragments": 8,
                "overlap": 1,
                "codec": "e3m0",
                "consensus": 0.0,  # four bits carry differences only
                "merge": "mix",
                "mix": 0.5,
            },
            layers_a_fragment=3,
        ),
        "noloco-paper": Preset(
            "noloco at the settings of its paper, every 50 steps, for comparison",
            _NOLOCO | {"interval": 50, "momentum": 0.5, "consensus": 0.7},
        ),
    },
)
