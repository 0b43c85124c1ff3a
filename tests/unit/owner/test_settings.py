"""Settings: flag, environment, config.toml, default; every mistake is named with its remedy."""

from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import LoadedSettings, find_home, load_settings
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.records import MAX_LIFE

PEER = "/ip4/203.0.113.7/tcp/31330/p2p/12D3KooWRBhwfeP2Y4TCx1SM6s9rUoHhR5STiGwxBhgFRcw3UERE"


def load(
    home: Path, toml: str = "", env: dict[str, str] | None = None, **flags: Any
) -> LoadedSettings:
    if toml:
        (home / "config.toml").write_text(toml)
    return load_settings({"home": home, **flags}, env or {})


def refusal(home: Path, toml: str = "", env: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(home, toml, env, **flags)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path: Path,
) -> None:
    toml, env = "port = 1\nkeep = 5\ndht_port = 7\n", {"LOWCOMM_PORT": "2", "LOWCOMM_KEEP": "6"}
    loaded = load(tmp_path, toml, env, port=3)
    assert (loaded.settings.port, loaded.settings.keep, loaded.settings.dht_port) == (3, 6, 7)
    assert loaded.settings.checkpoint_every == NodeSettings.model_fields["checkpoint_every"].default
    assert loaded.sources["port"] == "flag --port"
    assert loaded.sources["keep"] == "environment LOWCOMM_KEEP"
    assert loaded.sources["dht_port"] == str(tmp_path / "config.toml")
    assert loaded.sources["checkpoint_every"] == "default"


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, "chekpoint_every = 5\n")
    assert "'chekpoint_every'" in message
    assert "did you mean checkpoint_every?" in message
    assert str(tmp_path / "config.toml") in message


def test_an_unknown_variable_is_passed_over_with_a_warning_that_names_the_nearest(
    tmp_path: Path,
) -> None:
    loaded = load(
        tmp_path, "", {"LOWCOMM_PEER": PEER, "LOWCOMM_PORT": "7", "LOWCOMM_ZZZ": "secret"}
    )
    assert loaded.settings.port == 7
    assert len(loaded.warnings) == 2
    assert (
        "LOWCOMM_PEER is no setting and has no effect; did you mean LOWCOMM_PEERS?"
        in loaded.warnings[0]
    )
    assert "lowcomm-node config" in loaded.warnings[1]
    assert not any(PEER in warning or "secret" in warning for warning in loaded.warnings), (
        "values stay untold"
    )
    assert load(tmp_path, "", {"LOWCOMM_PEER": ""}).warnings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peers", ["203.0.113.7:31330"]),
        ("duty", "5%"),
        ("duty", "0.6"),
        ("peers", ["/ip4/203.0.113.7/tcp/31330"]),
        ("announce", ["node.example.org"]),
        ("announce", ["node.example.org:0"]),
        ("announce", ["2001:db8::7:31331"]),
        ("announce", ["a:1"] * 9),
        ("run", "Upper"),
        ("run", "name@12"),
        ("run", "../name"),
        ("run", "name@" + "g" * 12),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("data", ""),
        ("threads", 0),
        ("keep", 0),
        ("checkpoint_every", 0),
        ("max_memory", 0),
        ("poll", 0),
        ("poll", float("inf")),
        ("record_life", MAX_LIFE + 1),
        ("schedule", "22-7"),
        ("only_idle", "perhaps"),
        ("idle_after", "10"),
        ("on_battery", "sometimes"),
        ("max_vram", 0),
        ("max_disk", -1),
        ("nice", 20),
        ("nice", -1),
    ],
)
def test_what_could_not_work_is_refused_before_anything_starts(
    tmp_path: Path, key: str, value: Any
) -> None:
    assert refusal(tmp_path, **{key: value}).startswith(f"flag --{key.replace('_', '-')}: {key} = ")


INVITE = issue_invite(Identity(b"c" * 32), "ab" * 32, b"i" * 32, 2e9).text()


def test_an_invite_is_read_and_never_shown(tmp_path: Path) -> None:
    for loaded in (load(tmp_path, invite=INVITE), load(tmp_path, "", {"LOWCOMM_INVITE": INVITE})):
        invite = loaded.settings.invite
        assert invite is not None and invite.get_secret_value() == INVITE
        assert INVITE not in repr(loaded) + str(loaded.settings.model_dump(mode="json"))
    assert load(tmp_path).settings.invite is None


def test_an_invite_that_is_damaged_is_named_and_not_shown(tmp_path: Path) -> None:
    message = refusal(tmp_path, invite=INVITE[:-1])
    assert message.startswith("flag --invite: invite = ...: This is not an invite")
    assert INVITE[10:50] not in message


def test_records_must_outlive_two_looks_at_the_dht(tmp_path: Path) -> None:
    assert "twice poll" in refusal(tmp_path, poll=6.0, record_life=11.0)
    assert load(tmp_path, poll=5.5, record_life=11.0).settings.poll == 5.5


def test_a_file_that_is_not_toml_names_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, "port = 1\nport =\n")
    assert "config.toml: not valid TOML" in message
    assert "line 2" in message


def test_the_home_is_chosen_by_flag_then_variable_then_systemd_then_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"LOWCOMM_HOME": "/var/a", "STATE_DIRECTORY": "/var/b:/var/c"}
    assert find_home(tmp_path, env) == tmp_path
    assert find_home(None, env) == Path("/var/a")
    del env["LOWCOMM_HOME"]
    assert find_home(None, env) == Path("/var/b")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert find_home(None, {}) == tmp_path / "lowcomm"


def test_a_home_in_its_own_file_is_refused(tmp_path: Path) -> None:
    assert "use --home or LOWCOMM_HOME" in refusal(tmp_path, 'home = "/elsewhere"\n')


def test_an_address_of_ipv6_that_is_announced_stands_in_brackets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stands in brackets, such as \[2001:db8::7\]:31331"):
        load_settings({"home": tmp_path, "announce": ["2001:db8::7:31331"]}, {})
