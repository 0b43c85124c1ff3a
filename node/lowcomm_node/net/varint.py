"""Numbers of one to ten bytes, as multiaddresses and protobuf write them: seven bits a byte, the
lowest first."""

MAX_BYTES = 10


def write_varint(number: int) -> bytes:
    """The bytes of a number that is not negative."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + write_varint(rest) if rest else bytes([low])


def read_varint(data: bytes, at: int = 0) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends. Raises ValueError if there is none."""
    number = 0
    for index, byte in enumerate(data[at : at + MAX_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return number, at + index + 1
    raise ValueError("not a number")
