"""A link of a household whose line is cut ends at both machines, whatever it did at that time."""

import asyncio
import socket
from pathlib import Path

import pytest
from laboratory import Host, Lab

from lowcomm_node.household import link
from lowcomm_node.household.link import SecureStream, make_context
from lowcomm_node.household.machines import Household

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]


async def linked(hosts: tuple[Host, Host], homes: tuple[Path, Path]) -> list[SecureStream]:
    """Both ends of a connection between two paired machines."""
    listener, caller = (host.socket(socket.SOCK_STREAM) for host in hosts)
    listener.listen()
    caller.connect((hosts[0].address, listener.getsockname()[1]))
    ends = (listener.accept()[0], caller)
    machines = [Household(home) for home in homes]
    streams = [
        SecureStream(
            end, make_context(one, other.certificate.der, is_lender=not place), is_lender=not place
        )
        for place, (end, one, other) in enumerate(
            zip(ends, machines, reversed(machines), strict=True)
        )
    ]
    await asyncio.gather(*(stream.handshake() for stream in streams))
    return streams


async def test_a_cut_line_is_noticed_at_both_ends_in_idle_and_while_bytes_are_under_way(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, seconds in (("IDLE", 1), ("BETWEEN", 1), ("SILENCE", 4)):
        monkeypatch.setattr(link, name, seconds)
    hosts = lab.public("lender"), lab.public("head")
    loop, carried, ends = asyncio.get_running_loop(), list[asyncio.Task[bool]](), []
    for _ in ("idle", "busy"):
        for stream in await linked(hosts, (tmp_path / "lender", tmp_path / "head")):
            near, far = socket.socketpair()
            near.setblocking(False)
            carried.append(asyncio.create_task(stream.carry(far)))
            ends += [near, far]
    idle_lender, _, idle_head, _, busy_lender, _, busy_head, _ = ends
    for one, other in ((idle_lender, idle_head), (busy_lender, busy_head)):
        await loop.sock_sendall(one, b"x")
        assert await asyncio.wait_for(loop.sock_recv(other, 1), 30) == b"x"

    async def send() -> None:
        while True:
            await loop.sock_sendall(busy_head, bytes(65536))
            await asyncio.sleep(0)

    async def drain() -> None:
        while await loop.sock_recv(busy_lender, 65536):
            pass

    others = [asyncio.create_task(send()), asyncio.create_task(drain())]
    hosts[0].ip(f"link set {hosts[0].device} down")
    assert await asyncio.wait_for(asyncio.gather(*carried), 60) == [False] * 4
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for one in ends:
        one.close()
