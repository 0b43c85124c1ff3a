"""Bytes of an exchange are those that coders write and frames have."""

import numpy as np
import pytest

from lowcomm_node.planner import volume
from lowcomm_node.planner.question import run_of
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import RunSpec

NUMEL = 5000


def sync_of(method: str, **changes):
    spec = RunSpec.model_validate({"run": {"name": "a"}, "sync": {"method": method, **changes}})
    return spec.sync


@pytest.mark.parametrize("codec", ["fp32", "bf16", "mod3", "mod4", "mod8"])
def test_contents_of_a_pair_are_what_its_coder_writes(codec: str) -> None:
    near = np.linspace(-1, 1, NUMEL, dtype=np.float32)
    one, two = coder(codec, NUMEL), coder(codec, NUMEL)
    out, back = memoryview(bytearray(one.max_size)), memoryview(bytearray(one.max_size))
    for _ in range(2):  # modulo codecs know how far both are apart from the second time on
        vector = near + np.float32(1e-3) * np.cos(np.arange(NUMEL, dtype=np.float32))
        size = one.encode(vector, out)
        there = two.encode(near.copy(), back)
        one.decode(back[:there], np.empty(NUMEL, dtype=np.float32))
        two.decode(out[:size], np.empty(NUMEL, dtype=np.float32))
        one.commit()
        two.commit()
    assert volume.contents(sync_of("lowcomm", codec=codec), NUMEL, 2) == size


@pytest.mark.parametrize("members", [2, 3, 8])
def test_contents_of_a_group_are_what_the_member_that_sends_most_writes(members: int) -> None:
    one, bounds = shard_coder("q2", NUMEL, feedback=True), shard_bounds(NUMEL, members)
    sent = []
    for mine, (start, stop) in enumerate(bounds):
        out = memoryview(bytearray(one.max_size))
        shares = one.encode(np.ones(NUMEL, dtype=np.float32), mine, bounds, out)
        mean = one.reduce(np.ones(stop - start, dtype=np.float32), start, out)
        one.forget()
        sent.append(sum(shares) + (members - 1) * mean)
    assert volume.contents(sync_of("streaming-diloco"), NUMEL, members) == max(sent)


@pytest.mark.parametrize("method", [name for name in PRESETS if name != "local"])
def test_what_agrees_on_an_exchange_is_little_beside_a_large_model(method: str) -> None:
    sync = sync_of(method)
    members = volume.members_of(sync, 8)
    told = volume.control(sync, 25_000_000, members)
    assert 0 < told < 0.01 * volume.contents(sync, 25_000_000, members)


def test_nobody_sends_anything_alone() -> None:
    assert volume.contents(sync_of("local"), NUMEL, 1) == 0
    assert volume.control(sync_of("local"), NUMEL, 1) == 0


def test_fragments_are_those_of_the_plan_that_peers_make() -> None:
    spec = run_of(1_000_000, 4)
    sizes = volume.fragment_sizes(spec)
    assert len(sizes) == spec.sync.fragments
    assert sum(sizes) == pytest.approx(1_000_000, rel=0.1)
