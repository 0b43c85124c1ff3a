"""What must hold for relays: what they answer, which places are kept, what p2pd is told; nothing is
started."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import control as streams
from lowcomm_node.net import p2pd, relays
from lowcomm_node.net.addresses import EntryPoint, circuit
from lowcomm_node.net.control import Connection, OpenStream, StreamListener
from lowcomm_node.net.p2pd import listeners
from lowcomm_node.net.relays import (
    MAX_RELAYS,
    USEFUL_BYTES,
    Places,
    Reservation,
    read_place,
)
from lowcomm_protocol.identity import Identity

RELAYS = [
    EntryPoint(Identity(bytes([n]) * 32).peer_id, f"/ip4/203.0.113.{n}/tcp/1") for n in range(1, 6)
]
DOOR = RELAYS[0]
OURS = Identity(b"o" * 32).peer_id
OK = b"\x08\x02\x28\x64"  # type = STATUS, status = 100


def field_of(number: int, value: int | bytes) -> bytes:
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80]) + varint(n >> 7)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def reservation(expires: int) -> bytes:
    return field_of(
        3, field_of(1, expires) + field_of(2, b"an address") + field_of(3, b"a voucher")
    )


def test_what_a_relay_gives_is_read():
    limit = field_of(4, field_of(1, 1800) + field_of(2, 2**32))
    place = read_place(OK + reservation(1_800_000_000) + limit, DOOR)
    assert place == Reservation(DOOR, 1_800_000_000.0, 2**32, 1800)
    assert place.useful
    assert circuit(place.relay) == f"{DOOR.dial}/p2p/{DOOR.peer_id}/p2p-circuit"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "gives no place"),
        (OK, "without an expiry"),
        (b"\x08\x02\x28\xc9\x01", "has no place left"),
        (b"\x08\x02\x28\xe7\x07", "gives no place"),
        (b"\x08\x00\x28\x64", "gives no place"),
        (b"\xff" * 20, "something else"),
        (b"\x1a\x7f", "something else"),
        (b"\x0d\x00\x00\x00\x00", "gives no place"),
    ],
)
def test_an_answer_that_is_no_place_is_refused(answer, words):
    with pytest.raises(LinkLost, match=words):
        read_place(answer, DOOR)


@given(st.binary(max_size=200))
def test_no_answer_does_harm(answer):
    try:
        place = read_place(answer, DOOR)
    except LinkLost:
        return
    assert place.expires >= 0


# Which places are kept


@dataclass
class Asked:
    """p2pd as far as Places knows it."""

    connected: set[str] = field(default_factory=set)
    gives: dict[str, int | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def connections(self) -> list[Connection]:
        return [Connection(peer, "") for peer in self.connected]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    control = Asked({one.peer_id for one in RELAYS}, {one.peer_id: None for one in RELAYS})

    async def reserve(_: Any, one: EntryPoint) -> Reservation:
        control.asked.append(one.peer_id)
        if one.peer_id not in control.gives:
            raise LinkLost("has no place left")
        return Reservation(one, time() + 3600, control.gives[one.peer_id], None)

    monkeypatch.setattr(relays, "reserve", reserve)
    return control


def ids(*numbers: int) -> list[str]:
    return [RELAYS[n].peer_id for n in numbers]


async def keep(places: Places, control: Asked) -> tuple[str, ...]:
    await places.keep(control, RELAYS)  # pyright: ignore[reportArgumentType]
    return tuple(dial.split("/")[-2] for dial in places.dials)


async def test_the_first_useful_relays_are_taken_and_no_more(asked):
    asked.gives |= dict(zip(ids(0), [USEFUL_BYTES - 1], strict=True))
    del asked.gives[RELAYS[1].peer_id]
    places = Places(OURS)
    assert await keep(places, asked) == tuple(ids(2, 3))
    assert asked.asked == ids(0, 1, 2, 3)
    assert len(places.dials) == MAX_RELAYS


async def test_relays_that_are_silent_hold_up_nobody_for_long_and_do_not_hide_the_others(
    asked, monkeypatch
):
    now, reserve = 1000.0, relays.reserve

    async def be_silent(control: Any, one: EntryPoint) -> Reservation:
        nonlocal now
        now += relays.DEADLINE * (one.peer_id not in asked.gives)
        return await reserve(control, one)

    monkeypatch.setattr(relays, "monotonic", lambda: now)
    monkeypatch.setattr(relays, "reserve", be_silent)
    asked.gives = dict.fromkeys(ids(4), None)
    places = Places(OURS)
    await keep(places, asked)
    assert asked.asked == ids(0, 1)
    now += relays.REFRESH
    await keep(places, asked)
    assert asked.asked == ids(0, 1, 2, 3), "others come first now"
    assert await keep(places, asked) == tuple(ids(4))


async def test_a_relay_that_is_gone_gives_way_to_the_next_and_is_asked_at_once_when_it_returns(
    asked,
):
    places = Places(OURS)
    await keep(places, asked)
    asked.connected -= set(ids(0, 1))
    assert await keep(places, asked) == tuple(ids(2, 3))
    asked.connected |= set(ids(0))
    asked.connected -= set(ids(3))
    assert await keep(places, asked) == tuple(ids(2, 0))


# What p2pd is told


def test_all_of_a_machine_is_ipv4_and_ipv6_over_tcp_and_quic(monkeypatch):
    monkeypatch.setattr(p2pd, "has_ipv6", lambda: True)
    assert listeners("0.0.0.0", 7) == (
        *("/ip4/0.0.0.0/tcp/7", "/ip4/0.0.0.0/udp/7/quic-v1"),
        *("/ip6/::/tcp/7", "/ip6/::/udp/7/quic-v1"),
    )
    assert listeners("127.0.0.1", 0) == ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
    assert listeners("::1", 7) == ("/ip6/::1/tcp/7", "/ip6/::1/udp/7/quic-v1")
    monkeypatch.setattr(p2pd, "has_ipv6", lambda: False)
    assert listeners("0.0.0.0", 7) == ("/ip4/0.0.0.0/tcp/7", "/ip4/0.0.0.0/udp/7/quic-v1")


# Who may hand us streams

DIALER = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(30)
s.connect("\\0" + sys.argv[1])
try:
    s.sendall(bytes.fromhex(sys.argv[2]))
    print(len(s.recv(1)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


async def test_a_process_that_is_not_our_p2pd_can_not_hand_us_a_stream():
    from lowcomm_node.net.hivemind_parts import p2pd_pb2

    taken: list[OpenStream] = []
    child: asyncio.subprocess.Process | None = None
    listener = StreamListener()
    listener.add("x", taken.append)
    listener.start()
    try:
        header = p2pd_pb2.StreamInfo(peer=b"anybody", addr=b"", proto="x").SerializeToString()
        name = listener.address[3:].decode().removeprefix("@")
        message = (bytes([len(header)]) + header).hex()
        command = [sys.executable, "-c", DIALER, name, message]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.stdout.strip() == "0", done.stderr
        assert not taken
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        listener.dialer = child.pid
        await until_async(lambda: bool(taken), 30, "the same of the process that is believed")
        taken[0].socket.send(b"x")
        assert (await child.communicate())[0].strip() == b"1"
    finally:
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()
        await listener.close()
        for stream in taken:
            stream.socket.close()


@pytest.mark.parametrize("header", [b"\xff" * 10, b"\x05abcde", b"", b"\xff\xff\x7f"])
async def test_a_header_that_is_none_is_dropped(header, monkeypatch):
    monkeypatch.setattr(streams, "HEADER_DEADLINE", 0.5)
    taken: list[OpenStream] = []
    listener = StreamListener()
    listener.add("x", taken.append)
    listener.dialer = os.getpid()
    listener.start()
    try:
        with socket.socket(socket.AF_UNIX) as dialer:
            dialer.connect("\0" + listener.address[3:].decode().removeprefix("@"))
            dialer.sendall(header)
            dialer.setblocking(False)
            async with asyncio.timeout(30):
                with suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(dialer, 1) == b""
        assert not taken
    finally:
        await listener.close()
