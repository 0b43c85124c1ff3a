"""What must hold for a group with a hostile member: it takes nothing from the others."""

from hashlib import sha256

import pytest

from helpers.exchange_stories import at, group_peers
from helpers.virtual import CALM, Swarm, VirtualPeer, check, naming
from lowcomm_protocol.exchange import events


@pytest.mark.parametrize("liar", range(4))
def test_the_shard_of_an_owner_that_tells_everybody_another_mean_is_applied_by_nobody(liar):
    for seed in range(20):
        swarm = Swarm(seed, 4, 4, CALM)
        owner = group_peers(swarm)[liar]
        owner.mean_for = lambda peer: sha256(peer.encode()).digest()
        with naming(swarm):
            swarm.run()
            honest = [peer for peer in group_peers(swarm) if peer is not owner]
            assert len({peer.outcome for peer in honest}) == 1
            for peer in honest:
                assert peer.shards == tuple(place != liar for place in range(4))
                assert peer.ended - peer.began <= 70.0


@pytest.mark.parametrize("method", ["noloco", "streaming-diloco"])
def test_an_owner_that_tells_one_of_three_another_mean_parts_only_that_one(method):
    for seed in range(10):
        swarm = Swarm(seed, 4, 4, CALM, method=method)
        *others, owner = group_peers(swarm)
        owner.mean_for = lambda peer, mean=owner.mean: mean() if peer != "peer001" else b"x" * 32
        owner.held_for = lambda peer, held, mean=owner.mean_for: (*held[:3], mean(peer))
        with naming(swarm):
            swarm.run()
            assert [peer.shards for peer in (others[0], others[2])] == [(True,) * 4] * 2
            assert others[1].shards == ((True,) * 3 + (False,) if method == "noloco" else ())
            assert others[1].group.in_doubt


def says_nothing(peer: VirtualPeer) -> None:
    peer.before = at(events.Commit, 0, lambda: peer.die(noticed=False))


def holds_nothing(peer: VirtualPeer) -> None:
    mine = list(peer.swarm.peers).index(peer.name)
    peer.held_for = lambda other, held: tuple(
        digest if place == mine else b"" for place, digest in enumerate(held)
    )
    peer.commit_for = lambda other, shards, heard: (
        tuple(place == mine for place in range(len(shards))),
        heard,
    )


def commits_to_nothing(peer: VirtualPeer) -> None:
    peer.commit_for = lambda other, shards, heard: ((False,) * len(shards), heard)


def leaves_out_one(peer: VirtualPeer) -> None:
    peer.commit_for = lambda other, shards, heard: ((False, *shards[1:]), heard)


def tells_each_another_lack(peer: VirtualPeer) -> None:
    names = list(peer.swarm.peers)

    def lacks(other: str, place: int) -> bool:
        return place not in (names.index(peer.name), names.index(other)) and place % 2 == (
            names.index(other) % 2
        )

    peer.held_for = lambda other, held: tuple(
        b"" if lacks(other, place) else digest for place, digest in enumerate(held)
    )
    peer.commit_for = lambda other, shards, heard: (
        tuple(not lacks(other, place) and shard for place, shard in enumerate(shards)),
        heard,
    )


VETOES = (
    says_nothing,
    holds_nothing,
    commits_to_nothing,
    leaves_out_one,
    tells_each_another_lack,
)


@pytest.mark.parametrize("method", ["noloco", "streaming-diloco"])
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("veto", VETOES)
def test_no_member_alone_takes_an_exchange_or_a_shard_from_three_others(veto, place, method):
    for seed in range(5):
        swarm = Swarm(seed, 4, 4, CALM, method=method)
        hostile = group_peers(swarm)[place]
        veto(hostile)
        with naming(swarm):
            swarm.run()
            honest = [peer for peer in group_peers(swarm) if peer is not hostile]
            assert {peer.outcome for peer in honest} == {honest[0].outcome}
            for peer in honest:
                assert peer.shards == (True,) * 4
                assert peer.ended - peer.began < 40.0, "one that is silent costs some seconds"
                blamed = {other for other, _ in peer.stumbles}
                assert blamed <= {hostile.name}
                assert blamed or veto in (leaves_out_one, tells_each_another_lack)


def test_of_three_one_that_voids_all_takes_nothing_from_the_two_others():
    for veto in (holds_nothing, commits_to_nothing, says_nothing):
        for seed in range(10):
            swarm = Swarm(seed, 3, 3, CALM, method="streaming-diloco")
            one, other, hostile = group_peers(swarm)
            veto(hostile)
            with naming(swarm):
                swarm.run()
                assert one.outcome == other.outcome
                assert one.shards == (True,) * 3


def test_a_stalled_contribution_is_left_out_of_one_mean_and_nobody_is_lost_for_it():
    for seed in range(20):
        swarm = Swarm(seed, 4, 4, CALM)
        slow, owner = group_peers(swarm)[1:3]
        send = slow.send_content

        def drag(peer: str, kind: str, payload: object = None, send=send, slow=slow) -> None:
            if (peer, kind) == ("peer002", "shard"):
                slow.swarm.send(slow.links[peer], slow.name, kind, payload, late=50.0)
            else:
                send(peer, kind, payload)

        slow.send_content = drag
        with naming(swarm):
            check(swarm.run())
            assert slow.name not in owner.averaged
            assert all(
                peer.shards == (True,) * 4 and not peer.group.in_doubt
                for peer in group_peers(swarm)
            )
