"""Packed text of a run: pieces that are read soon are fetched, and others make room for them.

A ``PackStore`` has one part of ``data.parts``: on the owner's disk, else in the home, whose pieces
come from peers and mirrors. Any peer may give any piece, since the run pins the digests of all. A
piece that was begun stays on the disk, and goes on wherever it is given next.

    order    what was asked for first; of equals the piece that fewest peers have, then at random
    room     --max-data: pieces that nobody reads make room, the least recently used first; those
             that nobody else has go last
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from random import Random
from time import monotonic

from cachetools import LRUCache, TTLCache

from lowcomm_node.errors import DataError, DiskFull, LinkLost
from lowcomm_node.fetch.engine import Download, Source
from lowcomm_node.storage.files import GIB, DiskQuota, require_space
from lowcomm_node.storage.pack_file import PackFile, bitmap_bytes, has_bit
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import DIGEST_BYTES, PackedText

KEEP_BYTES = 256 * 1024
"""Bytes of a piece that a crash may cost; whole blocks of a file system, which rounds holes up."""
FLUSH_SECONDS = 1.0
"""Seconds of fetching after which a crash costs no hashing."""
LOOK = 64
"""Pieces of which the rarest is taken."""
MAX_HOLDERS, BARRED_SECONDS = 64, 3600.0
"""Peers whose bitmaps are remembered; seconds for which nothing is asked of a peer that lied."""
MOST_WRONG = 3
"""Wrong pieces that make a liar; fewer may come from a disk that fails."""
Show = Callable[[str], None]


@dataclass(eq=False)
class PackSource(Source):
    """A text as one peer has it."""

    here: bytes = b""
    """Bitmap of its pieces."""


class PackDownload(Download[PackSource]):
    """Pieces of one text on their way."""

    SLICE_BYTES = 128 * 1024

    def __init__(self, file: PackFile, came: Callable[[int], Awaitable[None]]) -> None:
        """``came`` gets each piece that is here."""
        super().__init__(file.part.name, pb.Enter(pack=bytes.fromhex(file.part.pieces)))
        self.enter.listed = bool(file.digests)
        self.holders: LRUCache[str, bytes] = LRUCache(MAX_HOLDERS)
        """Bitmaps of peers, as they were last heard."""
        self._file = file
        self._came_whole = came
        self._copies: dict[int, int] = {}
        """Peers that have a piece, of pieces that were counted since a bitmap came."""
        self._kept: dict[int, int] = {}
        """Bytes on the disk of pieces under way."""
        self._begun: set[int] = set()
        """Pieces under way of which others gave the first bytes."""
        self._wrong: TTLCache[str, set[int]] = TTLCache(4096, BARRED_SECONDS)
        """Wrong pieces that came, by peer."""
        self._at_once: set[int] = set()
        """Pieces of which some giver sent wrong bytes: they must come of one giver."""

    def want(self, pieces: Iterable[int], urgency: int) -> None:
        """Fetch these, too; those with the lowest number first."""
        if self.conclude():
            self.total = self.size = 0
        for piece in pieces:
            self.total += self._file.part.piece_bytes
            self.missing[piece] = urgency

    def give_up(self, piece: int) -> None:
        """Nobody wants this piece any more."""
        if self.missing.pop(piece, None) is not None or self._under_way.pop(piece, None):
            self.total -= self._file.part.piece_bytes

    def conclude(self) -> bool:
        return not (self.missing or self._under_way)

    def listing_bytes(self, opened: pb.Opened, enter: pb.Enter) -> int:
        part = self._file.part
        spare = -part.piece_count % 8
        if (
            opened.name != self.enter.pack
            or opened.size != part.size
            or len(opened.here) != bitmap_bytes(part)
            or opened.here[-1] & ((1 << spare) - 1)
        ):
            raise ProtocolViolation(f"offers another text than {self.name}")
        return 0 if enter.listed else part.piece_count * DIGEST_BYTES

    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> PackSource:
        if listing and not await asyncio.to_thread(self._file.learn, listing):
            raise ProtocolViolation(f"lists digests that are not those of {self.name}")
        self.enter.listed = True
        source = PackSource(peer.peer_id, opened.size)
        self.renew(source, opened)
        return source

    def renew(self, source: PackSource, opened: pb.Opened) -> None:
        source.here = self.usable(source.peer, opened.here)
        self._hear(source)

    def _hear(self, source: PackSource) -> None:
        self.holders[source.peer] = source.here
        self._copies.clear()

    def usable(self, peer: str, bitmap: bytes) -> bytes:
        """What a peer says it has, without pieces that were wrong."""
        here = bytearray(bitmap)
        for piece in self._wrong.get(peer, ()):
            here[piece >> 3] &= ~(0x80 >> (piece & 7))
        return bytes(here)

    def size_of(self, source: PackSource, index: int) -> int:
        return self._file.part.piece_bytes

    def fits(self, source: PackSource, index: int) -> bool:
        return has_bit(source.here, index)

    def may_give(self, source: PackSource) -> bool:
        return any(self.fits(source, index) for index in (*self._under_way, *self.missing))

    def copies(self, piece: int) -> int:
        """Peers that are known to have a piece."""
        if piece not in self._copies:
            self._copies[piece] = sum(has_bit(one, piece) for one in self.holders.values())
        return self._copies[piece]

    def choose(self, source: PackSource) -> int | None:
        fitting = (item for item in self.missing.items() if self.fits(source, item[0]))
        few = enumerate(islice(fitting, LOOK))
        order = [(urgency, self.copies(one), place, one) for place, (one, urgency) in few]
        return min(order)[-1] if order else None

    async def begun(self, index: int) -> bytearray:
        self._begun.discard(index)
        self._kept.pop(index, None)
        if index in self._at_once:
            return bytearray()
        self._kept[index] = 0
        if index not in self._file.occupied:  # no thread, since most pieces are small
            return bytearray()
        begun = await asyncio.to_thread(self._file.begun, index)
        begun = min(begun, self._file.part.piece_bytes - 1) // KEEP_BYTES * KEEP_BYTES
        if begun:
            self._begun.add(index)
        self._kept[index] = begun
        return bytearray(await asyncio.to_thread(self._file.read, index, begun))

    async def keep(self, index: int, data: bytearray) -> None:
        kept, end = self._kept.get(index, len(data)), len(data) // KEEP_BYTES * KEEP_BYTES
        if kept < end < self._file.part.piece_bytes:
            self._kept[index] = end
            await asyncio.to_thread(self._file.write, index, bytes(data[kept:end]), kept)

    async def put(self, source: PackSource, index: int, data: bytearray) -> None:
        if not await asyncio.to_thread(self._file.take, index, data):
            self._at_once.add(index)
            if index not in self._begun:  # else nobody knows whose bytes are wrong
                wrong = self._wrong[source.peer] = self._wrong.get(source.peer, set()) | {index}
                if len(wrong) >= MOST_WRONG:
                    raise ProtocolViolation(f"sent {MOST_WRONG} wrong pieces of {self.name}")
                source.here = self.usable(source.peer, source.here)
                if source.peer in self.holders:
                    self._hear(source)
            self.give_back(source, index)
            return
        if index in self.missing or index in self._under_way:  # else another peer was faster
            self._came(index, len(data))
        self._at_once.discard(index)
        await self._came_whole(index)


class DataRoom:
    """Disk space for the packed text of a run, which its stores share."""

    def __init__(self, gibibytes: float | None = None, disk_quota: DiskQuota | None = None) -> None:
        """``gibibytes``: None: unlimited; ``disk_quota``: of the home."""
        self.most = None if gibibytes is None else int(gibibytes * GIB)
        self.stores: list[PackStore] = []
        self._disk_quota = disk_quota

    async def make(self, store: "PackStore", pieces: Collection[int]) -> None:
        """Make room for pieces that are wanted. Raises DiskFull, and drops nothing, where there is
        too little."""
        if self.most is not None:
            self._drop_idle(store, self.most)
        needed = len(set(pieces) - store.file.occupied) * store.part.piece_bytes
        await asyncio.gather(*(one.punch() for one in self.stores))
        await asyncio.to_thread(require_space, store.file.folder, needed)
        if self._disk_quota is not None:
            await asyncio.to_thread(
                self._disk_quota.require, needed, f"{store.part.name} of the run"
            )

    def _drop_idle(self, store: "PackStore", most: int) -> None:
        excess = sum(one.claimed() for one in self.stores) - most
        if excess <= 0:
            return
        idle = sorted(
            (*one.value(piece), number, piece)
            for number, one in enumerate(self.stores)
            for piece in one.idle()
        )
        dropped: list[tuple[PackStore, int]] = []
        for *_, number, piece in idle:
            if excess > 0:
                dropped.append((self.stores[number], piece))
                excess -= self.stores[number].part.piece_bytes
        if excess > 0:
            raise DiskFull(
                f"{store.part.name}: the pieces that are read next need {excess:,} bytes more than "
                f"--max-data {most / GIB:g} GiB has room for: raise it."
            )
        for one, piece in dropped:
            one.drop(piece)


class PackStore:
    """One part of a run's text on this machine."""

    def __init__(
        self,
        file: PackFile,
        fetch: Callable[["PackStore", Show], Awaitable[None]],
        room: DataRoom | None = None,
        random: Random | None = None,
    ) -> None:
        """``fetch`` runs ``download`` until all is here that is wanted. The file must be open."""
        self.file = file
        self.part: PackedText = file.part
        self.path = file.path
        """File with the pieces that are here in their places."""
        self.download = PackDownload(file, self._came)
        self.barred: TTLCache[str, bool] = TTLCache(4096, BARRED_SECONDS)
        """Peers that sent what is not the text."""
        self.assigned: Callable[[], Collection[int]] = lambda: ()
        """Pieces that are being read, or will be read next."""
        self.readers: Callable[[Collection[int]], Collection[str]] = lambda pieces: ()
        """Peers that are said to have some of these pieces."""
        self.bytes_fetched = self.bytes_given = 0
        self._fetch = fetch
        self._room = room or DataRoom()
        self._room.stores.append(self)
        self._random = random or Random()
        self._salt = self._random.random()
        self._calls = 0
        self._wanted: Counter[int] = Counter()
        self._giving: Counter[int] = Counter()
        self._coming: dict[int, asyncio.Future[None]] = {}
        self._shows: list[Show] = []
        self._used: dict[int, float] = {}
        self._damaged: set[int] = set()
        """Pieces of the owner's pack that are not those of the run."""
        self._flushed = monotonic()
        self._work: asyncio.Task[None] | None = None

    def has(self, piece: int) -> bool:
        """Whether a piece is here and verified."""
        return self.file.has(piece)

    def count_held(self) -> int:
        """The number of pieces that may be given."""
        return int.from_bytes(self.here()).bit_count()

    def count_coming(self) -> int:
        """The number of pieces that are being fetched."""
        return len(self._coming)

    def is_coming(self, piece: int) -> bool:
        """Whether somebody is giving a piece."""
        return piece in self._coming and piece not in self.download.missing

    def is_damaged(self, piece: int) -> bool:
        """Whether a piece of the owner's pack was found to be another than the run's."""
        return piece in self._damaged

    def here(self) -> bytes:
        """Bitmap of the pieces that may be given, the first in the highest bit."""
        if not self.file.is_own:
            return bytes(self.file.here)
        whole = ((1 << self.part.piece_count) - 1) << -self.part.piece_count % 8
        bitmap = bytearray(whole.to_bytes(bitmap_bytes(self.part)))
        for piece in self._damaged:
            bitmap[piece >> 3] &= ~(0x80 >> (piece & 7))
        return bytes(bitmap)

    async def have(self, pieces: Sequence[int], show: Show = lambda text: None) -> None:
        """Fetch these pieces, however long it takes, before those of later calls; ``show`` gets
        the reason of the wait. Raises DiskFull, and DataError if the owner's pack is damaged."""
        now = monotonic()
        self._used.update(dict.fromkeys(pieces, now))
        wanted = [piece for piece in dict.fromkeys(pieces) if not await self._is_here(piece)]
        if not wanted:
            return
        self._wanted.update(wanted)
        self._shows.append(show)
        try:
            await self._room.make(self, wanted)
            fresh = [piece for piece in wanted if piece not in self._coming and not self.has(piece)]
            self._random.shuffle(fresh)
            self._calls += 1
            self.download.want(fresh, self._calls)
            for piece in fresh:
                self._coming[piece] = asyncio.get_running_loop().create_future()
            coming = [self._coming[piece] for piece in wanted if piece in self._coming]
            if self._work is None:
                self._work = asyncio.create_task(self._run())
            await asyncio.wait(coming)
            for one in coming:
                one.result()
        finally:
            self._shows.remove(show)
            self._wanted.subtract(wanted)
            for piece in wanted:
                if self._wanted[piece] <= 0:
                    del self._wanted[piece]
                    self.download.give_up(piece)
                    if (future := self._coming.pop(piece, None)) and not future.done():
                        future.cancel()

    @contextmanager
    def giving(self, piece: int) -> Iterator[None]:
        """Context in which a piece stays here, since a peer gets it."""
        self._used[piece] = monotonic()
        self._giving[piece] += 1
        try:
            yield
        finally:
            self._giving[piece] -= 1

    async def is_good(self, piece: int) -> bool:
        """Whether a piece may be given: one of the owner's pack is read before its first use."""
        if not self.has(piece) and self.file.is_own and piece not in self._damaged:
            with suppress(DataError):
                await self._is_here(piece)
        return self.has(piece)

    def rank(self, peers: Sequence[PeerInfo]) -> list[PeerInfo]:
        """Peers to ask: those that are said to have what is missing first, in our own order."""
        missing = list(islice(self.download.missing, LOOK))
        said = self.readers(missing)

        def place(peer: PeerInfo) -> tuple[int, int]:
            name = peer.peer_id
            bitmap = self.download.holders.get(name)
            if bitmap is not None:
                has_any = any(has_bit(bitmap, piece) for piece in missing)
                rank = 0 if has_any else 2
            else:
                rank = 0 if peer.gives_text or name in said else 1
            return rank, hash((self._salt, name))

        return sorted((peer for peer in peers if peer.peer_id not in self.barred), key=place)

    def describe(self, progress: str) -> str:
        """What we wait for, for people: which piece, who has it, what would help."""
        if not self._coming:
            return progress
        piece, more = min(self._coming), len(self._coming) - 1
        which = f"piece {piece}" + (f" and {more} more" if more else "")
        count = self.download.copies(piece)
        has = f"{count} {'peer has' if count == 1 else 'peers have'} it" if count else (
            "nobody that answers has it: a node with the pack (`--data`) or a `--mirror` would help"
        )  # fmt: skip
        return f"{which} of {self.part.name}: {has}; {progress}"

    def is_whole(self) -> bool:
        """Whether all pieces are here."""
        return int.from_bytes(self.here()).bit_count() == self.part.piece_count

    def idle(self) -> Iterator[int]:
        """Pieces that may be dropped."""
        if self.file.is_own:
            return
        kept = {*self.assigned(), *self._wanted, *(+self._giving)}
        for piece in self.file.occupied:
            if piece < self.part.training_pieces and piece not in kept:
                yield piece

    def value(self, piece: int) -> tuple[bool, float]:
        """How much it would cost to drop a piece."""
        is_last = self.has(piece) and not self.download.copies(piece)
        return is_last, self._used.get(piece, 0.0)

    def claimed(self) -> int:
        """Bytes of our disk that pieces take, or will take."""
        pieces = () if self.file.is_own else self.file.occupied.union(self._wanted)
        return len(pieces) * self.part.piece_bytes

    def drop(self, piece: int) -> None:
        """Give a piece to nobody any more; ``punch`` gives its space back."""
        self.file.forget(piece)
        self._used.pop(piece, None)

    async def punch(self) -> None:
        """Give the space of dropped pieces back. Raises DiskFull where the disk can't."""
        try:
            await asyncio.to_thread(self.file.punch)
        except OSError as error:
            raise DiskFull(
                f"{self.path}: its file system gives no space of a piece back "
                f"({os.strerror(error.errno or 0)}): raise --max-data, or choose another disk with "
                "--home."
            ) from None

    async def close(self) -> None:
        """Stop fetching, and keep what has come."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await asyncio.to_thread(self.file.close)

    async def _is_here(self, piece: int) -> bool:
        is_there = self.file.is_own or piece in self.file.occupied
        if self.has(piece) or (is_there and await asyncio.to_thread(self.file.check, piece)):
            self._damaged.discard(piece)
            return True
        if self.file.is_own:
            self._damaged.add(piece)
            raise DataError(
                f"Piece {piece} of {self.path} is damaged: see `lowcomm-node data verify`, and "
                "copy the pack again, or leave --data away, and peers send it."
            )
        return False

    async def _run(self) -> None:
        """Fetch until nothing is wanted any more."""
        error: LowcommError | None = None
        try:
            while not self.download.conclude():
                await self._fetch(self, self._show)
                await asyncio.to_thread(self.file.flush)
        except LowcommError as failure:
            error = failure
        finally:
            self._work = None
            self.barred.update(dict.fromkeys(self.download.struck, True))
            self.download.struck.clear()
            for future in self._coming.values():
                if not future.done():
                    future.set_exception(error or LinkLost("the node stops"))
                    future.exception()  # its waiter may have gone

    def _show(self, progress: str) -> None:
        for show in self._shows:
            show(self.describe(progress))

    async def _came(self, piece: int) -> None:
        self.bytes_fetched += self.part.piece_bytes
        if (future := self._coming.pop(piece, None)) and not future.done():
            future.set_result(None)
        if monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = monotonic()
            await asyncio.to_thread(self.file.flush)
