"""Findings say what was seen, and remedies have this machine's own values in them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.doctor.case import Case
from lowcomm_node.doctor.findings import Finding, State, exit_code, read_finding
from lowcomm_node.doctor.judging import judge
from lowcomm_node.doctor.machine import (
    Disk,
    Gpu,
    Machine,
    Memory,
    Tcp,
    look_at_machine,
    own_hosts,
    read_gpus,
    read_resent,
)
from lowcomm_node.doctor.nat import Sight
from lowcomm_node.doctor.scouts import over_quic
from lowcomm_node.doctor.sights import Helper, Scouting, Subject, Survey
from lowcomm_node.doctor.survey import choose_helpers
from lowcomm_node.libp2p.multiaddress import EntryPoint
from lowcomm_node.probing.measuring import Speed
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.probes import Kind, Seen

ME, HELPER, RELAY = (Identity(letter * 32).peer_id for letter in (b"m", b"h", b"r"))
HOME = Path("/srv/lowcomm")
OUTER, LAN = "44.128.0.13", "192.168.1.7"
MACHINE = Machine(
    Disk(free=10**11, checkpoint=10**9, writable=True),
    Memory(total=10**11, free=10**10),
    (),
    torch_sees_gpus=True,
    tcp=Tcp("bbr", ("bbr", "cubic"), 0.0),
)
BEHIND = Subject(
    peer_id=ME,
    hosts=("127.0.0.1", LAN),
    listens=(
        f"/ip4/44.128.0.10/tcp/31330/p2p/{RELAY}/p2p-circuit",
        f"/ip4/{LAN}/tcp/40001",
        f"/ip4/{LAN}/udp/40002/quic-v1",
        "/ip6/2a00:128::7/tcp/40006",
    ),
    direct=45123,
    certificate=b"der",
    told=(f"{LAN}:45123",),
)
PUBLIC = replace(
    BEHIND, hosts=(OUTER,), listens=(f"/ip4/{OUTER}/tcp/40001",), told=(f"{OUTER}:45123",)
)  # fmt: skip


def helper(number: int = 10, sees: str = OUTER, offset: float = 0.0, **reached: bool) -> Helper:
    """A helper at a public address."""
    entry = EntryPoint(HELPER, f"/ip4/44.128.0.{number}/tcp/31330")
    told = tuple((Kind[name.upper()], ok) for name, ok in reached.items())
    return Helper(entry, f"44.128.0.{number}", Seen(f"/ip4/{sees}/tcp/9", 0.0, ()), offset, told)


def survey(*helpers: Helper, **options: Any) -> Survey:
    """What helpers told."""
    udp = Scouting(True, tuple(Sight(h.host, "scout", OUTER, 7) for h in helpers), False, True, helper="x")
    defaults: dict[str, Any] = {"helpers": helpers, "udp": udp, "speed": Speed(0.02, 1e6, 2e6), "outward": LAN}
    return Survey(**defaults | options)


def findings(**options: Any) -> dict[str, Finding]:
    """What is found, by name; a node behind a router that is well, unless it is said otherwise."""
    defaults: dict[str, Any] = {"home": HOME, "machine": MACHINE, "peers": ("ADDR",), "subject": BEHIND, "dht_peers": 3}
    found = judge(Case(**defaults | options))
    for finding in found:
        assert finding == read_finding(json.loads(json.dumps(finding.to_json()))), "it travels as it is"
    return {finding.name: finding for finding in found}


NOTHING = {"direct": False, "tcp": False, "quic": False}


def test_a_port_to_forward_is_named_with_the_address_to_forward_it_to():
    found = findings(survey=survey(helper(10, **NOTHING), helper(11, **NOTHING)))
    assert found["nat"].figures["kind"] == "port-restricted" and found["nat"].state is State.OK
    outside = found["outside"]
    assert outside.state is State.WARNING and RELAY[-6:] in outside.value and "punched" in outside.value
    assert outside.remedy == (
        f"forward TCP port 45123 to {LAN} and TCP and UDP port 40001 to {LAN} in your router, and start the node with "
        f"--port 45123 --dht-port 40001 --announce {OUTER}:45123"
    )
    assert outside.figures == {**NOTHING, "relays": [RELAY]}


def test_who_can_be_reached_by_no_way_at_all_is_told_that_this_is_a_fault():
    alone = replace(BEHIND, listens=BEHIND.listens[1:])
    found = findings(subject=alone, survey=survey(helper(**NOTHING)))
    assert found["outside"].state is State.FAULT and "nobody reaches it" in found["outside"].value
    assert exit_code(found.values()) == 4


def test_holes_are_not_promised_through_a_symmetric_router():
    udp = Scouting(True, (Sight("44.128.0.10", "s", OUTER, 7), Sight("44.128.0.11", "s", OUTER, 8)), False, True)
    found = findings(survey=survey(helper(10, **NOTHING), helper(11, **NOTHING), udp=udp))
    assert found["nat"].state is State.WARNING and found["nat"].figures["kind"] == "symmetric"
    assert found["nat"].remedy == found["outside"].remedy
    assert "punched" not in found["outside"].value


def test_a_firewall_is_told_from_a_router():
    found = findings(subject=PUBLIC, survey=survey(helper(**NOTHING)))
    assert found["nat"].figures["kind"] == "firewall"
    assert "ufw allow 45123/tcp && ufw allow 40001/tcp && ufw allow 40001/udp" in found["nat"].remedy
    assert "router" not in found["outside"].remedy


def test_a_machine_with_an_address_of_its_own_that_is_called_is_well():
    found = findings(subject=PUBLIC, survey=survey(helper(direct=True, tcp=True, quic=True)))
    assert found["nat"].figures["kind"] == "none"
    assert (found["outside"].state, found["outside"].remedy) == (State.OK, "")
    assert exit_code(found.values()) == 0


def test_a_forwarded_port_of_which_nobody_is_told_is_no_use():
    udp = Scouting(True, (Sight("44.128.0.10", "s", OUTER, 7),), True, True)
    found = findings(survey=survey(helper(direct=True, tcp=True, quic=True), udp=udp))
    assert found["outside"].state is State.WARNING
    assert f"--announce {OUTER}:45123" in found["outside"].remedy
    for told in (f"{OUTER}:45123", "node.example.org:45123"):
        found = findings(subject=replace(BEHIND, told=(told,)), survey=survey(helper(direct=True), udp=udp))
        assert found["outside"].state is State.OK, told
    both = replace(BEHIND, told=(f"{LAN}:45123", "[fd00::7]:45123"))
    found = findings(subject=both, survey=survey(helper(direct=True), udp=udp))
    assert found["outside"].state is State.WARNING, "an address of IPv6 is no name"


SIX = "2a00:128::7"
# The only address of a machine.
ALL_SIX = replace(
    BEHIND, hosts=(SIX,), told=("[fd00::7]:45123",), listens=(f"/ip6/{SIX}/tcp/40006", f"/ip6/{SIX}/udp/40007/quic-v1")
)


def test_remedies_for_a_machine_that_has_ipv6_alone_can_be_copied():
    def six(**reached: bool) -> Helper:
        return replace(helper(**reached), host="2a00:128::10", seen=Seen(f"/ip6/{SIX}/tcp/9", 0.0, ()))

    found = findings(subject=ALL_SIX, survey=survey(six(direct=True), udp=None, outward=SIX))["outside"]
    assert found.state is State.WARNING and f"not told of [{SIX}]:45123" in found.value
    assert f"--port 45123 --dht-port 40006 --announce [{SIX}]:45123" in found.remedy
    told = replace(ALL_SIX, told=(f"[{SIX}]:45123",))
    assert findings(subject=told, survey=survey(six(direct=True), udp=None))["outside"].state is State.OK
    shut = findings(subject=ALL_SIX, survey=survey(six(**NOTHING), udp=None, outward=SIX))
    assert "ufw allow 45123/tcp && ufw allow 40006/tcp && ufw allow 40006/udp" in shut["outside"].remedy
    assert f"[{SIX}]:9" in shut["nat"].figures["seen"]
    behind = replace(ALL_SIX, hosts=("fd00::7",), listens=("/ip6/fd00::7/tcp/40006",))
    shut = findings(subject=behind, survey=survey(six(**NOTHING), udp=None, outward="fd00::7"))
    assert "TCP and UDP port 40006 to fd00::7" in shut["outside"].remedy
    assert f"--announce [{SIX}]:45123" in shut["outside"].remedy


def test_what_only_neighbours_have_tried_is_no_word_of_the_internet():
    found = findings(survey=survey(helper(sees="192.168.1.9", direct=True), udp=None))
    assert "from within this network only" in found["outside"].value
    assert found["nat"].state is State.UNKNOWN and found["nat"].remedy


def test_neighbours_help_only_where_there_is_nobody_else():
    def chosen(*helpers: Helper) -> list[Helper]:
        pairs: Any = [(None, each) for each in helpers]
        return [each for _, each in choose_helpers(pairs)]

    near, far = replace(helper(sees="192.168.1.9"), host="192.168.1.5"), helper(10)
    assert chosen(near, far) == [far]
    assert chosen(near) == [near]
    assert chosen(far, far, helper(11)) == [far, helper(11)]


@pytest.mark.parametrize(
    ("offsets", "state", "words"),
    [
        ((0.01, -0.02, 0.0), State.OK, "right"),
        ((-12.3, -12.4, -12.2), State.FAULT, "this clock is 12.3 s ahead of 3 peers: run `timedatectl set-ntp true`"),
        ((1.5, 1.6, 1.4), State.WARNING, "this clock is 1.5 s behind 3 peers: run"),
        ((0.0, 0.1, 500.0), State.OK, "0.1 s behind"),  # one whose own clock is wrong
        ((60.0,), State.FAULT, "if it is that one's clock"),
    ],
)
def test_a_clock_is_judged_by_most_of_those_that_answer(offsets: tuple[float, ...], state: State, words: str):
    found = findings(survey=survey(*(helper(10 + k, offset=offset, direct=True) for k, offset in enumerate(offsets))))
    assert found["clock"].state is state and words in f"{found['clock'].value} {found['clock'].remedy}"


def test_udp_that_does_not_get_out_is_told_with_where_it_should_have_gone():
    entry = f"/ip4/44.128.0.10/udp/31330/quic-v1/p2p/{HELPER}"
    found = findings(survey=survey(helper(**NOTHING), udp=Scouting(False, helper=entry)))
    assert found["udp"].state is State.WARNING
    assert LAN in found["udp"].remedy and "44.128.0.10 port 31330" in found["udp"].remedy


def test_only_who_says_that_he_takes_udp_is_held_against_the_network():
    told = f"/ip4/44.128.0.10/udp/31331/quic-v1/p2p/{HELPER}"
    elsewhere = f"/ip4/9.9.9.9/udp/31331/quic-v1/p2p/{HELPER}"
    somebody = f"/ip4/44.128.0.10/udp/1/quic-v1/p2p/{RELAY}"
    says = replace(helper(), seen=Seen("", 0.0, (elsewhere, somebody, told)))
    assert (str(over_quic(says)[0]), over_quic(says)[1]) == (told, True)
    silent = replace(helper(), seen=Seen("", 0.0, (elsewhere, somebody)))
    assert (over_quic(silent)[0].dial, over_quic(silent)[1]) == ("/ip4/44.128.0.10/udp/31330/quic-v1", False)


def test_a_slow_line_is_told_and_one_that_was_not_measured_too():
    found = findings(survey=survey(helper(direct=True), speed=Speed(0.3, 40_000, 2e6)))
    assert found["bandwidth"].state is State.WARNING and "40 kB/s" in found["bandwidth"].remedy
    found = findings(survey=survey(helper(direct=True), speed=None, no_speed="measure again tomorrow"))
    assert found["bandwidth"].state is State.UNKNOWN and "tomorrow" in found["bandwidth"].value


def test_ipv6_is_judged_only_where_there_is_some():
    six = replace(BEHIND, hosts=(*BEHIND.hosts, "2a00:128::7"))
    assert findings(survey=survey(helper()))["ipv6"].state is State.OK
    assert findings(subject=six, survey=survey(helper()))["ipv6"].state is State.UNKNOWN
    lost = findings(subject=six, survey=survey(helper(), ipv6=Scouting(False, helper="/ip6/2a00::1/tcp/1/p2p/x")))[
        "ipv6"
    ]
    assert lost.state is State.WARNING and "2a00:128::7" in lost.remedy
    reached = Scouting(True, reached=((Kind.TCP, True),))
    assert "libp2p over TCP arrive" in findings(subject=six, survey=survey(helper(), ipv6=reached))["ipv6"].value
    assert [target.port for target in six.targets(6)] == [45123, 40006], "the ports of IPv6 are others"


def test_where_nobody_helps_nothing_is_claimed():
    silent = Survey(silent=(("ADDR", "answers, but not to probes"),))
    found = findings(survey=silent)
    for name in ("clock", "nat", "outside", "udp", "bandwidth"):
        assert found[name].state is State.UNKNOWN and "not to probes" in found[name].value, name
    assert exit_code(found.values()) == 0


def test_a_network_that_was_not_looked_at_says_how_it_can_be():
    found = findings(peers=(), subject=None, dht_peers=None, absent="start it")
    assert (found["node"].state, found["node"].remedy) == (State.UNKNOWN, "start it")
    assert found["dht"].state is State.UNKNOWN and "doctor --peers ADDR" in found["dht"].remedy
    assert {"clock", "nat", "outside"}.isdisjoint(found) and exit_code(found.values()) == 0


def test_a_swarm_that_does_not_answer_has_an_exit_code_of_its_own():
    found = findings(subject=None, dht_peers=None, trouble="No peer answers at ADDR")
    assert found["dht"].state is State.FAULT and "ADDR" in found["dht"].remedy
    assert exit_code(found.values()) == 6


def test_a_home_that_enters_by_what_it_remembers_says_so():
    found = findings(peers=(), subject=None, dht_peers=0, status=STATUS)["dht"]
    assert found.value == "nobody answers at the addresses that this home remembers"
    found = findings(peers=(), subject=None, dht_peers=None, trouble="looking for the swarm")["dht"]
    assert "compare the addresses that this home remembers with" in found.remedy


def test_a_node_that_hangs_is_a_fault():
    found = findings(peers=(), subject=None, dht_peers=None, absent="end it with `kill 42`", hangs=True)
    assert (found["node"].state, found["node"].remedy) == (State.FAULT, "end it with `kill 42`")
    assert exit_code(found.values()) == 4


def test_a_port_that_is_taken_is_no_fault_of_the_swarm():
    found = findings(subject=None, dht_peers=None, absent="start it", broken="Port 45123 is in use: choose another")
    assert (found["node"].state, found["dht"].state) == (State.FAULT, State.UNKNOWN)
    assert found["node"].remedy == found["dht"].remedy == "Port 45123 is in use: choose another"
    assert exit_code(found.values()) == 4


STATUS: dict[str, Any] = {
    "peer_id": ME, "phase": "training", "waiting": "training alone: no other peer is alive", "peers": 0, "warnings": [],
    "run": {"name": "test", "fingerprint": "abc"}, "exchanges": {"completed": 2, "failed": 1},
    "trainer": {"device": "cpu"},
}  # fmt: skip


def test_a_node_says_what_it_waits_for_and_whom_it_does_not_reach():
    lost = {"peer_id": HELPER, "route": None, "route_reason": "direct: can't be reached"}
    members = [lost, {"peer_id": ME, "route": "relay abcdef", "route_reason": None}]
    found = findings(status=STATUS, members=members, survey=survey(helper()))
    assert "training alone" in found["node"].value and found["node"].state is State.OK
    assert found["routes"].state is State.WARNING and "1 relay" in found["routes"].value
    assert found["routes"].remedy.endswith(f"lowcomm-node ping {HELPER[-6:]}")


GPU = Gpu("H100", 80 * 10**9, 70 * 10**9)


@pytest.mark.parametrize(
    ("machine", "name", "state", "words"),
    [
        ({"disk": Disk(10**12, 0, False)}, "disk", State.FAULT, f"make {HOME} writable"),
        ({"disk": Disk(10**8, 0, True)}, "disk", State.FAULT, "100.0 MB are free"),
        ({"disk": Disk(10**10, 6 * 10**9, True)}, "disk", State.FAULT, "a checkpoint has 6.0 GB"),
        ({"disk": Disk(10**10, 3 * 10**9, True)}, "disk", State.WARNING, "lower --keep"),
        ({"memory": Memory(10**9, 10**8)}, "memory", State.FAULT, "100.0 MB free of 1.0 GB"),
        ({"memory": Memory(10**9, 5 * 10**8)}, "memory", State.WARNING, "500.0 MB"),
        ({"tcp": Tcp("cubic", ("cubic",), 0.02)}, "congestion", State.WARNING, "net.ipv4.tcp_congestion_control=bbr"),
        ({"tcp": Tcp("cubic", ("cubic",), 0.0001)}, "congestion", State.OK, ""),
        ({"tcp": Tcp("", (), None)}, "congestion", State.UNKNOWN, ""),
        ({"gpus": (GPU,)}, "gpu", State.OK, ""),
        ({"gpus": (GPU,), "torch_sees_gpus": False}, "gpu", State.WARNING, "torch for CUDA to use the H100"),
        ({"gpus": (replace(GPU, free=10**6),)}, "gpu", State.WARNING, "nvidia-smi"),
    ],
)
def test_this_machine_is_judged(machine: dict[str, Any], name: str, state: State, words: str):
    found = findings(machine=replace(MACHINE, **machine))[name]
    assert found.state is state and words in found.remedy and bool(found.remedy) == bool(words), found


def test_where_a_node_may_choose_bbr_itself_a_line_that_loses_needs_no_remedy():
    found = findings(machine=replace(MACHINE, tcp=Tcp("cubic", ("cubic", "bbr"), 0.02)))["congestion"]
    assert found.state is State.OK and not found.remedy
    assert "2.00 %" in found.value and "go on with bbr" in found.value


def test_a_gpu_that_the_node_does_not_use_is_told():
    found = findings(machine=replace(MACHINE, gpus=(GPU,)), status=STATUS)["gpu"]
    assert found.state is State.WARNING and "--device cuda" in found.remedy


def test_what_tools_of_the_system_print_is_read():
    assert read_gpus("NVIDIA H100, SXM, 81559, 80000\nno such line\n") == (
        Gpu("NVIDIA H100, SXM", 81559 * 2**20, 80000 * 2**20),
    )
    head = "Tcp: RtoAlgorithm OutSegs RetransSegs\n"
    assert read_resent(f"Ip: 1\n{head}Tcp: 1 20000 400\n") == 0.02
    assert read_resent(f"{head}Tcp: 1 100 50\n") is None, "too few to tell"
    assert read_resent("") is None


def test_a_machine_can_be_looked_at_before_there_is_a_home(tmp_path: Path):
    machine = look_at_machine(tmp_path / "not" / "yet")
    assert machine.disk.free > 0 and machine.disk.writable and machine.memory.total >= machine.memory.free > 0
    assert "127.0.0.1" in own_hosts()
    folder = tmp_path / "runs" / "f" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    assert look_at_machine(tmp_path).disk.checkpoint == 1000


def test_a_finding_of_a_newer_release_is_read_as_far_as_it_is_known():
    finding = Finding(name="disk", state=State.OK, value="room")
    assert read_finding(finding.to_json() | {"since": 7}) == finding
