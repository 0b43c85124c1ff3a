"""State for joiners: a donor serves the files of an immutable checkpoint, a joiner downloads and checks them.

    joiner ── Fetch(manifest) ──► donor     the donor makes a fresh checkpoint if its newest one is old
    joiner ── Fetch(part, from offset) ──► donor       weights, outer, inner; resumed where a stream broke off

A part is one of a few known names, so no path ever comes from the network. Sizes are checked against the model before a
byte is kept, digests against the manifest afterwards; names, shapes and values by the trainer.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic

import grpc

from lowcomm_node.checkpoint import CheckpointStore
from lowcomm_node.durable import disk_full_error, require_space, sha256_file
from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.exchange.channels import Channels
from lowcomm_node.exchange.stream import explain
from lowcomm_node.exchange.throttle import Arrival, Throttle
from lowcomm_node.manifest import MANIFEST, CheckpointInfo, read_manifest
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import PeerInfo

PARTS = ("weights", "outer", "inner")
MAX_MANIFEST = 256 * 1024
CHUNK_BYTES = 512 * 1024
MAX_JOINERS = 2
"""Peers that are served at once; the others try another donor, or later."""
CHUNK_DEADLINE = 30.0
FETCH_ATTEMPTS = 4
RETRY_PAUSE = 2.0
"""Seconds before an attempt is repeated: gRPC does not dial again at once, so attempts would be used up in a moment."""
_VECTORS = {"weights": 1, "outer": 2, "inner": 2}
_HEADERS = 16 * 1024 * 1024


class SnapshotServer:
    """Serves checkpoints to joiners."""

    def __init__(
        self,
        store: CheckpointStore,
        refresh: Callable[[], Awaitable[int]],
        max_age: float,
        up: Throttle | None = None,
    ) -> None:
        self._store, self._refresh, self._max_age = store, refresh, max_age
        self._up = up or Throttle()
        self._joiners: Counter[str] = Counter()
        self._refreshed: tuple[float, int] | None = None
        self._refreshing = asyncio.Lock()

    @property
    def joiners(self) -> int:
        """How many peers are served now."""
        return len(self._joiners)

    async def chunks(self, peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        """The bytes of one part. Raises RetryLater if too many are served now, CheckpointError if there is no such part."""
        if peer not in self._joiners and len(self._joiners) >= MAX_JOINERS:
            raise RetryLater(f"{MAX_JOINERS} joiners are being served: ask another peer, or later.")
        self._joiners[peer] += 1
        try:
            step = await self._fresh_step() if request.part == "manifest" else request.snapshot
            with self._pin(step) as folder:
                async for chunk in _read(_file(folder, request.part), request.offset, self._up):
                    yield chunk
        finally:
            self._joiners[peer] -= 1
            if not self._joiners[peer]:
                del self._joiners[peer]

    @contextmanager
    def _pin(self, step: int) -> Iterator[Path]:
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self._store.pin(step))
            except CheckpointError:
                # Its own words name a path of this machine, which is no stranger's business.
                raise CheckpointError(f"There is no snapshot {step} any more: ask for the manifest again.") from None
            yield folder

    async def _fresh_step(self) -> int:
        """The newest checkpoint, made anew if the last was made more than ``max_age`` seconds ago."""
        async with self._refreshing:  # those who ask meanwhile get the same one
            if self._refreshed is None or monotonic() - self._refreshed[0] > self._max_age:
                self._refreshed = (monotonic(), await self._refresh())
            return self._refreshed[1]


def _file(folder: Path, part: str) -> Path:
    if part == "manifest":
        return folder / MANIFEST
    if part not in PARTS:
        raise CheckpointError(f"There is no part {part[:20]!r} of a snapshot: ask for {', '.join(PARTS)}.")
    return folder / f"{part}.safetensors"


async def _read(path: Path, offset: int, up: Throttle) -> AsyncIterator[pb.FetchChunk]:
    with path.open("rb") as file:
        file.seek(min(offset, path.stat().st_size))
        while data := await asyncio.to_thread(file.read, up.piece(CHUNK_BYTES)):
            await up.pass_(len(data))
            yield pb.FetchChunk(offset=offset, data=data)
            offset += len(data)


class Fetcher:
    """Downloads a donor's snapshot into a folder of ours."""

    def __init__(
        self,
        channels: Channels,
        folder: Path,
        parameters: int,
        tell: Callable[[str, int, int], None],
        down: Throttle | None = None,
    ) -> None:
        self._channels, self._folder, self._parameters = channels, folder, parameters
        self._down = down or Throttle()
        self._tell = tell
        self.bytes_received = 0

    async def fetch(self, donor: PeerInfo) -> CheckpointInfo:
        """Download and check all parts. Raises LinkLost, CheckpointError or DiskFull; what has arrived is kept."""
        self._folder.mkdir(parents=True, exist_ok=True)
        info = await self._manifest(donor)
        wanted = sum(file.size for file in info.parts)
        require_space(self._folder, wanted)
        with disk_full_error(self._folder, wanted):
            for file in info.parts:
                path = self._folder / file.name
                await self._part(donor, info, file.part, path, file.size)
                if await asyncio.to_thread(sha256_file, path) != file.sha256:
                    path.unlink()
                    raise CheckpointError(
                        f"The {file.part} of {donor.peer_id} do not match their digest: ask another peer."
                    )
        return info

    async def _manifest(self, donor: PeerInfo) -> CheckpointInfo:
        path = self._folder / MANIFEST
        path.unlink(missing_ok=True)
        await self._append(donor, pb.FetchRequest(part="manifest"), path, MAX_MANIFEST)
        try:
            step = int(json.loads(path.read_bytes())["content"]["step"])
            info = read_manifest(self._folder, step)
            self._check_sizes(info)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            raise CheckpointError(f"The manifest of {donor.peer_id} is malformed: ask another peer.") from None
        return info

    def _check_sizes(self, info: CheckpointInfo) -> None:
        if not 0 <= info.step < 2**63:
            raise CheckpointError(f"A snapshot of step {info.step} is refused: ask another peer.")
        parts = [file.part for file in info.parts]
        if sorted(parts) != sorted(PARTS):
            raise CheckpointError(f"A snapshot with the parts {parts[:5]} is refused: expected {', '.join(PARTS)}.")
        for file in info.parts:
            largest = 4 * self._parameters * _VECTORS[file.part] + _HEADERS
            if not (isinstance(file.size, int) and 0 < file.size <= largest and isinstance(file.sha256, str)):
                raise CheckpointError(
                    f"A snapshot with {file.size} bytes of {file.part} is refused: at most {largest}."
                )

    async def _part(self, donor: PeerInfo, info: CheckpointInfo, part: str, path: Path, size: int) -> None:
        if path.exists() and path.stat().st_size > size:
            path.unlink()
        for attempt in range(FETCH_ATTEMPTS):
            have = path.stat().st_size if path.exists() else 0
            if have == size and (attempt or await self._is_ours(info, part, path)):
                return
            request = pb.FetchRequest(part=part, snapshot=info.step, offset=have if attempt else 0)
            if not attempt:
                path.unlink(missing_ok=True)  # left over from another snapshot
            try:
                await self._append(donor, request, path, size)
            except LinkLost:
                if attempt == FETCH_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_PAUSE)
        if path.stat().st_size != size:
            raise LinkLost(f"sent {path.stat().st_size} of {size} bytes of {part}")

    async def _is_ours(self, info: CheckpointInfo, part: str, path: Path) -> bool:
        wanted = next(file.sha256 for file in info.parts if file.part == part)
        return await asyncio.to_thread(sha256_file, path) == wanted

    async def _append(self, donor: PeerInfo, request: pb.FetchRequest, path: Path, limit: int) -> None:
        stub = await self._channels.stub(donor)
        call = stub.Fetch(request, metadata=self._channels.metadata(donor.peer_id))
        try:
            # How large a manifest is it does not tell before; it is small.
            arrival = Arrival(self._down, limit - request.offset if request.part != "manifest" else 0, CHUNK_BYTES)
            with path.open("ab") as file:
                have = request.offset
                while True:
                    await arrival.make_way()
                    async with asyncio.timeout(CHUNK_DEADLINE):
                        chunk = await call.read()
                    if chunk is grpc.aio.EOF:
                        break
                    if chunk is None:  # what gRPC makes of bytes that it can't parse
                        raise CheckpointError(f"{donor.peer_id} sent bytes that are no chunk: ask another peer.")
                    if chunk.offset != have or not chunk.data or have + len(chunk.data) > limit:
                        raise CheckpointError(f"{donor.peer_id} sent bytes out of place: ask another peer.")
                    arrival.took(len(chunk.data))
                    await asyncio.to_thread(file.write, chunk.data)
                    have += len(chunk.data)
                    self.bytes_received += len(chunk.data)
                    self._tell(request.part, have, limit)
                file.flush()
                os.fsync(file.fileno())
        except grpc.RpcError as error:
            raise LinkLost(explain(error.code(), error.details())) from None
        except TimeoutError:
            raise LinkLost("stopped sending") from None
        finally:
            call.cancel()
