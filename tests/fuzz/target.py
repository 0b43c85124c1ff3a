"""What is fuzzed: a target takes any bytes, and raises nothing but what is documented, in bounded
time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Run = Callable[[bytes], None]
Made = tuple[Run, Sequence[bytes]]
"""What takes the bytes, and a corpus to begin with: valid messages, made by code."""
MAX_BYTES = 1 << 16
MAX_PIECES = 64


@dataclass(frozen=True)
class Target:
    """One decoder or handler."""

    name: str
    make: Callable[[], Made]
    """To be called in the process that fuzzes it."""


TARGETS: dict[str, Target] = {}


def target(make: Callable[[], Made]) -> Callable[[], Made]:
    """Register a target under its function's name."""
    name = make.__name__.replace("_", "-")
    TARGETS[name] = Target(name, make)
    return make


def join(*pieces: bytes) -> bytes:
    """Bytes that ``cut`` takes apart."""
    return b"".join(len(piece).to_bytes(2) + piece for piece in pieces)


def cut(data: bytes) -> Iterator[bytes]:
    """Any bytes as pieces, each with its length in front; the last may be shorter than it says."""
    at = 0
    while at + 2 <= len(data) and at < MAX_BYTES:
        size = int.from_bytes(data[at : at + 2])
        yield data[at + 2 : at + 2 + size]
        at += 2 + size


def fit(data: bytes, size: int) -> bytes:
    """So many bytes of ``data``, or zeros after it: what has another size is refused at once, and
    nothing else is seen."""
    return data[:size].ljust(size, b"\0")
