"""The key file is made once, privately, and never lost or replaced; a home has one daemon."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.storage.files import (
    ephemeral_identity,
    home_lock,
    load_or_create_identity,
)
from lowcomm_protocol.identity import Identity, identity_from_libp2p


def test_an_identity_is_made_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path) == first
    assert identity_from_libp2p(path.read_bytes()) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"], "no drafts are left"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    first = load_or_create_identity(path)
    path.chmod(mode)
    assert load_or_create_identity(path) == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_passing_identity_is_in_no_file_and_its_children_can_read_it() -> None:
    with ephemeral_identity() as (first, path), ephemeral_identity() as (second, _):
        assert first.peer_id != second.peer_id
        assert path.stat().st_mode & 0o777 == 0o600
        assert str(path.readlink()).startswith("/memfd:")
        code = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
        read = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, timeout=60, check=True
        )
        assert identity_from_libp2p(read.stdout) == first
    assert not path.exists()


def test_a_passing_identity_is_in_a_file_of_its_owner_where_memory_has_no_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with ephemeral_identity() as (identity, path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert identity_from_libp2p(path.read_bytes()) == identity
    assert not path.exists()


def test_all_who_start_at_once_get_the_same_identity(tmp_path: Path) -> None:
    path, barrier, found = tmp_path / "identity.key", threading.Barrier(8), []

    def start() -> None:
        barrier.wait(10)
        found.append(load_or_create_identity(path).peer_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [load_or_create_identity(path).peer_id] * 8


@pytest.mark.parametrize(
    "damage", [b"", b"not a key", Identity(b"x" * 32).to_libp2p()[:-1], b"\0" * 68]
)
def test_a_damaged_key_is_an_error_with_a_remedy_and_is_kept(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match="Restore it from a copy") as caught:
        load_or_create_identity(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == damage


def test_a_home_that_can_not_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--home"):
        load_or_create_identity(tmp_path / "file" / "identity.key")


def test_a_home_has_one_daemon_and_the_second_learns_which(tmp_path: Path) -> None:
    lock = tmp_path / "home" / "lock"
    with home_lock(lock):
        with pytest.raises(RetryLater, match=str(os.getpid())) as caught, home_lock(lock):
            pass
        assert str(lock.parent) in str(caught.value)
        assert caught.value.exit_code == 75
    with home_lock(lock):
        assert lock.read_text() == str(os.getpid())


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    precious, lock = tmp_path / "precious", tmp_path / "home" / "lock"
    precious.write_text("precious")
    lock.parent.mkdir()
    lock.symlink_to(precious)
    with (
        pytest.raises(
            ConfigError, match=r"home/lock is a link, or belongs to somebody else"
        ) as caught,
        home_lock(lock),
    ):
        pass
    assert "remove it" in str(caught.value)
    assert precious.read_text() == "precious"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(ConfigError, match="is a link"), home_lock(lock):
        pass


def test_a_home_of_somebody_else_is_not_taken_and_nothing_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    for take in (
        lambda: home_lock(home / "lock").__enter__(),
        lambda: load_or_create_identity(home / "identity.key"),
    ):
        with pytest.raises(ConfigError, match=rf"{home} belongs to another user .*--home.*chown"):
            take()
    assert list(home.iterdir()) == []
