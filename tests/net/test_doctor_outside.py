"""``doctor`` behind real routers: what it tells of calls from outside is what the router does."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from laboratory import Host, Lab
from nat import Block, Nat
from residents import PORT, Server

from helpers.processes import command, environment

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
