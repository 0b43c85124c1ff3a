"""Disks that fail: a process that is killed at one of its writes, and a small file system that runs
full.

Children are forked from a server that has imported torch once, so that each costs milliseconds. A
child touches the disk through ``os`` and safetensors; each such call is a point at which it can be
killed."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import lowcomm_node.storage.state_file as state_file

CALLS = ("fsync", "mkdir", "rename", "rmdir", "unlink")
DEADLINE = 60
_USER_AND_MOUNTS = 0x10000000 | 0x00020000

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "safetensors.torch", "lowcomm_node.storage.checkpoint", "lowcomm_node.data"]
)


def is_killed_at(point: int, act: Callable[..., None], *arguments: Any) -> bool:
    """Run ``act`` in a process that SIGKILL ends just before call number ``point``; false if it
    made no so many."""
    code = _run(_act_and_die, point, act, arguments)
    assert code in (0, -signal.SIGKILL), f"the process ended with {code}"
    return code != 0


def on_small_disk(folder: Path, size: int, act: Callable[..., Any], *arguments: Any) -> Any:
    """What ``act`` gives in a process that has a file system of ``size`` bytes mounted at
    ``folder``."""
    ours, theirs = _context.Pipe()
    # Sent, not passed: to read it the child imports the test, whose libraries may start threads,
    # and then no process may have a namespace of its own.
    ours.send((act, arguments))
    code = _run(_act_on_small_disk, folder, size, theirs)
    assert code == 0, f"the process ended with {code}"
    result = ours.recv()
    if isinstance(result, _NotAllowed):
        pytest.skip(f"this machine lets us mount no file system of our own ({result.reason})")
    return result


class _NotAllowed(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _run(target: Callable[..., None], *arguments: Any) -> int | None:
    process = _context.Process(target=target, args=arguments)
    process.start()
    try:
        process.join(DEADLINE)
        return process.exitcode
    finally:
        process.kill()
        process.join(DEADLINE)


def _act_and_die(point: int, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    left = point

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            count()
            return call(*arguments, **keywords)

        return called

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save = state_file.save_file

    def save_by_halves(tensors: Any, path: Path, metadata: Any = None) -> None:
        count()
        save(tensors, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        count()
        path.write_bytes(whole)

    state_file.save_file = save_by_halves
    act(*arguments)


def _act_on_small_disk(folder: Path, size: int, parent: Connection) -> None:
    try:
        _mount(folder, size)
    except _NotAllowed as error:
        parent.send(error)
        return
    act, arguments = parent.recv()
    parent.send(act(*arguments))


def _mount(folder: Path, size: int) -> None:
    """Mount a tmpfs for this process alone; as the root of a user namespace of its own, so nobody
    need be root."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.unshare(_USER_AND_MOUNTS):
            raise _NotAllowed(os.strerror(ctypes.get_errno()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
            raise _NotAllowed(os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise _NotAllowed(str(error)) from error


class PowerLoss:
    """Watches that a folder gets its final name only when all that it holds is on the disk, and
    that the name is, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: list[Path] = []
        self._unsynced_names: set[Path] = set()
        self.named: list[Path] = []
        """The folders that got their final names."""
        self._fsync, self._rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", self._watch_fsync)
        monkeypatch.setattr(os, "rename", self._watch_rename)

    def check(self) -> None:
        """Call this at the end."""
        assert self.named, "nothing was named"
        assert not self._unsynced_names, "a crash can undo these renames"

    def _watch_fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self._fsync(descriptor)
        self._synced.append(path)
        self._unsynced_names = {name for name in self._unsynced_names if name.parent != path}

    def _watch_rename(self, source: Path, target: Path) -> None:
        if source.name.startswith(".writing-"):
            files = [path for path in source.rglob("*") if path.is_file()]
            assert files
            missing = [path.name for path in files if path not in self._synced]
            assert not missing, "not on the disk when their folder got its name"
            last = max(self._synced.index(path) for path in files)
            assert source in self._synced[last + 1 :], "the names of the files are not on the disk"
            self.named.append(target)
            self._unsynced_names.add(target)
        self._rename(source, target)
