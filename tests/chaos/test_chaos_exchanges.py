"""Every fault, in every phase of an exchange, by every role: thousands of seeded stories in virtual
time."""

from collections import Counter

import pytest
from faults import POSSIBLE, Boundary, Fault, Kind, Plan
from virtual_chaos import (
    CHAOTIC,
    GROUP_FRAMES,
    GROUP_REQUESTS,
    PAIR_FRAMES,
    PAIR_REQUESTS,
    ChaoticSwarm,
    check_chaos,
)  # fmt: skip

from helpers.virtual import VirtualPeer, naming

pytestmark = pytest.mark.chaos

SHORT, LONG = 15.0, 200.0
"""Seconds that are within the deadline of an exchange, and far beyond it."""


def passages(frames: tuple[str, ...], requests: tuple[str, ...]) -> list[tuple[Boundary, str]]:
    """Where an exchange passes a boundary."""
    return [
        *((Boundary.FRAME, frame) for frame in frames),
        *((Boundary.PIPE, request) for request in requests),
    ]


PAIR, GROUP = passages(PAIR_FRAMES, PAIR_REQUESTS), passages(GROUP_FRAMES, GROUP_REQUESTS)
LASTING = (Kind.DELAY, Kind.STOP)


def faults_at(passage: tuple[Boundary, str], number: int) -> list[Fault]:
    """All that can go wrong there."""
    boundary, what = passage
    return [
        Fault(boundary, kind, what, number, seconds)
        for kind in POSSIBLE[boundary]
        for seconds in ((SHORT, LONG) if kind in LASTING else (0.0,))
    ]


def run(swarm: ChaoticSwarm) -> ChaoticSwarm:
    """Tell one story, and check it; one that fails names its seed and plan."""
    with naming(swarm):
        check_chaos(swarm.run())
    return swarm


@pytest.mark.parametrize("passage", PAIR, ids=lambda passage: passage[1])
def test_no_fault_makes_the_two_of_a_pair_apply_different_things_without_doubt(passage):
    fired = Counter[Kind]()
    for fault in faults_at(passage, 0):
        for role in range(2):
            for seed in range(8):
                swarm = run(ChaoticSwarm(seed, 2, 2, {role: Plan((fault,))}))
                fired[fault.kind] += len(swarm.fired)
    assert set(fired) == set(POSSIBLE[passage[0]])
    assert all(fired.values()), f"some faults never happened: {fired}"


@pytest.mark.parametrize("passage", PAIR, ids=lambda passage: passage[1])
def test_a_fault_of_one_peer_costs_two_peers_their_exchange_at_most(passage):
    for fault in faults_at(passage, 0):
        for seed in range(6):
            swarm = run(ChaoticSwarm(seed, 6, 2, {0: Plan((fault,))}))
            with naming(swarm):
                assert sum(peer.applied is None for peer in swarm.peers.values()) <= 2


@pytest.mark.parametrize("role", [0, 1, 3], ids=["leader", "next", "last"])
@pytest.mark.parametrize("passage", GROUP, ids=lambda passage: passage[1])
def test_no_fault_makes_members_of_a_group_apply_different_shards_without_doubt(passage, role):
    fired = Counter[Kind]()
    for number in range(1 if passage[0] is Boundary.PIPE else 3):
        for fault in faults_at(passage, number):
            swarm = run(ChaoticSwarm(number, 4, 4, {role: Plan((fault,))}))
            fired[fault.kind] += len(swarm.fired)
    assert all(fired.values()), f"some faults never happened: {fired}"


def lacked(peer: VirtualPeer) -> set[str]:
    """The members whose means a peer has told that it does not hold."""
    tally = peer.group.tally
    held = tally.helds.get(peer.name, (b"",) * len(tally.members))
    return {name for name, digest in zip(tally.members, held, strict=True) if not digest}


@pytest.mark.parametrize("passage", GROUP[2:], ids=lambda passage: passage[1])
def test_a_fault_of_one_member_costs_the_others_two_shards_at_most(passage):
    """Its own, and where a stream has broken the one of the member at the other end."""
    for fault in faults_at(passage, 0):
        if fault.kind in CHAOTIC:
            continue  # an honest peer can't do that; others may give up the streams of whoever does
        for seed in range(4):
            swarm = run(ChaoticSwarm(seed, 4, 4, {3: Plan((fault,))}))
            (victim,) = swarm.victims
            for peer in swarm.peers.values():
                if peer is not victim:
                    with naming(swarm):
                        assert peer.applied is not None, (
                            "a fault of one member has cost another the exchange"
                        )
                        lost = {
                            name
                            for name, shard in zip(peer.applied, peer.shards, strict=True)
                            if not shard
                        }
                        if fault.kind is Kind.CLOCK_STEP:
                            # Beyond its deadline it says at once which means it lacks, and nobody
                            # applies these.
                            lost -= lacked(victim)
                        assert len(lost - {victim.name}) <= 1, (
                            "a fault of one member has cost the others theirs"
                        )


@pytest.mark.parametrize(
    ("group", "sizes", "count"), [(2, (2, 3, 6), 300), (4, (4, 6), 150), (8, (5, 9), 50)]
)
def test_many_faults_at_once_are_survived_as_well(group, sizes, count):
    fired = applied = 0
    where = PAIR if group == 2 else GROUP
    for seed in range(count):
        size = sizes[seed % len(sizes)]
        plans = {
            place: Plan.seeded(seed * 100 + place, where, 3, LONG)
            for place in range((size + 1) // 2)
        }
        swarm = run(ChaoticSwarm(seed, size, group, plans))
        fired += len(swarm.fired)
        applied += sum(peer.applied is not None for peer in swarm.peers.values())
    assert fired > count, "too little goes wrong"
    assert applied > count / 2, "too much goes wrong for a test"
