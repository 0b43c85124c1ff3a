"""Files that survive a crash: written, synced, then renamed; sealed with a digest; locked.

A file counts only once its folder has its final name, so a crash leaves either the old state or the
new one:

    write temporary folder -> fsync files -> fsync folder -> rename -> fsync parent
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError, DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


def sync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk: otherwise a crash can undo a rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits; read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that carries its own digest, and sync it.

    Raises ValueError or TypeError if it is not plain JSON.
    """
    sealed = _seal(content)
    # Numeric keys are read back as text, which sorts differently.
    if _seal(json.loads(sealed)["content"]) != sealed:
        raise ValueError("its keys must be text")
    with path.open("wb") as file:
        file.write(sealed)
    sync_file(path)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read what ``write_sealed_json`` wrote.

    Raises OSError, or ValueError if a single bit differs.
    """
    data = path.read_bytes()
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(data)["content"]
        # The digest detects changed values; comparing all bytes detects changes anywhere else.
        if isinstance(content, dict) and _seal(content) == data:
            return content
    raise ValueError(f"{path} does not match its own digest")


@contextmanager
def disk_full_error(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn "no space left" into DiskFull, with the folder, the bytes needed and free, and the
    remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(folder, needed) from error
        raise


def require_space(folder: Path, needed: int) -> None:
    """Raise DiskFull before anything is written if ``needed`` bytes can't fit."""
    if shutil.disk_usage(folder).free < needed:
        raise disk_full(folder, needed)


def disk_full(folder: Path, needed: int | None = None) -> DiskFull:
    """The error for a folder that has no room for ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    wanted = "more" if needed is None else f"{needed:,}"
    return DiskFull(
        f"No room in {folder}: {wanted} bytes needed, {free:,} free (a quota may allow less). "
        "Free some space there, or choose another disk with --home; what was saved before is "
        "untouched."
    )


@contextmanager
def folder_lock(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder; yields False if another holder has it and ``wait`` is false.

    The kernel drops it when its holder dies, so a crash leaves no stale lock.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield lock(descriptor, fcntl.LOCK_EX, wait=wait)
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int, *, wait: bool) -> bool:
    """Lock an open file or folder (``fcntl.LOCK_SH`` or ``LOCK_EX``) until it is closed; False if
    taken. Raises ConfigError on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        path = Path(f"/proc/self/fd/{descriptor}")
        raise ConfigError(
            f"{path.readlink() if path.is_symlink() else 'The home'} can't be locked "
            f"({error.strerror}): choose a folder on a local disk with --home."
        ) from None
    return True


def _seal(content: dict[str, Any]) -> bytes:
    encoded = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    whole = {"content": content, "sha256": hashlib.sha256(encoded).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
