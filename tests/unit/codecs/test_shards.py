"""What must hold for a fragment that a group shares out: the same bits at all, few bytes, and
errors that are made good."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.codecs import codec, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import CODECS

FOR_GROUPS = [name for name, entry in CODECS.items() if not entry.only_in_pairs]


class Swarm:
    """A group that exchanges one fragment again and again, by the coders alone."""

    def __init__(self, name: str, numel: int, count: int, feedback: bool) -> None:
        self.bounds = shard_bounds(numel, count)
        self.coders = [shard_coder(name, numel, feedback) for _ in range(count)]
        self.codec = codec(name)
        self.sent = [0] * count

    def exchange(self, vectors: list[np.ndarray]) -> list[np.ndarray]:
        """The mean, as every member has it."""
        buffer = [bytearray(4 * vectors[0].size + 64) for _ in self.coders]
        sizes = [
            one.encode(vector, mine, self.bounds, memoryview(out))
            for mine, (one, vector, out) in enumerate(
                zip(self.coders, vectors, buffer, strict=True)
            )
        ]
        means = [np.zeros_like(vectors[0]) for _ in self.coders]
        for owner, (start, stop) in enumerate(self.bounds):
            shares = []
            for member, vector in enumerate(vectors):
                if member == owner:
                    shares.append(vector[start:stop])
                    continue
                at = sum(sizes[member][:owner])
                share = np.empty(stop - start, dtype=np.float32)
                self.coders[owner].codec.decode(
                    memoryview(buffer[member])[at : at + sizes[member][owner]], share
                )
                assert np.array_equal(share, vector[start:stop]), (
                    "a member's own vector is what the owner decodes"
                )
                shares.append(share)
                self.sent[member] += sizes[member][owner]
            mean = np.mean(shares, axis=0, dtype=np.float32)
            out = bytearray(4 * mean.size + 64)
            size = self.coders[owner].reduce(mean, start, memoryview(out))
            self.sent[owner] += size * (len(vectors) - 1)
            for member, one in enumerate(self.coders):
                if member != owner:
                    one.codec.decode(memoryview(out)[:size], means[member][start:stop])
            means[owner][start:stop] = mean
        return means


def drawn(seed: int, numel: int, count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(numel).astype(np.float32) for _ in range(count)]


@given(
    st.sampled_from(FOR_GROUPS),
    st.integers(2, 5),
    st.integers(8, 2000),
    st.integers(0, 999),
    st.booleans(),
)
def test_all_members_end_with_the_same_bits(name, count, numel, seed, feedback):
    swarm = Swarm(name, numel, count, feedback)
    for round_ in range(2):
        means = swarm.exchange(drawn(seed + round_, numel, count))
        assert all(np.array_equal(one, means[0]) for one in means)
        for one in swarm.coders:
            one.commit(swarm.bounds)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", FOR_GROUPS)
def test_a_member_sends_two_times_all_shards_but_its_own(name, count):
    numel = 58_624  # the largest fragment of the demo model
    swarm = Swarm(name, numel, count, False)
    swarm.exchange(drawn(0, numel, count))
    most = 2 * (count - 1) / count * codec(name).coded_size(numel)
    assert max(swarm.sent) <= 1.02 * most, "shards are whole blocks, so one may be a block larger"
    assert sum(swarm.sent) / count <= 1.0001 * most


def test_a_shard_that_is_not_applied_keeps_its_old_residual():
    numel, count = 1024, 4
    swarm = Swarm("q2", numel, count, True)
    swarm.exchange(drawn(0, numel, count))
    swarm.coders[0].commit([swarm.bounds[1], swarm.bounds[2]])
    lost = swarm.coders[0].state()["contribution-residual"]
    assert not lost[:256].any() and not lost[768:].any()
    assert lost[256:768].any()
    assert not swarm.coders[0].state()["mean-residual"].any(), "our own shard was not applied"
    swarm.coders[1].commit([swarm.bounds[1]])
    of_means = swarm.coders[1].state()["mean-residual"]
    assert of_means[256:512].any() and not of_means[512:].any()


def test_a_late_peer_does_not_pay_what_its_donor_owes():
    swarm = Swarm("q2", 700, 3, True)
    swarm.exchange(drawn(0, 700, 3))
    swarm.coders[0].commit(swarm.bounds)
    late = shard_coder("q2", 700, True)
    late.restore(swarm.coders[0].state())
    late.load_shared_state(swarm.coders[0].shared_state())
    assert not any(residual.any() for residual in late.state().values())
    with pytest.raises(CodecError, match="learns nothing"):
        late.load_shared_state({"range": np.zeros(3, dtype=np.float32)})


def test_state_that_does_not_fit_is_refused():
    with pytest.raises(CodecError, match="expected"):
        shard_coder("q2", 300, True).restore({})
    with pytest.raises(CodecError, match="expected"):
        shard_coder("q2", 300).restore({"mean-residual": np.zeros(300, dtype=np.float32)})
    assert shard_coder("fp32", 300, True).state() == {}, "nothing is lost, so nothing is remembered"
