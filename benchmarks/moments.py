"""Held-out loss of one replica of the demo's model by ``--moments``: 300 steps, 6 seeds.

python benchmarks/moments.py    about ten minutes of a core; measures what its results lack
"""

from itertools import product
from statistics import mean, stdev
from typing import Any

import kit
import torch

from lowcomm_node.data import open_data
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.trainer.inner import InnerReplica
from lowcomm_node.trainer.moments import BITS
from lowcomm_protocol.spec.run import RunSpec

STEPS, SEEDS, OPTIMIZERS = 300, range(6), ("adamw", "muon")
RESULTS = kit.RESULTS / "moments.json"


def losses(optimizer: str, form: str) -> list[float]:
    """Held-out loss of each seed."""
    dataset, found = open_data("builtin:python", "bytes", kit.OUT / "data"), []
    for seed in SEEDS:
        content: dict[str, Any] = {
            "run": {"name": "moments", "steps": STEPS, "seed": seed},
            "train": {"optimizer": optimizer},
            "sync": {"method": "local"},
        }
        spec, cpu = RunSpec.model_validate(content), torch.device("cpu")
        replica = InnerReplica(spec, "peer-0", dataset, cpu, moments=form)
        for _ in range(STEPS):
            replica.inner_step()
        found.append(held_out_loss(replica.model, dataset, spec.model.context))
    return found


def main() -> None:
    """Measure what is missing, and print the table."""
    results = kit.read(RESULTS)
    for optimizer, form in product(OPTIMIZERS, BITS):
        if (key := f"{optimizer}, {form}") not in results:
            results[key] = losses(optimizer, form)
            kit.write(RESULTS, results)
    rows = [(key, f"{mean(one):.4f}", f"{stdev(one):.4f}") for key, one in results.items()]
    print(kit.table(("optimizer, moments", "held-out loss", "deviation of seeds"), rows))


if __name__ == "__main__":
    main()
