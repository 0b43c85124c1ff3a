"""What must hold for where records stand, and for the number of peers that follows."""

from collections import Counter
from statistics import mean

import pytest

from lowcomm_protocol.peers.shards import (
    AT_DOOR,
    MAX_BITS,
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


def look(
    size: SwarmSize, peers: list[str], rounds: int, run: str = RUN, lie: int | None = None
) -> int:
    """Look at the own shard and another one in turn, as a node does. Returns the moves.

    ``lie``: records that the own shard shows instead of its own.
    """
    deep, moves = [shard_of(run, peer, MAX_BITS) for peer in peers], 0
    for turn in range(rounds):
        up = MAX_BITS - size.bits
        number = deep[0] >> up if turn % 2 == 0 else turn % (1 << size.bits)
        count = sum(shard >> up == number for shard in deep)
        if lie is not None and turn % 2 == 0:
            count = lie
        moves += size.count(min(count, MAX_LISTED), own=turn % 2 == 0)
    return moves


def test_shards_are_even_and_each_is_half_of_the_one_above():
    counts = Counter(shard_of(RUN, peer, 8) for peer in PEERS)
    assert len(counts) == 256 and max(counts.values()) < 2 * len(PEERS) / 256
    assert all(shard_of(RUN, peer, 8) >> 3 == shard_of(RUN, peer, 5) for peer in PEERS[:100])
    assert {shard_of(RUN, peer, 0) for peer in PEERS} == {0}
    assert shard_of(RUN, "x", 16) != shard_of("cd" * 32, "x", 16)


@pytest.mark.parametrize("number", [10, 100, 1_000, 10_000])
def test_the_number_of_peers_is_right_within_a_third_and_no_depth_swings(number: int):
    estimates = list[int]()
    for seed in range(20 if number < 10_000 else 4):
        size, run = SwarmSize(), f"run-{seed}"
        look(size, PEERS[:number], 30, run)
        assert look(size, PEERS[:number], 10, run) == 0
        assert (size.shards == 0) == (number <= MOST)
        assert number / 2**size.bits <= 1.5 * MOST
        estimates.append(size.peers)
    assert 0.66 * number <= min(estimates) and max(estimates) <= 1.34 * number
    assert mean(estimates) == pytest.approx(number, rel=0.1)


@pytest.mark.parametrize("lie", [MAX_LISTED, 1])
def test_a_shard_that_is_flooded_or_hidden_moves_its_peers_by_two_depths_at_most(lie: int):
    size = SwarmSize()
    look(size, PEERS[:1_000], 40)
    honest = size.bits
    look(size, PEERS[:1_000], 40, lie=lie)
    assert abs(size.bits - honest) <= 2
    look(size, PEERS[:1_000], 40)
    assert abs(size.bits - honest) <= 1, "they come back"


def test_a_swarm_that_shrinks_comes_back_to_the_door():
    size = SwarmSize()
    look(size, PEERS[:2_000], 40)
    assert size.bits >= 5
    look(size, PEERS[:20], 40)
    assert size.bits == 0 and size.peers == 20 and size.shards == 0


def test_peers_take_turns_at_the_door():
    size = SwarmSize()
    assert size.is_at_door("ada", NOW), "a small swarm has all of them there"
    look(size, PEERS, 40)
    there = [
        {peer for peer in PEERS if size.is_at_door(peer, NOW + PERIOD * turn)} for turn in range(2)
    ]
    assert all(0.6 * AT_DOOR < len(peers) < 1.6 * AT_DOOR for peers in there)
    assert len(there[0] & there[1]) < AT_DOOR / 4
    assert rank("ada", NOW) == rank("ada", NOW + 1) != rank("ada", NOW + PERIOD)


def test_one_who_moves_down_goes_on_to_the_depth_of_others_and_never_back_by_their_word():
    size = SwarmSize()
    for records in (10, 40, 20):
        size.count(records, own=True)
    assert size.peers == 20, "the median"
    assert not size.count(MAX_LISTED, own=False), "not our shard"
    assert size.count(MAX_LISTED, own=True)
    assert size.bits == 1 and size.peers == MAX_LISTED, "counts of another depth are gone"
    size.follow(7)
    size.follow(3)
    size.follow(-1)
    assert size.bits == 7
    size.follow(MAX_BITS + 1)
    assert not size.count(MAX_LISTED, own=True) and size.bits == MAX_BITS
