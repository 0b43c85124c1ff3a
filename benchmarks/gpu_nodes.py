"""What exchanges cost training on a GPU: two real nodes that share one, and the same two that never
meet.

    python benchmarks/gpu_nodes.py [--device cuda] [--small] [--seconds N]

`make gpu` runs it. Both train 85 million parameters (12 layers, 768, bytes, context 1024) with
Muon, once with `lowcomm` and once with `local`, which exchanges nothing. It writes steps a second,
seconds that training waited between two steps and what for, and exchanges to
benchmarks/results/gpu_nodes.json. ``--small`` with ``--device cpu`` only shows that the script
works.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kit

from helpers.processes import Node, Swarm
from lowcomm_node.planner.run_template import write_template
from lowcomm_protocol.spec.models import TransformerSettings

MODEL = TransformerSettings(layers=12, width=768, heads=12, feed_forward=2048, context=1024)
CORES = 4
SOON = 5
"""Steps after which a trainer has compiled what it computes with."""
START = 300.0
COUNTED = ("completed", "failed", "realigned")


def main() -> int:
    """Measure both and print what was found; 1 if nothing was exchanged."""
    parser = kit.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a model that a processor trains")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--out", type=Path, default=kit.RESULTS / "gpu_nodes.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": kit.loaded_machine(), "device": arguments.device}
    for method in ("lowcomm", "local"):
        results[method] = measure(method, arguments.device, arguments.small, arguments.seconds)
        print(method, *results[method], sep="\n", flush=True)
    kit.write(arguments.out, results)
    return int(not all(found["exchanges"] for found in results["lowcomm"]))


def measure(method: str, device: str, small: bool, seconds: float) -> list[dict[str, Any]]:
    """What two nodes do in ``seconds``, once both train."""
    options = ("--device", device, "--checkpoint-every", "100000")
    with two_nodes(method, None if small else MODEL, options, 1 if small else CORES) as nodes:
        for node in nodes:
            node.until(lambda status: (status["trainer"]["steps"] or 0) > SOON, "steps", START)
        began, before = time.monotonic(), [node.until(bool, "an answer") for node in nodes]
        time.sleep(seconds)  # what is measured is what happens meanwhile
        took, after = time.monotonic() - began, [node.until(bool, "an answer") for node in nodes]
    return [between(*both, took) for both in zip(before, after, strict=True)]


@contextmanager
def two_nodes(
    method: str, model: TransformerSettings | None, options: Sequence[str], cores: int
) -> Iterator[list[Any]]:
    """Two nodes of a run that does not end, and a bootstrap server; all end with the context.

    ``model``: None for the demo's; ``cores``: those that each trainer computes on."""

    class AsUsers(Node):
        pace = ("--nice", "5")  # other programs of this machine must not decide
        threads = str(cores)

    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            run = Path(folder) / "run.toml"
            given: dict[str, Any] = {
                "run": {"name": "gpu", "steps": 10_000_000, "start_peers": 2},
                "model": model.model_dump() if model else {},
                "train": {"optimizer": "muon"},
                "sync": {"method": method},
            }
            run.write_text(write_template(given))
            swarm.bootstrap("--run", str(run))
            nodes = [AsUsers(Path(folder) / str(k), swarm.address, *options) for k in (1, 2)]
            swarm.processes += nodes
            yield nodes
        finally:
            swarm.close()


def between(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a node did in between."""
    trainer, earlier = after["trainer"], before["trainer"]
    waited = {
        why: round(spent - earlier["waited"].get(why, 0.0), 2)
        for why, spent in trainer["waited"].items()
    }
    done = {name: after["exchanges"][name] - before["exchanges"][name] for name in COUNTED}
    return {
        "seconds": round(seconds, 1),
        "steps/s": round((trainer["steps"] - earlier["steps"]) / seconds, 2),
        "computing, s": round(trainer["computing"] - earlier["computing"], 2),
        "waited, s": waited,
        "exchanges": done.pop("completed"),
        **done,
    }


if __name__ == "__main__":
    sys.exit(main())
