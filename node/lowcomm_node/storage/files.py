"""Small files that must survive a crash, and the lock of a home."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowcomm_node.errors import CheckpointError, ConfigError, DiskFull, RetryLater
from lowcomm_node.system.units import write_size
from lowcomm_protocol.errors import LowcommError, SignatureError
from lowcomm_protocol.identity import KEY_BYTES, Identity, identity_from_libp2p

if TYPE_CHECKING:
    from lowcomm_protocol.spec.run import SignedRun

WRITING = ".writing-"  # prefix of files and folders that are not whole; a crash leaves them behind


def sync(path: Path) -> None:
    """Force a file's bytes or a folder's entries to the disk, so that no crash undoes a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits; read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with its own digest, and sync it. Raises ValueError or TypeError."""
    sealed = _seal(content)
    # Numeric keys are read back as text, which sorts differently.
    if _seal(json.loads(sealed)["content"]) != sealed:
        raise ValueError("its keys must be text")
    with path.open("wb") as file:
        file.write(sealed)
    sync(path)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read what ``write_sealed_json`` wrote. Raises OSError, ValueError if a single bit differs."""
    data = path.read_bytes()
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(data)["content"]
        # The digest detects changed values; comparing all bytes detects changes anywhere else.
        if isinstance(content, dict) and _seal(content) == data:
            return content
    raise ValueError(f"{path} does not match its own digest")


@contextmanager
def disk_full_error(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn "no space left" into DiskFull, with the bytes needed and free, and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder, needed) from error
        raise


def require_space(folder: Path, needed: int) -> None:
    """Raise DiskFull before anything is written if ``needed`` bytes can't fit."""
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def _disk_full(folder: Path, needed: int | None) -> DiskFull:
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"No room in {folder}: {'more' if needed is None else f'{needed:,}'} bytes needed, "
        f"{free:,} free (a quota may allow less). Free some space there, or choose another disk "
        "with --home; what was saved before is untouched."
    )


@contextmanager
def folder_lock(folder: Path, *, wait: bool = True, name: str = ".lock") -> Iterator[bool]:
    """Hold the lock of a folder, which ends with the process; yields False if another has it and
    ``wait`` is false."""
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
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


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file atomically: temporary file, fsync, rename. Raises DiskFull."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_error(path.parent, len(data)):
        descriptor, name = tempfile.mkstemp(prefix=WRITING, dir=path.parent)
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
        sync(path.parent)


@contextmanager
def new_folder(path: Path, size: int | None = None) -> Iterator[Path]:
    """Context with an empty folder, which appears at ``path``, whole and durable, at its end.
    Raises CheckpointError if something is there already, DiskFull."""
    if path.exists():
        raise CheckpointError(f"{path} exists: name a folder that does not.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_error(path.parent, size):
        temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=path.parent))
        try:
            yield temporary
            for file in temporary.iterdir():
                sync(file)
            sync(temporary)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(path.parent)


def read_small(path: Path, limit: int) -> bytes:
    """A small file of ours; empty if it is missing or too large."""
    with suppress(OSError), path.open("rb") as file:
        data = file.read(limit + 1)
        return data if len(data) <= limit else b""
    return b""


def kept_run(path: Path) -> "SignedRun | None":
    """The signed run in a file of ours; None if it can't be read."""
    from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, read_signed_run  # few callers need it

    with suppress(LowcommError):
        return read_signed_run(read_small(path, 2 * MAX_SPEC_BYTES), str(path))
    return None


def load_or_create_identity(path: Path) -> Identity:
    """Read this node's key (mode 0600), or make one; no file is replaced. Raises ConfigError,
    DiskFull."""
    try:
        if not path.exists():
            create_private(path, Identity(secrets.token_bytes(KEY_BYTES)).to_libp2p())
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


@contextmanager
def ephemeral_identity() -> Iterator[tuple[Identity, Path]]:
    """A fresh key that ends with this process, and a path in memory for its children to read it."""
    identity = Identity(secrets.token_bytes(KEY_BYTES))
    if not hasattr(os, "memfd_create"):  # only Linux has it
        with tempfile.NamedTemporaryFile() as file:  # for its owner alone
            file.write(identity.to_libp2p())
            file.flush()
            yield identity, Path(file.name)
        return
    descriptor = os.memfd_create("identity")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, identity.to_libp2p())
        yield identity, Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def create_private(path: Path, data: bytes) -> None:
    """Write a new file of mode 0600. If two processes race, both use the file of the first."""
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
    sync(path.parent)


def _check_owner(home: Path) -> None:
    """Raise ConfigError if a home belongs to another user, who could change its keys."""
    owner, ours = home.stat().st_uid, os.geteuid()
    if owner not in (ours, 0):
        raise ConfigError(
            f"{home} belongs to another user (number {owner}, this is {ours}): choose another "
            f"--home, start the node as that user, or make it yours with `chown -R {ours} "
            f"{shlex.quote(str(home))}`."
        )


@contextmanager
def home_lock(path: Path) -> Iterator[None]:
    """Context in which this process is the only daemon of a home. Raises RetryLater if another one
    is, ConfigError if home or lock belong to another user or can't be locked, DiskFull."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_owner(path.parent)
    foreign = ConfigError(
        f"{path} is a link, or belongs to somebody else, so nothing is written to it: remove it if "
        "it is yours, or choose another --home."
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise foreign from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise foreign
        if not lock(descriptor, fcntl.LOCK_EX, wait=False):
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            raise RetryLater(
                f"{path.parent} is in use by process {holder}: stop that first (a node with "
                "`lowcomm-node finish`), or use another --home."
            )
        os.ftruncate(descriptor, 0)
        with disk_full_error(path.parent):
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


GIB = 1024**3
_BLOCK = 512  # bytes of the blocks in which the system counts a file's space


class DiskQuota:
    """Disk space that the owner grants to a home."""

    def __init__(self, home: Path, gibibytes: float | None = None) -> None:
        """``gibibytes``: None: unlimited."""
        self.home = home
        self.most = None if gibibytes is None else int(gibibytes * GIB)

    def used(self) -> int:
        """Bytes that the home takes on its disk; targets of links lie elsewhere."""
        total = 0
        for folder, folders, files in os.walk(self.home):
            for name in (*folders, *files):
                total += _space_of(Path(folder, name))
        return total

    def room(self) -> float:
        """Bytes that may still be written."""
        return float("inf") if self.most is None else max(0, self.most - self.used())

    def require(
        self, needed: float, what: str, room: float | None = None, part: Path | None = None
    ) -> None:
        """Raise DiskFull if ``needed`` bytes of ``what`` exceed ``room`` (None: measure it).

        ``part``: the file that they are written to. What it takes already is counted as used.
        """
        needed -= 0 if part is None else _space_of(part)
        room = self.room() if room is None else room
        if self.most is not None and needed > room:
            raise DiskFull(
                f"{what} needs {int(needed):,} bytes, and {self.home} has {int(room):,} left of "
                f"--max-disk {self.most / GIB:g} ({write_size(self.most)}): raise that, or lower "
                "--keep."
            )


def _space_of(path: Path) -> int:
    """Bytes that a file takes on its disk: none if it was removed meanwhile."""
    with suppress(OSError):
        return path.lstat().st_blocks * _BLOCK
    return 0
