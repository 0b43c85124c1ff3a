"""Being known and knowing others: real gRPC over TLS between nodes without trainers, and a DHT in
memory."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from time import time

import grpc
import pytest

from helpers.memory_dht import MemoryDiscovery
from helpers.parties import ADA, BOB, CLEO, CREATOR, Parties, run_of
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.swarm import membership as membership_module
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_protocol.errors import Reason
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.invites import Token, issue_invite
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.run import SignedRun


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncExitStack]:
    monkeypatch.setattr(membership_module, "REMOVALS_EVERY", 0.0)
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def parties(tmp_path: Path, stack: AsyncExitStack) -> Parties:
    return Parties(run_of("open"), tmp_path, stack)


@pytest.fixture
def invited(tmp_path: Path, stack: AsyncExitStack) -> Parties:
    return Parties(run_of("invite"), tmp_path, stack)


def invite(run: SignedRun, uses: int = 1, letter: bytes = b"i") -> Token:
    return issue_invite(CREATOR, run.run_id, letter * 32, time() + 1000, uses)


def signed(data: bytes) -> pb.SignedRecord:
    return pb.SignedRecord.FromString(data)


# Whom a peer is


async def test_peers_that_find_each_other_greet_and_know_the_newest_of_each(
    parties: Parties,
) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    await ada.membership.announce(Phase.TRAINING)
    await bob.look()
    assert (ada.knows(), bob.knows()) == ({BOB.peer_id}, {ADA.peer_id}), "ada has been greeted"
    assert ada.refusals.counts() == bob.refusals.counts() == {}


async def test_a_man_in_the_middle_with_another_certificate_is_counted_and_told_nothing(
    parties: Parties,
) -> None:
    ada, bob, middle = await parties(ADA), await parties(BOB), await parties(CLEO)
    ada.membership.own.addresses = (
        f"127.0.0.1:{middle.port}",
    )  # whoever is on the way answers in ada's place
    await ada.membership.announce(Phase.TRAINING)
    await bob.look()
    assert bob.refusals.counts() == {"connection.other-certificate": 1}
    assert {info.peer_id for info in bob.roster.known(time())} == {ADA.peer_id}
    assert bob.knows() == middle.knows() == set(), "nobody has proved to be there"
    assert bob.warnings == []


async def test_a_stolen_record_that_its_thief_tells_as_its_own_is_not_believed(
    parties: Parties,
) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    stolen = signed(ada.membership._record())
    assert (await bob.call(ada, pb.Introduction(record=stolen)))[0] is grpc.StatusCode.OK
    cleo = await parties(CLEO)
    await bob.call(cleo, pb.Introduction(record=stolen))
    assert cleo.knows() == set()
    assert cleo.refusals.counts() == {"record.misplaced": 1}
    await ada.call(cleo, pb.Introduction(record=stolen))
    assert cleo.knows() == {ADA.peer_id}


async def test_a_record_of_a_megabyte_is_refused_before_it_is_copied(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    large = pb.Introduction(record=pb.SignedRecord(payload=bytes(1_000_000), signature=b"s" * 64))
    monkeypatch.setattr(Roster, "hear", lambda *_: pytest.fail("it was looked at"))
    assert (await bob.call(ada, large))[0] is grpc.StatusCode.OK
    assert ada.refusals.counts() == {"record.too-large": 1}


async def test_a_node_whose_clock_was_set_back_goes_on_after_its_last_record(
    parties: Parties,
) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    ahead = time() + 40
    last = PeerInfo(
        peer_id=ADA.peer_id, run_id=parties.run.run_id, phase=Phase.LEFT, issued=ahead,
        expires=ahead + 30
    )  # fmt: skip
    data = write_record(last, ADA)
    assert await ada.discovery.publish(peers_key(parties.run.run_id), ADA.peer_id, data, 20)
    assert bob.roster.hear(data, time()) is not None
    await ada.look()
    assert (await ada.call(bob, ada.membership._introduction(BOB.peer_id)))[0] is grpc.StatusCode.OK
    assert bob.knows() == {ADA.peer_id}, "believed again at once"


async def test_where_others_are_is_not_believed_of_a_peer(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, told = await parties(ADA), list[str]()
    monkeypatch.setattr(ada.discovery, "add_entry_points", told.extend)
    own, others = (f"/ip4/203.0.113.7/tcp/1/p2p/{peer.peer_id}" for peer in (BOB, CLEO))
    now = time()
    info = PeerInfo(
        peer_id=BOB.peer_id, run_id=parties.run.run_id, phase=Phase.TRAINING, issued=now,
        expires=now + 30,
        entry_points=(others, own),
    )  # fmt: skip
    bob = MemoryDiscovery(BOB.peer_id, parties.network)
    assert await bob.publish(
        peers_key(parties.run.run_id), BOB.peer_id, write_record(info, BOB), 30
    )
    await ada.look()
    assert told == [], "a record alone proves nothing"
    ada.membership.sign_of_life(BOB.peer_id)
    assert told == [own]


async def test_another_process_with_our_identity_is_warned_of_once(parties: Parties) -> None:
    ada, again = await parties(ADA), await parties(ADA)
    await ada.membership.announce(Phase.TRAINING)
    await ada.look()
    assert ada.warnings == []
    again.membership.own.last_issued = time() + 1
    await again.membership.announce(Phase.TRAINING)
    await ada.look()
    await ada.look()
    assert len(ada.warnings) == 1 and ADA.peer_id in ada.warnings[0]


async def test_a_nodes_own_records_are_never_taken_for_those_of_another_process() -> None:
    own = OwnRecord(
        identity=ADA, run_id=run_of("open").run_id, certificate=bytes(32), addresses=(),
        progress=lambda: (0, 0, 0.0),
    )  # fmt: skip
    assert not any(own.follow(own.record(60, (), b""), False) for _ in range(50))


async def test_a_node_whose_clock_was_ahead_for_a_moment_is_believed_at_once(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    with monkeypatch.context() as patch:
        patch.setattr("lowcomm_node.swarm.own_record.time", lambda: time() + 3600)
        assert bob.roster.hear(ada.membership._record(), time()) is None
    assert bob.roster.hear(ada.membership._record(), time()) is not None


async def test_a_run_is_over_when_all_that_are_there_have_finished_it(parties: Parties) -> None:
    ada, steps = await parties(ADA), parties.run.spec.run.steps
    # A record is taken only if it is issued at least a millisecond after the last.
    issue_times = count(time())

    def finished(bob: tuple[Phase, int], cleo: tuple[Phase, int]) -> int | None:
        issued = next(issue_times)
        for peer, (phase, swarm_step) in ((BOB, bob), (CLEO, cleo)):
            now = time()
            info = PeerInfo(
                peer_id=peer.peer_id, run_id=parties.run.run_id, phase=phase, issued=issued,
                expires=issued + 30, swarm_step=swarm_step,
            )  # fmt: skip
            ada.roster.hear(write_record(info, peer), now)
            ada.roster.heard(peer.peer_id, now)
        served = ada.membership.finished(lambda swarm_step: swarm_step >= steps)
        return None if served is None else len(served)

    done = (Phase.FINISHED, steps)
    assert finished(done, (Phase.TRAINING, steps - 1)) is None
    assert [info.peer_id for info in ada.membership.donors()] == [BOB.peer_id, CLEO.peer_id]
    assert finished(done, (Phase.PAUSED, steps - 1)) is None
    assert finished((Phase.FINISHED, steps - 1), done) is None, "it can't have"
    assert finished(done, (Phase.JOINING, 0)) == 1
    assert finished(done, done) == 2


# Who may join


async def test_an_invite_lets_in_and_nothing_else_does(invited: Parties) -> None:
    creator, ada = await invited(CREATOR), await invited(ADA, invite(invited.run))
    bob = await invited(BOB)  # whose program does not care that it has none
    for party in (creator, ada, bob):
        await party.membership.announce(Phase.TRAINING)
    for party in (creator, ada, bob):
        await party.look()
    assert (creator.knows(), ada.knows()) == ({ADA.peer_id}, {CREATOR.peer_id})
    assert creator.refusals.counts()["record.not-invited"] >= 1
    assert creator.refusals.counts()["call.not-invited"] >= 1
    assert any(
        "does not take us: This run takes invited peers only" in text for text in bob.warnings
    )
    assert [error.reason for error in bob.barred] == [Reason.NOT_INVITED]
    assert ada.barred == creator.barred == []


async def test_who_came_late_by_an_invite_learns_that_it_is_used_up(invited: Parties) -> None:
    token = invite(invited.run)
    ada = await invited(ADA, token)
    bob = await invited(BOB, token)
    await ada.membership.announce(Phase.TRAINING)
    await bob.membership.announce(Phase.TRAINING)
    await ada.look()
    await bob.look()
    assert ada.knows() == set() and ada.barred == []
    assert ada.refusals.counts()["record.invite-used-up"] == 1
    assert [error.reason for error in bob.barred] == [Reason.INVITE_USED_UP]


# Removals


async def test_a_removal_in_the_dht_takes_effect_at_the_next_look(parties: Parties) -> None:
    ada, bob = await parties(ADA), await parties(BOB)
    for party in (ada, bob):
        await party.membership.announce(Phase.TRAINING)
        await party.look()
    assert ada.knows() == {BOB.peer_id} and ada.removals_heard == 0
    await parties.removing(BOB.peer_id)
    await ada.look()
    assert ada.knows() == set()
    assert ada.removals_heard == 1
    assert (await bob.call(ada, pb.Introduction()))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert ada.refusals.counts()["call.removed"] == 1
    await bob.look()
    assert [str(error) for error in bob.barred] == [
        f"{BOB.peer_id} was removed from this run by its creator."
    ]
    await parties.removing(version=2)
    await ada.look()
    assert ada.knows() == {BOB.peer_id}
