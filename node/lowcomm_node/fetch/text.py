"""The packed text of one run on this machine: from the owner's packs, else from peers.

HOME/packs/DIGEST/   pieces that came, or what is known of the owner's; DIGEST are the first digits
                     of the digest that the run pins
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.mirrors import Mirror
from lowcomm_node.fetch.packs import DataRoom, PackStore, Show
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import GIB, DiskQuota
from lowcomm_node.storage.pack_file import PackFile
from lowcomm_node.storage.paths import absolute
from lowcomm_protocol.spec.sections import DataSettings, PackedText

DIGITS = 16  # of a text's digest, in the name of its folder


class RunText:
    """Stores of a run's parts, from ``open`` to ``close``."""

    def __init__(
        self,
        settings: NodeSettings,
        data: DataSettings,
        fetch: Callable[[PackStore], Fetch],
        warn: Callable[[str], None],
    ) -> None:
        """``fetch`` gets what a store wants from peers; ``warn`` tells of mirrors that are of no
        use."""
        self.stores: tuple[PackStore, ...] = ()
        """In the order of ``data.parts``; none before ``open``."""
        self.by_digest: dict[bytes, PackStore] = {}
        self._settings = settings
        self._data = data
        self._fetch = fetch
        self._warn = warn

    async def open(self) -> None:
        """Open all parts; nothing is fetched or hashed. Raises ConfigError, DataError, DiskFull."""
        if self.stores or not self._data.parts:
            return
        settings = self._settings
        read = [part for part in self._data.parts if part.share]
        # The block that is read, the next, and a piece of held-out text.
        blocks = [2 * max(self._data.shuffle_bytes, part.piece_bytes) for part in read]
        needs = zip(read, blocks, strict=True)
        needed = sum(min(part.size, block + part.piece_bytes) for part, block in needs)
        most = settings.max_data
        if most is not None and most * GIB < needed:
            raise ConfigError(
                f"--max-data {most:g} GiB has no room for the {needed / GIB:.2g} GiB of text that "
                "this run reads at a time: raise it."
            )
        files = await asyncio.to_thread(self._open_files)
        room = DataRoom(most, DiskQuota(settings.home, settings.max_disk))
        self.stores = tuple(
            PackStore(file, self._fetch, room, self._mirrors_of(part), self._warn)
            for file, part in zip(files, self._data.parts, strict=True)
        )
        self.by_digest |= {bytes.fromhex(store.part.pieces): store for store in self.stores}

    async def have_first(self, show: Show) -> tuple[str, ...]:
        """Have the held-out text on which all peers compare themselves. Returns the paths of all
        parts. Raises DataError, DiskFull."""
        for store in self.stores:
            if store.part.share:
                await store.have([store.part.training_pieces], show)
        return tuple(str(store.path) for store in self.stores)

    def is_whole(self) -> bool:
        """Whether all pieces of all parts are here."""
        return bool(self.stores) and all(store.is_whole() for store in self.stores)

    async def close(self) -> None:
        """Stop fetching, and keep what has come."""
        await asyncio.gather(*(store.close() for store in self.stores))

    def _mirrors_of(self, part: PackedText) -> list[Mirror]:
        """Those that the owner names, and those of the run where the owner allows them."""
        settings = self._settings
        named = [Mirror(url, part, is_local=settings.local_mirrors) for url in settings.mirror]
        return named + [Mirror(url, part) for url in part.mirrors if settings.allow_mirrors]

    def _open_files(self) -> list[PackFile]:
        own = self._own_packs()
        files: list[PackFile] = []
        for part in self._data.parts:
            path, digests = own.get(part.pieces, (None, b""))
            folder = self._settings.paths.packs / part.pieces[:DIGITS]
            files.append(file := PackFile(part, folder, path))
            try:
                file.open(digests)
            except OSError as error:
                raise ConfigError(
                    f"{file.path} can't be opened ({error.strerror}): see its rights and its disk."
                ) from None
        return files

    def _own_packs(self) -> dict[str, tuple[Path, bytes]]:
        """Path and list of each of the owner's packs, by the digest that a run pins."""
        if self._settings.data is None:
            return {}
        from lowcomm_node.data.pack import find_packs  # NumPy: most daemons never need it

        path = absolute(self._settings.data)
        own = {pack.text.pieces: (pack.path, pack.digests) for pack in find_packs(path)}
        names = ", ".join(part.name for part in self._data.parts)
        if not own.keys() & {part.pieces for part in self._data.parts}:
            raise ConfigError(
                f"{path} has none of the texts of this run ({names}): name its packs, or leave "
                "--data away, and peers send them."
            )
        return own
