"""Packets as a TUN device with IFF_VNET_HDR gives them: one packet of the wire, or many of one
stream in one piece.

A piece is the virtio header (linux/virtio_net.h), the headers of one packet, and the payloads of
all its segments. To forward a piece costs as much as to forward a packet, so a link that carries
pieces is fast; to treat each packet of the wire on its own, as a real link does, pieces are cut.
"""

from struct import Struct
from typing import NamedTuple

VNET = Struct("=BBHHHH")
"""flags, kind of piece, bytes of headers, payload of a segment, where the checksum begins, where in
there it stands."""
_UDP = 5
"""VIRTIO_NET_HDR_GSO_UDP_L4; the other kinds are TCP."""
_FIN_PSH, _CWR = 0x09, 0x80


class Shape(NamedTuple):
    """How a piece is made up, in bytes."""

    segments: int
    """Packets of the wire in it."""
    headers: int
    """IP and TCP or UDP headers of each."""
    payload: int
    """Of each segment but the last, which may be shorter."""
    total: int
    """Of all packets, on the wire."""


def shape_of(piece: bytes) -> Shape:
    """What a piece holds."""
    size = len(piece) - VNET.size
    if not piece[1]:
        return Shape(1, 0, size, size)
    headers, payload = _headers(piece), VNET.unpack_from(piece)[3]
    segments = -((headers - size) // payload)
    return Shape(segments, headers, payload, size + (segments - 1) * headers)


def is_multicast(piece: bytes) -> bool:
    """Whether it is for many, which only neighbours hear."""
    if piece[10] >> 4 == 4:
        return piece[26] >> 4 == 0xE
    return piece[34] == 0xFF


def cut(piece: bytes, first: int, last: int) -> bytes:
    """The segments ``first`` to ``last`` (without it) of a piece, as a piece."""
    if not piece[1]:
        return piece
    flags, kind, _, payload, start, offset = VNET.unpack_from(piece)
    headers = _headers(piece)
    begin = VNET.size + headers
    content = memoryview(piece)[begin + first * payload : begin + last * payload]
    head = bytearray(memoryview(piece)[VNET.size : begin])
    udp = kind & 0x7F == _UDP
    if not udp:
        _put(head, start + 4, 4, _get(head, start + 4, 4) + first * payload)
        if begin + last * payload < len(piece):
            head[start + 13] &= ~_FIN_PSH
        if first:
            head[start + 13] &= ~_CWR
    size = headers + len(content)
    # What stands in the checksum's place is the sum of the pseudo header, the length among it;
    # whoever needs the whole checksum goes on from there.
    was = len(piece) - VNET.size - start
    _put(
        head,
        start + offset,
        2,
        _fold(_get(head, start + offset, 2) + (~was & 0xFFFF) + size - start),
    )
    if udp:
        _put(head, start + 4, 2, size - start)
    if head[0] >> 4 == 4:
        _put(head, 2, 2, size)
        _put(head, 4, 2, _get(head, 4, 2) + first)
        _put(head, 10, 2, 0)
        _put(
            head,
            10,
            2,
            ~_fold(sum(_get(head, place, 2) for place in range(0, (head[0] & 15) * 4, 2))),
        )
    else:
        _put(head, 4, 2, size - 40)
    if len(content) <= payload:
        kind = payload = 0
    return b"".join((VNET.pack(flags, kind, headers, payload, start, offset), head, content))


def _headers(piece: bytes) -> int:
    # The kernel's own field may be larger than the headers are.
    start = VNET.unpack_from(piece)[4]
    return start + (8 if piece[1] & 0x7F == _UDP else (piece[VNET.size + start + 12] >> 4) * 4)


def _get(head: bytearray, place: int, width: int) -> int:
    return int.from_bytes(head[place : place + width], "big")


def _put(head: bytearray, place: int, width: int, value: int) -> None:
    head[place : place + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "big")


def _fold(value: int) -> int:
    while value >> 16:
        value = (value & 0xFFFF) + (value >> 16)
    return value
