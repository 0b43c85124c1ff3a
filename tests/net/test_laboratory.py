"""The laboratory itself: its NATs and firewalls are what their names say, and nothing of it
remains."""

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from laboratory import Host, Lab
from namespaces import LaboratoryError, existing, processes, tool
from nat import Block, Nat
from shaping import Link

from helpers.waiting import until

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]
CONES = [Nat.FULL_CONE, Nat.PORT_RESTRICTED]
Address = tuple[str, int]


# What hosts do with their sockets


def address_of(host: Host, sock: socket.socket) -> Address:
    """Where others on the same network reach it."""
    return host.addresses[6 if sock.family == socket.AF_INET6 else 4], sock.getsockname()[1]


def seen_by(server: Host, sock: socket.socket) -> Address:
    """The address that a server sees a UDP socket at."""
    with server.socket(version=6 if sock.family == socket.AF_INET6 else 4) as answering:
        sock.sendto(b"who am I?", address_of(server, answering))
        return answering.recvfrom(100)[1][:2]


def tcp_seen_by(server: Host, client: Host, port: int = 0) -> tuple[Address, int]:
    """The address that a server sees a TCP connection come from, and the client's own port."""
    with (
        server.socket(socket.SOCK_STREAM) as listening,
        client.socket(socket.SOCK_STREAM, port) as calling,
    ):
        listening.listen()
        calling.connect(address_of(server, listening))
        answering, address = listening.accept()
        answering.close()
        return address, calling.getsockname()[1]


def has_received(sock: socket.socket) -> bool:
    """Whether something is there to be read, or to be accepted."""
    return bool(select.select([sock], (), (), 0)[0])


def arrives(sender: socket.socket, receiver: socket.socket, address: Address) -> bool:
    """Send a datagram and receive it. Raises TimeoutError."""
    sender.sendto(b"hello", address)
    return receiver.recv(100) == b"hello"


def is_refused(by: Host, sender: socket.socket, receiver: socket.socket, address: Address) -> bool:
    """Send a datagram, wait until a firewall has dropped one, and look whether nothing has
    arrived."""
    before = by.refused()
    with suppress(PermissionError):  # that is what a host's own firewall says
        sender.sendto(b"hello", address)
    until(lambda: by.refused() > before, 20, "a datagram is refused")
    return not has_received(receiver)


def can_call(client: Host, listening: socket.socket, address: Address) -> bool:
    """Open a TCP connection. Raises TimeoutError."""
    with client.socket(socket.SOCK_STREAM, version=ip_address(address[0]).version) as calling:
        calling.connect(address)
        listening.accept()[0].close()
        return True


def is_call_refused(by: Host, client: Host, listening: socket.socket, address: Address) -> bool:
    """Call, wait until a firewall has dropped something, and look whether no connection has come
    about."""
    with client.socket(socket.SOCK_STREAM, version=ip_address(address[0]).version) as calling:
        before = by.refused()
        calling.setblocking(False)
        calling.connect_ex(address)
        until(lambda: by.refused() > before, 20, "a call is refused")
        return not has_received(listening)


@dataclass
class Peer:
    """A host at home with a UDP socket, and the address that others would send to."""

    host: Host
    sock: socket.socket
    mapped: Address

    @classmethod
    def of(cls, host: Host, server: Host) -> "Peer":
        """A socket that has asked a server for its address."""
        sock = host.socket()
        return cls(host, sock, seen_by(server, sock))

    def hears(self, other: "Peer") -> bool:
        """The other one sends to us; if it arrives, we know from where. It arrives or our router
        refuses it."""
        router = self.host.router
        before = router.refused()
        other.sock.sendto(b"hello", self.mapped)
        until(
            lambda: has_received(self.sock) or router.refused() > before,
            20,
            "a datagram is let in or refused",
        )
        if not has_received(self.sock):
            return False
        other.mapped = self.sock.recvfrom(100)[1]
        return True


# Addresses


def test_public_addresses_are_such_that_programs_tell_them_to_others(lab: Lab):
    server, alice = lab.public("server", ip=(4, 6)), lab.home("alice", ip=(4, 6))
    public = (*server.addresses.values(), alice.public_address, alice.addresses[6])
    assert all(ip_address(address).is_global for address in public)
    assert ip_address(alice.address).is_private
    assert server.public_address == server.address


def test_programs_in_a_host_see_its_network_alone(lab: Lab):
    alice = lab.home("alice")
    done = alice.run(["ip", "-brief", "address"])
    assert done.returncode == 0
    assert alice.address in done.stdout
    assert [line.split()[0].partition("@")[0] for line in done.stdout.splitlines()] == [
        "lo",
        "eth0",
    ]


def test_hosts_of_one_home_share_a_public_address_and_reach_each_other(lab: Lab):
    server, alice = lab.public("server"), lab.home("alice")
    bob = alice.router.host("bob")
    assert alice.public_address == bob.public_address
    ours, theirs = alice.socket(), bob.socket()
    ours.sendto(b"hello", address_of(bob, theirs))
    assert theirs.recvfrom(100) == (b"hello", address_of(alice, ours))
    assert seen_by(server, ours)[0] == seen_by(server, theirs)[0] == alice.public_address


def test_a_full_cone_serves_one_host(lab: Lab):
    with pytest.raises(ValueError, match="alice alone"):
        lab.home("alice", nat=Nat.FULL_CONE).router.host("bob")


# Mappings and filters of NATs, RFC 4787


@pytest.mark.parametrize("nat", CONES)
def test_a_cone_maps_a_port_to_the_same_one_for_all_destinations(lab: Lab, nat: Nat):
    first, second, alice = lab.public("first"), lab.public("second"), lab.home("alice", nat=nat)
    sock = alice.socket()
    assert seen_by(first, sock) == seen_by(first, sock) == seen_by(second, sock)
    mapped, port = tcp_seen_by(first, alice)
    assert tcp_seen_by(second, alice, port) == (mapped, port)
    assert mapped[0] == alice.public_address


def test_a_symmetric_nat_maps_a_port_to_another_one_for_each_destination(lab: Lab):
    servers = [lab.public(name) for name in ("first", "second", "third")]
    alice = lab.home("alice", nat="symmetric")
    sock = alice.socket()
    # Drawn at random, so two may be equal by chance, but not three.
    assert len({seen_by(server, sock) for server in servers}) > 1
    port = tcp_seen_by(servers[0], alice)[1]
    assert len({tcp_seen_by(server, alice, port)[0] for server in servers}) > 1
    assert {seen_by(server, sock)[0] for server in servers} == {alice.public_address}


@pytest.mark.parametrize("nat", Nat)
def test_only_a_full_cone_lets_in_who_was_not_sent_to(lab: Lab, nat: Nat):
    server, stranger, alice = (
        lab.public("server"),
        lab.public("stranger"),
        lab.home("alice", nat=nat),
    )
    inside, outside = alice.socket(), server.socket()
    inside.sendto(b"hello", address_of(server, outside))
    mapped = outside.recvfrom(100)[1]
    assert arrives(outside, inside, mapped), "whoever was sent to may answer"
    for other in (
        stranger.socket(),
        server.socket(),
    ):  # another address, and another port of the same
        if nat is Nat.FULL_CONE:
            assert arrives(other, inside, mapped)
        else:
            assert is_refused(alice.router, other, inside, mapped)


@pytest.mark.parametrize("nat", Nat)
def test_no_nat_lets_in_what_comes_to_a_port_without_a_mapping(lab: Lab, nat: Nat):
    stranger, alice = lab.public("stranger"), lab.home("alice", nat=nat)
    inside = alice.socket()
    unmapped = (alice.public_address, inside.getsockname()[1])
    assert is_refused(alice.router, stranger.socket(), inside, unmapped)


@pytest.mark.parametrize("nat", [Nat.FULL_CONE, Nat.PORT_RESTRICTED])
def test_only_a_full_cone_lets_in_calls_to_a_port_that_has_called_others(lab: Lab, nat: Nat):
    server, stranger, alice = (
        lab.public("server"),
        lab.public("stranger"),
        lab.home("alice", nat=nat),
    )
    mapped, port = tcp_seen_by(server, alice)
    listening = alice.socket(socket.SOCK_STREAM, port)
    listening.listen()
    if nat is Nat.FULL_CONE:
        assert can_call(stranger, listening, mapped)
    else:
        assert is_call_refused(alice.router, stranger, listening, mapped)


@pytest.mark.parametrize(
    ("first", "second", "works"),
    [
        (Nat.PORT_RESTRICTED, Nat.PORT_RESTRICTED, True),
        (Nat.FULL_CONE, Nat.SYMMETRIC, True),
        (Nat.PORT_RESTRICTED, Nat.SYMMETRIC, False),
        (Nat.SYMMETRIC, Nat.SYMMETRIC, False),
    ],
)
def test_udp_holes_can_be_punched_unless_mappings_are_not_foreseen(
    lab: Lab, first: Nat, second: Nat, works: bool
):
    server = lab.public("server")
    alice, bob = (
        Peer.of(lab.home(name, nat), server) for name, nat in (("alice", first), ("bob", second))
    )
    # Each sends to where the server has seen the other, and then to where it has heard the other
    # from.
    heard = [(bob.hears(alice), alice.hears(bob)) for _ in range(2)]
    assert heard[-1] == (works, works)


@pytest.mark.parametrize(("nat", "works"), [(Nat.PORT_RESTRICTED, True), (Nat.SYMMETRIC, False)])
def test_tcp_opens_at_once_from_both_sides_where_mappings_are_foreseen(
    lab: Lab, nat: Nat, works: bool
):
    server, alice, bob = lab.public("server"), lab.home("alice", nat=nat), lab.home("bob", nat=nat)
    mappings = {host: tcp_seen_by(server, host) for host in (alice, bob)}
    ours, theirs = (host.socket(socket.SOCK_STREAM, mappings[host][1]) for host in (alice, bob))
    for calling, other in ((ours, bob), (theirs, alice)):
        calling.setblocking(False)
        calling.connect_ex(mappings[other][0])
        if calling is ours:
            until(bob.router.refused, 20, "the first call is refused: nothing has gone out there")

    def connected() -> list[socket.socket]:
        return select.select((), [ours, theirs], (), 0)[1]

    if works:
        until(lambda: len(connected()) == 2, 20, "both are connected")
        assert [sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for sock in (ours, theirs)] == [
            0,
            0,
        ]
        ours.sendall(b"hello")
        theirs.settimeout(20)
        assert theirs.recv(100) == b"hello"
    else:
        until(alice.router.refused, 20, "the second call is refused too")
        assert connected() == []


# IPv6


def test_hosts_of_ipv6_alone_reach_each_other_and_nobody_else(lab: Lab):
    six, other, four = lab.public("six", ip=(6,)), lab.public("other", ip=(6,)), lab.public("four")
    sock = six.socket(version=6)
    assert seen_by(other, sock) == address_of(six, sock)
    with pytest.raises(OSError, match="unreachable"):
        six.socket().sendto(b"hello", (four.address, 9))
    with pytest.raises(OSError, match=r"unreachable|assign"):
        four.socket(version=6).sendto(b"hello", (six.address, 9))


@pytest.mark.parametrize("nat", Nat)
def test_ipv6_is_not_translated_and_homes_let_in_answers_alone(lab: Lab, nat: Nat):
    server, stranger = lab.public("server", ip=(4, 6)), lab.public("stranger", ip=(6,))
    alice = lab.home("alice", nat=nat, ip=(4, 6))
    inside, outside = alice.socket(version=6), server.socket(version=6)
    inside.sendto(b"hello", address_of(server, outside))
    assert outside.recvfrom(100)[1][:2] == address_of(alice, inside)
    assert arrives(outside, inside, address_of(alice, inside))
    assert is_refused(alice.router, stranger.socket(version=6), inside, address_of(alice, inside))


# Firewalls


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("at", ["router", "host", "server"])
def test_a_block_drops_its_protocol_and_nothing_else_until_it_is_lifted(
    lab: Lab, at: str, version: int
):
    server, alice = lab.public("server", ip=(4, 6)), lab.home("alice", ip=(4, 6))
    blocking = {"router": alice.router, "host": alice, "server": server}[at]
    inside, outside = alice.socket(version=version), server.socket(version=version)
    listening = server.socket(socket.SOCK_STREAM, version=version)
    listening.listen()
    udp, tcp = address_of(server, outside), address_of(server, listening)
    assert arrives(inside, outside, udp)
    assert can_call(alice, listening, tcp)
    blocking.block(Block("udp"))
    assert is_refused(blocking, inside, outside, udp), "although it was let through before"
    assert can_call(alice, listening, tcp)
    blocking.block(Block("tcp"))
    assert arrives(inside, outside, udp)
    assert is_call_refused(blocking, alice, listening, tcp)
    blocking.block()
    assert arrives(inside, outside, udp)
    assert can_call(alice, listening, tcp)


def test_a_block_spares_the_ports_that_it_excepts(lab: Lab):
    server, alice = lab.public("server"), lab.home("alice")
    spared, other = server.socket(socket.SOCK_STREAM, 443), server.socket(socket.SOCK_STREAM, 8443)
    spared.listen()
    other.listen()
    alice.router.block(Block("tcp", except_ports=(443, 80)), Block("udp"))
    assert can_call(alice, spared, address_of(server, spared))
    assert is_call_refused(alice.router, alice, other, address_of(server, other))


def test_a_block_at_a_host_leaves_its_loopback_alone(lab: Lab):
    alice = lab.public("alice")
    alice.block(Block("udp"), Block("tcp"))
    sock = alice.socket()
    sock.sendto(b"hello", ("127.0.0.1", sock.getsockname()[1]))
    assert sock.recv(100) == b"hello"


# What remains


def machine() -> str:
    """What the laboratory must not change: devices, addresses, routes and forwarding of this
    machine."""
    forwarding = [
        Path(f"/proc/sys/net/{path}").read_text()
        for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding")
    ]
    return "".join(
        (
            tool("ip", "-oneline", "link"),
            tool("ip", "-brief", "address"),
            tool("ip", "route"),
            *forwarding,
        )
    )


def is_alive(pid: int) -> bool:
    """Whether a process still runs."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("needs_a_laboratory")
def test_nothing_remains_also_after_a_failure():
    before = machine()
    with pytest.raises(RuntimeError, match="a test fails"), Lab(grace=0.1) as lab:
        server, alice = (
            lab.public("server", link=Link()),
            lab.home("alice", nat="full-cone", link=Link()),
        )
        server.popen(["sleep", "600"])
        stubborn = alice.popen(
            ["sh", "-c", "trap '' TERM; setsid sleep 600 & echo; wait"], stdout=subprocess.PIPE
        )
        with stubborn.stdout:
            stubborn.stdout.readline()
        pids = [
            *until(
                lambda: len(found := processes(existing(lab.prefix))) >= 4 and found,
                20,
                "three sleeps, one shell",
            ),
            server.link.process.pid,
            alice.link.process.pid,
            lab.warden.process.pid,
        ]
        open_socket = alice.socket()
        assert machine() == before, "nor is anything changed meanwhile"
        raise RuntimeError("a test fails")
    assert existing(lab.prefix) == []
    assert [pid for pid in pids if is_alive(pid)] == []
    assert (server.link.process.returncode, alice.link.process.returncode) == (0, 0), (
        "asked to end, not killed"
    )
    assert open_socket.fileno() == -1
    assert machine() == before


ABANDONED = """
import sys
sys.path.insert(0, sys.argv[1])
from laboratory import Lab, Link
with Lab() as lab:
    alice = lab.home("alice", link=Link())
    sleeper = alice.popen(["sleep", "600"]).pid
    print(lab.prefix, sleeper, alice.link.process.pid, lab.warden.process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("with_warden", [False, True])
@pytest.mark.usefixtures("needs_a_laboratory")
def test_nothing_remains_of_a_process_that_was_killed(with_warden: bool):
    with subprocess.Popen(
        [sys.executable, "-c", ABANDONED, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        prefix, *pids = process.stdout.readline().split()
        child, emulator, warden = map(int, pids)
        with Lab():
            assert len(existing(prefix)) == 3, "a laboratory leaves those of living processes alone"
        if with_warden:
            os.kill(warden, signal.SIGKILL)
        process.kill()
    if with_warden:
        assert is_alive(child)
        with Lab():
            assert existing(prefix) == [], "the next laboratory removes what is left"
    until(lambda: not existing(prefix), 20, "namespaces removed")
    until(lambda: not any(map(is_alive, (child, emulator, warden))), 20, "processes ended")


def test_two_laboratories_know_nothing_of_each_other(lab: Lab):
    with Lab() as other:
        ours, theirs = lab.public("server"), other.public("server")
        assert ours.address == theirs.address
        assert ours.namespace != theirs.namespace
        asking, answering, stranger = (
            lab.public("client").socket(),
            ours.socket(port=5000),
            theirs.socket(port=5000),
        )
        asking.sendto(b"hello", (ours.address, 5000))
        assert answering.recv(100) == b"hello"
        assert not has_received(stranger)
    asking.sendto(b"still here", (ours.address, 5000))
    assert answering.recv(100) == b"still here"


def test_errors_name_the_command_and_its_complaint(lab: Lab):
    with pytest.raises(LaboratoryError, match=r"ip -n .*-server.*nowhere"):
        lab.public("server").ip("link set nowhere up")
    with pytest.raises(ValueError, match="can't be called 'a b'"):
        lab.public("a b")
    with pytest.raises(LaboratoryError, match=r"link=Link\(\)"):
        _ = lab.public("alice").link
