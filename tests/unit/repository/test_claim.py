"""How replicas in containers share a volume: each has a home of its own, and finds it again."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "docker" / "entry"))

from claim import claim, read_addresses, spread

from helpers.waiting import until

ENTRY = Path(sys.modules["claim"].__file__ or "").parent
Claim = Callable[[str], tuple[int, str]]


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Claim]:
    """Claims a home for a container, which keeps it until its lock is closed."""
    locks: list[int] = []

    def take(container: str) -> tuple[int, str]:
        lock, home = claim(tmp_path, container)
        assert home.is_dir() and home.stat().st_mode & 0o077 == 0
        locks.append(lock)
        return lock, home.name

    yield take
    for lock in locks:
        with suppress(OSError):  # the test has closed it
            os.close(lock)


def test_no_two_replicas_share_a_home(replica: Claim) -> None:
    assert [replica(name)[1] for name in "abcd"] == ["0", "1", "2", "3"]


def test_a_container_that_starts_again_takes_the_home_that_it_had(replica: Claim) -> None:
    a, _ = replica("a")
    b, home = replica("b")
    os.close(a)
    os.close(b)
    assert replica("b")[1] == home == "1"
    assert replica("new")[1] == "0", "and a new one the first that is free"


def test_a_home_stays_taken_as_long_as_what_it_became_lives(tmp_path: Path, replica: Claim) -> None:
    code = (
        "import claim, os, sys, pathlib; claim.claim(pathlib.Path(sys.argv[1]), 'a'); "
        "os.execvp('sleep', ['sleep', '60'])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True); {code}", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ENTRY)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        comm = Path(f"/proc/{child.pid}/comm")
        until(lambda: comm.read_text() == "sleep\n", 20, "it has become another program")
        assert replica("b")[1] == "1"
    finally:
        child.kill()
        child.wait()
    assert replica("c")[1] == "0", "the kernel has dropped its lock"


def test_addresses_are_read_once_they_are_there_and_missed_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    with pytest.raises(OSError, match="does the bootstrap server run"):
        read_addresses(file, 0.0)
    file.write_text("/dns4/a/tcp/1/p2p/X\n/ip4/192.0.2.1/tcp/1/p2p/X\n")
    assert read_addresses(file) == "/dns4/a/tcp/1/p2p/X,/ip4/192.0.2.1/tcp/1/p2p/X"


def test_as_many_homes_as_gpus_have_one_each(tmp_path: Path) -> None:
    assert spread("3", tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert [spread(home, tmp_path) for home in "0123"] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
