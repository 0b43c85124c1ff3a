"""What the two ends of a tunnel tell each other around the bytes that they carry. No I/O.

    caller                                        callee
      │ ── NEW, session, 0 ────────────────────────► │    or RESUME, session, number
      │ ◄──────────────────────── READY, number ──── │    or BUSY, or GONE: the stream is not taken
      │ ── length, bytes; ... ─────────────────────► │    and the other way round, at the same time
      │ ◄────────────────────────── ACK, number ──── │    at least every 512 KiB
      │ ── END ────────────────────────────────────► │    no more bytes from this side
      │ ◄────────────────────────── ACK, number ──── │    at once
      │ ◄────────────────────────────────── END ──── │
      │ ── ACK, number ────────────────────────────► │    the callee closes, then the caller

A word has 4 bytes, big-endian: a length below 2^31, or a signal above. A session is named by 16
random bytes, a number has 8. Numbers count the bytes of one side from 0; its END takes one, too. In
READY, RESUME and ACK a number says how many have come. p2pd can't close one direction alone, and
over QUIC it resets a stream at its end, which loses what is still on the way; so nothing rests on
how a stream ends. GONE may come instead of any word: the session is over, and can't be resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from lowcomm_protocol.errors import ProtocolViolation

WORD, NUMBER, SESSION = 4, 8, 16
OPENING, ANSWER = WORD + SESSION + NUMBER, WORD + NUMBER
"""Bytes of what the caller says first, and of what is answered."""
MAX_LENGTH = 256 * 1024
"""Bytes of one piece."""
ACK_EVERY = 512 * 1024
"""Bytes after which an ACK is due, at the latest."""


class Signal(IntEnum):
    """A word other than a length."""

    END = 0x8000_0000
    ACK = 0x8000_0001
    READY = 0x8000_0002
    BUSY = 0x8000_0003
    GONE = 0x8000_0004
    NEW = 0x8000_0005
    RESUME = 0x8000_0006


@dataclass(frozen=True)
class Opening:
    """The caller's first words."""

    session: bytes
    number: int | None
    """Bytes that it has received before; None: a new session."""


@dataclass(frozen=True)
class Ack:
    """Acknowledges ``number`` bytes."""

    number: int


Part = memoryview | Signal | Ack
"""The elements of a stream: a piece, END or GONE, an ACK."""


def word(number: int) -> bytes:
    """Encode a length or a signal."""
    return number.to_bytes(WORD)


def numbered(signal: Signal, number: int) -> bytes:
    """Encode a signal with its number: READY, BUSY, GONE as an answer, and ACK."""
    return word(signal) + number.to_bytes(NUMBER)


def opening(session: bytes, number: int | None) -> bytes:
    """Encode an ``Opening``."""
    return (
        word(Signal.NEW if number is None else Signal.RESUME)
        + session
        + (number or 0).to_bytes(NUMBER)
    )


def read_opening(data: bytes) -> Opening:
    """Decode the first OPENING bytes from a caller. Raises ProtocolViolation."""
    signal, session, number = (
        data[:WORD],
        data[WORD : WORD + SESSION],
        int.from_bytes(data[WORD + SESSION :]),
    )
    if signal == word(Signal.RESUME):
        return Opening(session, number)
    if signal == word(Signal.NEW) and not number:
        return Opening(session, None)
    raise ProtocolViolation("began a tunnel with something else than NEW or RESUME")


def read_answer(data: bytes) -> tuple[Signal, int]:
    """Decode the first ANSWER bytes from a callee: READY, BUSY or GONE, and a number.

    Raises ProtocolViolation.
    """
    signal = int.from_bytes(data[:WORD])
    if signal not in (Signal.READY, Signal.BUSY, Signal.GONE):
        raise ProtocolViolation(f"answered {signal:#x} to a new stream, which is no answer")
    return Signal(signal), int.from_bytes(data[WORD:])


class Decoder:
    """Splits a stream into parts, after opening and answer. It buffers an incomplete word only."""

    def __init__(self) -> None:
        self._missing = 0
        self._head = b""

    def feed(self, data: memoryview) -> Iterator[Part]:
        """The pieces, ENDs, GONEs and ACKs in ``data``, in order. Raises ProtocolViolation at other
        words."""
        while data:
            if self._missing:
                piece, data = data[: self._missing], data[self._missing :]
                self._missing -= len(piece)
                yield piece
                continue
            due = WORD + NUMBER if self._head[:WORD] == word(Signal.ACK) else WORD
            taken = due - len(self._head)
            self._head = self._head + bytes(data[:taken])
            data = data[taken:]
            if len(self._head) < due:
                return
            number = int.from_bytes(self._head[:WORD])
            if number == Signal.ACK:
                if due == WORD:
                    continue
                yield Ack(int.from_bytes(self._head[WORD:]))
            elif number in (Signal.END, Signal.GONE):
                yield Signal(number)
            elif 0 < number <= MAX_LENGTH:
                self._missing = number
            else:
                raise ProtocolViolation(
                    f"sent the word {number:#x} into a tunnel, where it means nothing"
                )
            self._head = b""
