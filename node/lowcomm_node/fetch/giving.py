"""Our side of ``File``: a peer without a file of the run takes it from us, piece by piece.

enter ──► position 3, 2, 1 ──► opened, digests of the pieces ──► (wanted ──► chunks)*
"""

from collections.abc import Callable

from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.donor import CHUNK_BYTES, Giver
from lowcomm_node.fetch.queue import Turn
from lowcomm_node.fetch.readahead import ReadAhead
from lowcomm_node.fetch.shelf import Shelf
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.stream import CalleeStream
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.sections import PIECE_BYTES

TURN_BYTES = 1_000_000_000
"""Bytes that a turn is long enough for, at the rate at which states travel."""


class FileGiver(Giver):
    """Gives the files on our shelf, and no other: a peer names a digest, never a path."""

    def __init__(
        self,
        shelf: Shelf,
        up: BandwidthLimit | None = None,
        may: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """See `Giver`."""
        super().__init__(TURN_BYTES, up, may)
        self._shelf = shelf

    async def _serve_turn(
        self, turn: Turn, stream: CalleeStream, requests: ReadAhead, wanted: bytes
    ) -> None:
        held = self._shelf.find(wanted)
        if held is None:
            raise RetryLater("does not have it yet")
        opened = pb.Opened(snapshot=wanted, size=held.size)
        await self._send(stream, pb.FetchReply(opened=opened))
        listed = b"".join(held.digests) if len(held.digests) > 1 else b""
        for start in range(0, len(listed), CHUNK_BYTES):
            data = listed[start : start + CHUNK_BYTES]
            await self._send(stream, pb.FetchReply(chunk=pb.Chunk(offset=start, data=data)))
        places = [
            (start, min(PIECE_BYTES, held.size - start))
            for start in range(0, held.size, PIECE_BYTES)
        ]
        await self._serve_pieces(turn, stream, requests, held.path, places)
