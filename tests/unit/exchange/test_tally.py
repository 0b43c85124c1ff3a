"""What must hold for what members of a group tell of the means of its shards: what most hold alike
is applied, whatever one of them tells."""

import pytest

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.tally import DIGEST_BYTES, Tally

MEMBERS = ("a", "b", "c")
A, B, C, OTHER = (bytes([value]) * DIGEST_BYTES for value in range(1, 5))
YES, NO = True, False


def tally(**means: bytes) -> Tally:
    """Ours, who are ``a``, and hold these means."""
    return Tally("a", MEMBERS, means=dict(means))


def test_a_mean_is_awaited_until_it_is_there_or_somebody_lacks_it():
    ours = tally(a=A)
    assert [ours.awaits(peer) for peer in MEMBERS] == [NO, YES, YES]
    ours.add_held("b", (A, b"", C))
    assert [ours.awaits(peer) for peer in MEMBERS] == [NO, NO, YES]
    ours.means["c"] = C
    assert not ours.awaits("c")
    assert not ours.awaits(MEMBERS)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ((A, B), "another form than of 3 digests"),
        ((A, B, C, C), "another form than of 3 digests"),
        ((A, B, C[1:]), "another form than of 3 digests"),
        ((A, B, C + C), "another form than of 3 digests"),
        ((A, OTHER, C), "another digest of its own mean"),
        ((A, b"", C), "another digest of its own mean"),
        ((OTHER, B, C), "our mean that we have not sent"),
    ],
)
def test_what_a_member_can_not_hold_is_refused_and_not_taken_in(
    held: tuple[bytes, ...], reason: str
):
    ours = tally(a=A, b=B)
    with pytest.raises(ProtocolViolation, match=f"b told .*{reason}"):
        ours.add_held("b", held)
    assert ours.helds == {}


def test_we_commit_to_what_all_who_were_heard_hold_alike():
    ours = tally(a=A, b=B, c=C)
    ours.hold()
    assert ours.commit() == ((YES, YES, YES), (YES, NO, NO))
    ours.add_held("b", (A, B, OTHER))
    assert ours.commit() == ((YES, YES, NO), (YES, YES, NO))
    ours.add_held("c", (b"", B, C))
    assert ours.commit() == ((NO, YES, NO), (YES, YES, YES))
    assert (ours.commits, ours.heards) == ({"a": (NO, YES, NO)}, {"a": (YES, YES, YES)})
    nobody = Tally("a", MEMBERS)
    nobody.hold()
    assert nobody.commit()[0] == (NO, NO, NO), "what all lack alike is no mean"


@pytest.mark.parametrize(
    ("shards", "heard", "reason"),
    [
        ((YES, YES), (YES, YES, NO), "another number of shards than 3"),
        ((YES, YES, NO), (YES, YES), "another number of shards than 3"),
        ((YES, YES, NO, NO), (YES, YES, NO, NO), "another number of shards than 3"),
        ((YES, YES, YES), (YES, YES, NO), "a shard that it does not hold"),
        ((YES, YES, NO), (NO, YES, NO), "without hearing of both"),
        ((YES, YES, NO), (YES, NO, NO), "without hearing of both"),
    ],
)
def test_a_commit_that_can_not_be_is_refused_and_not_taken_in(
    shards: tuple[bool, ...], heard: tuple[bool, ...], reason: str
):
    ours = tally(a=A, b=B, c=C)
    with pytest.raises(ProtocolViolation, match="before we told it"):
        ours.add_commit("b", (YES, YES, NO), (YES, YES, NO))
    ours.hold()
    ours.add_held("b", (A, B, b""))
    with pytest.raises(ProtocolViolation, match=f"b has committed .*{reason}"):
        ours.add_commit("b", shards, heard)
    assert (ours.commits, ours.heards) == ({}, {})


D = bytes([5]) * DIGEST_BYTES
FOUR, MEANS = ("a", "b", "c", "d"), (A, B, C, D)
NONE = (b"",) * 4


def of_four(**helds: tuple[bytes, ...]) -> Tally:
    """Ours, who are ``a`` and hold all means of four, once these helds have come."""
    ours = Tally("a", FOUR, means=dict(zip(FOUR, MEANS, strict=True)))
    ours.hold()
    for peer, held in helds.items():
        ours.add_held(peer, held)
    return ours


def voted(ours: Tally, **votes: str) -> Tally:
    """After our commit, and these of others, who have heard all that we have."""
    _, heard = ours.commit()
    for peer, bits in votes.items():
        ours.add_commit(peer, tuple(bit == "1" for bit in bits), heard)
    return ours


@pytest.mark.parametrize("held", [(*NONE[:3], D), (b"", B, b"", D), (A, OTHER, OTHER, D)])
def test_one_of_four_that_holds_less_takes_no_shard_from_the_others(held: tuple[bytes, ...]):
    ours = of_four(b=MEANS, c=MEANS, d=held)
    assert ours.commit()[0] == (YES,) * 4
    for vote in ("0000", "0001"):
        found = voted(of_four(b=MEANS, c=MEANS, d=held), b="1111", c="1111", d=vote).outcome()
        assert (found.applied, found.is_outvoted, found.is_certain) == ((YES,) * 4, NO, YES)


def test_two_of_the_three_others_void_the_shard_of_an_owner():
    ours = voted(of_four(b=MEANS, c=MEANS, d=MEANS), b="1111", c="0110", d="0110")
    assert ours.outcome().applied == (NO, YES, YES, YES), "of three votes on d's two are for it"


def test_an_owner_has_no_vote_on_its_own_shard_but_among_three():
    others = (A, B, C, OTHER)
    ours = voted(of_four(b=others, c=others, d=MEANS), b="1110", c="1110", d="1111")
    assert ours.outcome().applied == (YES, YES, YES, NO), "d has sent us another mean"
    ours = tally(a=A, b=B, c=C)
    ours.hold()
    ours.add_held("b", (A, B, C))
    ours.add_held("c", (b"", b"", C))
    assert voted(ours, b="111", c="001").outcome().applied == (YES,) * 3, "c alone voids nothing"


def test_of_three_that_hold_two_means_of_an_owner_nobody_applies_it():
    ours = tally(a=A, b=B, c=C)
    ours.hold()
    ours.add_held("b", (A, B, OTHER))
    ours.add_held("c", (A, B, C))
    assert ours.commit()[0] == (YES, YES, NO)


def test_we_are_outvoted_where_most_vote_for_a_mean_that_we_lack_or_hold_otherwise():
    for owner_sent_us in (b"", OTHER):
        ours = Tally("a", FOUR, means={"a": A, "b": B, "c": C, "d": owner_sent_us})
        ours.hold()
        for peer, held in {"b": MEANS, "c": MEANS}.items():
            ours.add_held(peer, held)
        found = voted(ours, b="1111", c="1111").outcome()
        assert (found.applied, found.is_outvoted) == ((YES, YES, YES, NO), YES)


def test_it_is_certain_where_votes_that_we_do_not_know_can_decide_nothing():
    assert voted(of_four(b=MEANS, c=MEANS, d=MEANS), b="1111", c="1111").outcome().is_certain
    open_ = voted(of_four(b=MEANS, c=MEANS, d=MEANS), b="1111").outcome()
    assert (open_.applied, open_.is_certain) == ((YES,) * 4, NO), "we go with what we voted for"
    votes = {"b": "0000", "c": "0000", "d": "0000"}
    against = voted(of_four(b=MEANS, c=MEANS, d=MEANS), **votes).outcome()
    assert (against.applied, against.is_certain) == ((NO,) * 4, YES)
