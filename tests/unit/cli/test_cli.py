"""The command line: what it prints, what it exits with, what it loads; never a traceback for a
mistake."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import lowcomm_protocol.errors as protocol_errors
from helpers.command_line import Cli
from helpers.statuses import make_peer, make_status
from lowcomm_node import cli as cli_package
from lowcomm_node import errors as node_errors
from lowcomm_node.catalogue import code_of
from lowcomm_node.cli import OLD_NAMES, app, common, running
from lowcomm_node.errors import NoPeers, NotRunning
from lowcomm_node.node.process import Trainer
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import load_or_create_identity, write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import read_token
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

EXIT_CODES = {
    "LowcommError": 1,
    "SpecError": 78,
    "SignatureError": 78,
    "VersionError": 5,
    "NodeError": 1,
    "NotRunning": 3,
    "Unhealthy": 4,
    "Incompatible": 5,
    "NoPeers": 6,
    "NotAdmitted": 77,
    "RetryLater": 75,
    "DiskFull": 75,
    "PortInUse": 75,
    "ConfigError": 78,
    "DataError": 78,
}
NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


def python(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **settings,
    )


# starting


def test_the_command_line_loads_neither_torch_nor_hivemind_nor_grpc() -> None:
    heavy = "{'torch', 'hivemind', 'grpc', 'numba', 'starlette', 'uvicorn'}"
    code = f"import sys, lowcomm_node.cli; print(sorted({heavy} & set(sys.modules)))"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


COMMANDS = [
    *("init", "create", "join", "demo", "status", "peers", "finish", "pause", "resume", "generate"),
    *("eval", "id", "config", "invite", "remove", "amend", "doctor", "ping", "limits", "exchanges"),
    *("logs", "report", "track", "web", "plan", "checkpoint", "data", "lend", "pair"),
]


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_of_commands_go_on_working(
    old: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[list[str]] = []
    monkeypatch.setattr(cli_package, "end", lambda code: None)
    monkeypatch.setattr(cli_package, "run_app", lambda *_: ended.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["lowcomm-node", old, "--home", str(tmp_path)])
    cli_package.main()
    assert ended == [[*OLD_NAMES[old], "--home", str(tmp_path)]] and old not in COMMANDS
    assert OLD_NAMES[old][0] in COMMANDS


def test_the_help_names_every_command(cli: Cli) -> None:
    assert set(typer.main.get_group(app).commands) == set(COMMANDS), "all that there are"
    shown = cli("--help").out
    assert [command for command in COMMANDS if not re.search(rf"\b{command}\b", shown)] == []


# errors


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_each_error_has_its_exit_code(
    name: str, code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = getattr(node_errors, name, None) or getattr(protocol_errors, name)

    def fail(home: Path) -> None:
        raise error("The thing is wrong: mend it.")

    monkeypatch.setattr(common, "ControlClient", fail)
    ended = cli("status")
    assert (ended.code, ended.out, ended.err) == (code, "", "error: The thing is wrong: mend it.\n")
    ended = cli("status", "--json")
    assert ended.json == {
        "error": "The thing is wrong: mend it.",
        "code": code_of(error),
        "exit_code": code,
    }
    assert ended.code == code


@pytest.mark.parametrize("flag", ["-v", "-vv", "--verbose"])
def test_the_traceback_is_shown_on_request_and_the_exit_code_stays(flag: str, cli: Cli) -> None:
    ended = cli("status", flag)
    assert ended.code == NotRunning.exit_code
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: No node runs in ")


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "peers",
        "status --wait",
        "finish",
        "finish --now",
        "pause 30m",
        "resume",
        "peers --json",
    ],
)
def test_commands_that_need_the_node_say_how_to_start_it(command: str, cli: Cli) -> None:
    ended = cli(*command.split())
    assert ended.code == 3
    assert "lowcomm-node join --peers ADDR" in ended.err


@pytest.mark.parametrize(
    "command",
    ["sttus", "status --hoem x", "exchanges --limit 0", "demo --nodes 0", "status --step"],
)
def test_a_command_line_that_makes_no_sense_is_a_usage_error(command: str, cli: Cli) -> None:
    assert cli(*command.split()).code == 2


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("id --home {file}/below", 78, "Not a directory"),
        ("config --home {file}", 78, "Not a directory"),
        ("init {tmp}/missing/run.toml", 1, "missing/run.toml: No such file or directory"),
        ("init --method nolco {tmp}/run.toml", 78, "did you mean 'noloco'?"),
        ("init --name Upper {tmp}/run.toml", 78, "run.name = 'Upper'"),
        ("init {file}", 78, "--force"),
        ("create {tmp}/run.toml --peers " + NOWHERE, 78, "lowcomm-node init"),
        ("create {file} --peers " + NOWHERE, 78, "not valid TOML"),
        ("create {file} --peers 127.0.0.1:31330", 78, "flag --peers"),
        (
            "create {tmp}/bytes.toml --tokenizer t.json --peers " + NOWHERE,
            78,
            'set "local", or leave the flag',
        ),
        ("create {tmp}/local.toml --peers " + NOWHERE, 78, "name yours with --tokenizer PATH"),
        ("init {tmp}/new.toml --tokenizer {file}", 78, "is not a tokenizer.json"),
        ("join", 78, "--peers"),
        ("join --peers 127.0.0.1:31330", 78, "flag --peers"),
        ("join --peers " + NOWHERE + " --run Upper", 78, "NAME@FINGERPRINT"),
        ("join --peers " + NOWHERE + " --port 70000", 78, "flag --port: port = '70000'"),
        *(
            (f"join --device{s} 0,gpu", 78, "flag --device: device = '0,gpu': expected one device")
            for s in ("", "s")
        ),
        (
            "join --peers " + NOWHERE + " --invite inviteXYZ",
            78,
            "flag --invite: invite = ...: This is not an invite",
        ),
        ("invite", 78, "has created no run"),
        ("invite --expires 7", 78, "'7' is not a duration such as 90s"),
        ("invite --expires 3661d", 78, "at most 3660d"),
        ("invite --for nobody", 78, "'nobody' is not a peer id"),
        ("remove nobody", 78, "'nobody' is not a peer id"),
        ("remove 12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c", 78, "has created no run"),
        ("init {tmp}/run.toml --admission lst", 78, "expected 'open', 'invite' or 'list'"),
        ("init {tmp}/run.toml --admission list", 78, "needs members"),
        ("plan --up 20Mbit --step-seconds 1 --peers 4", 78, "--parameters"),
        ("plan --up 20 --step-seconds 1 --peers 4 --parameters 1B", 78, "--up 20: 20 of what?"),
        ("plan --up none --step-seconds 1 --peers 4 --parameters 1B", 78, "name its rate"),
        ("plan --up 1Mbit --step-seconds 1 --peers 4 --parameters 1G", 78, "such as 10M"),
        ("plan --up 1Mbit --step-seconds 0 --peers 4 --parameters 1B", 78, "--step-seconds 0"),
        ("plan --up 1Mbit --step-seconds 1 --peers 4 {tmp}/no.toml", 78, "lowcomm-node init"),
        ("checkpoint ls", 78, "holds no checkpoints"),
        ("checkpoint export {tmp}/new", 78, "holds no checkpoints"),
        ("checkpoint publish {tmp}/none a/b", 78, "holds no export"),
        ("eval --tasks arc_easy", 78, "lowcomm-node checkpoint export FOLDER"),
        ("eval {tmp}", 78, "--tasks arc_easy"),
        ("eval {tmp} --tasks arc_easy", 78, "is no export for transformers"),
        ("eval {export} --tasks arc_easy", 78, "needs the library lm_eval"),
        ("generate", 78, "holds no checkpoints"),
        ("generate --checkpoint {tmp}/none", 1, "no sound checkpoint"),
    ],
)
def test_a_mistake_gives_one_line_that_names_the_remedy(
    command: str, code: int, told: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("this is no TOML")
    (tmp_path / "bytes.toml").write_text('[run]\nname = "a"\n')
    (tmp_path / "local.toml").write_text('[run]\nname = "a"\n[data]\ntokenizer = "local"\n')
    (tmp_path / "export").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "export" / name).touch()
    ended = cli(*command.format(file=file, tmp=tmp_path, export=tmp_path / "export").split())
    assert ended.code == code, ended.err
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) == 1
    assert told in ended.err


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ("--data {tmp}/none", 78, "/none: nothing is there"),
        ("--data jsonl:{tmp}/none*", 78, "nothing is there"),
        ("--tokenizer {tmp}/none", 78, "--tokenizer {tmp}/none: nothing is there"),
        ("--weights {tmp}/none", 78, "--weights {tmp}/none: nothing is there"),
        ("--port {taken}", 75, "{taken} of 127.0.0.1 is in use: choose another with --port"),
        ("--dht-port {taken}", 75, "with --dht-port"),
        ("--control-port {taken}", 75, "with --control-port"),
        ("", 75, "No room in {tmp}"),
    ],
)
def test_a_node_that_can_not_work_is_refused_before_its_trainer_starts(
    options: str, code: int, told: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "launch", lambda _: pytest.fail("it has started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"tmp": tmp_path, "taken": taken.getsockname()[1]}
        if not options:
            monkeypatch.setattr(os, "fsync", full)
        ended = cli(*f"join --peers {NOWHERE} {options.format(**given)}".split())
    assert ended.code == code, ended.err
    assert told.format(**given) in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_reading_is_no_error_of_ours(tmp_path: Path, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "lowcomm_node", "id", "--home", str(tmp_path)],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writing)
    assert done.stderr == ""


# runs


@pytest.mark.parametrize("method", PRESETS)
def test_init_writes_a_specification_that_says_what_it_means(
    method: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    ended = cli(
        "init", str(file), "--method", method, "--name", "mine", "--steps", "77", "--seed", "5"
    )
    assert ended.code == 0
    assert f"lowcomm-node create {file} --peers" in ended.out
    spec = parse_toml(file.read_text())
    assert (spec.sync.method, spec.run.name, spec.run.steps, spec.run.seed) == (
        method,
        "mine",
        77,
        5,
    )
    bare = parse_toml(f'[run]\nname = "mine"\nsteps = 77\nseed = 5\n[sync]\nmethod = "{method}"\n')
    assert spec.run_id == bare.run_id
    written = tomllib.loads(file.read_text())
    assert written["sync"].keys() == spec.model_dump()["sync"].keys()
    comments = re.findall(r"^(\w+) = .*# \S", file.read_text(), re.MULTILINE)
    assert {"method", "interval", "group", "consensus", "learning_rate", "source"} <= set(comments)


def test_init_takes_a_length_in_tokens(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert cli("init", str(file), "--tokens", "1.5M").code == 0
    run = tomllib.loads(file.read_text())["run"]
    assert run["tokens"] == 1_500_000 and "steps" not in run
    assert parse_toml(file.read_text()).run.steps == 2930
    for more in (("--steps", "3"), ("--tokens", "ten")):
        ended = cli("init", str(file), "--force", "--tokens", "1M", *more)
        assert ended.code == 78 and "write such as 10B" in ended.err


ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


def test_a_run_of_bytes_asks_for_no_tokenizer_of_the_home(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def publish(*_: object) -> None:
        raise NoPeers("Nobody answers.")

    monkeypatch.setattr("lowcomm_node.cli.creator.publish_run", publish)
    (tmp_path / "config.toml").write_text('tokenizer = "gone.json"\n')
    run = tmp_path / "run.toml"
    run.write_text('[run]\nname = "a"\n[sync]\nmethod = "lowcomm"\n')
    ended = cli("create", str(run), "--home", str(tmp_path), "--peers", ADDRESS)
    assert ended.err == "error: Nobody answers.\n"


# who may take part


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--set", "run.steps=5"),
            "--at is missing: name the swarm step from which the change holds",
        ),
        (
            ("--set", "sync.codec=fp32", "--at", "9"),
            "can't be changed while a run trains; these can: run.steps",
        ),
        (("--set", "run.steps=many", "--at", "9"), "'many' is no number"),
        (("--set", "train.schedule=wsd", "--at", "9"), "No address of the swarm is known"),
        (("--set", "run.steps", "--at", "9"), "expected SETTING=VALUE"),
        (("--set", "run.steps=5", "--at", "9", "--run", "c"), "has created no run 'c', only a@"),
        (("--set", "run.steps=5", "--at", "9"), "No address of the swarm is known"),
    ],
)
def test_a_mistake_in_an_amendment_is_named_with_its_remedy(
    arguments: tuple[str, ...], told: str, cli: Cli, tmp_path: Path
):
    created(tmp_path)
    ended = cli("amend", "--home", str(tmp_path), *arguments)
    assert ended.code == 78
    assert told in ended.err and "Traceback" not in ended.err


def created(home: Path, name: str = "a", admission: str = "invite") -> SignedRun:
    """A run that was created in a home."""
    identity = load_or_create_identity(Paths(home).identity)
    run = sign_run(parse_toml(f'[run]\nname = "{name}"\nadmission = "{admission}"\n'), identity)
    write_atomic(Paths(home).signed_run(run.fingerprint), run.to_bytes())
    return run


def test_an_invite_says_what_it_is_good_for(cli: Cli, tmp_path: Path) -> None:
    run = created(tmp_path / "home")
    made = cli("invite", "--uses", "3", "--expires", "7d", "--json").json
    token = read_token(made["invite"])
    token.invite.verify(run.creator)
    assert (token.invite.run_id, token.invite.uses, made["uses"]) == (run.run_id, 3, 3)
    assert made["invite_id"] == token.invite.invite_id
    assert 6.99 < (token.invite.expires - time.time()) / 86_400 <= 7
    shown = cli("invite", "--for", NOWHERE[-52:])
    assert shown.out.startswith("invite") and f"for {NOWHERE[-52:]}" in shown.out
    alone = read_token(shown.out.splitlines()[0]).invite
    assert (alone.peer_id, alone.uses) == (NOWHERE[-52:], 1)
    assert f"lowcomm-node remove {alone.invite_id}" in shown.out


def test_only_runs_of_this_home_are_invited_to_and_the_one_that_is_meant_is_named(
    cli: Cli, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    foreign = sign_run(parse_toml('[run]\nname = "b"\nadmission = "invite"\n'), Identity(b"x" * 32))
    load_or_create_identity(Paths(home).identity)
    write_atomic(Paths(home).signed_run(foreign.fingerprint), foreign.to_bytes())
    assert "has created no run" in cli("invite").err
    created(home)
    open_run = created(home, "c", "open")
    assert "choose one with --run" in cli("invite").err
    assert cli("invite", "--run", "a").code == 0
    assert "takes no invites" in cli("invite", "--run", f"c@{open_run.fingerprint}").err
    assert "has created no run 'b', only a@" in cli("invite", "--run", "b").err


def test_a_folder_with_a_former_demo_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    ended = cli("demo", "--home", str(tmp_path))
    assert ended.code == 78
    assert "former demo" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


# looking at the machine


def test_doctor_looks_at_the_machine_where_there_is_no_network(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ended = cli("doctor", "--json")
    found = {finding["name"]: finding for finding in ended.json["findings"]}
    assert ended.code == ended.json["exit_code"] == 0
    assert found["dht"]["state"] == "unknown" and found["disk"]["figures"]["free"] > 0
    assert "--peers ADDR" in found["dht"]["remedy"] and str(home) in found["node"]["value"]
    assert not home.exists(), "to look at a home does not make one"


# tables


def peer(**more: Any) -> PeerStatus:
    """A peer with long figures."""
    known: dict[str, Any] = {
        "peer_id": NOWHERE[-52:], "swarm_step": 123_456, "tokens_per_second": 7800.0, "age": 12.3,
        "completed": 4207,
        "refused": 1057, "failed": 265, "round_trip": 0.149, "rate_up": 18.7e6, "rate_down": 18.7e6,
        "route": "direct [2001:db8:1234:5678:9abc:def0:1234:5678]:38247",
    }  # fmt: skip
    return make_peer(**known | more)


REASON = "we refused it: we had merged this fragment a few steps before; " + "and so on " * 20


@pytest.mark.parametrize("width", [40, 80, 140])
def test_peers_fit_the_terminal_and_reasons_have_lines_of_their_own(width: int) -> None:
    found = [
        peer(),
        peer(route="relay q1w2e3", last_reason=REASON, phase="finishing"),
        peer(
            route=None, route_reason=f"direct: can't be reached; tunnel: {'x' * 300}", rate_up=None
        ),
        peer(left_out=True, held_against="update too large (norm 17.6, limit 3.2) \x1b[2J"),
    ]
    lines = running.peers_table(found, width).splitlines()
    assert all(len(line) <= max(width, 56) and line.isprintable() for line in lines)
    heads = lines[0].split()
    assert {"peer", "phase", "step", "done", "failed", "score"} <= set(heads), (
        "what tells most is never left out"
    )
    assert {"route", "refused", "seen"} <= set(heads) or width < 80
    assert ("release" in heads) == (width >= 140)
    assert sum(line.startswith("tSQY1c") for line in lines) == 4
    shown = " ".join(line.strip() for line in lines)
    assert (
        "last: we refused it" in shown
        and "left out: update too large" in shown
        and "not reached: direct: can't" in shown
    )


# checkpoints


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints of one run in the home that ``cli`` uses."""
    store = CheckpointStore(Paths(tmp_path / "home").checkpoints("abcdef012345"))
    for step in (100, 200):
        store.save(
            step,
            {"weights": {"w": torch.full((4,), float(step))}},
            {"swarm_step": step},
            1.7e9 + step,
        )
    return store


def test_verify_tells_which_checkpoint_is_damaged(store: CheckpointStore, cli: Cli) -> None:
    assert cli("checkpoint", "verify").code == 0
    weights = store.info(100).path / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ended = cli("checkpoint", "verify")
    assert ended.code == 1
    assert ended.err.startswith("error: Damaged: 100.")
    assert "ok" in next(line for line in ended.out.splitlines() if line.split()[0] == "200")


# waiting for a node


class Story:
    """Stands in for ControlClient; a node whose status changes at every look."""

    def __init__(self, *statuses: tuple[str, int]) -> None:
        self.statuses = list(statuses)

    def __call__(self, home: Path) -> "Story":
        return self

    def __enter__(self) -> "Story":
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> Status:
        phase, step = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        waiting = "no partner" if phase == "joining" else None
        return make_status(phase=phase, waiting=waiting, trainer={"swarm_step": step})


@pytest.mark.parametrize(
    ("arguments", "story", "code", "told"),
    [
        ("", [("joining", 0), ("syncing", 0), ("training", 1)], 0, "training at swarm step 1"),
        ("--step 50", [("training", 49), ("training", 51)], 0, "training at swarm step 51"),
        ("--finished", [("training", 99), ("finished", 100)], 0, "finished at swarm step 100"),
        ("--step 200", [("training", 99), ("finished", 100)], 1, "finished at swarm step 100"),
        ("--finished", [("training", 99), ("left", 99)], 1, "left at swarm step 99"),
        ("--timeout 0", [("joining", 0)], 75, "no partner"),
    ],
)
def test_wait_ends_when_it_is_reached_or_can_not_be_any_more(
    arguments: str,
    story: list[tuple[str, int]],
    code: int,
    told: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "ControlClient", Story(*story))
    monkeypatch.setattr(running, "POLL", 0.0)
    ended = cli("status", "--wait", *arguments.split())
    assert ended.code == code
    assert told in ended.out + ended.err
