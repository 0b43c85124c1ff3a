"""Files of start weights: what a specification pins of them, and whether a file is the pinned one.

Each is read once, from its beginning to its end, a block at a time.
"""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.sections import PIECE_BYTES, StartFile, digest_of_pieces

BLOCK = 1024 * 1024
Tell = Callable[[int], None]
"""Is told of bytes that were read."""


def pin(path: Path, tell: Tell = lambda count: None) -> StartFile:
    """Entry of a file for a specification. Raises ConfigError if it can't be read, ValueError if
    its name or size can't be pinned."""
    whole, pieces, size = sha256(), [sha256()], 0
    for block in _blocks(path):
        if size and size % PIECE_BYTES == 0:
            pieces.append(sha256())
        whole.update(block)
        pieces[-1].update(block)
        size += len(block)
        tell(len(block))
    digests = [piece.digest() for piece in pieces]
    return StartFile(
        name=path.name, size=size, sha256=whole.hexdigest(), pieces=digest_of_pieces(digests)
    )


def check(path: Path, wanted: StartFile, tell: Tell = lambda count: None) -> None:
    """Raise ConfigError, which names the file, unless it is the pinned one."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): {_remedy(wanted)}") from None
    if size != wanted.size:
        raise ConfigError(
            f"{path} has {size:,} bytes, the {wanted.name} of this run {wanted.size:,}: "
            f"{_remedy(wanted)}"
        )
    whole = sha256()
    for block in _blocks(path):
        whole.update(block)
        tell(len(block))
    if whole.hexdigest() != wanted.sha256:
        raise ConfigError(
            f"{path} is not the {wanted.name} of this run: its SHA-256 is {whole.hexdigest()}, the "
            f"run's is {wanted.sha256}: {_remedy(wanted)}"
        )


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): see its rights and its disk."
        ) from None


def _remedy(wanted: StartFile) -> str:
    return (
        f"name the folder with the {wanted.name} that the run's creator used, or leave --weights "
        "away, and peers send it."
    )
