"""Has the files of a run here before its trainer starts.

The tokenizer: what the owner named, else a copy in the home, in the folder of weights, or a peer's.
Weights to begin with: from the owner's folder, else the home, else peers. A node that has a
checkpoint needs none, and hands on those that it finds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.shelf import Shelf, link
from lowcomm_node.fetch.wanted import RunFile, start_of, tokenizer_of
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.paths import absolute
from lowcomm_node.storage.start_files import check
from lowcomm_node.system.tasks import start
from lowcomm_protocol.spec.run import RunSpec, SignedRun
from lowcomm_protocol.spec.sections import PIECE_BYTES, StartFile


@dataclass(frozen=True)
class Provided:
    """What a trainer is given."""

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
    """The files of one run at one node."""

    def __init__(
        self,
        settings: NodeSettings,
        run: SignedRun,
        shelf: Shelf,
        fetch: Callable[[RunFile, Path], Awaitable[Sequence[bytes]]],
        show: Callable[[str], None],
    ) -> None:
        """``fetch`` gets a file from peers, and gives the digests of its pieces; ``show`` is told
        what the node waits for."""
        self._settings = settings
        self._spec = run.spec
        self._shelf = shelf
        self._fetch = fetch
        self._show = show
        self._disk_quota = DiskQuota(settings.home, settings.max_disk)
        self._paths = settings.paths
        self._fingerprint = run.fingerprint
        self._looking: asyncio.Task[None] | None = None

    async def provide(self) -> Provided:
        """Have all files here, however long it takes.

        Raises ConfigError, which names a file that is another, or DiskFull.
        """
        tokenizer = await self._tokenizer()
        if self._has_checkpoint():
            if self._looking is None:
                self._looking = start(self._look())
            return Provided(tokenizer, ())
        found = [str(await self._weights(*both)) for both in self._start()]
        return Provided(tokenizer, tuple(found))

    async def close(self) -> None:
        """Look for nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _start(self) -> list[tuple[RunFile, StartFile]]:
        return list(zip(start_of(self._spec), self._spec.start.files, strict=True))

    def _has_checkpoint(self) -> bool:
        return any(self._paths.checkpoints(self._fingerprint).glob("step-*"))

    async def _look(self) -> None:
        """Find weights that peers may ask for, though we need them no more."""
        for file, _ in self._start():
            for path in self._places(file):
                if await self._shelf.try_(file, path):
                    break

    def _places(self, file: RunFile) -> list[Path]:
        home = self._paths.start(self._fingerprint) / file.name
        return [self._settings.weights / file.name, home] if self._settings.weights else [home]

    async def _tokenizer(self) -> str | None:
        file, named = tokenizer_of(self._spec), self._settings.tokenizer
        if file is None:
            return named
        if named is not None:
            await self._shelf.try_(file, absolute(named))
            return named  # if it is another, the trainer says so
        kept = self._paths.tokenizer(self._fingerprint)
        places = [kept, self._settings.weights / file.name] if self._settings.weights else [kept]
        for path in places:
            if await self._shelf.try_(file, path):
                return str(path)
        return str(await self._fetched(file, kept))

    async def _weights(self, file: RunFile, pinned: StartFile) -> Path:
        home = self._paths.start(self._fingerprint) / file.name
        if self._settings.weights is not None:
            path = self._settings.weights / file.name
            self._show(f"reading {path} to check it")
            if not await self._shelf.try_(file, path):
                await asyncio.to_thread(check, path, pinned)  # which says why
            await asyncio.to_thread(link, home, path)
            return path
        self._show(f"looking for {file.name}, which the run begins with")
        if await self._shelf.try_(file, home):
            return home
        return await self._fetched(file, home)

    async def _fetched(self, file: RunFile, path: Path) -> Path:
        self._disk_quota.require(file.size or PIECE_BYTES, f"{file.name} of the run")
        digests = await self._fetch(file, path)
        self._shelf.put(file, path, digests)
        return path
