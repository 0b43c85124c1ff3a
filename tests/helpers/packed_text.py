"""A small packed text, stores that hold some of its pieces, and peers that give them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from helpers.donors import identity
from helpers.wire import Callee, Handler, listening
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.fetch.packs import DataRoom, PackStore
from lowcomm_node.net.channels import Channels
from lowcomm_node.storage.pack_file import PackFile
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import PackedText

PIECE, TRAINING = 16 * 1024, 19
DATA = Random(4).randbytes((TRAINING + 1) * PIECE)


def part_of(data: bytes, piece_bytes: int) -> tuple[PackedText, bytes]:
    """A text whose last piece is held out, and the list of its digests."""
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    digests = b"".join(sha256(piece).digest() for piece in pieces)
    part = PackedText(
        name="text",
        pieces=sha256(digests).hexdigest(),
        tokens=(len(pieces) - 1) * piece_bytes // 2,
        held_out_tokens=100,
        piece_bytes=piece_bytes,
    )
    return part, digests


PART, DIGESTS = part_of(DATA, PIECE)
ALL = range(PART.piece_count)


def opened(
    folder: Path, own: Path | None = None, digests: bytes = b"", part: PackedText = PART
) -> PackFile:
    """The pieces in a folder."""
    file = PackFile(part, folder, own)
    file.open(digests)
    return file


def store_of(
    folder: Path,
    channels: Channels,
    peers: Sequence[PeerInfo],
    *,
    warnings: list[str] | None = None,
    room: DataRoom | None = None,
    part: PackedText = PART,
    digests: bytes = b"",
) -> PackStore:
    """A store that asks these peers."""

    def fetch(store: PackStore) -> Fetch:
        warn = (warnings if warnings is not None else []).append
        return Fetch(channels, store, lambda: store.rank(peers), warn=warn, gives_up=False)

    return PackStore(opened(folder, None, digests, part), fetch, room, random=Random(1))


def never(store: PackStore) -> Fetch:
    """Nobody gives anything."""
    nobody: Any = None
    return Fetch(nobody, store, list, gives_up=False)


def holding(folder: Path, pieces: Sequence[int], data: bytes = DATA) -> PackStore:
    """A store with some of the pieces, which it believes to be right."""
    file = opened(folder, digests=DIGESTS)
    for piece in pieces:
        file.write(piece, data[piece * PIECE : (piece + 1) * PIECE])
    return PackStore(file, never)


def giving_of(store: PackStore) -> Handler:
    """What gives a store's pieces to those that call."""
    server = PieceServer(VerifiedFiles())
    server.packs[bytes.fromhex(store.part.pieces)] = store
    return server.serve


@asynccontextmanager
async def givers(*stores: PackStore) -> AsyncIterator[list[Callee]]:
    """Peers that give what is in these stores."""
    async with AsyncExitStack() as stack:
        callees = list[Callee]()
        for number, store in enumerate(stores, 1):
            callee = await stack.enter_async_context(listening(identity(number)))
            callee.fetching = giving_of(store)
            callees.append(callee)
        yield callees
        for store in stores:
            await store.close()
