"""What must hold for who may take part in a run: lists, invites and their uses, removals."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm_protocol.errors import (
    AdmissionError,
    LowcommError,
    Reason,
    RecordError,
    SignatureError,
)
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers import admission as admission_module
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import (
    MAX_REMOVALS_BYTES,
    MAX_REMOVED,
    MAX_USES,
    Token,
    issue_invite,
    read_claim,
    read_removals,
    read_token,
    write_removals,
)
from lowcomm_protocol.peers.records import MAX_CLOCK_SKEW

CREATOR, STRANGER = Identity(b"c" * 32), Identity(b"s" * 32)
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 9)]
ADA, BOB, CLEO, *_ = PEERS
RUN, OTHER_RUN = "ab" * 32, "cd" * 32
NOW = 1_800_000_000.0
DAY = 86_400.0


def invite(
    uses: int = 1, *, expires: float = NOW + DAY, secret: bytes = b"i" * 32, **fields
) -> Token:
    return issue_invite(
        fields.pop("creator", CREATOR), fields.pop("run_id", RUN), secret, expires, uses, **fields
    )


def by_invite() -> Admission:
    return Admission(Rules(RUN, CREATOR.peer_id, "invite"))


def reason(admission: Admission, peer: str, claim: bytes = b"", now: float = NOW) -> Reason | None:
    """Why a peer is refused; None if it is let in."""
    try:
        admission.check(peer, claim, now)
    except LowcommError as error:
        return error.reason
    return None


# Rules


def test_a_list_takes_its_members_and_the_creator_only():
    admission = Admission(Rules(RUN, CREATOR.peer_id, "list", frozenset([ADA])))
    assert [reason(admission, peer) for peer in (ADA, CREATOR.peer_id)] == [None, None]
    with pytest.raises(AdmissionError, match=f"{BOB} is not on the list.*{CREATOR.peer_id}"):
        admission.check(BOB, b"", NOW)
    assert reason(admission, BOB) is Reason.NOT_LISTED
    assert (admission.barred(ADA, NOW), admission.barred(BOB, NOW)) == (False, True)


def test_an_invite_is_needed_where_the_run_says_so_except_by_the_creator():
    admission = by_invite()
    with pytest.raises(AdmissionError, match="takes invited peers only"):
        admission.check(ADA, b"", NOW)
    assert reason(admission, CREATOR.peer_id) is None
    assert reason(admission, ADA, invite().claim(ADA, NOW).data) is None
    assert (admission.barred(ADA, NOW), admission.barred(BOB, NOW)) == (False, True)


# What is pasted


def test_a_token_is_short_text_that_round_trips_and_hides_its_secret():
    token = invite(5, peer_id=ADA)
    assert read_token(token.text()) == token
    assert token.text().isalnum() and len(token.text()) < 400
    assert len(invite(5).text()) < 280
    assert "i" * 8 not in repr(token)
    assert (token.invite.run_id, token.invite.uses, token.invite.peer_id) == (RUN, 5, ADA)
    token.invite.verify(CREATOR.peer_id)
    with pytest.raises(SignatureError):
        token.invite.verify(STRANGER.peer_id)


@pytest.mark.parametrize("secret", [b"x" * 32, b"", b"i" * 31])
def test_a_token_with_another_secret_than_its_invite_says_is_refused_at_once(secret):
    text = replace(invite(), secret=secret).text()
    with pytest.raises(AdmissionError, match="not an invite"):
        read_token(text)


# What a claim is good for


CLAIM = invite().claim(ADA, NOW).data


def test_a_claim_is_good_for_its_peer_run_and_time_only():
    assert reason(by_invite(), ADA, CLAIM) is None
    assert reason(by_invite(), BOB, CLAIM) is Reason.BAD_SIGNATURE
    other_run = Admission(Rules(OTHER_RUN, CREATOR.peer_id, "invite"))
    assert reason(other_run, ADA, CLAIM) is Reason.MISPLACED
    assert reason(by_invite(), ADA, CLAIM, NOW + DAY - 0.1) is None
    assert reason(by_invite(), ADA, CLAIM, NOW + DAY) is Reason.INVITE_EXPIRED


def test_a_claim_from_the_future_is_refused():
    ahead = NOW + MAX_CLOCK_SKEW
    assert reason(by_invite(), ADA, invite().claim(ADA, ahead).data) is None
    assert reason(by_invite(), ADA, invite().claim(ADA, ahead + 1).data) is Reason.FROM_FUTURE


def test_only_the_creator_of_the_run_invites():
    for forged in (
        invite(creator=STRANGER).claim(ADA, NOW).data,  # a stranger's invite
        changed_claim(
            lambda claim: setattr(
                claim.invite, "signature", STRANGER.sign("invite", claim.invite.payload)
            )
        ),
        changed_claim(
            lambda claim: setattr(
                claim.invite, "signature", CREATOR.sign("peer record", claim.invite.payload)
            )
        ),
    ):
        assert reason(by_invite(), ADA, forged) is Reason.BAD_SIGNATURE


def test_only_who_holds_the_token_claims():
    for forged in (
        changed_claim(lambda claim: setattr(claim, "claimed_ms", claim.claimed_ms - 1)),
        changed_claim(
            lambda claim: setattr(claim, "signature", CREATOR.sign("claim on an invite", b""))
        ),
        changed_claim(
            lambda claim: setattr(
                claim, "signature", invite(secret=b"x" * 32).claim(ADA, NOW).signature
            )
        ),
    ):
        assert reason(by_invite(), ADA, forged) is Reason.BAD_SIGNATURE


def changed_claim(change) -> bytes:
    claim = pb.Claim.FromString(CLAIM)
    change(claim)
    return claim.SerializeToString()


def changed_invite(**fields) -> bytes:
    """A claim on an invite with fields that our own program would not write, properly signed."""
    claim = pb.Claim.FromString(CLAIM)
    inner = pb.Invite.FromString(claim.invite.payload)
    for name, value in fields.items():
        setattr(inner, name, value)
    claim.invite.payload = inner.SerializeToString()
    claim.invite.signature = CREATOR.sign("invite", claim.invite.payload)
    return claim.SerializeToString()


@pytest.mark.parametrize(
    "fields",
    [
        {"run_id": b"short"},
        {"key": b"k" * 31},
        {"uses": 0},
        {"uses": MAX_USES + 1},
        {"peer_id": "nobody"},
    ],
)
def test_an_invite_with_a_field_out_of_bounds_is_refused(fields):
    assert reason(by_invite(), ADA, changed_invite(**fields)) is Reason.MALFORMED


@given(st.integers(0, len(CLAIM) - 1), st.integers(1, 255))
def test_a_changed_byte_makes_a_claim_invalid_or_says_the_same(place, flip):
    data = bytearray(CLAIM)
    data[place] ^= flip
    admission = by_invite()
    if reason(admission, ADA, bytes(data)) is None:
        known = read_claim(bytes(data), ADA)
        assert (known.invite, known.rank) == (
            read_claim(CLAIM, ADA).invite,
            read_claim(CLAIM, ADA).rank,
        )


# How many may come by one invite


def test_who_holds_an_invite_can_claim_in_the_name_of_others_and_bars_none_of_them():
    admission = by_invite()
    admission.check(ADA, CLAIM, NOW)
    other = invite(1, secret=b"o" * 32)
    for peer, second in ((ADA, 2), (BOB, 1)):
        use = pb.Use(peer_id=peer, claim=other.claim(peer, NOW + second).data)
        admission.hear_uses([use], NOW + 3)
    assert (
        reason(admission, CLEO, other.claim(CLEO, NOW + 3).data, NOW + 3) is Reason.INVITE_USED_UP
    ), "both were heard"
    assert not admission.barred(ADA, NOW + 3), (
        "a claim that it has not shown was pushed out, not its own"
    )


def claims_of(times: Sequence[tuple[int, int]], uses: int) -> list[tuple[str, bytes]]:
    token = invite(uses)
    return [(PEERS[peer], token.claim(PEERS[peer], NOW + second).data) for peer, second in times]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_peers_that_have_heard_the_same_claims_decide_the_same_in_whatever_order(
    times, uses, random
):
    claims = claims_of(times, uses)
    first: dict[str, int] = {}
    for peer, second in times:
        first[PEERS[peer]] = min(second, first.get(PEERS[peer], second))
    expected = set(sorted(first, key=lambda peer: (first[peer], peer))[:uses])
    for _ in range(2):
        random.shuffle(claims)
        admission = by_invite()
        for peer, claim in claims:
            reason(admission, peer, claim, NOW + 10)
        # Records come again and again, and so do the claims in them.
        assert {
            peer for peer, claim in claims if reason(admission, peer, claim, NOW + 10) is None
        } == expected
        assert {peer for peer in PEERS if not admission.barred(peer, NOW + 10)} == expected
        assert sum(map(len, admission._uses.values())) <= uses


def test_a_claim_that_comes_too_late_costs_no_signature(monkeypatch):
    admission, token = by_invite(), invite(1)
    admission.check(ADA, token.claim(ADA, NOW).data, NOW)
    late = token.claim(BOB, NOW + 1).data
    monkeypatch.setattr(
        "lowcomm_protocol.peers.invites.verify", lambda *_: pytest.fail("a signature was verified")
    )
    assert reason(admission, BOB, late) is Reason.INVITE_USED_UP
    assert reason(admission, ADA, token.claim(ADA, NOW).data) is None, (
        "known claims are not verified again"
    )


def test_what_is_kept_of_claims_is_bounded_and_room_comes_back(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_CLAIMS", 3)
    admission = by_invite()
    short = [invite(1, expires=NOW + 10, secret=bytes([number]) * 32) for number in range(3)]
    for peer, token in zip(PEERS, short, strict=False):
        admission.check(peer, token.claim(peer, NOW).data, NOW)
    long = invite(8, secret=b"l" * 32)
    assert reason(admission, PEERS[4], long.claim(PEERS[4], NOW).data) is Reason.TOO_MANY
    assert reason(admission, PEERS[0], short[0].claim(PEERS[0], NOW).data) is None
    assert reason(admission, PEERS[4], long.claim(PEERS[4], NOW).data, NOW + 11) is None
    assert list(admission._came_by) == [PEERS[4]]


# Uses that were made by peers that have gone


def tell(
    teller: Admission, listener: Admission, alive: Sequence[str] = (), now: float = NOW
) -> int:
    uses = teller.uses_to_tell(frozenset(alive))
    listener.hear_uses(uses, now)
    return len(uses)


def test_a_use_stays_used_for_those_who_never_met_who_made_it():
    old, newcomer, token = by_invite(), by_invite(), invite(1)
    old.check(ADA, token.claim(ADA, NOW).data, NOW)
    assert tell(old, newcomer, alive=[ADA]) == 0, "the living tell of themselves"
    assert tell(old, newcomer) == 1
    assert reason(newcomer, BOB, token.claim(BOB, NOW + 1).data) is Reason.INVITE_USED_UP


def test_uses_are_believed_only_as_far_as_they_are_signed():
    token, newcomer = invite(4), by_invite()
    sound = pb.Use(peer_id=ADA, claim=token.claim(ADA, NOW).data)
    stolen = pb.Use(peer_id=BOB, claim=token.claim(ADA, NOW).data)
    newcomer.hear_uses([stolen, sound], NOW)
    assert newcomer.barred(ADA, NOW), "after the first that is not sound nothing is looked at"
    newcomer.hear_uses([sound, pb.Use(peer_id="x" * 2_000_000, claim=b""), stolen], NOW)
    assert not newcomer.barred(ADA, NOW) and newcomer.barred(BOB, NOW)
    newcomer.hear_uses(
        [pb.Use(peer_id=peer, claim=token.claim(peer, NOW).data) for peer in PEERS] * 10, NOW
    )
    assert sum(not newcomer.barred(peer, NOW) for peer in PEERS) == 4


def test_a_use_by_a_peer_with_an_endless_name_costs_no_memory():
    newcomer, hostile = by_invite(), [pb.Use(peer_id="x" * 2_000_000, claim=b"")]
    tracemalloc.start()
    try:
        name = hostile[0].peer_id  # what protobuf itself makes of it
        before, _ = tracemalloc.get_traced_memory()
        newcomer.hear_uses(hostile, NOW)
        assert tracemalloc.get_traced_memory()[1] - before < len(name) + 64 * 1024
    finally:
        tracemalloc.stop()


def test_uses_survive_a_restart_and_damage_loses_them_without_a_word():
    before, token = by_invite(), invite(2)
    for peer in (ADA, BOB):
        before.check(peer, token.claim(peer, NOW).data, NOW)
    data = before.to_bytes()
    after = by_invite()
    after.load(data, NOW)
    assert after.to_bytes() == data
    assert reason(after, CLEO, token.claim(CLEO, NOW + 1).data) is Reason.INVITE_USED_UP
    for damaged in (data[:-3], b"\xff" * 50, data.replace(data[40:44], b"\0\0\0\0")):
        by_invite().load(damaged, NOW)
    late = by_invite()
    late.load(data, NOW + DAY)
    assert late.to_bytes() == b""


# Removals


def removing(*ids: str, version: int = 1, creator: Identity = CREATOR, run_id: str = RUN) -> bytes:
    return write_removals(creator, run_id, version, frozenset(ids)).data


@pytest.mark.parametrize("mode", ["open", "invite", "list"])
def test_a_removed_peer_is_out_whatever_let_it_in_and_comes_back_when_that_is_undone(mode):
    admission = Admission(Rules(RUN, CREATOR.peer_id, mode, frozenset([ADA, BOB])))
    claims = {peer: invite(5).claim(peer, NOW).data for peer in (ADA, BOB)}
    for peer in (ADA, BOB):
        assert reason(admission, peer, claims[peer]) is None
    assert admission.hear_removals(removing(ADA))
    assert (admission.barred(ADA, NOW), admission.barred(BOB, NOW)) == (True, False)
    assert (reason(admission, ADA, claims[ADA]), reason(admission, BOB, claims[BOB])) == (
        Reason.REMOVED,
        None,
    )
    assert admission.hear_removals(removing(version=2))
    assert not admission.barred(ADA, NOW) and reason(admission, ADA, claims[ADA]) is None


def test_a_removed_invite_takes_out_all_who_came_by_it():
    admission, kept = by_invite(), invite(secret=b"k" * 32)
    admission.check(ADA, CLAIM, NOW)
    admission.check(BOB, kept.claim(BOB, NOW).data, NOW)
    assert admission.hear_removals(removing(invite().invite.invite_id))
    assert (admission.barred(ADA, NOW), admission.barred(BOB, NOW)) == (True, False)
    with pytest.raises(AdmissionError, match="was taken back by the run's creator"):
        admission.check(ADA, CLAIM, NOW)
    assert reason(by_invite_with(admission), CLEO, invite().claim(CLEO, NOW).data) is Reason.REMOVED


def by_invite_with(other: Admission) -> Admission:
    fresh = by_invite()
    fresh.hear_removals(other.removals.data)
    return fresh


def test_the_list_with_the_highest_number_holds_in_whatever_order_lists_come():
    lists = [removing(ADA, version=1), removing(BOB, version=2), removing(CLEO, version=3)]
    one, two = by_invite(), by_invite()
    assert [one.hear_removals(data) for data in lists] == [True, True, True]
    assert [two.hear_removals(data) for data in reversed(lists)] == [True, False, False]
    assert one.removals == two.removals
    assert one.removals.ids == {CLEO}
    assert not one.hear_removals(lists[2]), "the same again is no news"


def test_only_the_creator_of_the_run_removes():
    admission = by_invite()
    for data in (
        removing(ADA, creator=STRANGER),
        pb.SignedRemovalList(payload=b"", signature=b"s" * 64).SerializeToString(),
    ):
        with pytest.raises(LowcommError):
            admission.hear_removals(data)
    assert not admission.hear_removals(removing(ADA, run_id=OTHER_RUN))
    assert not admission.removals.ids


def test_the_creator_can_not_be_removed():
    with pytest.raises(RecordError, match="creator of a run can't be removed"):
        removing(CREATOR.peer_id)
    payload = pb.RemovalList(
        run_id=bytes.fromhex(RUN), version=1, keys=[CREATOR.public_key]
    ).SerializeToString()
    admission = by_invite()
    admission.hear_removals(
        pb.SignedRemovalList(
            payload=payload, signature=CREATOR.sign("removal list", payload)
        ).SerializeToString()
    )
    assert not admission.barred(CREATOR.peer_id, NOW) and reason(admission, CREATOR.peer_id) is None


def test_a_removal_list_is_bounded_and_the_longest_fits_into_a_record():
    ids = [Identity(number.to_bytes(32, "big")).peer_id for number in range(MAX_REMOVED)]
    data = removing(*ids)
    assert len(data) < MAX_REMOVALS_BYTES < 30 * 1024
    assert read_removals(data, CREATOR.peer_id).ids == set(ids)
    with pytest.raises(RecordError, match=f"at most {MAX_REMOVED}"):
        removing(*ids, ADA)
    with pytest.raises(RecordError, match="is refused: at most"):
        read_removals(bytes(1_000_000), CREATOR.peer_id)
