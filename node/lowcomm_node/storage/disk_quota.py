"""The owner's limit on the disk space of a home: checkpoints, tokenized text, state being
fetched."""

import os
from contextlib import suppress
from pathlib import Path

from lowcomm_node.errors import DiskFull
from lowcomm_node.system.units import write_size

GIB = 1024**3
_BLOCK = 512
"""Bytes of the blocks in which the system counts a file's space."""


class DiskQuota:
    """What a home may take, as its owner says."""

    def __init__(self, home: Path, gibibytes: float | None = None) -> None:
        """``gibibytes``: None: unlimited."""
        self.home = home
        self.most = None if gibibytes is None else int(gibibytes * GIB)

    def used(self) -> int:
        """Bytes that the home takes on its disk.

        Targets of links lie elsewhere and do not count.
        """
        total, folders = 0, [self.home]
        while folders:
            # A file removed meanwhile takes no space.
            with suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(Path(entry.path))
        return total

    def room(self) -> float:
        """Bytes that may still be written."""
        return float("inf") if self.most is None else max(0, self.most - self.used())

    def require(self, needed: float, what: str) -> None:
        """Raise DiskFull before anything is written if ``needed`` bytes of ``what`` exceed the
        quota."""
        if self.most is not None and needed > self.room():
            raise self.refusal(needed, what)

    def refusal(self, needed: float, what: str) -> DiskFull:
        """The error for ``needed`` bytes of ``what``."""
        assert self.most is not None
        return DiskFull(
            f"{what} needs {int(needed):,} bytes, and {self.home} has {int(self.room()):,} left of "
            f"--max-disk {self.most / GIB:g} ({write_size(self.most)}): raise that, or lower "
            "--keep."
        )
