"""What must hold for whom to meet, and whether to accept."""

from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.virtual import OFFER
from lowcomm_protocol import matching
from lowcomm_protocol.matching import (
    Refusal,
    candidates,
    consider,
    keeps_momentum,
    must_realign,
    order,
)
from lowcomm_protocol.spec.names import PAIRINGS

seeds, rounds, fragments = st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 63)


def swarms(smallest: int = 2, largest: int = 24):
    return st.integers(smallest, largest).map(
        lambda size: [f"peer{number}" for number in range(size)]
    )


@given(seeds, fragments, rounds, swarms(), st.randoms())
def test_equal_views_give_the_same_order(seed, fragment, round_, peers, random):
    line = order(seed, fragment, round_, peers)
    shuffled = peers * 2
    random.shuffle(shuffled)
    assert order(seed, fragment, round_, shuffled) == line
    assert sorted(line) == sorted(peers)


@given(seeds, rounds, swarms(), st.data())
def test_views_that_differ_by_a_peer_keep_the_order_of_the_rest(seed, round_, peers, data):
    gone = data.draw(st.sampled_from(peers))
    rest = [peer for peer in order(seed, 0, round_, peers) if peer != gone]
    assert order(seed, 0, round_, [peer for peer in peers if peer != gone]) == rest


@pytest.mark.parametrize("pairing", PAIRINGS)
@given(seed=seeds, fragment=fragments, round_=rounds, peers=swarms())
def test_equal_views_give_a_perfect_matching(pairing, seed, fragment, round_, peers):
    first = {}
    for me in peers:
        others = [peer for peer in peers if peer != me]
        found = candidates(seed, fragment, round_, me, others, 2, pairing)
        assert sorted(found) == sorted(others), "in pairs everybody else is a candidate, once"
        first[me] = found[0]
    single = [me for me in peers if first[first[me]] != me]
    assert len(single) == len(peers) % 2


@given(seeds, rounds, swarms(1), st.integers(3, 8))
def test_groups_are_a_partition_of_the_swarm(seed, round_, peers, group):
    slices = {}
    for me in peers:
        found = candidates(seed, 0, round_, me, peers, group)
        assert me not in found
        slices[me] = frozenset([me, *found])
    for members in slices.values():
        assert len(members) <= group
        assert all(slices[peer] == members for peer in members)
    sizes = sorted(len(members) for members in set(slices.values()))
    assert sum(sizes) == len(peers)
    assert all(size == group for size in sizes[1:])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_partners_change_from_round_to_round_and_are_drawn_evenly(pairing):
    peers = [f"peer{number}" for number in range(8)]
    met = [candidates(3, 0, round_, "peer0", peers, 2, pairing)[0] for round_ in range(700)]
    counts = {peer: met.count(peer) for peer in peers[1:]}
    assert all(70 <= count <= 130 for count in counts.values()), counts
    assert sum(one == two for one, two in pairwise(met)) < 150


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@given(seed=seeds, cycle=st.integers(0, 10**5))
def test_after_a_cycle_of_rounds_everybody_has_the_mean_of_all(size, seed, cycle):
    peers = [f"peer{number}" for number in range(size)]
    values = {peer: float(2**number) for number, peer in enumerate(peers)}
    levels = size.bit_length() - 1
    for round_ in range(cycle * levels, (cycle + 1) * levels):
        partner = {me: candidates(seed, 0, round_, me, peers, 2)[0] for me in peers}
        values = {me: (values[me] + values[partner[me]]) / 2 for me in peers}
    assert set(values.values()) == {(2.0**size - 1) / size}


def in_one_go(
    seed: int, fragment: int, round_: int, me: str, peers: list[str], partner: str | None
) -> list[str]:
    """All candidates of a pair, sorted at once."""
    others = {*peers} - {me, partner}
    rest = sorted(
        others, key=lambda peer: sha256(f"{me}/{peer}/{fragment}/{round_}".encode()).digest()
    )
    return ([partner] if partner else []) + rest


@pytest.mark.parametrize("pairing", PAIRINGS)
@given(seed=seeds, fragment=fragments, round_=rounds, peers=swarms(), data=st.data())
def test_candidates_drawn_when_they_are_asked_for_are_those_that_are_sorted_at_once(
    pairing, seed, fragment, round_, peers, data
):
    me = data.draw(st.sampled_from(peers))
    found = candidates(seed, fragment, round_, me, peers, 2, pairing)
    paired = (
        found[0]
        if candidates(seed, fragment, round_, found[0], peers, 2, pairing)[0] == me
        else None
    )
    wanted = in_one_go(seed, fragment, round_, me, peers, paired)
    places = range(-len(wanted), len(wanted))
    assert len(found) == len(wanted)
    for place in data.draw(st.permutations(places)):
        assert found[place] == wanted[place]
    assert (found[:], found[:2], found[1:]) == (wanted, wanted[:2], wanted[1:])
    with pytest.raises(IndexError):
        found[len(wanted)]


@pytest.mark.parametrize(("pairing", "sorts"), [("hypercube", 1), ("random", 4)])
def test_a_thousand_peers_sort_a_permutation_once_however_many_ask(pairing, sorts, monkeypatch):
    peers = [f"peer{number}" for number in range(1000)]
    hashed = []
    matching._line.cache_clear()
    monkeypatch.setattr(matching, "sha256", lambda text: hashed.append(text) or sha256(text))
    for round_ in range(4):  # of a cycle of ten
        assert len({candidates(7, 0, round_, me, peers, 2, pairing)[0] for me in peers[:20]}) == 20
    assert len(hashed) == sorts * len(peers)


AGAINST = {
    Refusal.OTHER_PROTOCOL: {"protocol": 99},
    Refusal.OTHER_RUN: {"run_id": "ff" * 32},
    Refusal.OTHER_PLAN: {"plan": "ff" * 32},
    Refusal.OTHER_CODEC: {"codec": "bf16"},
    Refusal.UNKNOWN_FRAGMENT: {"fragment": 4},
}


@pytest.mark.parametrize("refusal", AGAINST)
def test_each_reason_against_an_offer_is_told(refusal):
    theirs = replace(OFFER, **AGAINST[refusal])
    assert consider(theirs, OFFER, 4, [(False, Refusal.BUSY)]) is refusal


def test_what_can_never_fit_is_told_before_what_may_pass():
    theirs = replace(OFFER, protocol=99, run_id="ff" * 32, codec="bf16")
    hopeless = [(True, Refusal.NOT_TRAINING), (True, Refusal.BUSY)]
    assert consider(theirs, OFFER, 0, hopeless) is Refusal.OTHER_PROTOCOL
    assert consider(OFFER, OFFER, 1, hopeless) is Refusal.NOT_TRAINING
    assert consider(OFFER, OFFER, 1, []) is None


def test_a_realignment_keeps_the_momentum_where_all_say_that_it_is_the_same():
    ours = replace(OFFER, slow_digest=b"a" * 32, momentum_digest=b"m" * 32)
    apart = replace(ours, slow_digest=b"b" * 32)
    missed = replace(apart, momentum_digest=b"n" * 32)
    assert not must_realign(ours, [ours, ours])
    assert must_realign(ours, [ours, apart]) and keeps_momentum(ours, [ours, apart])
    assert must_realign(ours, [apart, missed]) and not keeps_momentum(ours, [apart, missed])
    silent = [replace(one, momentum_digest=b"") for one in (ours, apart)]
    assert not keeps_momentum(silent[0], [silent[1]]), "who says nothing of it has none to keep"
