"""What must hold for the memory of exchanges: once there has been one, no vector of a fragment is
allocated any more."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.allocating import Tensors
from helpers.merged_bits import Text, begin, train
from lowcomm_node.trainer.memory import (
    GROUP_VECTORS,
    PAIR_VECTORS,
    UNCODED_VECTORS,
)
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec

MODEL = {"vocab": 258, "context": 16, "width": 160, "heads": 2, "feed_forward": 480, "layers": 1}
"""Several times as large as the pieces in which an outer step is computed."""


@contextmanager
def allocating_less_than(numel: int) -> Iterator[None]:
    """Context in which no vector of so many float32 values may be allocated."""
    tracemalloc.start()
    try:
        with Tensors(numel) as tensors:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            yield
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tensors.found == []
    assert peak - before < 4 * numel, "NumPy or Python"


def replicas_of(method: str, **sync: Any) -> dict[str, Replica]:
    spec = RunSpec.model_validate(
        {
            "run": {"name": "memory", "steps": 100},
            "model": MODEL,
            "sync": {"method": method, "codec": "fp32", "fragments": 1, **sync},
        }
    )
    peers = ("a", "b", "c") if spec.sync.group > 2 else ("a", "b")
    cpu = torch.device("cpu")
    made = {peer: Replica(spec, peer, Text(), cpu) for peer in peers}  # type: ignore[arg-type]
    for replica in made.values():
        begin(replica)
    return made


def pairs(
    replicas: dict[str, Replica],
    buffers: dict[str, memoryview],
    until: Callable[[Replica, int], None] | None = None,
) -> None:
    """An exchange of two; ``until``: its last part, if it does not end with the merge."""
    coded = {}
    for peer, replica in replicas.items():
        replica.capture(0)
        coded[peer] = buffers[peer][: captured(replica).encode(buffers[peer])]
    for peer, replica in replicas.items():
        other = "b" if peer == "a" else "a"
        captured(replica).receive(other, coded[other])
    for replica in replicas.values():
        captured(replica).pool({"a": 3, "b": 5})
        (until or finish)(replica, 0)


def captured(replica: Replica) -> Any:
    return replica.capture_of(0)


def groups(replicas: dict[str, Replica], buffers: dict[str, memoryview]) -> None:
    """An exchange of three, in which the same bytes stand for all that has the same size."""
    sizes = {}
    for peer, replica in replicas.items():
        replica.capture(0, members=tuple(replicas))
        sizes[peer] = captured(replica).encode(buffers[peer])
    for peer, replica in replicas.items():
        group = captured(replica)
        for other in replicas:
            if other != peer:
                at = sum(sizes[other][: group.mine])
                group.receive(other, buffers[other][at : at + sizes[other][group.mine]])
    means = {}
    for peer, replica in replicas.items():
        group = captured(replica)
        means[peer] = buffers[peer][: group.reduce({"a": 3, "b": 5, "c": 4}, buffers[peer])]
    for peer, replica in replicas.items():
        for other in replicas:
            if other != peer:
                captured(replica).receive_mean(other, means[other])
        captured(replica).pool(list(replicas))
        finish(replica, 0)


def finish(replica: Replica, fragment: int) -> None:
    replica.outer(fragment)
    replica.merge(fragment, replica.clock.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sync", "exchange"),
    [
        ("noloco", {}, pairs),
        ("lowcomm", {}, pairs),
        ("lowcomm", {"codec": "mod3"}, pairs),
        ("gossip", {"merge": "mix", "mix": 0.5}, pairs),
        ("diloco", {"mean": "mean"}, groups),
    ],
)
def test_an_exchange_allocates_no_vector_of_a_fragment(
    method: str, sync: dict[str, Any], exchange: Callable[..., None]
):
    replicas = replicas_of(method, **sync)
    numel = replicas["a"].phi[0].numel()
    buffers = {peer: memoryview(bytearray(4 * numel + 65_536)) for peer in replicas}
    made: list[int] = []
    for number in range(4):
        for place, replica in enumerate(replicas.values()):
            train(replica, seed=10 * number + place)
        if number < 2:
            with Tensors(numel):  # torch imports what it needs for that
                exchange(replicas, buffers)
            made = [replica.scratch.made for replica in replicas.values()]
        else:
            with allocating_less_than(numel // 2):
                exchange(replicas, buffers)
    assert [replica.scratch.made for replica in replicas.values()] == made
    slow = 2 * (1 + replicas["a"].keeps_momentum)  # slow weights and momentum, old and new
    if method == "diloco":
        assert max(made) <= GROUP_VECTORS + UNCODED_VECTORS + slow
    else:
        uncoded = UNCODED_VECTORS * (sync.get("codec") == "mod3")
        assert made == 2 * [PAIR_VECTORS + uncoded + slow]


@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_until_its_merge_an_exchange_holds_its_capture_and_its_outcome_alone(momentum: float):
    replicas = replicas_of("lowcomm", codec="mod3", momentum=momentum, outer_lr=0.7)
    numel = replicas["a"].phi[0].numel()
    buffers = {peer: memoryview(bytearray(4 * numel + 65_536)) for peer in replicas}
    for number in range(2):
        for place, replica in enumerate(replicas.values()):
            train(replica, seed=10 * number + place)
        pairs(replicas, buffers, until=Replica.outer)
        kept = 2 + (momentum > 0)
        slow = (1 + (momentum > 0)) * (number > 0)  # the vectors of the first are none of these
        assert {held(one) for one in replicas.values()} == {kept + slow}
        for replica in replicas.values():
            replica.merge(0, replica.clock.step)
        assert {held(one) for one in replicas.values()} == {kept - 1}, "what the merge put in place"


@pytest.mark.parametrize("method", ["lowcomm", "noloco", "gossip"])
def test_with_slow_weights_in_files_an_exchange_holds_its_capture_alone_in_memory(
    method: str, tmp_path: Path
):
    replicas = replicas_of(method)
    for peer, replica in replicas.items():
        replica.phi = [one.clone() for one in replica.phi]  # none is of the scratch in memory
        replica.keep_in_files(tmp_path / peer)
    numel = replicas["a"].phi[0].numel()
    buffers = {peer: memoryview(bytearray(4 * numel + 65_536)) for peer in replicas}
    pairs(replicas, buffers, until=lambda replica, fragment: None)
    most = {PAIR_VECTORS}
    assert {held(one) for one in replicas.values()} == most
    for replica in replicas.values():
        replica.outer(0)
        assert held(replica) == 1, "the weights as captured"
        replica.merge(0, replica.clock.step)
        assert held(replica) == 0


def held(replica: Replica) -> int:
    """Vectors of its scratch that somebody holds."""
    return replica.scratch.made - replica.scratch.free


def test_without_momentum_none_is_kept_and_with_equal_slow_weights_it_is_told_as_ever():
    assert replicas_of("gossip")["a"].delta == []
    assert replicas_of("gossip")["a"].momentum_digest(0) == ""
    assert len(replicas_of("noloco")["a"].delta) == len(replicas_of("lowcomm")["a"].delta) == 1
    equal = replicas_of("streaming-diloco", momentum=0.0)["a"]
    assert len(equal.delta) == 1 and len(equal.momentum_digest(0)) == 64
