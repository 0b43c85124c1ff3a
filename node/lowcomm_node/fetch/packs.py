"""Packed text of a run: pieces that are read soon are fetched, and others make room for them.

A ``PackStore`` has one part of ``data.parts``: on the owner's disk, else in the home, whose pieces
come from peers, and from mirrors where peers bring too little. Anybody may give any piece, since
the run pins the digests of all. A piece that was begun stays on the disk, and goes on wherever it
is given next.

    order    what was asked for first; of equals the piece that fewest peers have, then at random
    room     --max-data: pieces that nobody reads make room, the least recently used first; those
             that nobody else has go last
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from random import Random
from time import monotonic

from cachetools import LRUCache, TTLCache

from lowcomm_node.errors import DataError, DiskFull, LinkLost, RetryLater
from lowcomm_node.fetch.engine import BARRED_SECONDS, LATER, TICK, Download, Fetch, Source
from lowcomm_node.fetch.mirrors import Mirror, MirrorRefused
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.storage.files import GIB, DiskQuota, require_space
from lowcomm_node.storage.pack_file import PackFile, bitmap_bytes, has_bit
from lowcomm_node.system.tasks import first_of
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
MAX_HOLDERS = 64
"""Peers whose bitmaps are remembered."""
MOST_WRONG = 3
"""Wrong pieces that make a liar; fewer may come from a disk that fails."""
HELP_RATE = 250_000.0
"""Bytes a second from peers with which no mirror is asked."""
PATIENCE = 5.0
"""Seconds that peers have before a mirror is asked."""
RANGE_BYTES = 1024 * 1024
"""Bytes of neighbouring small pieces that a mirror is asked for at once."""
Show = Callable[[str], None]


@dataclass(eq=False)
class PackSource(Source):
    """A text as one peer or mirror has it."""

    here: bytes = b""
    """Bitmap of its pieces."""


@dataclass(eq=False)
class _Waiter:
    """A call that waits for pieces."""

    pieces: set[int]
    """Those that are still to come."""
    show: Show
    done: asyncio.Future[None]


class DataRoom:
    """Disk space for the packed text of a run, which its stores share."""

    def __init__(self, gibibytes: float | None = None, disk_quota: DiskQuota | None = None) -> None:
        """``gibibytes``: None: unlimited; ``disk_quota``: of the home."""
        self.most = None if gibibytes is None else int(gibibytes * GIB)
        self.stores: list[PackStore] = []
        self._disk_quota = disk_quota

    async def make(self, store: "PackStore", pieces: Collection[int]) -> None:
        """Make room for pieces of a store. Raises DiskFull, and drops nothing, where there is too
        little."""
        if self.most is not None:
            await self._drop_idle(store, self.most)
        needed = len(set(pieces) - store.file.occupied) * store.part.piece_bytes
        await asyncio.to_thread(require_space, store.file.folder, needed)
        if self._disk_quota is not None:
            await asyncio.to_thread(
                self._disk_quota.require, needed, f"{store.part.name} of the run"
            )

    async def _drop_idle(self, store: "PackStore", most: int) -> None:
        excess = sum(len(one.claimed()) * one.part.piece_bytes for one in self.stores) - most
        idle = sorted(
            (*one.worth(piece), number, piece)
            for number, one in enumerate(self.stores if excess > 0 else ())
            for piece in one.idle()
        )
        dropped: dict[PackStore, list[int]] = {}
        for *_, number, piece in idle:
            if excess > 0:
                one = self.stores[number]
                dropped.setdefault(one, []).append(piece)
                excess -= one.part.piece_bytes
        if excess > 0:
            raise DiskFull(
                f"{store.part.name}: the pieces that are read next need {excess:,} bytes more than "
                f"--max-data {most / GIB:g} GiB has room for: raise it."
            )
        await asyncio.gather(*(one.drop(pieces) for one, pieces in dropped.items()))


class PackStore(Download[PackSource]):
    """One part of a run's text on this machine."""

    SLICE_BYTES = 128 * 1024

    def __init__(
        self,
        file: PackFile,
        fetch: Callable[["PackStore"], Fetch],
        room: DataRoom | None = None,
        mirrors: Sequence[Mirror] = (),
        warn: Callable[[str], None] = lambda text: None,
        random: Random | None = None,
    ) -> None:
        """``fetch`` asks peers; ``warn`` gets what is wrong with a mirror. The file must be
        open."""
        assert isinstance(file.part, PackedText)
        super().__init__(file.part.name, pb.Enter(pack=bytes.fromhex(file.part.pieces)))
        self.enter.listed = bool(file.digests)
        self.file = file
        self.part = file.part
        self.path = file.path
        """File with the pieces that are here in their places."""
        self.holders: LRUCache[str, bytes] = LRUCache(MAX_HOLDERS)
        """Bitmaps of peers, as they were last heard."""
        self.assigned: Callable[[], Collection[int]] = lambda: ()
        """Pieces that are being read, or will be read next."""
        self.readers: Callable[[Collection[int]], Collection[str]] = lambda pieces: ()
        """Peers that are said to have some of these pieces."""
        self.bytes_fetched = self.bytes_given = 0
        self._fetch = fetch
        self._room = room or DataRoom()
        self._room.stores.append(self)
        self._mirrors = mirrors
        self._mirror = ""  # host of the mirror that gives a piece now
        self._no_mirror = ""  # why none does; empty where none is needed
        self._warn = warn
        self._random = random or Random()
        self._salt = self._random.random()
        self._urgency = 0
        self._waiters: list[_Waiter] = []
        self._used: dict[int, float] = {}
        self._giving: Counter[int] = Counter()
        self._damaged: set[int] = set()
        """Pieces of the owner's pack that are not those of the run."""
        self._copies: dict[int, int] = {}
        """Peers that have a piece, of pieces that were counted since a bitmap came."""
        self._begun: set[int] = set()
        """Pieces under way of which others gave the first bytes."""
        self._at_once: set[int] = set()
        """Pieces of which some giver sent wrong bytes: they must come of one giver."""
        self._wrong: TTLCache[str, set[int]] = TTLCache(4096, BARRED_SECONDS)
        """Wrong pieces that came, by peer."""
        self._flushed = monotonic()
        self._work: asyncio.Task[None] | None = None

    # what is here

    def is_whole(self) -> bool:
        """Whether all pieces are here."""
        return self.count_held() == self.part.piece_count

    def count_held(self) -> int:
        """The number of pieces that may be given."""
        return int.from_bytes(self.here()).bit_count()

    def count_coming(self) -> int:
        """The number of pieces that are being fetched."""
        return len(self.missing) + len(self._under_way)

    def is_coming(self, piece: int) -> bool:
        """Whether a piece is on its way from a peer or mirror."""
        return piece in self._under_way

    def here(self) -> bytes:
        """Bitmap of the pieces that may be given, the first in the highest bit."""
        if not self.file.is_own:
            return bytes(self.file.here)
        whole = ((1 << self.part.piece_count) - 1) << -self.part.piece_count % 8
        return _without(whole.to_bytes(bitmap_bytes(self.part)), self._damaged)

    async def have(self, pieces: Collection[int], show: Show = lambda text: None) -> None:
        """Fetch these pieces before those of later calls. ``show`` takes the reason for the wait.

        Raises DiskFull, and DataError if the owner's pack is damaged."""
        self._used.update(dict.fromkeys(pieces, monotonic()))
        lacking = await self._check(pieces)
        if not lacking:
            return
        if self.file.is_own:
            raise DataError(
                f"Piece {min(lacking)} of {self.path} is damaged: see `lowcomm-node data verify`, "
                "and copy the pack again, or leave --data away, and peers send it."
            )
        waiter = _Waiter(lacking, show, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await self._room.make(self, lacking)
            self._ask_for(piece for piece in lacking if not self.file.has(piece))
            if self._work is None:
                self._work = asyncio.create_task(self._run())
            await waiter.done
        finally:
            self._waiters.remove(waiter)
            for piece in lacking.difference(*(one.pieces for one in self._waiters)):
                if piece in self.missing or piece in self._under_way:
                    self.missing.pop(piece, None)
                    self._under_way.pop(piece, None)
                    self.total -= self.part.piece_bytes

    async def _check(self, pieces: Collection[int]) -> set[int]:
        """Read those of these pieces that are here and were not verified yet. Returns those that
        are not here."""
        lacking = {piece for piece in pieces if not self.file.has(piece)}
        if lacking:
            await asyncio.to_thread(self.file.check, lacking)
            lacking = {piece for piece in lacking if not self.file.has(piece)}
        if self.file.is_own:
            self._damaged.difference_update(pieces)
            self._damaged |= lacking
        return lacking

    # who reads, and who gets pieces

    @asynccontextmanager
    async def giving(self, piece: int, size: int) -> AsyncIterator[None]:
        """Context in which a piece stays here, since a peer gets ``size`` bytes of it. Raises
        RetryLater if it is not here."""
        self._used[piece] = monotonic()
        self._giving[piece] += 1
        try:
            if self.file.is_own and piece not in self._damaged:
                await self._check([piece])  # before its first use
            if not self.file.has(piece):
                raise RetryLater("does not have that piece any more")
            yield
            self.bytes_given += size
        finally:
            self._giving[piece] -= 1

    def claimed(self) -> set[int]:
        """Pieces that take space of our disk, or will take it."""
        if self.file.is_own:
            return set()
        return self.file.occupied.union(*(waiter.pieces for waiter in self._waiters))

    def idle(self) -> Iterator[int]:
        """Pieces on our disk that may be dropped."""
        waited_for = chain.from_iterable(waiter.pieces for waiter in self._waiters)
        kept = {*self.assigned(), *waited_for, *(+self._giving)}
        training = range(self.part.training_pieces)
        return (one for one in self.file.occupied if one in training and one not in kept)

    def worth(self, piece: int) -> tuple[bool, float]:
        """A larger value for a piece that is dropped later."""
        return self.file.has(piece) and not self.copies(piece), self._used.get(piece, 0.0)

    async def drop(self, pieces: Collection[int]) -> None:
        """Give the space of pieces back. Raises DiskFull where the file system can't."""
        try:
            await asyncio.to_thread(self.file.drop, pieces)
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
        await asyncio.gather(*(mirror.close() for mirror in self._mirrors))
        await asyncio.to_thread(self.file.close)

    # pieces on their way

    def _ask_for(self, pieces: Iterable[int]) -> None:
        """Fetch these, too, after those that are under way or missing."""
        if self.conclude():
            self.total = self.size = 0
        fresh = [one for one in pieces if one not in self.missing and one not in self._under_way]
        self._random.shuffle(fresh)
        self._urgency += 1
        self.missing.update(dict.fromkeys(fresh, self._urgency))
        self.total += len(fresh) * self.part.piece_bytes

    async def _run(self) -> None:
        """Fetch until nothing is missing."""
        error: LowcommError | None = None
        try:
            while not self.conclude():
                fetch = self._fetch(self)
                await first_of(fetch.run(self._show), self._ask_mirrors(fetch))
                await asyncio.to_thread(self.file.flush)
        except LowcommError as failure:
            error = failure
        except asyncio.CancelledError:
            error = LinkLost("the node stops")
            raise
        finally:
            self._work = None
            for waiter in self._waiters:  # one that still makes room begins the next work
                if error is not None and not waiter.done.done():
                    waiter.done.set_exception(error)
                    waiter.done.exception()  # it may have gone

    def conclude(self) -> bool:
        return not (self.missing or self._under_way)

    def listing_bytes(self, opened: pb.Opened, enter: pb.Enter) -> int:
        spare = -self.part.piece_count % 8
        if (
            opened.name != self.enter.pack
            or opened.size != self.part.size
            or len(opened.here) != bitmap_bytes(self.part)
            or opened.here[-1] & ((1 << spare) - 1)
        ):
            raise ProtocolViolation(f"offers another text than {self.name}")
        return 0 if enter.listed else self.part.piece_count * DIGEST_BYTES

    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> PackSource:
        if listing:
            await self._learn(listing)
        source = PackSource(peer.peer_id, opened.size)
        self.renew(source, opened)
        return source

    async def _learn(self, listing: bytes) -> None:
        if not await asyncio.to_thread(self.file.learn, listing):
            raise ProtocolViolation(f"lists digests that are not those of {self.name}")
        self.enter.listed = True

    def renew(self, source: PackSource, opened: pb.Opened) -> None:
        source.here = _without(opened.here, self._wrong.get(source.peer, ()))
        self.holders[source.peer] = source.here
        self._copies.clear()

    def size_of(self, source: PackSource, index: int) -> int:
        return self.part.piece_bytes

    def fits(self, source: PackSource, index: int) -> bool:
        return has_bit(source.here, index)

    def may_give(self, source: PackSource) -> bool:
        return any(self.fits(source, index) for index in (*self._under_way, *self.missing))

    def choose(self, source: PackSource) -> int | None:
        fitting = (item for item in self.missing.items() if self.fits(source, item[0]))
        few = enumerate(islice(fitting, LOOK))
        order = [(urgency, self.copies(one), place, one) for place, (one, urgency) in few]
        return min(order)[-1] if order else None

    def copies(self, piece: int) -> int:
        """Peers that are known to have a piece."""
        if piece not in self._copies:
            self._copies[piece] = sum(has_bit(one, piece) for one in self.holders.values())
        return self._copies[piece]

    async def begun(self, index: int) -> bytearray:
        self._begun.discard(index)
        # No thread, since most pieces are small and new.
        if index in self._at_once or index not in self.file.occupied:
            return bytearray()
        size = await asyncio.to_thread(self.file.begun, index)
        size = min(size, self.part.piece_bytes - 1) // KEEP_BYTES * KEEP_BYTES
        if size:
            self._begun.add(index)
        return bytearray(await asyncio.to_thread(self.file.read, index, size))

    async def keep(self, index: int, data: bytearray, came: int) -> None:
        end = len(data) // KEEP_BYTES * KEEP_BYTES
        start = (len(data) - came) // KEEP_BYTES * KEEP_BYTES
        if start < end < self.part.piece_bytes and index not in self._at_once:
            await asyncio.to_thread(self.file.write, index, bytes(data[start:end]), start)

    async def put(self, source: PackSource, index: int, data: bytearray) -> None:
        if not await asyncio.to_thread(self.file.take, index, data):
            self._at_once.add(index)
            self.give_back(source, index)
            if index not in self._begun:  # else nobody knows whose bytes are wrong
                self._blame(source, index)
            return
        self._at_once.discard(index)
        if index in self.missing or index in self._under_way:  # else another peer was faster
            self._came(index, len(data))
        self.bytes_fetched += len(data)
        for waiter in self._waiters:
            waiter.pieces.discard(index)
            if not (waiter.pieces or waiter.done.done()):
                waiter.done.set_result(None)
        if monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = monotonic()
            await asyncio.to_thread(self.file.flush)

    def _blame(self, source: PackSource, index: int) -> None:
        """Ask a source no more for a piece that it sent wrong, and for nothing after a few."""
        wrong = self._wrong[source.peer] = self._wrong.get(source.peer, set()) | {index}
        if len(wrong) >= MOST_WRONG:
            raise ProtocolViolation(f"sent {MOST_WRONG} wrong pieces of {self.name}")
        source.here = _without(source.here, wrong)
        if source.peer in self.holders:
            self.holders[source.peer] = source.here
            self._copies.clear()

    def rank(self, peers: Sequence[PeerInfo]) -> list[PeerInfo]:
        """Peers to ask: those that are said to have what is missing first, in our own order."""
        missing = list(islice(self.missing, LOOK))
        said = self.readers(missing)

        def place(peer: PeerInfo) -> tuple[int, int]:
            name = peer.peer_id
            bitmap = self.holders.get(name)
            if bitmap is not None:
                has_any = any(has_bit(bitmap, piece) for piece in missing)
                rank = 0 if has_any else 2
            else:
                rank = 0 if peer.gives_text or name in said else 1
            return rank, hash((self._salt, name))

        return sorted((peer for peer in peers if peer.peer_id not in self.struck), key=place)

    # mirrors

    async def _ask_mirrors(self, fetch: Fetch) -> None:
        """Fetch pieces from mirrors while peers bring too little, until cancelled."""
        began = monotonic()
        while True:
            due = [mirror for mirror in self._mirrors if mirror.later <= monotonic()]
            is_slow = monotonic() - began > PATIENCE and fetch.rate < HELP_RATE
            came = bool(due) and is_slow and await self._came_from(due[0], fetch.down)
            await asyncio.sleep(0.0 if came else TICK)

    async def _came_from(self, mirror: Mirror, down: BandwidthLimit) -> bool:
        """Fetch some neighbouring pieces. Returns whether they have come."""
        try:
            if not self.file.digests:
                await self._learn(await mirror.listing())
            if not await self._fetch_range(mirror, down):
                return False
        except LinkLost as error:
            mirror.failures += 1
            mirror.later = max(mirror.later, monotonic() + LATER * 2 ** min(5, mirror.failures))
            self._no_mirror = f"{mirror.host} {error}"
            return False
        except (MirrorRefused, ProtocolViolation) as error:
            mirror.later = inf
            self._no_mirror = f"{mirror.host}: {error}"
            self._warn(f"mirror {mirror.url}: {error}: it is not asked again")
            return False
        self._no_mirror, mirror.failures = "", 0
        return True

    async def _fetch_range(self, mirror: Mirror, down: BandwidthLimit) -> bool:
        size = self.part.piece_bytes
        here = _without(b"\xff" * bitmap_bytes(self.part), self._wrong.get(mirror.url, ()))
        source = PackSource(mirror.url, self.part.size, here=here)
        if (first := self.take(source)) is None:
            return False
        pieces = [first]
        while len(pieces) < RANGE_BYTES // size and pieces[-1] + 1 in self.missing:
            if not self.fits(source, pieces[-1] + 1):
                break
            pieces.append(pieces[-1] + 1)
            self.ask(source, pieces[-1])
        try:
            data = await self.begun(first)
            self._mirror = mirror.host
            start, stop = first * size + len(data), (pieces[-1] + 1) * size
            async with aclosing(mirror.read(start, stop, down)) as blocks:
                async for block in blocks:
                    data += block
                    while pieces and len(data) >= size:
                        await self.put(source, pieces[0], data[:size])
                        del pieces[0], data[:size]
                    if pieces:
                        await self.keep(pieces[0], data, min(len(block), len(data)))
        finally:
            self._mirror = ""
            for piece in pieces:
                self.give_back(source, piece)
        return True

    # for people

    def _show(self, progress: str) -> None:
        text = self.describe(progress)
        for waiter in self._waiters:
            waiter.show(text)

    def describe(self, progress: str) -> str:
        """What we wait for: which piece, who has it, what would help; ``progress``: of peers."""
        if self._mirror:
            progress = f"{self.size / 1e6:.1f} MB, now from {self._mirror}"
        elif self._no_mirror:
            progress = f"{progress}; {self._no_mirror}"
        if self.conclude():
            return progress
        piece, more = min(chain(self.missing, self._under_way)), self.count_coming() - 1
        which = f"piece {piece}" + (f" and {more} more" if more else "")
        count = self.copies(piece)
        has = f"{count} {'peer has' if count == 1 else 'peers have'} it" if count else (
            "nobody that answers has it: a node with the pack (`--data`) or a `--mirror` would help"
        )  # fmt: skip
        return f"{which} of {self.part.name}: {has}; {progress}"


def _without(bitmap: bytes, pieces: Iterable[int]) -> bytes:
    """A bitmap of pieces without some of them."""
    here = bytearray(bitmap)
    for piece in pieces:
        here[piece >> 3] &= ~(0x80 >> (piece & 7))
    return bytes(here)
