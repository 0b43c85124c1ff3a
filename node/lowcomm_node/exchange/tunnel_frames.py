"""What the two ends of a tunnel tell each other around the bytes that they carry. No I/O.

    caller                                callee
      │ ◄──────────── READY, or BUSY ─────── │    whether the stream is taken
      │ ──── length, bytes; ... ───────────► │    and the other way round, at the same time
      │ ──── END ──────────────────────────► │    no more bytes from this side
      │ ◄─────────────────────────── ACK ─── │    all of them have been passed on
      │ ◄─────────────────────────── END ─── │
      │ ──── ACK ──────────────────────────► │    whoever has got END and ACK closes the stream

Each word has 4 bytes, big-endian: a length below 2^31, or a signal above. p2pd can't close one direction alone, and over QUIC
it resets a stream at its end, which loses what is still on the way; so nothing rests on how a stream ends.
"""

from collections.abc import Iterator
from enum import IntEnum

from lowcomm_protocol.errors import ProtocolViolation

WORD = 4
MAX_LENGTH = 256 * 1024
"""Bytes of one piece."""


class Signal(IntEnum):
    """A word that is no length."""

    END = 0x8000_0000
    ACK = 0x8000_0001
    READY = 0x8000_0002
    BUSY = 0x8000_0003


def word(number: int) -> bytes:
    """A length or a signal, as it is sent."""
    return number.to_bytes(WORD)


class Decoder:
    """Takes a stream apart. Holds no bytes but those of a word that has not come whole."""

    def __init__(self) -> None:
        self._missing = 0
        self._head = b""

    def feed(self, data: memoryview) -> Iterator[memoryview | Signal]:
        """The pieces and signals in ``data``, in their order. Raises ProtocolViolation at a word that is neither."""
        while data:
            if self._missing:
                piece, data = data[: self._missing], data[self._missing :]
                self._missing -= len(piece)
                yield piece
                continue
            taken = WORD - len(self._head)
            self._head, data = self._head + bytes(data[:taken]), data[taken:]
            if len(self._head) < WORD:
                return
            number, self._head = int.from_bytes(self._head), b""
            if number < Signal.END:
                if not 0 < number <= MAX_LENGTH:
                    raise ProtocolViolation(f"sent a piece of {number} bytes into a tunnel: 1 to {MAX_LENGTH}")
                self._missing = number
                continue
            try:
                yield Signal(number)
            except ValueError:
                raise ProtocolViolation(f"sent the word {number:#x} into a tunnel, which means nothing") from None
