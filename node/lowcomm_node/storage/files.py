"""Small files that must survive a crash, and the lock of a home."""

import errno
import fcntl
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.storage.durable import disk_full_error, lock, sync_folder
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import KEY_BYTES, Identity, identity_from_libp2p


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file atomically: temporary file, fsync, rename. Raises DiskFull."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_error(path.parent, len(data)):
        descriptor, name = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def read_small(path: Path, limit: int) -> bytes:
    """A small file of ours; empty if it is missing or too large."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return b""
    return data if len(data) <= limit else b""


def load_or_create_identity(path: Path) -> Identity:
    """Read this node's key (mode 0600), or make one. An existing file is never replaced.

    Raises ConfigError if it is not a key, or can't be read or written, DiskFull.
    """
    try:
        if not path.exists():
            _create(path, new_identity().to_libp2p())
        elif path.stat().st_mode & 0o077:
            with suppress(OSError):  # a file system without permissions, or a file of somebody else
                path.chmod(0o600)
        return identity_from_libp2p(path.read_bytes())
    except SignatureError as error:
        raise ConfigError(
            f"{path}: {error} Restore it from a copy, or move it away to become a new peer."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: make it readable and writable, or choose another --home."
        ) from None


def new_identity() -> Identity:
    """A fresh key, not stored."""
    return Identity(secrets.token_bytes(KEY_BYTES))


@contextmanager
def ephemeral_identity() -> Iterator[tuple[Identity, Path]]:
    """A fresh key that ends with this process, even on SIGKILL, and a path for its children to read
    it."""
    identity = new_identity()
    # A file in memory: p2pd reads its key from a path, and this one never reaches a disk.
    descriptor = os.memfd_create("identity")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, identity.to_libp2p())
        yield identity, Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _create(path: Path, data: bytes) -> None:
    """Write a new file. If two processes race, both use the file of the first.

    Raises ConfigError if the home belongs to another user.
    """
    if path.parent.exists():
        _check_owner(path.parent)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_atomic(draft, data, 0o600)
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _check_owner(home: Path) -> None:
    """Raise ConfigError if a home belongs to another user, who could change its files, keys
    included."""
    owner, ours = home.stat().st_uid, os.geteuid()
    if owner not in (ours, 0):
        raise ConfigError(
            f"{home} belongs to another user (number {owner}, this is {ours}): choose another "
            f"--home, start the node as that user, or make it yours with `chown -R {ours} "
            f"{shlex.quote(str(home))}`."
        )


def _open_own(path: Path) -> int:
    """Open or create a small file of ours for reading and writing.

    Raises ConfigError if it is a link, or belongs to another user.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise ConfigError(_no_lock(path)) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        os.close(descriptor)
        raise ConfigError(_no_lock(path))
    return descriptor


def _no_lock(path: Path) -> str:
    return (
        f"{path} is a link, or belongs to somebody else, so nothing is written to it: remove it if "
        "it is yours, or choose another --home."
    )


class HomeLock:
    """Held by the daemon of a home. The kernel drops it when the daemon dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> "HomeLock":
        """Take the lock.

        Raises RetryLater if another daemon has it, ConfigError if home or lock belong to another
        user or can't be locked, DiskFull.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _check_owner(self._path.parent)
        self._descriptor = _open_own(self._path)
        try:
            if not lock(self._descriptor, fcntl.LOCK_EX, wait=False):
                holder = os.read(self._descriptor, 20).decode(errors="replace").strip() or "unknown"
                raise RetryLater(
                    f"{self._path.parent} is in use by process {holder}: stop that first (a node "
                    "with `lowcomm-node stop`), or use another --home."
                )
            os.ftruncate(self._descriptor, 0)
            with disk_full_error(self._path.parent):
                os.write(self._descriptor, str(os.getpid()).encode())
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Give the lock back."""
        os.close(self._descriptor)
