"""Emulated links between real namespaces: what they are set to is what packets of the kernel
meet."""

import hashlib
import os
import signal
import socket
from threading import Thread
from time import monotonic

import pytest
from laboratory import Host, Lab
from links import EmulatedLink
from namespaces import LaboratoryError
from shaping import BUCKET, Counters, Link

from helpers.waiting import until

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]
_RCVBUFFORCE, _UDP_SEGMENT = 33, 103
_RECEIVED_AT_ONCE = 64 << 20


def flood(sender: Host, receiver: Host, count: int, size: int = 200) -> list[int]:
    """Send numbered datagrams in one go, of ``size`` bytes on the wire; which have arrived, in
    order, once the link of the sender has done with all."""
    with sender.socket() as sending, receiver.socket() as receiving:
        # Nothing is to be lost but on the link.
        receiving.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _RECEIVED_AT_ONCE)
        before = sender.link.traffic().up
        address = (receiver.address, receiving.getsockname()[1])
        for number in range(count):
            sending.sendto(number.to_bytes(size - 28, "big"), address)
        now = until(
            lambda: done(sender.link, before.offered + count),
            30,
            "the link has done with all packets",
        )
        return [
            int.from_bytes(receiving.recv(2000), "big")
            for _ in range(now.delivered - before.delivered)
        ]


def done(link: EmulatedLink, count: int) -> Counters | None:
    """What has become of all packets that were sent up a link, once something has."""
    up = link.traffic().up
    return up if up.offered == count == up.lost + up.dropped + up.cut_off + up.delivered else None


def stream(sender: Host, receiver: Host, content: bytes, version: int = 4) -> float:
    """Send something by TCP, and see it arrive unchanged; seconds from the first byte sent to the
    last received."""
    with (
        receiver.socket(socket.SOCK_STREAM, version=version) as listening,
        sender.socket(socket.SOCK_STREAM, version=version) as sending,
    ):
        listening.listen()
        sending.connect((receiver.addresses[version], listening.getsockname()[1]))
        receiving = listening.accept()[0]
        receiving.settimeout(30)
        begin = monotonic()
        thread = Thread(target=lambda: (sending.sendall(content), sending.shutdown(socket.SHUT_WR)))
        thread.start()
        digest = hashlib.sha256()
        with receiving:
            while part := receiving.recv(1 << 20):
                digest.update(part)
        took = monotonic() - begin
        thread.join()
        assert digest.digest() == hashlib.sha256(content).digest()
        return took


def round_trip(one: Host, other: Host) -> float:
    """Seconds that a datagram and its answer take."""
    with one.socket() as asking, other.socket() as answering:
        begin = monotonic()
        asking.sendto(b"hello", (other.address, answering.getsockname()[1]))
        answering.sendto(*answering.recvfrom(100))
        assert asking.recv(100) == b"hello"
        return monotonic() - begin


def test_both_directions_are_delayed(lab: Lab):
    alice, server = lab.public("alice", link=Link(delay=0.05)), lab.public("server")
    assert round_trip(alice, server) >= 0.1
    assert round_trip(server, alice) >= 0.1


def test_each_direction_has_settings_of_its_own_and_others_while_it_runs(lab: Lab):
    alice, server = (
        lab.public("alice", link=Link(loss=1.0), down=Link(delay=0.03)),
        lab.public("server"),
    )
    assert flood(alice, server, 20) == []
    alice.link.change(Link(delay=0.02), Link(delay=0.04))
    assert round_trip(alice, server) >= 0.06
    alice.link.change(Link())
    assert flood(alice, server, 20) == list(range(20))


def test_the_same_seed_loses_the_same_packets(lab: Lab):
    server = lab.public("server")
    seeds = {"alice": 1, "bob": 1, "carol": 2}
    arrived = {
        name: flood(lab.public(name, link=Link(loss=0.1, seed=seed)), server, 500)
        for name, seed in seeds.items()
    }
    assert arrived["alice"] == arrived["bob"] == sorted(arrived["alice"])
    assert arrived["alice"] != arrived["carol"]
    assert 400 < len(arrived["alice"]) < 500


def test_counters_tell_of_every_packet_and_byte(lab: Lab):
    alice, server = lab.home("alice", link=Link(loss=0.1, seed=1)), lab.public("server")
    arrived = flood(alice, server, 500, size=300)
    up, down = alice.link.traffic().up, alice.link.traffic().down
    assert (up.offered, up.offered_bytes) == (500, 500 * 300)
    assert (up.delivered, up.delivered_bytes) == (len(arrived), len(arrived) * 300)
    assert up.lost == 500 - len(arrived)
    assert down == Counters(), "no host and no kernel has said anything of its own accord"


@pytest.mark.parametrize("version", [4, 6])
def test_datagrams_that_are_sent_in_one_piece_are_lost_one_by_one(lab: Lab, version: int):
    # So does QUIC. A kernel before 4.18 can't, and one before 6.2 gives them to the emulator
    # singly.
    alice, server = (
        lab.home("alice", ip=(4, 6), link=Link(loss=0.2, seed=1)),
        lab.public("server", ip=(4, 6)),
    )
    sending, receiving = alice.socket(version=version), server.socket(version=version)
    sending.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, 100)
    sent = [number.to_bytes(100, "big") for number in range(50)]
    sending.sendto(b"".join(sent), (server.addresses[version], receiving.getsockname()[1]))
    up = until(lambda: done(alice.link, 50), 30, "the link has done with all packets")
    arrived = [receiving.recv(2000) for _ in range(up.delivered)]
    assert 25 < len(arrived) < 50
    assert arrived == [content for content in sent if content in set(arrived)]


def test_packets_overtake_each_other_where_asked_for_and_none_is_missing(lab: Lab):
    alice, server = (
        lab.public("alice", link=Link(reorder=0.1, late=0.2, seed=1)),
        lab.public("server"),
    )
    arrived = flood(alice, server, 500)
    assert sorted(arrived) == list(range(500))
    assert arrived != sorted(arrived)
    alice.link.change(Link(delay=0.01, jitter=0.05, seed=1))
    assert flood(alice, server, 500) == list(range(500)), "jitter alone keeps the order"


def test_a_queue_keeps_the_first_packets_and_drops_the_rest(lab: Lab):
    link = Link(rate=1e6, queue=20_000)
    alice, server = lab.public("alice", link=link), lab.public("server")
    arrived = flood(alice, server, 500, size=1000)
    assert arrived[:20] == list(range(20))
    assert alice.link.traffic().up.dropped == 500 - len(arrived) > 0


def test_nothing_is_faster_than_the_rate(lab: Lab):
    alice, server = (
        lab.public("alice", link=Link(rate=8e6), down=Link(rate=16e6)),
        lab.public("server"),
    )
    content = os.urandom(400_000)
    assert stream(alice, server, content) >= len(content) * 8 / 8e6 - BUCKET
    assert stream(server, alice, content) >= len(content) * 8 / 16e6 - BUCKET


@pytest.mark.parametrize("version", [4, 6])
def test_streams_arrive_whole_over_bad_links_and_each_of_their_packets_counts(
    lab: Lab, version: int
):
    link = Link(rate=200e6, delay=0.002, jitter=0.001, loss=0.005, reorder=0.01, late=0.002, seed=1)
    alice = lab.home("alice", ip=(4, 6), link=link)
    server = lab.public("server", ip=(4, 6), link=link)
    content = os.urandom(2_000_000)
    stream(alice, server, content, version)
    up = alice.link.traffic().up
    largest = 1500 - (60 if version == 6 else 40)
    assert up.offered >= len(content) / largest, (
        "packets of the wire, not the large pieces that they come in"
    )
    assert up.offered_bytes >= len(content) + up.offered * (1500 - largest)
    assert up.lost > 0
    assert up.late > 0


def test_an_outage_stops_both_directions_and_a_stream_goes_on_after_it(lab: Lab):
    alice, server = lab.public("alice", link=Link(delay=0.01)), lab.public("server")
    listening, calling = server.socket(socket.SOCK_STREAM), alice.socket(socket.SOCK_STREAM)
    listening.listen()
    calling.connect((server.address, listening.getsockname()[1]))
    answering = listening.accept()[0]
    answering.settimeout(30)
    alice.link.outage(True)
    before = alice.link.traffic()
    calling.sendall(b"hello")
    server.socket().sendto(b"hello", (alice.address, 9))
    until(
        lambda: alice.link.traffic().up.cut_off >= before.up.cut_off + 2,
        30,
        "sent, and sent again, in vain",
    )
    until(
        lambda: alice.link.traffic().down.cut_off > before.down.cut_off, 30, "the other way neither"
    )
    cut_off = alice.link.traffic().up.cut_off
    with alice.socket() as datagrams:
        for _ in range(20):
            datagrams.sendto(b"hello", (server.address, 9))
    until(
        lambda: alice.link.traffic().up.cut_off >= cut_off + 20,
        30,
        "datagrams, too, and all of them",
    )
    assert alice.link.traffic().up.delivered == before.up.delivered
    assert alice.link.traffic().down.delivered == before.down.delivered
    alice.link.outage(False)
    with answering:
        assert answering.recv(100) == b"hello"


def test_an_emulator_that_died_or_can_not_begin_is_told_of(lab: Lab):
    alice = lab.public("alice", link=Link())
    os.kill(alice.link.process.pid, signal.SIGKILL)
    with pytest.raises(LaboratoryError, match="emulator ended with -9"):
        until(alice.link.traffic, 20, "noticed")
    bob = lab.public("bob")
    with pytest.raises(LaboratoryError, match=r"(?s)emulator ended with 1.*OSError"):
        EmulatedLink((bob, "eth0"), (alice, "eth1"), Link(), Link())
