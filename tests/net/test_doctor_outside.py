"""``doctor`` behind real routers: what it tells of calls from outside is what the router does."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from laboratory import Host, Lab, Router
from nat import Block, Nat
from residents import PORT, Server

from helpers.processes import command, environment
from helpers.waiting import until
from lowcomm_node.doctor.checks import access
from lowcomm_node.doctor.observations import Helper, LargePackets, Observations
from lowcomm_node.doctor.probes import probe_packets
from lowcomm_node.doctor.report import State
from lowcomm_node.net.addresses import host_of, parse_entry_point
from lowcomm_node.net.hivemind_client import load_hivemind
from lowcomm_protocol.peers.probes import Seen

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]
KINDS = ("direct", "tcp", "quic")


def serve(host: Host, folder: Path) -> str:
    """Start a bootstrap server; its address."""
    return Server(host, folder / host.name).address(deadline=120)


def examine(host: Host, home: Path, *addresses: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """What ``doctor`` finds on a host, by name; ``code``: its exit code."""
    asked = [word for address in addresses for word in ("--peers", address)]
    arguments = ("doctor", "--json", "--home", str(home), *asked)
    done = host.run(command("lowcomm_node", *arguments), timeout=150, env=environment())
    assert done.returncode == code and "Traceback" not in done.stderr, (done.stdout, done.stderr)
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


# most of a minute; what doctor makes of such sights is in tests/unit/doctor/test_doctor_checks.py
@pytest.mark.soak
def test_a_home_and_a_public_host_are_told_apart(lab: Lab, tmp_path: Path) -> None:
    address = serve(lab.public("server"), tmp_path)
    home, public = lab.home("home", nat=Nat.PORT_RESTRICTED), lab.public("public")
    with ThreadPoolExecutor() as pool:
        at_home, in_public = pool.map(
            lambda host: examine(host, tmp_path / host.name, address), (home, public)
        )

    # Behind a router that lets nothing in: that is said, and which way is left, and what to forward
    # where.
    outside = at_home["outside"]
    assert outside["state"] == "warning" and "calls do not arrive" in outside["value"]
    assert outside["figures"] == {
        **dict.fromkeys(KINDS, False),
        "relays": [address.rpartition("/")[2]],
    }
    assert f"to {home.address} in your router" in outside["remedy"]
    assert f"--announce {home.public_address}:" in outside["remedy"]
    assert at_home["nat"]["figures"]["kind"] == "behind-nat", (
        "one server alone can't tell which kind"
    )
    assert at_home["udp"]["figures"] == {"gets_out": True, "gets_in": False}

    # On an address of its own everything arrives.
    assert in_public["outside"]["state"] == "ok" and not in_public["outside"]["remedy"], in_public[
        "outside"
    ]
    assert {kind: in_public["outside"]["figures"][kind] for kind in KINDS} == dict.fromkeys(
        KINDS, True
    )
    assert in_public["nat"]["figures"]["kind"] == "none"


PORTAL = """
import contextlib, socket
with socket.create_server(("", 8080)) as server:
    while True:
        caller, _ = server.accept()
        with contextlib.suppress(OSError):
            caller.recv(1024)
            caller.sendall(b"HTTP/1.1 302 Found\\r\\n"
                           b"Location: http://login.example/start\\r\\n"
                           b"Content-Length: 0\\r\\n\\r\\n")
        caller.close()
"""


def lose_large_packets(home: Host) -> None:
    """Make a black hole of a home's line: what it drops, nobody is told of."""
    assert home.router is not None
    home.router.block(Block("tcp", larger_than=1300), Block("udp", larger_than=1300))


def want_a_login(home: Host) -> None:
    """Have a login page answer in the place of everybody, as hotels do."""
    assert home.router is not None
    home.router.block(Block("udp"))
    home.router.popen([sys.executable, "-c", PORTAL])
    redirect = ["-i", "lan", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "8080"]
    home.router.run(["iptables", "-t", "nat", "-I", "PREROUTING", *redirect])
    home.router.run(["iptables", "-I", "INPUT", "-i", "lan", "-j", "ACCEPT"])
    router = home.router
    until(lambda: answers(router), 30, "the login page is there")


def answers(router: Router) -> bool:
    """Whether its login page is there, as it sees itself."""
    with router.inside():
        try:
            socket.create_connection(("127.0.0.1", 8080), 1).close()
        except OSError:
            return False
    return True


def at(host: Host, look: Callable[..., Any], *arguments: object) -> Any:
    """What is seen from a host, by this process."""
    with host.inside():
        return look(*arguments)


def sent_large(helper: Helper) -> tuple[LargePackets, ...]:
    """Whether large packets get through."""
    return asyncio.run(probe_packets([helper], loopback=False))


def test_lost_packets_a_login_page_and_missing_names_are_seen(lab: Lab, tmp_path: Path) -> None:
    address = serve(lab.public("server"), tmp_path)
    entry = parse_entry_point(address)
    well, lossy, held = (lab.home(name) for name in ("well", "lossy", "held"))
    lose_large_packets(lossy)
    want_a_login(held)
    helper = Helper(entry, host_of(entry.dial) or "", Seen("", 0.0, ()), 0.0)
    asyncio.run(load_hivemind())
    seen = Observations(home=tmp_path, asked=(address,))
    with ThreadPoolExecutor() as pool:
        sent = [pool.submit(at, home, sent_large, helper) for home in (well, lossy)]
        portal = pool.submit(at, held, access.portal, seen).result()
        names = pool.submit(at, held, access.names, seen).result()
    assert [one.result() for one in sent] == [(LargePackets(ok, ok),) for ok in (True, False)]
    assert portal is not None and "http://login.example/start" in portal.remedy, portal
    assert names is not None and names.state is State.WARNING, "no laboratory has name servers"
    assert "no name server" in names.value, names


@pytest.mark.soak  # most of a minute; what it looks at is in the test above
def test_a_line_that_loses_large_packets_and_a_login_page_are_told(
    lab: Lab, tmp_path: Path
) -> None:
    address = serve(lab.public("server"), tmp_path)
    lossy, held = lab.home("lossy"), lab.home("held")
    lose_large_packets(lossy)
    want_a_login(held)
    with ThreadPoolExecutor() as pool:
        in_lossy = pool.submit(examine, lossy, tmp_path / "lossy", address, code=4)
        in_held = pool.submit(examine, held, tmp_path / "held", address, code=6)

    packets = in_lossy.result()["packets"]
    assert packets["state"] == "fault" and "the line of this machine" in packets["value"], packets
    assert lossy.address in packets["remedy"] and "mtu 1280" in packets["remedy"]
    portal = in_held.result()["portal"]
    assert portal["state"] == "fault" and "http://login.example/start" in portal["remedy"], portal
    assert in_held.result()["names"]["state"] == "warning", "no laboratory has name servers"


@pytest.mark.soak
def test_each_kind_of_router_is_told(lab: Lab, tmp_path: Path) -> None:
    addresses = [serve(lab.public(f"s{k}"), tmp_path) for k in range(2)]
    hosts = {kind: lab.home(kind.name.lower().replace("_", "-"), nat=kind) for kind in Nat}
    with ThreadPoolExecutor() as pool:
        examined = pool.map(lambda kind: examine(hosts[kind], tmp_path / kind, *addresses), Nat)
    found = dict(zip(Nat, examined, strict=True))
    told = {kind: found[kind]["nat"]["figures"]["kind"] for kind in Nat}
    assert told == {
        Nat.FULL_CONE: "open",
        Nat.PORT_RESTRICTED: "port-restricted",
        Nat.SYMMETRIC: "symmetric",
    }
    assert found[Nat.FULL_CONE]["udp"]["figures"] == {"gets_out": True, "gets_in": True}
    assert "punched" in found[Nat.PORT_RESTRICTED]["outside"]["value"]
    assert "punched" not in found[Nat.SYMMETRIC]["outside"]["value"]


@pytest.mark.soak
def test_a_network_that_lets_no_udp_out_is_told(lab: Lab, tmp_path: Path) -> None:
    address = serve(lab.public("server"), tmp_path)
    home = lab.home("home")
    assert home.router is not None
    home.router.block(Block("udp"))
    udp = examine(home, tmp_path / "home", address)["udp"]
    assert udp["state"] == "warning" and home.address in udp["remedy"] and PORT in udp["remedy"], (
        udp
    )
