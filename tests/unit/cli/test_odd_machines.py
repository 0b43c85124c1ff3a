"""What must hold on odd machines: one line says what is missing, and nothing depends on the
locale."""

import errno
import fcntl
import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from time import time

import pytest

from lowcomm_bootstrap import cli as bootstrap
from lowcomm_node.cli import app
from lowcomm_node.cli.creator import with_entry_points
from lowcomm_node.errors import ConfigError
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.owner.settings import unused
from lowcomm_node.owner.sources import load_settings
from lowcomm_node.storage.files import home_lock, lock
from lowcomm_node.swarm.remembered_peers import RememberedPeer, remember
from lowcomm_node.system.app import run_app
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run

Run = Callable[..., tuple[int, str]]
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWSQFqtYyvDBvkRFEjCARKkipjJRhjM86xvxkFGScqahMZ"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; its exit code and what it says on stderr."""
    for variable in [name for name in os.environ if name.startswith("LOWCOMM_")]:
        monkeypatch.delenv(variable)

    def call(program: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        if program == "lowcomm-node":
            return run_app(app, find_p2pd), capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            bootstrap.main()
        code = ended.value.code
        return code if isinstance(code, int) else 1, capsys.readouterr().err

    return call


def is_one_line(code: int, told: str, *parts: str) -> bool:
    told_once = told.startswith("error: ") and len(told.splitlines()) == 1
    return code != 0 and told_once and all(part in told for part in parts)


@pytest.mark.parametrize(
    "command", ["lowcomm-node config", "lowcomm-node report", "lowcomm-bootstrap id"]
)
def test_without_a_home_folder_a_line_says_what_to_set(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for variable in ("HOME", "XDG_DATA_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(variable, raising=False)
    assert is_one_line(*run(*command.split()), "--home", "HOME")


def test_a_file_system_without_locks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for take in (
        lambda: home_lock(tmp_path / "lock").__enter__(),
        lambda: lock(os.open(tmp_path, os.O_RDONLY), fcntl.LOCK_EX, wait=False),
    ):
        with pytest.raises(ConfigError, match=f"{tmp_path}.*--home"):
            take()


@pytest.mark.parametrize("where", ["create {file} --peers " + NOBODY, "plan {file}"])
def test_a_byte_order_mark_is_no_part_of_a_run(run: Run, tmp_path: Path, where: str) -> None:
    file = tmp_path / "windows.toml"
    assert run("lowcomm-node", "init", str(file))[0] == 0
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    home = ["--home", str(tmp_path / "home")]
    told = run("lowcomm-node", *where.format(file=file).split(), *home)[1]
    assert "TOML" not in told
    file.write_bytes(file.read_text(encoding="utf-8-sig").encode("utf-16"))
    assert is_one_line(
        *run("lowcomm-node", *where.format(file=file).split(), *home), str(file), "UTF-8"
    )


def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b'\xef\xbb\xbfmax_up = "8Mbit"\n')
    assert load_settings({"home": tmp_path}, {}).settings.max_up == 1e6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("join --keep x", "a whole number"),
        ("join --nice 1.5", "a whole number"),
        ("join --max-memory much", "a number"),
        ("init {tmp}/run.toml --steps x", "a whole number"),
        ("init {tmp}/run.toml --name A", "of a-z, 0-9"),
        ("checkpoint export --format x", "'gguf'"),
    ],
)
def test_what_a_value_must_be_is_said_in_plain_words(
    run: Run, tmp_path: Path, arguments: str, expected: str
) -> None:
    code, told = run("lowcomm-node", *arguments.format(tmp=tmp_path).split())
    assert is_one_line(code, told, expected)
    assert "Input should" not in told and "pattern" not in told and "bool" not in told


def test_files_that_a_run_does_not_use_are_named(tmp_path: Path) -> None:
    flags = {"home": tmp_path, "data": "a.txt", "tokenizer": "t.json", "weights": tmp_path}
    settings = load_settings(flags, {}).settings
    told = list(unused(settings, parse_toml('[run]\nname = "a"\n')))
    assert [line.split()[0] for line in told] == ["--data", "--tokenizer", "--weights"]
    own = '[run]\nname = "a"\n[data]\nsource = "local"\ntokenizer = "local"\n'
    assert [line.split()[0] for line in unused(settings, parse_toml(own))] == ["--weights"]


def test_an_amendment_goes_where_the_run_was_created(tmp_path: Path) -> None:
    key = Identity(bytes(range(32)))
    signed = sign_run(parse_toml('[run]\nname = "a"\n'), key)
    settings = load_settings({"home": tmp_path}, {}).settings
    with pytest.raises(ConfigError, match="--peers"):
        with_entry_points(settings, signed)
    known = RememberedPeer(
        peer_id=NOBODY.rpartition("/")[2], addresses=(NOBODY,), answered=time(), named=True
    )
    remember(settings.paths.remembered_peers(signed.fingerprint), [known], time())
    assert with_entry_points(settings, signed).peers == (NOBODY,)
