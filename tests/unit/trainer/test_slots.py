"""What must hold for the slots of exchanges: all that one exchange needs fits, and nothing more is
taken."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.node.ipc import Arena, create_file
from lowcomm_node.trainer.building import slot_bytes
from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.codecs import CODECS, codec, coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.spec.names import MAX_GROUP, codecs_for_groups


@given(
    st.sampled_from(codecs_for_groups()),
    st.integers(MAX_GROUP, 200_000),
    st.integers(2, MAX_GROUP),
    st.booleans(),
)
def test_the_shards_of_a_group_of_any_size_fit_into_a_slot(name, numel, count, realign):
    coding = codec("fp32" if realign else name)
    sizes = [coding.coded_size(stop - start) for start, stop in shard_bounds(numel, count)]
    room = slot_bytes(GroupCapture, name, numel)
    assert sum(sizes) <= room, "what we contribute to the shards of others; the means of all"
    assert count * max(sizes) <= room, "what others contribute to the largest shard"


@pytest.mark.parametrize("name", CODECS)
def test_a_contribution_in_a_pair_fits_into_a_slot(name):
    for numel in (1, 255, 100_000):
        assert slot_bytes(PairCapture, name, numel) >= max(coder(name, numel).max_size, 4 * numel)
    assert slot_bytes(PairCapture, name, 100_000) < 500_000


def test_slots_are_taken_all_at_once_or_not_at_all():
    memory = create_file()
    arena = Arena(memory, slots=4, slot_bytes=4096)
    os.close(memory)
    try:
        taken = arena.take(3)
        assert len(set(taken)) == 3 and arena.free == 1
        assert arena.take(2) == [] and arena.free == 1, "one would be of no use"
        arena.give_back(taken[0])
        assert set(arena.take(2)) | set(taken[1:]) == set(range(4))
        with pytest.raises(ValueError, match="given back twice"):
            for _ in range(2):
                arena.give_back(0)
    finally:
        arena.close()
