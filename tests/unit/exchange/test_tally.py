"""What must hold for what members of a group tell of the means of its shards: only what all who
were heard hold is applied."""

import pytest

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group.tally import DIGEST_BYTES, Tally

MEMBERS = ("a", "b", "c")
A, B, C, OTHER = (bytes([value]) * DIGEST_BYTES for value in range(1, 5))
YES, NO = True, False


def tally(**means: bytes) -> Tally:
    """Ours, who are ``a``, and hold these means."""
    return Tally("a", MEMBERS, means=dict(means))


def test_what_we_hold_is_told_in_the_order_of_the_members_and_does_not_change_any_more():
    ours = tally(c=C, a=A)
    assert (ours.digest_of("c"), ours.digest_of("b")) == (C, b"")
    assert ours.hold() == (A, b"", C)
    ours.means["b"] = B
    assert ours.helds == {"a": (A, b"", C)}


def test_a_mean_is_awaited_until_it_is_there_or_somebody_lacks_it():
    ours = tally(a=A)
    assert [ours.awaits(peer) for peer in MEMBERS] == [NO, YES, YES]
    ours.add_held("b", (A, b"", C))
    assert [ours.awaits(peer) for peer in MEMBERS] == [NO, NO, YES]
    ours.means["c"] = C
    assert not ours.awaits("c")


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


@pytest.mark.parametrize("held", [(A, B, C), (b"", B, b""), (A, B, OTHER)])
def test_a_member_may_lack_what_we_sent_and_hold_another_mean_of_somebody_else(
    held: tuple[bytes, ...],
):
    ours = tally(a=A, b=B, c=C)
    ours.add_held("b", held)
    assert ours.helds == {"b": held}


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
        ((YES, YES, YES), (YES, YES, NO), "a shard that one of us does not hold"),
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


def test_a_member_may_commit_to_less_than_both_hold():
    ours = tally(a=A, b=B, c=C)
    ours.hold()
    ours.add_held("b", (A, B, C))
    ours.add_commit("b", (NO, YES, NO), (YES, YES, YES))
    assert (ours.commits["b"], ours.heards["b"]) == ((NO, YES, NO), (YES, YES, YES))


def test_a_shard_is_applied_that_no_commit_leaves_out():
    ours = tally()
    ours.commits = {"a": (YES, YES, NO), "b": (YES, NO, NO)}
    assert ours.applied() == (YES, NO, NO)


@pytest.mark.parametrize(
    ("commits", "heards", "certain"),
    [
        ("a", {"a": (YES, NO, NO)}, YES),
        ("a", {"a": (YES, YES, NO)}, NO),
        ("ab", {"a": (YES, YES, NO), "b": (YES, YES, NO)}, YES),
        ("ab", {"a": (YES, YES, NO), "b": (NO, YES, YES)}, NO),
        ("ab", {"a": (YES, YES, NO), "b": (YES, YES, YES)}, YES),
        ("a", {"a": (YES, YES, YES)}, YES),
        ("abc", {"a": (YES, YES, NO), "b": (YES, YES, NO), "c": (YES, NO, YES)}, YES),
    ],
)
def test_it_is_certain_where_one_heard_all_or_all_who_were_heard_have_committed(
    commits: str, heards: dict[str, tuple[bool, ...]], certain: bool
):
    ours = tally()
    ours.commits, ours.heards = dict.fromkeys(commits, (YES, YES, YES)), heards
    assert ours.is_certain() is certain
