"""What must hold for the owner's limits: a change holds at once and after a restart, and a bad one
changes nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import load_settings


def settings(home: Path, env: dict[str, str] | None = None, **flags: Any) -> NodeSettings:
    return load_settings({"home": home} | flags, env or {}).settings


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {"max_up": "20Mb"},
            "--max-up: max_up = '20Mb': 20Mb is not a unit: write 20Mbit or 20MB.",
        ),
        ({"max_down": 2.5}, "2.5 of what"),
        ({"max_down": True}, "such as 20Mbit"),
        ({"max_up": "1bit"}, "at least 64kbit"),
        ({"max_up": "5Mbit", "max_peers": 0}, "--max-peers"),
        ({"max_peers": "few"}, "--max-peers"),
        ({"port": 5}, "'port' can't be changed"),
    ],
)
def test_a_limit_that_is_not_valid_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], remedy: str
) -> None:
    before = settings(tmp_path, max_up="8Mbit")
    allowance = Allowance(before)
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        allowance.change(before, changes)
    assert allowance.bandwidth.up.rate == 1e6
    assert not (tmp_path / "config.toml").exists()


def test_a_change_holds_at_once_and_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('# mine\nport = 7 # fixed\nmax_up = "5Mbit"\n')
    before = settings(tmp_path)
    allowance = Allowance(before)
    after = allowance.change(before, {"max_up": "none", "max_down": "20Mbit", "max_peers": "3"})
    assert (
        allowance.bandwidth.up.rate,
        allowance.bandwidth.down.rate,
        allowance.peer_limit.most,
    ) == (None, 2.5e6, 3)
    again = settings(tmp_path)
    assert after == again
    assert (again.port, again.max_up, again.max_down, again.max_peers) == (7, None, 2.5e6, 3)
    assert (tmp_path / "config.toml").read_text().startswith("# mine\nport = 7 # fixed\n")


def test_who_may_read_the_file_and_where_it_lies_stay_as_they_were(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "dotfiles"
    for folder in (home, elsewhere):
        folder.mkdir()
    config = home / "config.toml"
    before = settings(home)
    Allowance(before).change(before, {"max_peers": 3})
    assert config.stat().st_mode & 0o777 == 0o600, "it may hold a token"
    config.unlink()
    target = elsewhere / "lowcomm.toml"
    target.write_text("")
    target.chmod(0o640)
    config.symlink_to(target)
    Allowance(before).change(before, {"max_peers": 4})
    assert config.is_symlink() and target.read_text() == "max_peers = 4\n"
    assert target.stat().st_mode & 0o777 == 0o640


def test_what_can_not_be_kept_does_not_hold(tmp_path: Path) -> None:
    before = settings(tmp_path)
    (tmp_path / "config.toml").write_text("port =\n")
    allowance = Allowance(before)
    with pytest.raises(ConfigError, match="not valid TOML"):
        allowance.change(before, {"max_up": "20Mbit"})
    assert allowance.bandwidth.up.rate is None
    assert (tmp_path / "config.toml").read_text() == "port =\n"
