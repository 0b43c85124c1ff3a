"""The files that a specification names."""

from dataclasses import dataclass

from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import PIECE_BYTES, count_pieces


@dataclass(frozen=True)
class RunFile:
    """A file that all peers of a run have alike."""

    name: str
    """For people, and for the file in a home; never a path."""
    sha256: bytes
    size: int | None = None
    """Bytes; None: not told, and at most one piece."""
    pieces: str = ""
    """Digest of the list of its pieces' digests (``spec.start.digest_of_pieces``)."""

    def takes(self, size: int) -> bool:
        """Whether it may have so many bytes."""
        return 0 < size <= PIECE_BYTES if self.size is None else size == self.size

    @property
    def is_one_piece(self) -> bool:
        """Whether its own digest is that of its only piece."""
        return self.size is None or count_pieces(self.size) == 1


def tokenizer_of(spec: RunSpec) -> RunFile | None:
    """The tokenizer of a run; None if it has none, or one that nobody checks."""
    data = spec.data
    if not data.tokenizer_sha256:
        return None
    digest, size = bytes.fromhex(data.tokenizer_sha256), data.tokenizer_size or None
    return RunFile("tokenizer.json", digest, size, data.tokenizer_pieces)


def start_of(spec: RunSpec) -> tuple[RunFile, ...]:
    """The weights that a run begins with."""
    return tuple(
        RunFile(one.name, bytes.fromhex(one.sha256), one.size, one.pieces)
        for one in spec.start.files
    )
