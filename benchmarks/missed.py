"""What it costs a group that members miss exchanges: unequal speeds, churn, a liar. In simulation,
with the protocol's own objects.

    python benchmarks/missed.py            all scenes, a few minutes of a core
    python benchmarks/missed.py --report   what was measured last

`streaming-diloco` on a model of 37,088 parameters with AdamW, two fragments, bytes of Python's
library. Printed are the held-out loss, a mean of the honest members; exchanges that honest members
applied, and realigned in; outer steps that they took over; bytes of contents that they sent. Writes
benchmarks/results/missed.json."""

import sys
from dataclasses import dataclass
from typing import Any

import kit

OUT = kit.RESULTS / "missed.json"
MODEL = {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64, "context": 32}
ATTACKS = ("flipped", "huge", "flipped-huge", "stale", "nan", "endless")


@dataclass(frozen=True)
class Scene:
    """One simulation."""

    name: str
    members: tuple[dict[str, Any], ...]
    """Settings of each `Member`."""
    steps: int = 160
    seed: int = 0


def speeds(*each: float) -> Scene:
    """Members that train at these speeds, from the beginning to the end."""
    told = ", ".join(f"{one:g}" for one in each)
    return Scene(f"speeds {told}", tuple({"speed": one} for one in each))


CHURN = (
    {},
    {},
    {"dies": 40.3},
    {"leaves": 80.2},
    {"joins": 50.4},
    {"joins": 90.7},
    {"pauses": ((60.1, 15.0),)},
)
SCENES = (
    speeds(1, 1, 0.1, 0.1),
    speeds(1, 0.5, 0.5, 0.25),
    speeds(1, 0.9, 0.3, 0.3, 0.3, 0.1),
    speeds(1, 1, 1, 0.1),
    *(Scene(f"one dies, leaves, stops; two come; seed {one}", CHURN, seed=one) for one in (0, 1)),
    *(
        Scene(f"a liar, {attack}; seed {one}", ({}, {}, {}, {"attack": attack}), 120, one)
        for attack in ATTACKS
        for one in (0, 1)
    ),
)


def measure(scene: Scene) -> dict[str, Any]:
    """Run one scene; what came of it."""
    import torch

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import Conditions, Member
    from lowcomm_node.simulation.swarm import Swarm
    from lowcomm_node.trainer.replica import Replica
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    there = sum("joins" not in one for one in scene.members)
    spec = RunSpec.model_validate(
        {
            "run": {
                "name": "missed",
                "seed": scene.seed,
                "steps": scene.steps,
                "start_peers": min(there, 4),
            },
            "model": MODEL,
            "train": {"batch": 2, "optimizer": "adamw"},
            "sync": {"method": "streaming-diloco", "fragments": 2},
        }
    )
    text = open_data("builtin:python", "bytes", kit.OUT / "data")
    members = [Member(**one) for one in scene.members]
    swarm = Swarm(spec, text, members, Conditions(), Replica, False, 0)
    swarm.network.run()
    result = swarm.result()
    honest = [peer for peer, one in zip(swarm.peers, members, strict=True) if one.attack is None]
    return {
        "loss": result.loss,
        "average": result.average_loss,
        "applied": sum(peer.applied for peer in honest),
        "realigned": sum(peer.realigned for peer in honest),
        "taken over": sum(peer.taken_over for peer in honest),
        "bytes": sum(peer.bytes_sent for peer in honest),
    }


def show(name: str, one: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{name:40} loss {one['loss']:.3f}  applied {one['applied']:4}  realigned "
        f"{one['realigned']:3}  took over {one['taken over']:3}  {one['bytes'] / 1e6:.2f} MB",
        flush=True,
    )


def main() -> int:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = kit.read(OUT) if arguments.report else {}
    print(kit.machine())
    for scene in SCENES:
        found = results.get(scene.name) or measure(scene)
        show(scene.name, found)
        results[scene.name] = found
    kit.write(OUT, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
