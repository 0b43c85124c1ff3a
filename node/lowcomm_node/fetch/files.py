"""Files that a run names by their digest: its tokenizer, and the weights that it begins with.

HOME/runs/FINGERPRINT/tokenizer.json
HOME/runs/FINGERPRINT/start/NAME          came from peers, or a link into the owner's folder

The tokenizer: what the owner named, else a copy in the home, in the folder of weights, or a peer's.
Weights to begin with: from the owner's folder, else the home, else peers. A node that has a
checkpoint needs none, and gives those that it finds.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.engine import Download, Source
from lowcomm_node.fetch.text import RunText
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import DiskQuota, require_space, sync
from lowcomm_node.storage.pack_file import FilePieces, PackFile
from lowcomm_node.storage.paths import absolute
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
"""Bytes that are hashed at a time."""


@dataclass(frozen=True)
class RunFile:
    """A file of which all peers of a run hold the same bytes."""

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


def tokenizer_of(spec: RunSpec) -> RunFile | None:
    """The tokenizer of a run; None if it has none, or one that nobody checks."""
    data = spec.data
    if not data.tokenizer_sha256:
        return None
    digest, size = bytes.fromhex(data.tokenizer_sha256), data.tokenizer_size or None
    return RunFile("tokenizer.json", digest, size, data.tokenizer_pieces)


def start_of(spec: RunSpec) -> list[RunFile]:
    """The weights that a run begins with."""
    return [
        RunFile(one.name, bytes.fromhex(one.sha256), one.size, one.pieces)
        for one in spec.start.files
    ]


class FileDownload(Download[Source]):
    """A file on its way to ``path``; its digest is fixed, so every piece may come from anybody.

    Pieces lie in a hidden folder beside it.
    """

    def __init__(self, file: RunFile, path: Path) -> None:
        super().__init__(file.name, pb.Enter(file=file.sha256), file.size or 0)
        self.file = file
        self.path = path
        self.folder = path.with_name(f".{path.name}.pieces")
        self.digests = b""  # SHA-256 of each piece, once they are known
        self._pieces: PackFile | None = None
        self._opening = asyncio.Lock()

    def conclude(self) -> bool:
        return bool(self.digests) and self.size == self.total

    def listing_bytes(self, opened: pb.Opened, enter: pb.Enter) -> int:
        if opened.name != self.file.sha256 or not self.file.takes(opened.size):
            raise ProtocolViolation(f"offers another file than {self.name}")
        count = count_pieces(opened.size)
        return count * DIGEST_BYTES if count > 1 and not enter.listed else 0

    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> Source:
        if listing and sha256(listing).hexdigest() != self.file.pieces:
            raise ProtocolViolation(f"lists digests that are not those of {self.name}")
        if self.file.size is not None:
            await self._begin(self.file.size, listing or self.file.sha256)
        elif not self.digests and not self._under_way:
            self.missing[0] = 0
        return Source(peer.peer_id, opened.size)

    def size_of(self, source: Source, index: int) -> int:
        # Before the size is pinned, nothing that a peer says of it counts for another.
        return source.size if self._pieces is None else self._pieces.size_of(index)

    async def put(self, source: Source, index: int, data: bytearray) -> None:
        if self._pieces is None and sha256(data).digest() == self.file.sha256:
            await self._begin(len(data), self.file.sha256)
        if self._pieces is None or not await asyncio.to_thread(self._pieces.take, index, data):
            raise ProtocolViolation(f"sent a wrong piece of {self.name}")
        if index in self.missing or index in self._under_way:  # else another peer was faster
            self._came(index, len(data))

    def describe(self, progress: str, is_served: bool) -> str:
        """The progress, for people."""
        if is_served:
            return f"fetching {self.name}: {progress}"
        return f"waiting for {self.name}, which the run needs: {progress}"

    def finish(self) -> None:
        """Give the whole file its name. Raises DiskFull."""
        self.close()
        (self.folder / "data").replace(self.path)
        sync(self.path.parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Keep what has come. Raises DiskFull."""
        if self._pieces is not None:
            self._pieces.close()

    async def _begin(self, size: int, digests: bytes) -> None:
        """Open the folder, and read what is in it."""
        async with self._opening:
            if self._pieces is not None:
                return
            pieces = PackFile(
                FilePieces(size, PIECE_BYTES, sha256(digests).hexdigest()), self.folder
            )
            self._pieces = pieces
            await asyncio.to_thread(self._open, pieces, digests)
            self.total, self.digests = size, digests
            self.enter.listed = True
            self.missing.clear()
            self._under_way.clear()
            for piece in range(pieces.part.piece_count):
                if pieces.has(piece):
                    self.size += pieces.size_of(piece)
                else:
                    self.missing[piece] = 0

    def _open(self, pieces: PackFile, digests: bytes) -> None:
        self.path.with_name(f".{self.path.name}.part").unlink(missing_ok=True)  # before 0.2
        if not self.folder.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            require_space(self.path.parent, pieces.part.size)
        pieces.open(digests)
        pieces.check(piece for piece in list(pieces.occupied) if not pieces.has(piece))


@dataclass(frozen=True)
class VerifiedFile:
    """A file that is here, and was read once to see that it is the right one."""

    path: Path
    size: int
    digests: bytes
    """SHA-256 of each piece, one after another."""
    identity: tuple[int, ...]
    """Device, inode, size and time: they differ if anybody has written to the file since."""

    def place(self, index: int) -> tuple[int, int]:
        """Offset and size of a piece; 0: there is no such piece."""
        start = index * PIECE_BYTES
        return start, max(0, min(PIECE_BYTES, self.size - start))


class VerifiedFiles:
    """The files of a run that are on this machine, by their SHA-256."""

    def __init__(self) -> None:
        self._held: dict[bytes, VerifiedFile] = {}

    def find(self, digest: bytes) -> VerifiedFile | None:
        """A verified file that nobody has touched since."""
        held = self._held.get(digest)
        return held if held is not None and _identity(held.path) == held.identity else None

    def add(self, file: RunFile, path: Path, digests: bytes) -> None:
        """Take in a file that is the right one, and the digests of its pieces."""
        size = path.stat().st_size
        self._held[file.sha256] = VerifiedFile(path, size, digests, _identity(path))

    async def verify(self, file: RunFile, path: Path) -> str:
        """Take in a file if it is the wanted one. Returns why it is not; empty if it is."""
        held = self.find(file.sha256)
        if held is not None and held.path == path:
            return ""
        stop = Event()
        try:
            size = path.stat().st_size
            if not file.takes(size):
                return f"has {size:,} bytes, the {file.name} of this run {file.size or 0:,}"
            read = await asyncio.to_thread(read_digests, path, stop)
        except OSError as error:
            return f"can't be read ({error.strerror})"
        finally:
            stop.set()  # a thread can't be cancelled
        if read.sha256 != file.sha256:
            return (
                f"is not the {file.name} of this run: its SHA-256 is {read.sha256.hex()}, the "
                f"run's is {file.sha256.hex()}"
            )
        self.add(file, path, b"".join(read.pieces))
        return ""


def _identity(path: Path) -> tuple[int, ...]:
    with suppress(OSError):
        status = path.stat()
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return ()


@dataclass(frozen=True)
class FileDigests:
    """SHA-256 of a file, and of its pieces of `PIECE_BYTES`."""

    size: int  # bytes
    sha256: bytes
    pieces: tuple[bytes, ...]


def read_digests(path: Path, stop: Event | None = None) -> FileDigests:
    """Read a file, unless ``stop`` is set before its end. Raises OSError."""
    whole, pieces, size = sha256(), [sha256()], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if size and size % PIECE_BYTES == 0:
                pieces.append(sha256())
            whole.update(block)
            pieces[-1].update(block)
            size += len(block)
            if stop is not None and stop.is_set():
                break
    return FileDigests(size, whole.digest(), tuple(piece.digest() for piece in pieces))


def pin(path: Path) -> StartFile:
    """Entry of a file for a specification. Raises ConfigError if it can't be read, ValueError if
    its name or size can't be pinned."""
    try:
        read = read_digests(path)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): see its rights and its disk."
        ) from None
    pieces = digest_of_pieces(read.pieces)
    return StartFile(name=path.name, size=read.size, sha256=read.sha256.hex(), pieces=pieces)


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
        text: RunText | None = None,
        show_text: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``fetch`` gets a file from peers; ``show`` receives what the node waits for, and
        ``show_text`` that of packed text."""
        self._settings = settings
        self._run = run
        self._files = files
        self._fetch = fetch
        self._show = show
        self._text = text
        self._show_text = show_text
        self._disk_quota = DiskQuota(settings.home, settings.max_disk)
        self._looking: asyncio.Task[None] | None = None

    async def provide(self) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
        """Have all files here, however long it takes. Returns the paths of the tokenizer, of the
        weights to begin with, none where there is a checkpoint, and of packed text. Raises
        ConfigError, DataError, DiskFull.
        """
        if self._text is not None:  # first of all: its room, and the owner's own
            await self._text.open()
        paths, name = self._settings.paths, self._run.fingerprint
        tokenizer = self._settings.tokenizer
        if file := tokenizer_of(self._run.spec):
            if tokenizer is None:
                tokenizer = str(await self._have(file, paths.tokenizer(name)))
            else:  # if it is another, the trainer says so
                await self._files.verify(file, absolute(tokenizer))
        packs = () if self._text is None else await self._text.have_first(self._show_text)
        weights = {file: paths.start(name) / file.name for file in start_of(self._run.spec)}
        # An adapter is of no use without them.
        if self._run.spec.adapter or not any(paths.checkpoints(name).glob("step-*")):
            start_with = [str(await self._weights(*one)) for one in weights.items()]
            return tokenizer, tuple(start_with), packs
        if self._looking is None:  # peers may ask for weights, though we need them no more
            self._looking = start(self._look(weights))
        return tokenizer, (), packs

    async def open_text(self) -> None:
        """Open packed text and tokenizer, as far as they are here, to give them to others. Raises
        ConfigError, DataError, DiskFull."""
        if self._text is not None:
            await self._text.open()
        if file := tokenizer_of(self._run.spec):
            named = self._settings.tokenizer
            kept = self._settings.paths.tokenizer(self._run.fingerprint)
            await self._files.verify(file, kept if named is None else absolute(named))

    async def close(self) -> None:
        """Look for nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, weights: dict[RunFile, Path]) -> None:
        for file, kept in weights.items():
            await self._find(file, kept)

    async def _find(self, file: RunFile, kept: Path) -> Path | None:
        """Where a file is: in the owner's folder of weights, or where the home keeps it."""
        owned = self._settings.weights
        for path in [owned / file.name, kept] if owned else [kept]:
            if not await self._files.verify(file, path):
                return path
        return None

    async def _weights(self, file: RunFile, kept: Path) -> Path:
        if self._settings.weights is None:
            self._show(f"looking for {file.name}, which the run begins with")
            return await self._have(file, kept)
        path = self._settings.weights / file.name
        self._show(f"reading {path} to check it")
        if problem := await self._files.verify(file, path):
            raise ConfigError(
                f"{path} {problem}: name the folder with the {file.name} that the run's creator "
                "used, or leave --weights away, and peers send it."
            )
        await asyncio.to_thread(_link, kept, path)
        return path

    async def _have(self, file: RunFile, kept: Path) -> Path:
        """Where a file is that the owner did not name; it comes from peers if it is not here."""
        if path := await self._find(file, kept):
            return path
        download = FileDownload(file, kept)
        needed = file.size or PIECE_BYTES
        part = download.folder / "data"
        self._disk_quota.require(needed, f"{file.name} of the run", part=part)
        try:
            await self._fetch(download)
            await asyncio.to_thread(download.finish)
        finally:
            await asyncio.to_thread(download.close)
        self._files.add(file, kept, download.digests)
        return kept


def _link(path: Path, target: Path) -> None:
    """Have ``path`` lead to a file of the owner's, so that a later start finds it again."""
    if path.exists() and path.samefile(target):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.absolute())
    fresh.replace(path)
