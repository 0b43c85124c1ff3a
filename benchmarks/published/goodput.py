"""Goodput of members that fail at random: the production engine without tensors, beside barriers.

The scene follows Covenant-72B: 72B parameters, and a barrier every 30 steps with 70 s of
communication that computes 94.5 % of the time, which makes 40 s a step. The line is assumed;
intervals of ours are those that it carries. Goodput is the share of the members' time whose steps
were merged with those of others: what a failure loses, and the time until a member is back, is
missing.
"""

from math import exp, inf
from typing import Any

from lowcomm_protocol.spec.run import RunSpec

VALUES, STEP, UPLINK = 72 * 10**9, 40.0, 110e6 / 8
MEMBERS = 8
WINDOW, BARRIER = 30, 70.0
"""Steps between two barriers, and seconds of communication at each."""
RESTART = 300.0
"""Seconds until a member trains again."""
HOURS = 12.0
BETWEEN = {"never": inf, "24 h": 24.0, "6 h": 6.0, "2 h": 2.0, "1 h": 1.0, "20 min": 1 / 3}
"""Hours between two failures of one member."""
FELL_TO = 0.27
"""Goodput of data-parallel training in the paper of Decoupled DiLoCo, which keeps 88 % itself."""
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "groups": ("streaming-diloco", {"interval": 36, "fragments": 16}, MEMBERS - 1),
    "pairs": ("lowcomm", {"interval": 52, "fragments": 16, "codec": "mod3"}, 1),
}
"""Preset, settings, and how many streams share the line."""


def barrier(window: int, talk: float, hours: float) -> float:
    """Share of the time that counts where all wait for all every ``window`` steps, and a failure of
    any member costs all what came since, and the restart."""
    computes, whole = window * STEP, window * STEP + talk
    if hours == inf:
        return computes / whole
    rate = MEMBERS / (3600 * hours)
    return computes / ((1 / rate + RESTART) * (exp(rate * whole) - 1))


def hours_at(share: float) -> float:
    """Between two failures of a member where a barrier at every step leaves such a share."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if barrier(1, 0.0, middle) < share else (low, middle)
    return low


def engine(method: str, hours: float) -> dict[str, float]:
    """Shares of the members' time: of steps, and of steps that were merged."""
    # Not above: the report needs neither torch nor the simulator.
    from published.hollow import Failures, World

    from lowcomm_node.simulation.network import Conditions

    preset, sync, streams = METHODS[method]
    spec = RunSpec.model_validate(
        {"run": {"name": "papers", "steps": 10**8}, "sync": {"method": preset} | sync}
    )
    failures = None if hours == inf else Failures(3600 * hours, RESTART)
    conditions = Conditions(bandwidth=UPLINK / streams)
    until = 3600 * HOURS
    world = World(spec, VALUES, MEMBERS, conditions, lambda random: STEP, failures, until, UPLINK)
    count = world.run()
    time = MEMBERS * until
    return {
        "steps": count.steps * STEP / time,
        "merged": count.merged * STEP / time,
        "applied": count.applied,
        "failed": count.failed,
        "realigned": count.realigned,
    }


WHERE = f"where that is {FELL_TO:.0%}".replace("%", " %")
SCENES = ("6 h", *(name for name in BETWEEN if name != "6 h"), WHERE)
"""By time between failures, in the order in which they are measured."""


def measure(scene: str) -> dict[str, Any]:
    """What each method keeps."""
    hours = hours_at(FELL_TO) if scene == WHERE else BETWEEN[scene]
    return {
        "minutes": None if hours == inf else 60 * hours,
        "every step": barrier(1, 0.0, hours),
        "every window": barrier(WINDOW, BARRIER, hours),
        **{method: engine(method, hours) for method in METHODS},
    }
