"""Exchanges whose every bit is known: weights from NumPy's generator, no inner step.

    python tests/helpers/merged_bits.py [THREADS[,THREADS] [CASE ...]]

prints, as a line of JSON for each number of threads, a digest of fast weights, slow weights and
outer momentum, where there is any, for each case: three exchanges of two peers, or of three. Apart
from pytest, so that each run of it can have a processor of its own (``ATEN_CPU_CAPABILITY``).
"""

import json
import sys
from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec

OF_0_1 = {"interval": 4, "outer_lr": 1.25, "momentum": 0.0, "memory": 0.0}
GROUPS_OF_0_1 = {"method": "streaming-diloco", "outer": "nesterov", "memory": 0.0,
                 "merge": "mix", "mix": 0.25}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "lowcomm": {"method": "lowcomm", "codec": "fp32", **OF_0_1},
    "lowcomm, bf16": {"method": "lowcomm", "codec": "bf16", **OF_0_1},
    "noloco": {"method": "noloco"},
    "gossip": {"method": "gossip"},
    "diloco in pairs": {"method": "diloco", "group": 2},
    "diloco": {"method": "diloco"},
    "streaming-diloco": {"codec": "fp32", **GROUPS_OF_0_1},
    "streaming-diloco, bf16": {"codec": "bf16", **GROUPS_OF_0_1},
    "realigned": {"method": "noloco", "momentum": 0.5},
    "odd numbers": {"method": "noloco", "outer_lr": 0.37, "consensus": 0.3, "mix": 0.3,
                    "merge": "mix"},
    "remembering": {"method": "noloco", "outer_lr": 1.0, "momentum": 0.5, "memory": 0.9},
}  # fmt: skip
PRESETS = ("lowcomm", "streaming-diloco", "diloco-paper", "streaming-diloco-paper", "noloco-paper")
CASES |= {f"{preset}, as shipped": {"method": preset} for preset in PRESETS}
CASES |= {
    f"lowcomm, {codec}": {"method": "lowcomm", "codec": codec} for codec in ("mod3", "mod6", "mod8")
}
CASES |= {
    f"streaming-diloco, {codec}": GROUPS_OF_0_1 | {"codec": codec} for codec in ("q2", "int8")
}
ROUNDS = 3
CPU = torch.device("cpu")
MODEL = {"vocab": 258, "context": 16, "width": 32, "heads": 2, "feed_forward": 64, "layers": 1}


class Text:
    """Stands in for a dataset: nothing is trained."""

    tokenizer = None

    class train:  # noqa: N801
        """Of a split, its length is asked."""

        tokens = 4096


def digest(name: str, device: torch.device = CPU) -> str:
    """Of all that the peers of a case hold after its exchanges."""
    run = {"run": {"name": "bits", "steps": 100}, "model": MODEL, "sync": CASES[name]}
    spec = RunSpec.model_validate(run)
    peers = ("a", "b", "c") if spec.sync.group > 2 else ("a", "b")
    replicas = {peer: Replica(spec, peer, Text(), device) for peer in peers}  # type: ignore[arg-type]
    for replica in replicas.values():
        begin(replica)
    exchange = groups if len(peers) > 2 else pairs
    for number in range(ROUNDS):
        for fragment in range(len(replicas["a"].plan.fragments)):
            for place, replica in enumerate(replicas.values()):
                train(replica, seed=100 * number + 10 * fragment + place)
                replica.capture(fragment, name == "realigned" and number == 1, peers[2:] and peers)
            exchange(replicas, fragment)
    told = sha256()
    for replica in replicas.values():
        for p in range(len(replica.phi)):
            momentum = replica.delta[p : p + 1] if spec.sync.momentum else []
            for vector in (replica.fast(p), replica.phi[p], *momentum):
                told.update(vector.numpy().tobytes())
    return told.hexdigest()[:16]


def begin(replica: Replica) -> None:
    """Weights of our own: torch's random numbers depend on the processor."""
    source = np.random.Generator(np.random.PCG64(7))
    for weight in replica.weights.values():
        values = 0.05 * source.standard_normal(weight.numel())
        weight.data.copy_(torch.from_numpy(values.astype(np.float32)).view_as(weight))
    replica.phi = [replica.fast(p) for p in range(len(replica.phi))]


def train(replica: Replica, seed: int) -> None:
    """Move all weights but every seventh, and never by much; peers mostly agree where to."""
    shared, own = (np.random.Generator(np.random.PCG64(one)) for one in (seed // 10, 1000 + seed))
    for weight in replica.weights.values():
        moved = shared.standard_normal(weight.numel()) + own.standard_normal(weight.numel())
        moved[::7] = 0.0
        values = weight.data.flatten().cpu().numpy() + (1e-3 * moved).astype(np.float32)
        weight.data.copy_(torch.from_numpy(values).view_as(weight))
    replica.tokens += 1000 + 7 * seed
    replica.steps += 1


def pairs(replicas: dict[str, Replica], fragment: int) -> None:
    """An exchange of two."""
    coded = {}
    for peer, replica in replicas.items():
        buffer = memoryview(bytearray(16 * replica.phi[fragment].numel() + 65_536))
        coded[peer] = buffer[: sum(replica.capture_of(fragment).encode(buffer))]
    for peer, replica in replicas.items():
        other = next(one for one in replicas if one != peer)
        wrapped = replica.capture_of(fragment).receive(other, coded[other])
        if wrapped:
            buffer = memoryview(bytearray(16 * replica.phi[fragment].numel() + 65_536))
            size = replicas[other].capture_of(fragment).resend(wrapped, buffer)
            replica.capture_of(fragment).patch(other, buffer[:size])
    for replica in replicas.values():
        replica.capture_of(fragment).pool({"a": 3, "b": 5})
        replica.outer(fragment)
        replica.merge(fragment, replica.clock.step)


def groups(replicas: dict[str, Replica], fragment: int) -> None:
    """An exchange of three, of which the last one's shard is left out."""
    shares, means = {}, {}
    for peer, replica in replicas.items():
        buffer = memoryview(bytearray(16 * replica.phi[fragment].numel() + 65_536))
        sizes = replica.capture_of(fragment).encode(buffer)
        ends = list(accumulate(sizes))
        cut = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        shares[peer] = dict(zip(replicas, cut, strict=True))
    for peer, replica in replicas.items():
        for other in replicas:
            if other != peer:
                replica.capture_of(fragment).receive(other, shares[other][peer])
        buffer = memoryview(bytearray(16 * replica.phi[fragment].numel() + 65_536))
        size = replica.capture_of(fragment).reduce({"a": 3, "b": 5, "c": 4}, buffer)
        means[peer] = buffer[:size]
    for peer, replica in replicas.items():
        for other in replicas:
            if other != peer:
                replica.capture_of(fragment).receive_mean(other, means[other])
        replica.capture_of(fragment).pool(["a", "b"])
        replica.outer(fragment)
        replica.merge(fragment, replica.clock.step)


if __name__ == "__main__":
    for threads in sys.argv[1].split(",") if len(sys.argv) > 1 else ("1",):
        torch.set_num_threads(int(threads))
        print(json.dumps({name: digest(name) for name in sys.argv[2:] or CASES}))
