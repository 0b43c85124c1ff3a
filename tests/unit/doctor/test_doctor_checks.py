"""Checks say what was seen, and remedies have this machine's own values in them."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.cards import FakeLibrary
from helpers.statuses import make_peer, make_status
from lowcomm_node.doctor import checks
from lowcomm_node.doctor.checks import Check, Nat, kind_of_nat
from lowcomm_node.doctor.findings import (
    Finding,
    Helper,
    Observations,
    ObservedAddress,
    Severity,
    Subject,
    Survey,
    exit_code,
)
from lowcomm_node.doctor.run import check, own_hosts
from lowcomm_node.household.machines import Household, Machine
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.status.model import read, to_json
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.probes import ProbeKind, Seen

ME, HELPER, RELAY = (Identity(letter * 32).peer_id for letter in (b"m", b"h", b"r"))
HOME = Path("/srv/lowcomm")
OUTER, LAN, SIX = "44.128.0.13", "192.168.1.7", "2a00:128::7"
CIRCUIT = f"/ip4/44.128.0.10/tcp/31330/p2p/{RELAY}/p2p-circuit"
BEHIND = Subject(
    peer_id=ME,
    hosts=("127.0.0.1", LAN),
    listens=(
        CIRCUIT,
        f"/ip4/{LAN}/tcp/40001",
        f"/ip4/{LAN}/udp/40002/quic-v1",
        f"/ip6/{SIX}/tcp/40006",
    ),
    direct=45123,
    certificate=b"der",
    announced=(f"{LAN}:45123",),
)
PUBLIC = replace(
    BEHIND, hosts=(OUTER,), listens=(f"/ip4/{OUTER}/tcp/40001",), announced=(f"{OUTER}:1",)
)
# The only address of a machine.
ALL_SIX = replace(
    BEHIND,
    hosts=(SIX,),
    announced=("[fd00::7]:45123",),
    listens=(f"/ip6/{SIX}/tcp/40006", f"/ip6/{SIX}/udp/40007/quic-v1"),
)
INNER_SIX = replace(ALL_SIX, hosts=("fd00::7",), listens=("/ip6/fd00::7/tcp/40006",))
NOTHING = {"direct": False, "tcp": False, "quic": False}


def helper(
    number: int = 10, sees: str = OUTER, offset: float = 0.0, port: str = "udp/7", **reached: bool
) -> Helper:
    """A helper at a public address, called over UDP unless ``port`` says otherwise."""
    entry = EntryPoint(HELPER, f"/ip4/44.128.0.{number}/tcp/31330")
    called = {ProbeKind[name.upper()]: ok for name, ok in reached.items()}
    seen = Seen(f"/{'ip6' if ':' in sees else 'ip4'}/{sees}/{port}", 0.0, ())
    return Helper(entry, f"44.128.0.{number}", seen, offset, called)


def survey(*helpers: Helper, subject: Subject = BEHIND, **options: Any) -> Survey:
    """What helpers told; a line that is well, behind a router, unless it is said otherwise."""
    return Survey(subject=subject, helpers=helpers, **{"outward": LAN} | options)


def told(*addresses: str) -> Survey:
    """What a helper says that calls a forwarded port, of which others are told so."""
    subject = replace(BEHIND, announced=addresses)
    return survey(helper(direct=True), subject=subject)


def over_six(subject: Subject, **reached: bool) -> Survey:
    """What a helper says that sees an address of IPv6."""
    outward = subject.hosts[0]
    return survey(helper(sees=SIX, **reached), subject=subject, outward=outward)


def finding(one: Check, **seen: Any) -> Finding:
    """What a check finds."""
    defaults: dict[str, Any] = {"home": HOME, "peers": ("ADDR",), "dht_peers": 3}
    found = one(Observations(**defaults | seen))
    assert found is not None and (found.state is not Severity.OK or not found.remedy)
    as_json = json.loads(json.dumps(to_json(found)))
    assert found == read(Finding, as_json | {"since": "a newer release"}), "it travels as it is"
    return found


def case(must: str, one: Check, state: Severity, seen: Any, *words: str, never: str = "\0") -> Any:
    """What must hold: what is found in a survey, or in other observations."""
    seen = {"survey": seen} if isinstance(seen, Survey) else seen
    return pytest.param(one, state, seen, words, never, id=must)


OK, WARNING, FAULT, UNKNOWN = Severity.OK, Severity.WARNING, Severity.FAULT, Severity.UNKNOWN
SHUT = survey(helper(10, **NOTHING), helper(11, **NOTHING))
SYMMETRIC = survey(helper(10, port="udp/7", **NOTHING), helper(11, port="udp/8", **NOTHING))
FIREWALL = survey(helper(**NOTHING), subject=PUBLIC)
OPEN = survey(helper(direct=True, tcp=True, quic=True), subject=PUBLIC)
NEAR = survey(helper(sees="192.168.1.9", direct=True))
SILENT = Survey(subject=BEHIND, silent={"ADDR": "answers, but not to probes"})
FORWARD = f"forward TCP port 45123 to {LAN} and TCP and UDP port 40001 to {LAN} in your router"
START = f", and start the node with --port 45123 --dht-port 40001 --announce {OUTER}:45123"
UFW = "ufw allow 45123/tcp && ufw allow 4000{0}/tcp && ufw allow 4000{0}/udp"
SIX_FLAGS = f"--port 45123 --dht-port 40006 --announce [{SIX}]:45123"
QUIC = f"/ip4/44.128.0.10/udp/31330/quic-v1/p2p/{HELPER}"
TAKEN = "Port 45123 is in use: choose another"
STATUS = make_status(
    peer_id=ME,
    waiting="training alone: no other peer is alive",
    exchanges={"completed": 2, "failed": 1},
    trainer={"device": "cpu"},
)
MEMBERS = [
    make_peer(peer_id=HELPER, route_reason="direct: can't be reached"),
    make_peer(peer_id=ME, route="relay abcdef"),
    make_peer(peer_id=RELAY),
]


TO_PING = f"lowcomm-node ping {HELPER[-6:]}"


def clocks(*offsets: float) -> Survey:
    """What helpers say of our clock."""
    return survey(*(helper(10 + k, offset=offset) for k, offset in enumerate(offsets)))


SIX_FORWARD = "TCP and UDP port 40006 to fd00::7"
BEHIND_SIX = over_six(replace(INNER_SIX, listens=(CIRCUIT, *INNER_SIX.listens)), **NOTHING)
TOLD_SIX = over_six(replace(ALL_SIX, announced=(f"[{SIX}]:45123",)), direct=True)
ALONE = replace(SHUT, subject=replace(BEHIND, listens=BEHIND.listens[1:]))
OVER_TCP = helper(port="tcp/9")
NO_UDP = survey(OVER_TCP)
UDP_LOST = survey(replace(OVER_TCP, seen=replace(OVER_TCP.seen, entry_points=(QUIC,))))
UDP_SHUT, UDP_COMES = survey(helper(quic=False)), survey(helper(port="tcp/9", quic=True))
NTP = "12.3 s ahead of 3 peers: run `timedatectl set-ntp true`"
BROKEN = {"broken": TAKEN, "absent": "start it", "dht_peers": None}
HANGS = {"absent": "end it with `kill 42`", "hangs": True}
REMEMBERED = {"peers": (), "dht_peers": 0, "status": STATUS}
LOST_PEERS = "1 relay; 1 not called yet; 1 not reached: direct: can't"
HOME_KNOWS = "no peer answers at the addresses that this home remembers"


@pytest.mark.parametrize(
    ("one", "state", "seen", "words", "never"),
    [
        case("holes can be punched", checks.nat, OK, SHUT, "port restricted"),
        case("ports to forward", checks.outside, WARNING, SHUT, FORWARD + START, "punched"),
        case("the relay that is left", checks.outside, WARNING, SHUT, RELAY[-6:]),
        case("no relay at all", checks.outside, FAULT, ALONE, "no peer reaches it"),
        case("a symmetric router", checks.nat, WARNING, SYMMETRIC, FORWARD, "rarely"),
        case("no holes there", checks.outside, WARNING, SYMMETRIC, FORWARD, never="punched"),
        case("a firewall", checks.nat, WARNING, FIREWALL, UFW.format(1), never="router"),
        case("ports to let in", checks.outside, FAULT, FIREWALL, UFW.format(1), never="router"),
        case("an address of its own", checks.nat, OK, OPEN, f"none: {OUTER}"),
        case("that is called", checks.outside, OK, OPEN, "direct calls, libp2p over TCP and"),
        case("a port unknown", checks.outside, WARNING, told(f"{LAN}:1"), f"--announce {OUTER}:4"),
        case("a port that is told", checks.outside, OK, told(f"{OUTER}:45123")),
        case("by a name", checks.outside, OK, told("node.example.org:45123")),
        case("not by IPv6", checks.outside, WARNING, told(f"{LAN}:1", "[fd00::7]:45123")),
        case("IPv6 unknown", checks.outside, WARNING, over_six(ALL_SIX, direct=True), SIX_FLAGS),
        case("IPv6 that is told", checks.outside, OK, TOLD_SIX),
        case("IPv6 shut", checks.outside, FAULT, over_six(ALL_SIX, **NOTHING), UFW.format(6)),
        case("IPv6 behind", checks.outside, WARNING, BEHIND_SIX, SIX_FLAGS, SIX_FORWARD),
        case("neighbours tried", checks.outside, WARNING, NEAR, "from within this network only"),
        case("and saw nothing", checks.nat, UNKNOWN, NEAR, "doctor --peers ADDR"),
        case("a clock that is right", checks.clock, OK, clocks(0.01, -0.02, 0.0), "in sync"),
        case("far ahead", checks.clock, FAULT, clocks(-12.3, -12.4, -12.2), NTP),
        case("a bit behind", checks.clock, WARNING, clocks(1.5, 1.6, 1.4), "1.5 s behind 3 peers"),
        case("one of three is wrong", checks.clock, OK, clocks(0.0, 0.1, 500.0), "0.1 s behind"),
        case("one against one", checks.clock, FAULT, clocks(60.0), "if it is that one's clock"),
        case("UDP is lost", checks.udp, WARNING, UDP_LOST, f"UDP out of {LAN}", "44.128.0.10"),
        case("UDP gets out", checks.udp, OK, UDP_SHUT, "gets out; calls do not come in"),
        case("UDP is answered", checks.udp, OK, UDP_COMES, "gets out, and calls come in"),
        case("nobody offers UDP", checks.udp, UNKNOWN, NO_UDP, "offers UDP"),
        case("silence: clock", checks.clock, UNKNOWN, SILENT, "not to probes"),
        case("silence: nat", checks.nat, UNKNOWN, SILENT, "not to probes"),
        case("silence: outside", checks.outside, UNKNOWN, SILENT, "not to probes"),
        case("silence: udp", checks.udp, UNKNOWN, SILENT, "not to probes"),
        case("a node that waits", checks.node, OK, {"status": STATUS}, "alone", "2 exchanges done"),
        case("a node that hangs", checks.node, FAULT, HANGS, "end it with `kill 42`"),
        case("a port that is taken", checks.node, FAULT, BROKEN, TAKEN),
        case("is no fault of the swarm", checks.dht, UNKNOWN, BROKEN, TAKEN),
        case("a silent swarm", checks.dht, FAULT, {"trouble": "Nobody"}, "Nobody", "compare ADDR"),
        case("no run", checks.dht, WARNING, {"runs": 0}, "create run.toml --peers ADDR"),
        case("at remembered peers", checks.dht, FAULT, REMEMBERED, HOME_KNOWS),
        case("peers lost", checks.routes, WARNING, {"members": MEMBERS}, LOST_PEERS, TO_PING),
    ],
)
def test_a_finding_says_what_was_seen_and_what_to_do(
    one: Check, state: Severity, seen: dict[str, Any], words: tuple[str, ...], never: str
):
    found = finding(one, **seen)
    text = f"{found.value}; {found.remedy}"
    assert found.state is state and all(word in text for word in words), found
    assert never not in text, found


def test_lenders_that_do_not_answer_are_named(tmp_path: Path):
    seen = Observations(home=tmp_path)
    assert checks.lenders(seen) is None
    household = Household(tmp_path)
    household.add(Machine(name="attic", key=household.key))
    assert checks.lenders(seen) is None, "a head is no lender"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = make_certificate().public_key.hex()
        household.add(Machine(name="desk", key=other, address=f"127.0.0.1:{port}"))
        found = checks.lenders(seen)
        assert found and found.state is OK and "desk answers" in found.value
    found = checks.lenders(seen)
    assert found and found.state is WARNING and f"desk at 127.0.0.1:{port} does not" in found.value
    assert "lowcomm-node lend" in found.remedy


EXIT = [([], 0), (["dht"], 6), (["node"], 4), (["node", "dht"], 6)]


@pytest.mark.parametrize(("faults", "code"), EXIT)
def test_a_swarm_that_does_not_answer_has_an_exit_code_of_its_own(faults: list[str], code: int):
    others = [Finding("gpu", state, "") for state in (WARNING, UNKNOWN, OK)]
    assert exit_code([*others, *(Finding(name, FAULT, "") for name in faults)]) == code


async def test_a_network_that_was_not_looked_at_says_how_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trying(monkeypatch, {"kind": "cpu", "name": "CPU"})
    for variable in [one for one in os.environ if one.lower() in checks.PROXIES]:
        monkeypatch.delenv(variable)
    found = {one.name: one for one in await check(Observations(home=tmp_path, absent="start it"))}
    assert set(found) == {"node", "dht", "disk", "memory", "gpu"}
    assert (found["node"].state, found["node"].remedy) == (UNKNOWN, "start it")
    assert found["dht"].state is UNKNOWN and "doctor --peers ADDR" in found["dht"].remedy
    monkeypatch.setenv("https_proxy", "http://ada:secret@10.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    found = {one.name: one for one in await check(Observations(home=tmp_path))}
    assert found["proxy"].value == "ignores https_proxy: peers are called directly"
    assert "secret" not in str(found["proxy"])


# reach


@pytest.mark.parametrize(
    ("observed", "calls_come_in", "kind"),
    [
        ([], None, Nat.UNKNOWN),
        ([("A", LAN, 1)], True, Nat.UNKNOWN),
        ([("A", "44.128.0.12", 1)], True, Nat.NONE),
        ([("A", "44.128.0.12", 1)], None, Nat.NONE),
        ([("A", "44.128.0.12", 1)], False, Nat.FIREWALL),
        ([("A", OUTER, 1)], True, Nat.OPEN),
        ([("A", OUTER, 1)], False, Nat.BEHIND),
        ([("A", OUTER, 1)], None, Nat.BEHIND),
        ([("A", OUTER, 1), ("B", OUTER, 1)], False, Nat.RESTRICTED),
        ([("A", OUTER, 1), ("B", OUTER, 1)], None, Nat.BEHIND),
        ([("A", OUTER, 1), ("B", OUTER, 2)], False, Nat.SYMMETRIC),
        ([("A", OUTER, 1), ("B", OUTER, 2)], None, Nat.SYMMETRIC),
        # Who sits beside us says nothing.
        ([("A", OUTER, 1), ("B", LAN, 9)], False, Nat.BEHIND),
    ],
)
def test_a_kind_of_router_is_told_by_what_shows_it(
    observed: list[tuple[str, str, int]], calls_come_in: bool | None, kind: Nat
):
    own = ("127.0.0.1", LAN, "44.128.0.12")
    seen = [ObservedAddress("probe", *place) for _, *place in observed]
    assert kind_of_nat(own, seen, calls_come_in) is kind
    others = [one._replace(socket=str(number)) for number, one in enumerate(seen)]
    if kind in (Nat.SYMMETRIC, Nat.RESTRICTED):
        assert kind_of_nat(own, others, calls_come_in) is Nat.BEHIND, "ports of ours that differ"


@pytest.mark.parametrize("address", ["44.128.0.13/tcp/99999999999", "44.128.0.13/tcp/0"])
def test_an_address_that_there_can_not_be_is_not_believed(address: str):
    liar = replace(helper(), seen=Seen(f"/ip4/{address}", 0.0, ()))
    assert Survey(subject=BEHIND, helpers=(liar,)).observed == ()


# machine


def has(monkeypatch: pytest.MonkeyPatch, **looks: object) -> None:
    """Have looks at this machine see something else."""
    for name, seen in looks.items():
        monkeypatch.setattr(checks, name, lambda *_, seen=seen: seen)


@pytest.mark.parametrize(
    ("free", "checkpoint", "state", "words"),
    [
        (10**8, 0, FAULT, "100.0 MB free"),
        (10**10, 6 * 10**9, FAULT, "a checkpoint has 6.0 GB"),
        (10**10, 3 * 10**9, WARNING, "lower --keep"),
        (10**11, 3 * 10**9, OK, ""),
    ],
)
def test_room_on_the_disk_is_held_against_checkpoints(
    monkeypatch: pytest.MonkeyPatch, free: int, checkpoint: int, state: Severity, words: str
):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    has(monkeypatch, largest_checkpoint=checkpoint)
    disk = finding(checks.disk)
    assert disk.state is state and words in disk.remedy and bool(disk.remedy) == bool(words)


@pytest.mark.parametrize(
    ("one", "looks", "state", "words"),
    [
        ("memory", {"memory_of_machine": (10**9, 10**8)}, FAULT, "100.0 MB free of 1.0 GB"),
        ("memory", {"memory_of_machine": (10**9, 5 * 10**8)}, WARNING, "500.0 MB"),
        ("memory", {"memory_of_machine": (10**10, 5 * 10**9)}, OK, ""),
    ],
)
def test_this_machine_is_judged(
    monkeypatch: pytest.MonkeyPatch, one: str, looks: dict[str, Any], state: Severity, words: str
):
    has(monkeypatch, **looks)
    found = finding(getattr(checks, one))
    assert found.state is state and words in found.remedy and bool(found.remedy) == bool(words)


def trying(monkeypatch: pytest.MonkeyPatch, seen: dict[str, Any]) -> None:
    """Have a device be tried with this outcome."""
    done = SimpleNamespace(stdout=f"a warning\n{json.dumps(seen)}\n".encode())
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(
    ("kind", "free", "trains_on", "words", "remedy"),
    [
        ("cuda", 70, None, "tried: computes bf16 yes, compiles no", ""),
        ("cuda", 70, "cuda:0", "trains on cuda:0: nothing is tried", ""),
        ("cuda", 70, "cpu", "One (70.0 GB free of 80.0 GB)", "--device auto"),
        ("cuda", 0, None, "One (0 B free", "end what else uses the One"),
        ("rocm", 70, None, "temperature and power are unknown; never tried on rocm", ""),
        ("mps", 70, None, "never tried on mps", ""),
    ],
)
def test_a_gpu_is_said_to_do_what_was_tried_and_to_be_used(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    free: int,
    trains_on: str | None,
    words: str,
    remedy: str,
):
    seen = {"kind": kind, "name": "One", "free": free * 10**9, "total": 80 * 10**9}
    several = {"cuda:0": ["One", 70 * 10**9], "cuda:1": ["Two", 10**9]} if kind == "cuda" else {}
    tried = {"computes_bf16": True, "compiles": False}
    trying(monkeypatch, {**seen, "tried": tried, "all": several})
    status = SimpleNamespace(trainer=SimpleNamespace(device=trains_on))
    found = finding(checks.gpu, status=status if trains_on else None)
    assert words in found.value and ("never tried" in found.value) == (kind != "cuda"), found
    assert remedy in found.remedy and bool(found.remedy) == bool(remedy)
    assert found.state is (WARNING if remedy else OK)
    takes = "--device all takes cuda:0 (One, 70.0 GB free), cuda:1 (Two, 1.0 GB free)"
    assert (takes in found.value) == bool(several and trains_on != "cuda:0")


def test_a_card_that_torch_does_not_see_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    trying(monkeypatch, {"kind": "cpu", "name": "CPU"})
    assert finding(checks.gpu).state is OK
    FakeLibrary(monkeypatch)
    found = finding(checks.gpu)
    assert found.state is WARNING and "CUDA to use the Large 9" in found.remedy


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="what it can do is not known here")
def test_a_device_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    assert finding(checks.gpu).figures == {"kind": "cpu", "name": "CPU"}
    monkeypatch.setattr(checks, "_TRIAL", "lowcomm_node.models.nothing")
    found = finding(checks.gpu)
    assert found.state is WARNING and "--device cpu" in found.remedy


def test_a_machine_can_be_looked_at_before_there_is_a_home(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    assert finding(checks.disk, home=tmp_path / "not" / "yet").figures["checkpoint"] == 0
    folder = tmp_path / "runs" / "f" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    assert finding(checks.disk, home=tmp_path).figures["checkpoint"] == 1000
    monkeypatch.setattr(checks.os, "access", lambda *_: False)
    assert f"make {tmp_path} writable" in finding(checks.disk, home=tmp_path).remedy
    assert "127.0.0.1" in own_hosts()
