"""What a link does to packets, in virtual time: no sockets, so these hold on any machine."""

import os
from itertools import pairwise
from random import Random

import pytest
from segments import VNET, cut, shape_of
from shaping import BUCKET, BURST, Direction, Link

MSS = 1000
_TCP, _UDP = 6, 17


def checksum(content: bytes) -> int:
    """RFC 1071; 0 over anything that holds its own right checksum."""
    total = sum(
        int.from_bytes(content[place : place + 2].ljust(2, b"\0"), "big")
        for place in range(0, len(content), 2)
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pseudo_header(packet: bytes, protocol: int, start: int) -> bytes:
    """What the checksums of TCP and UDP also cover."""
    addresses = packet[12:20] if packet[0] >> 4 == 4 else packet[8:40]
    return addresses + (len(packet) - start).to_bytes(4, "big") + protocol.to_bytes(4, "big")


def piece_of(content: bytes, version: int = 4, protocol: int = _TCP) -> bytes:
    """All of ``content`` in one piece, as the kernel makes it: the checksum's place holds the
    pseudo header's sum."""
    start = 20 if version == 4 else 40
    inner = bytearray(b"\x12\x34\x10\x92" + bytes(16 if protocol == _TCP else 4))
    if protocol == _TCP:
        inner[4:8], inner[12], inner[13] = (
            (0xFFFFFF00).to_bytes(4, "big"),
            5 << 4,
            0x99,
        )  # CWR, ACK, PSH, FIN
    else:
        inner[4:6] = (8 + len(content)).to_bytes(2, "big")
    if version == 4:
        outer = bytearray(b"\x45" + bytes(19))
        outer[2:4], outer[4:6] = (start + len(inner) + len(content)).to_bytes(2, "big"), b"\xff\xfe"
        outer[8:10], outer[12:20] = bytes((64, protocol)), bytes((10, 0, 0, 1, 10, 0, 0, 2))
        outer[10:12] = checksum(outer).to_bytes(2, "big")
    else:
        outer = bytearray(b"\x60" + bytes(39))
        outer[4:6], outer[6:8] = (
            (len(inner) + len(content)).to_bytes(2, "big"),
            bytes((protocol, 64)),
        )
        outer[8:40] = bytes(range(32))
    packet = bytes(outer + inner) + content
    offset = 16 if protocol == _TCP else 6
    seed = ~checksum(pseudo_header(packet, protocol, start)) & 0xFFFF
    packet = packet[: start + offset] + seed.to_bytes(2, "big") + packet[start + offset + 2 :]
    kind = 5 if protocol == _UDP else 1 if version == 4 else 4
    return VNET.pack(1, kind, 200, MSS, start, offset) + packet


def packet_of(piece: bytes, version: int, protocol: int) -> bytes:
    """A piece of one segment, with its checksum completed as a receiver's kernel would; checks all
    checksums."""
    flags, kind, _, _, start, offset = VNET.unpack_from(piece)
    packet = bytearray(piece[VNET.size :])
    assert (flags, kind) == (1, 0)
    packet[start + offset : start + offset + 2] = checksum(packet[start:]).to_bytes(2, "big")
    assert checksum(pseudo_header(bytes(packet), protocol, start) + packet[start:]) == 0
    if version == 4:
        assert checksum(packet[:20]) == 0
        assert int.from_bytes(packet[2:4], "big") == len(packet)
    else:
        assert int.from_bytes(packet[4:6], "big") == len(packet) - 40
    return bytes(packet)


def sent_through(
    direction: Direction, pieces: list[bytes], now: float = 0.0
) -> list[tuple[float, bytes]]:
    """When each piece arrives that was offered at one moment."""
    for piece in pieces:
        direction.offer(piece, now)
    arrived = []
    while (time := direction.next) is not None:
        arrived.append((time, direction.due(time)))
    return arrived


def numbered(count: int, size: int = MSS) -> list[bytes]:
    """Packets that are no pieces of anything."""
    return [VNET.pack(0, 0, 0, 0, 0, 0) + number.to_bytes(size, "big") for number in range(count)]


def numbers(arrived: list[tuple[float, bytes]]) -> list[int]:
    """Which packets have arrived."""
    return [int.from_bytes(piece[VNET.size :], "big") for _, piece in arrived]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("protocol", [_TCP, _UDP])
def test_a_piece_cut_anywhere_gives_the_packets_that_the_kernel_would_have_sent(
    version: int, protocol: int
):
    content = os.urandom(4 * MSS + 17)
    piece = piece_of(content, version, protocol)
    headers = (20 if version == 4 else 40) + (20 if protocol == _TCP else 8)
    assert shape_of(piece) == (5, headers, MSS, len(content) + 5 * headers)
    singles = [cut(piece, number, number + 1) for number in range(5)]
    packets = [packet_of(single, version, protocol) for single in singles]
    assert b"".join(packet[headers:] for packet in packets) == content
    if protocol == _TCP:
        start = headers - 20
        assert [int.from_bytes(packet[start + 4 : start + 8], "big") for packet in packets] == [
            (0xFFFFFF00 + number * MSS) % 2**32 for number in range(5)
        ]
        assert [packet[start + 13] for packet in packets] == [0x90, 0x10, 0x10, 0x10, 0x19]
    if version == 4:
        assert [int.from_bytes(packet[4:6], "big") for packet in packets] == [
            0xFFFE,
            0xFFFF,
            0,
            1,
            2,
        ]
    for first in range(5):
        for last in range(first + 1, 6):
            part = cut(piece, first, last)
            assert [cut(part, number, number + 1) for number in range(last - first)] == singles[
                first:last
            ]
            assert shape_of(part).total == sum(len(packet) for packet in packets[first:last])


def test_packets_have_the_same_fate_alone_as_in_pieces():
    link = Link(loss=0.2, reorder=0.1, delay=0.05, seed=7)
    alone, together = Direction(link, "up"), Direction(link, "up")
    pieces = [piece_of(os.urandom(30 * MSS)) for _ in range(10)]
    singles = [cut(piece, number, number + 1) for piece in pieces for number in range(30)]

    def payloads(arrived: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
        return [
            (time, cut(part, number, number + 1)[VNET.size + 40 :])
            for time, part in arrived
            for number in range(shape_of(part).segments)
        ]

    assert payloads(sent_through(alone, singles)) == payloads(sent_through(together, pieces))
    assert alone.counters == together.counters
    assert 0 < alone.counters.lost < 300
    assert 0 < alone.counters.late < 300


@pytest.mark.parametrize("what", ["loss", "reorder"])
def test_the_seed_and_its_number_alone_decide_about_a_packet(what: str):
    def fates(seed: int, name: str, **more: float) -> list[int]:
        link = Link(**{what: 0.3, "delay": 0.01, "seed": seed, **more})
        return numbers(sent_through(Direction(link, name), numbered(200)))

    assert fates(1, "up") == fates(1, "up")
    assert sorted(fates(1, "up", delay=0.5, jitter=0.1)) == sorted(fates(1, "up"))
    assert fates(1, "up") != fates(2, "up")
    assert fates(1, "up") != fates(1, "down")


@pytest.mark.parametrize("probability", [0.01, 0.5])
def test_as_many_packets_are_lost_as_asked_for(probability: float):
    direction = Direction(Link(loss=probability, seed=3), "up")
    sent_through(direction, numbered(10_000))
    assert direction.counters.lost == pytest.approx(10_000 * probability, rel=0.2)
    assert direction.counters.lost + direction.counters.delivered == 10_000


def test_packets_leave_one_after_another_at_the_rate():
    rate, size = 1e6, 1250
    arrived = sent_through(
        Direction(Link(rate=rate, delay=0.5, queue=10**9), "up"), numbered(1000, size)
    )
    assert numbers(arrived) == list(range(1000))
    # What an idle link may catch up on is one packet here.
    assert [time for time, _ in arrived] == pytest.approx(
        [0.5 + number * size * 8 / rate for number in range(1000)]
    )
    assert size * 8 / rate == BUCKET


def test_a_piece_takes_a_slow_link_in_parts_as_long_as_its_packets_would():
    rate = 1e6
    arrived = sent_through(
        Direction(Link(rate=rate, queue=10**9), "up"), [piece_of(bytes(50 * MSS))]
    )
    assert [shape_of(piece).segments for _, piece in arrived] == [1] * 50
    assert arrived[-1][0] == pytest.approx(50 * (MSS + 40) * 8 / rate - BUCKET)
    fast = sent_through(Direction(Link(rate=1e8, queue=10**9), "up"), [piece_of(bytes(50 * MSS))])
    assert {shape_of(piece).total * 8 / 1e8 <= BURST for _, piece in fast} == {True}
    assert len(fast) == 1


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_the_queue_has_no_room_for_is_dropped_at_its_tail(in_pieces: bool):
    queue = 10 * (MSS + 40)
    direction = Direction(Link(rate=1e6, queue=queue), "up")
    whole = piece_of(os.urandom(40 * MSS))
    pieces = [whole] if in_pieces else [cut(whole, number, number + 1) for number in range(40)]
    arrived = sent_through(direction, pieces)
    # The bucket lets one more begin at once.
    assert direction.counters.delivered in (10, 11)
    assert direction.counters.delivered + direction.counters.dropped == 40
    first = [cut(whole, number, number + 1) for number in range(direction.counters.delivered)]
    assert [
        cut(part, number, number + 1)
        for _, part in arrived
        for number in range(shape_of(part).segments)
    ] == first, "the first are those that are kept"


def test_the_queue_is_of_bytes_not_of_time_and_has_room_again_later():
    direction = Direction(Link(rate=1e6, queue=5000), "up")
    assert len(sent_through(direction, numbered(100))) < 10
    assert len(sent_through(direction, numbered(3), now=1.0)) == 3
    direction.link = Link(rate=1e3, queue=5000)
    sent_through(direction, numbered(100), now=2.0)
    direction.link = Link(rate=1e3, queue=10)
    before = direction.counters.dropped
    assert sent_through(direction, numbered(3), now=2.0) == []
    assert direction.counters.dropped == before + 3


@pytest.mark.parametrize(
    "settings",
    [{"loss": 1.1}, {"reorder": -0.1}, {"delay": -1}, {"rate": 0}, {"jitter": float("nan")}],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Link(**settings)


def test_jitter_makes_packets_later_but_never_lets_them_overtake():
    direction = Direction(Link(delay=0.1, jitter=0.05, seed=1), "up")
    random, arrived, offered = Random(1), [], []
    for piece in numbered(500):
        offered.append((offered[-1] if offered else 0.0) + random.uniform(0, 0.01))
        direction.offer(piece, offered[-1])
    while (time := direction.next) is not None:
        arrived.append((time, direction.due(time)))
    ways = [time - begin for (time, _), begin in zip(arrived, offered, strict=True)]
    assert numbers(arrived) == list(range(500))
    assert all(0.1 - 1e-9 <= way <= 0.15 + 1e-9 for way in ways)
    assert max(ways) - min(ways) > 0.02


def test_late_packets_are_overtaken_and_none_is_missing():
    direction = Direction(Link(delay=0.1, reorder=0.1, late=0.01, seed=1), "up")
    arrived = sent_through(direction, numbered(200))
    assert sorted(numbers(arrived)) == list(range(200))
    overtaken = [later for earlier, later in pairwise(numbers(arrived)) if later < earlier]
    assert overtaken
    assert {round(time, 6) for time, _ in arrived} == {0.1, 0.11}
    assert sum(round(time, 6) == 0.11 for time, _ in arrived) == direction.counters.late


def test_an_outage_takes_what_is_under_way_and_what_is_offered():
    direction = Direction(Link(delay=1.0, loss=0.5, seed=1), "up")
    for piece in numbered(100):
        direction.offer(piece, 0.0)
    lost = direction.counters.lost
    direction.outage(True)
    assert direction.next is None
    assert sent_through(direction, numbered(10), now=0.1) == []
    assert direction.counters.cut_off == 100 - lost + 10
    direction.outage(False)
    undisturbed = numbers(sent_through(Direction(direction.link, "up"), numbered(200)))
    after = numbers(sent_through(direction, numbered(100), now=0.2))
    assert after == [number - 100 for number in undisturbed if number >= 100], (
        "the seed goes on where it was"
    )
