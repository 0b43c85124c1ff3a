"""What must hold for where records stand, and for the number of peers that follows."""

from collections import Counter

import pytest

from lowcomm_protocol.peers.shards import (
    AT_DOOR,
    MAX_LISTED,
    MOST,
    PERIOD,
    SwarmSize,
    rank,
    shard_of,
)

RUN = "ab" * 32
NOW = 1_800_000_000.0
PEERS = [f"peer-{number}" for number in range(10_000)]


def look(size: SwarmSize, peers: list[str], rounds: int) -> None:
    """Look at the own shard and another one in turn, as a node does."""
    for turn in range(rounds):
        bits = size.bits
        number = shard_of(RUN, peers[0], bits) if turn % 2 == 0 else turn % (1 << bits)
        count = sum(shard_of(RUN, peer, bits) == number for peer in peers)
        size.count(min(count, MAX_LISTED), own=turn % 2 == 0)


def test_shards_are_even_and_each_is_half_of_the_one_above():
    counts = Counter(shard_of(RUN, peer, 8) for peer in PEERS)
    assert len(counts) == 256 and max(counts.values()) < 2 * len(PEERS) / 256
    assert all(shard_of(RUN, peer, 8) >> 3 == shard_of(RUN, peer, 5) for peer in PEERS[:100])
    assert {shard_of(RUN, peer, 0) for peer in PEERS} == {0}
    assert shard_of(RUN, "x", 16) != shard_of("cd" * 32, "x", 16)


@pytest.mark.parametrize("number", [10, 100, 1_000, 10_000])
def test_the_number_of_peers_is_right_within_a_third_and_no_depth_swings(number: int):
    size = SwarmSize()
    look(size, PEERS[:number], 40)
    depth = size.bits
    look(size, PEERS[:number], 2)
    assert size.bits == depth
    assert 0.67 * number <= size.peers <= 1.33 * number
    assert (size.shards == 0) == (number <= MOST)
    assert number / 2**depth <= 1.5 * MOST


def test_a_swarm_that_shrinks_comes_back_to_the_door():
    size = SwarmSize()
    look(size, PEERS[:2_000], 40)
    assert size.bits >= 5
    look(size, PEERS[:20], 40)
    assert size.bits == 0 and size.peers == 20 and size.shards == 0


def test_peers_take_turns_at_the_door():
    size = SwarmSize()
    look(size, PEERS, 40)
    there = [
        {peer for peer in PEERS if size.is_at_door(peer, NOW + PERIOD * turn)} for turn in range(2)
    ]
    assert all(0.6 * AT_DOOR < len(peers) < 1.6 * AT_DOOR for peers in there)
    assert len(there[0] & there[1]) < AT_DOOR / 4
    assert rank("ada", NOW) == rank("ada", NOW + 1) != rank("ada", NOW + PERIOD)


def test_one_who_moves_down_goes_on_to_the_depth_of_others_and_never_back_by_their_word():
    size = SwarmSize()
    size.count(MAX_LISTED, own=True)
    assert size.bits == 1
    size.follow(7)
    size.follow(3)
    size.follow(-1)
    assert size.bits == 7
