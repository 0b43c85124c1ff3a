"""Files that a run names by their digest: its tokenizer, and the weights that it begins with.

HOME/runs/FINGERPRINT/tokenizer.json
HOME/runs/FINGERPRINT/start/NAME          came from peers, or a link into the owner's folder

The tokenizer: what the owner named, else a copy in the home, in the folder of weights, or a peer's.
Weights to begin with: from the owner's folder, else the home, else peers. A node that has a
checkpoint needs none, and gives those that it finds.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.engine import Download, PieceRequest, Source
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.partial_file import PartialFile
from lowcomm_node.storage.paths import absolute
from lowcomm_node.storage.start_files import check
from lowcomm_node.system.tasks import start
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.run import RunSpec, SignedRun
from lowcomm_protocol.spec.sections import (
    DIGEST_BYTES,
    PIECE_BYTES,
    StartFile,
    count_pieces,
    digest_of_pieces,
)

BLOCK = 1024 * 1024


@dataclass(frozen=True)
class RunFile:
    """A file that all peers of a run have alike."""

    name: str
    """For people, and for the file in a home; never a path."""
    sha256: bytes
    size: int | None = None
    """Bytes; None: unknown, and at most one piece."""
    pieces: str = ""
    """Digest of the list of its pieces' digests (``spec.start.digest_of_pieces``)."""

    def takes(self, size: int) -> bool:
        """Whether the file may have this size."""
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


class FileDownload(Download):
    """A file on its way to ``path``; its digest is fixed, so every piece may come from anybody."""

    def __init__(self, file: RunFile, path: Path) -> None:
        super().__init__()
        self.file = file
        self.name = file.name
        self.path = path
        self.total = file.size or 0
        self._partial: PartialFile | None = None
        self._opening = asyncio.Lock()

    @property
    def enter(self) -> pb.Enter:
        return pb.Enter(file=self.file.sha256)

    @property
    def size(self) -> int:
        if self._partial is None:
            return 0
        bounds = map(self._partial.bounds, self._partial.missing)
        return self._partial.size - sum(stop - start for start, stop in bounds)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each piece, once they are known."""
        return self._partial.digests if self._partial is not None else ()

    def conclude(self) -> bool:
        return self._partial is not None and not self._partial.missing

    def listing_bytes(self, opened: pb.Opened) -> int:
        if opened.name != self.file.sha256 or not self.file.takes(opened.size):
            raise ProtocolViolation(f"offers another file than {self.file.name}")
        return 0 if self.file.is_one_piece else count_pieces(opened.size) * DIGEST_BYTES

    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> Source:
        digests = tuple(
            listing[start : start + DIGEST_BYTES] for start in range(0, len(listing), DIGEST_BYTES)
        )
        if listing and digest_of_pieces(digests) != self.file.pieces:
            raise ProtocolViolation(f"lists digests that are not those of {self.file.name}")
        if self.file.size is not None:
            await self._begin(self.file.size, digests or (self.file.sha256,))
        elif self._partial is None and not self._under_way:
            self.missing[0] = None
        return Source(peer.peer_id, opened.size)

    def size_of(self, source: Source, index: int) -> int:
        if self._partial is None:  # nothing that a peer says of it counts for another
            return source.size
        start, stop = self._partial.bounds(index)
        return stop - start

    async def put(self, source: Source, wanted: PieceRequest, data: bytearray) -> None:
        if self._partial is None:
            if await asyncio.to_thread(lambda: sha256(data).digest()) != self.file.sha256:
                raise ProtocolViolation(f"sent another file than {self.file.name}")
            await self._begin(len(data), (self.file.sha256,))
        assert self._partial is not None
        if not await asyncio.to_thread(self._partial.fits, wanted.index, data):
            raise ProtocolViolation(f"sent a wrong piece of {self.file.name}")
        if wanted.index in self._partial.missing:
            await asyncio.to_thread(self._partial.put, wanted.index, data)
        self._came(wanted.index)

    def describe(self, progress: str, is_served: bool) -> str:
        """The progress, for people."""
        if is_served:
            return f"fetching {self.name}: {progress}"
        return f"waiting for {self.name}, which the run needs: {progress}"

    async def finish(self) -> None:
        """Give the whole file its name. Raises DiskFull."""
        assert self._partial is not None
        await asyncio.to_thread(self._partial.conclude)

    def close(self) -> None:
        """Keep what has come."""
        if self._partial is not None:
            self._partial.close()

    async def _begin(self, size: int, digests: tuple[bytes, ...]) -> None:
        async with self._opening:
            if self._partial is None:
                self._partial = await asyncio.to_thread(
                    PartialFile, self.path, size, PIECE_BYTES, digests
                )
                self.total = size
                self.missing = dict.fromkeys(sorted(self._partial.missing))


@dataclass(frozen=True)
class VerifiedFile:
    """A file that is here, and was read once to see that it is the right one."""

    path: Path
    size: int
    digests: tuple[bytes, ...]
    """SHA-256 of each piece."""
    identity: tuple[int, ...]
    """Device, inode, size and time: they differ if anybody has written to the file since."""


class VerifiedFiles:
    """The files of a run that are on this machine, by their SHA-256."""

    def __init__(self) -> None:
        self._held: dict[bytes, VerifiedFile] = {}

    def find(self, digest: bytes) -> VerifiedFile | None:
        """A verified file that nobody has touched since."""
        held = self._held.get(digest)
        return held if held is not None and _identity(held.path) == held.identity else None

    def add(self, file: RunFile, path: Path, digests: Sequence[bytes]) -> None:
        """Take in a file that is the right one, and the digests of its pieces."""
        size = path.stat().st_size
        self._held[file.sha256] = VerifiedFile(path, size, tuple(digests), _identity(path))

    async def verify(self, file: RunFile, path: Path) -> bool:
        """Whether a file is the wanted one: then it is taken in."""
        held = self.find(file.sha256)
        if held is not None and held.path == path:
            return True
        stop = Event()
        try:
            digests = await asyncio.to_thread(_digests_of, file, path, stop)
        finally:
            stop.set()  # a thread can't be cancelled
        if digests is None:
            return False
        self.add(file, path, digests)
        return True


def _identity(path: Path) -> tuple[int, ...]:
    with suppress(OSError):
        found = path.stat()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return ()


def _digests_of(file: RunFile, path: Path, stop: Event) -> list[bytes] | None:
    """The digests of the pieces of a file; None if it is another, or can't be read."""
    whole, digests = sha256(), list[bytes]()
    try:
        with path.open("rb") as opened:
            if not file.takes(os.fstat(opened.fileno()).st_size):
                return None
            while not stop.is_set():
                piece, left = sha256(), PIECE_BYTES
                while left and (block := opened.read(min(BLOCK, left))):
                    whole.update(block)
                    piece.update(block)
                    left -= len(block)
                if left == PIECE_BYTES:
                    break
                digests.append(piece.digest())
    except OSError:
        return None
    return digests if whole.digest() == file.sha256 else None


@dataclass(frozen=True)
class Provided:
    """Paths of the files that a trainer begins with."""

    tokenizer: str | None
    start: tuple[str, ...]
    """Weights to begin with; none where there is a checkpoint."""


def check_named(spec: RunSpec, settings: NodeSettings) -> None:
    """Raise ConfigError unless the owner has named the files that a run leaves to each peer."""
    data = spec.data
    if data.source == "local" and settings.data is None:
        raise ConfigError("This run trains on text of your own: name it with --data PATH.")
    if data.tokenizer == "local" and not data.tokenizer_sha256 and settings.tokenizer is None:
        raise ConfigError("This run needs its tokenizer file: name it with --tokenizer PATH.")


class Provider:
    """Has the files of one run here before its trainer starts."""

    def __init__(
        self,
        settings: NodeSettings,
        run: SignedRun,
        files: VerifiedFiles,
        fetch: Callable[[FileDownload], Awaitable[None]],
        show: Callable[[str], None],
    ) -> None:
        """``fetch`` gets all pieces of a file from peers; ``show`` receives what the node waits
        for."""
        self._settings = settings
        self._spec = run.spec
        self._files = files
        self._fetch = fetch
        self._show = show
        self._disk_quota = DiskQuota(settings.home, settings.max_disk)
        paths, fingerprint = settings.paths, run.fingerprint
        self._checkpoints = paths.checkpoints(fingerprint)
        self._kept_tokenizer = paths.tokenizer(fingerprint)
        self._kept_start = paths.start(fingerprint)
        self._looking: asyncio.Task[None] | None = None

    async def provide(self) -> Provided:
        """Have all files here, however long it takes.

        Raises ConfigError, which names a file that is another, or DiskFull.
        """
        tokenizer = await self._tokenizer()
        if any(self._checkpoints.glob("step-*")):
            if self._looking is None:
                self._looking = start(self._look())
            return Provided(tokenizer, ())
        pinned = zip(start_of(self._spec), self._spec.start.files, strict=True)
        return Provided(tokenizer, tuple([str(await self._weights(*both)) for both in pinned]))

    async def close(self) -> None:
        """Look for nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        """Find weights that peers may ask for, though we need them no more."""
        for file in start_of(self._spec):
            await self._found(file, self._kept_start / file.name)

    async def _found(self, file: RunFile, kept: Path) -> Path | None:
        """Where a file is: in the owner's folder of weights, or where the home keeps it."""
        weights = self._settings.weights
        for path in [weights / file.name, kept] if weights else [kept]:
            if await self._files.verify(file, path):
                return path
        return None

    async def _tokenizer(self) -> str | None:
        file, named = tokenizer_of(self._spec), self._settings.tokenizer
        if file is None:
            return named
        if named is not None:
            await self._files.verify(file, absolute(named))
            return named  # if it is another, the trainer says so
        found = await self._found(file, self._kept_tokenizer)
        return str(found or await self._fetched(file, self._kept_tokenizer))

    async def _weights(self, file: RunFile, pinned: StartFile) -> Path:
        kept, weights = self._kept_start / file.name, self._settings.weights
        self._show(
            f"reading {weights / file.name} to check it"
            if weights
            else f"looking for {file.name}, which the run begins with"
        )
        if weights is None:
            return await self._found(file, kept) or await self._fetched(file, kept)
        path = weights / file.name
        if not await self._files.verify(file, path):
            await asyncio.to_thread(check, path, pinned)  # which says why
        await asyncio.to_thread(_link, kept, path)
        return path

    async def _fetched(self, file: RunFile, path: Path) -> Path:
        self._disk_quota.require(file.size or PIECE_BYTES, f"{file.name} of the run")
        download = FileDownload(file, path)
        try:
            await self._fetch(download)
            await download.finish()
        finally:
            download.close()
        self._files.add(file, path, download.digests)
        return path


def _link(path: Path, target: Path) -> None:
    """Have ``path`` lead to a file of the owner's, so that a later start finds it again."""
    if path.exists() and path.samefile(target):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.absolute())
    fresh.replace(path)
