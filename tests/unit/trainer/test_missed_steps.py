"""What must hold for outer steps that one replica hands over to another: real replicas and codecs,
without a network between them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.node.messages import Part
from lowcomm_node.trainer.capture import Capture
from lowcomm_node.trainer.missed import HEAD, Step, read
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs import shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import MAX_GROUP
from lowcomm_protocol.spec.run import RunSpec

NUMEL = 3000


def step_of(members: int, applied: set[int], codec: str = "q2", seed: int = 0) -> Step:
    """An outer step whose means are random."""
    coder, random, means = shard_coder(codec, NUMEL), np.random.default_rng(seed), []
    for shard, (start, stop) in enumerate(shard_bounds(NUMEL, members)):
        values = random.standard_normal(stop - start).astype(np.float32)
        out = memoryview(bytearray(coder.coded_size(stop - start)))
        coder.reduce(values, start, out)
        if shard in applied:
            means.append((shard, bytes(out)))
    return Step(members, means)


@pytest.mark.parametrize("codec", ["q2", "e3m0", "int8", "bf16"])
@pytest.mark.parametrize("members", [2, 5, MAX_GROUP])
def test_steps_come_as_they_went(codec, members):
    applied = set(range(0, members, 2))
    steps = [step_of(members, applied, codec, seed) for seed in (1, 2)]
    data = b"".join(one.pack() for one in steps)
    coder, bounds = shard_coder(codec, NUMEL), shard_bounds(NUMEL, members)
    for one, (moved, mean) in zip(steps, read(memoryview(data), coder, NUMEL, 2), strict=True):
        assert moved == tuple(bounds[shard] for shard in sorted(applied))
        for (start, stop), (_, coded) in zip(moved, one.means, strict=True):
            wanted = np.empty(stop - start, dtype=np.float32)
            coder.decode(memoryview(coded), wanted)
            assert np.array_equal(mean[start:stop].numpy(), wanted)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        step_of(3, {0, 1, 2}).pack()[:-1],
        step_of(3, {0, 1, 2}).pack() + b"-",
        step_of(3, {0}).pack() * 2,
        HEAD.pack(1, 1),
        HEAD.pack(MAX_GROUP + 1, 1),
        HEAD.pack(3, 0),
        HEAD.pack(3, 8) + step_of(3, {0}).pack()[HEAD.size :],
    ],
)
def test_what_are_no_steps_is_refused(data):
    with pytest.raises(CodecError):
        list(read(memoryview(data), shard_coder("q2", NUMEL), NUMEL, 1))


def exchange(replicas: Sequence[Replica], applied: set[str]) -> dict[str, Capture[Any]]:
    """Share fragment 0 out among these, which have captured it, and pool these shards."""
    captures = {one.peer_id: one.captures[0] for one in replicas}
    room = 8 * replicas[0].plan.fragments[0].numel
    shares, means = {}, {}
    for peer, capture in captures.items():
        out, at = bytearray(room), 0
        for owner, size in zip(captures, capture.code(memoryview(out)), strict=True):
            shares[peer, owner] = bytes(out[at : at + size])
            at += size
    for owner, capture in captures.items():
        for peer in captures.keys() - {owner}:
            capture.take(Part.SHARE, peer, memoryview(shares[peer, owner]))
        out = bytearray(room)
        size = capture.reduce(dict.fromkeys(captures, 1), memoryview(out))
        means[owner] = bytes(out[:size])
    for peer, capture in captures.items():
        for owner in captures.keys() - {peer}:
            capture.take(Part.MEAN, owner, memoryview(means[owner]))
        capture.pool(dict.fromkeys([owner for owner in captures if owner in applied], 1))
    return captures


def trained(dataset: Dataset) -> list[Replica]:
    """Three replicas of a group, a few steps from its beginning."""
    spec = RunSpec.model_validate(
        {
            "run": {"name": "missed"},
            "model": {
                "layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16
            },
            "train": {"batch": 4, "optimizer": "adamw"},
            "sync": {"method": "streaming-diloco", "fragments": 1},
        }
    )  # fmt: skip
    replicas = [Replica(spec, peer, dataset, torch.device("cpu"), False) for peer in "abc"]
    step(replicas)
    return replicas


def step(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        for _ in range(4):
            replica.inner_step()


def merge(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        replica.outer(0)
        replica.merge(0, 4)


def test_what_was_taken_over_reaches_all_weights_where_one_shard_alone_is_applied(tmp_path):
    (tmp_path / "one.txt").write_text("Some short sentences, and all much alike. " * 400)
    replicas = trained(open_data(f"text:{tmp_path}", "bytes", tmp_path / "cache"))
    *there, behind = replicas
    for replica in there:
        replica.capture(0, members=("a", "b"))
    exchange(there, {"a", "b"})
    merge(there)
    step(replicas)
    held = there[0].slow_digest(0), there[0].momentum_digest(0)
    for replica in replicas:
        replica.capture(0, members=("a", "b", "c"))
    behind.take_over(0, memoryview(there[1].missed(0, 1)), 1, held)
    captures = exchange(replicas, {"a"})
    theta, (start, stop) = behind.fast(0), captures["c"].bounds[2]
    merge(replicas)
    assert len({replica.slow_digest(0) for replica in replicas}) == 1
    mix = behind.spec.sync.mix
    wanted = mix * theta + (1 - mix) * behind.phi[0]
    assert torch.allclose(behind.fast(0)[start:stop], wanted[start:stop], atol=1e-6)
    assert not torch.allclose(theta[start:stop], wanted[start:stop], atol=1e-4)


@given(st.binary(max_size=2000), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_steps_or_refused(data, steps):
    try:
        for moved, mean in read(memoryview(data), shard_coder("q2", NUMEL), NUMEL, steps):
            assert all(mean[start:stop].isfinite().all() for start, stop in moved)
    except CodecError:
        pass
