"""What must hold for p2pd: an owner's host is understood, and a Ctrl-C is not p2pd's to answer."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.hivemind_client import lookup_failure
from lowcomm_node.net.p2pd import P2pDaemon, free_port, has_ipv6, listeners, numeric
from lowcomm_node.owner.sources import load_settings
from lowcomm_node.swarm.hosts import listening


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("0::0", "[::]"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_a_host_is_taken_in_every_form_that_other_programs_take(host: str, listens: str) -> None:
    settings = load_settings({"host": host, "home": "/nowhere"}, {}).settings
    found, announced = listening(settings)
    assert found == listens
    assert announced == (listens,) or listens in ("[::]", "0.0.0.0")


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "[::1", "127.0.0.1:31337", "[]", "é" * 80]
)
def test_a_host_that_can_not_be_looked_up_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .* can't be looked up .*0\.0\.0\.0 or ::"):
        numeric(host)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_interfaces_are_those_of_both_versions(host: str) -> None:
    assert listeners(host, 5)[::2] == ("/ip4/0.0.0.0/tcp/5", "/ip6/::/tcp/5")


def test_an_address_of_another_machine_is_not_said_to_be_in_use() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7:0 can't be listened on .*--host"):
        free_port("203.0.113.7", 0)


async def test_a_name_that_dns_does_not_know_is_the_reason() -> None:
    def at(*dials: str) -> list[EntryPoint]:
        return [EntryPoint("12D3KooW", dial) for dial in dials]

    unknown = "/dns4/no-such-host.invalid/tcp/9"
    told = await lookup_failure(at(unknown))
    assert told is not None and "no-such-host.invalid can't be looked up" in told
    assert await lookup_failure(at(unknown, "/ip4/203.0.113.7/tcp/9")) is None
    assert await lookup_failure(at("/dns4/localhost/tcp/9")) is None


async def test_it_is_not_in_the_process_group_of_the_terminal() -> None:
    daemon = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"])
    await daemon.start()
    try:
        assert daemon.pid is not None
        assert os.getpgid(daemon.pid) != os.getpgid(0)
    finally:
        await daemon.stop()


STARTED = """
import asyncio
from lowcomm_node.net import p2pd

async def main():
    p2pd.HAS_PRCTL = False
    daemon = p2pd.P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"])
    await daemon.start()
    print(daemon.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_it_ends_with_a_process_that_is_killed_where_the_kernel_does_not_end_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", STARTED]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        p2pd = psutil.Process(int(starter.stdout.readline()))
        assert p2pd.is_running()
        starter.kill()
    p2pd.wait(60)
