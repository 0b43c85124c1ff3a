"""A change of the IPv6 address, as many providers make every day: only what was bound to the old
one ends."""

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from laboratory import Host, Lab
from residents import Swarm

from helpers.dht_peers import Peer
from helpers.processes import until_exchanged
from lowcomm_node.net.control import OpenStream
from lowcomm_node.net.p2pd import listeners

pytestmark = [pytest.mark.net, pytest.mark.timeout(180)]
START = 120.0
PROTOCOL, PORT, SECONDS = "/test/echo/1", 31330, 60.0


async def echo(stream: OpenStream) -> None:
    """Say again whatever is said, until the stream ends."""
    loop = asyncio.get_running_loop()
    with stream.socket:
        while said := await loop.sock_recv(stream.socket, 64):
            await loop.sock_sendall(stream.socket, said)


class Talk:
    """A stream of one peer to another, over the version of IP that is asked for."""

    def __init__(self, stream: OpenStream) -> None:
        self._stream, self.words = stream, 0

    async def goes_on(self) -> bool:
        """Whether a word is answered over the stream that there was."""
        loop, word = asyncio.get_running_loop(), f"{self.words:08}".encode()
        try:
            async with asyncio.timeout(SECONDS):
                await loop.sock_sendall(self._stream.socket, word)
                self.words += 1
                return await loop.sock_recv(self._stream.socket, 64) == word
        except OSError:
            return False

    async def has_ended(self) -> None:
        """Return once the stream is over."""
        async with asyncio.timeout(SECONDS):
            try:
                while await asyncio.get_running_loop().sock_recv(self._stream.socket, 64):
                    pass
            except OSError:
                return


class Town:
    """Peers of the DHT on hosts of their own; all echo."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers: list[Peer] = []
        self._echoing: set[asyncio.Task[None]] = set()

    async def peer(self, host: Host) -> Peer:
        """A started one."""
        made = Peer(self._folder / host.name, listen=listeners("0.0.0.0", PORT), punching=False)
        self._peers.append(made)
        with host.inside():
            await made.start()
            await made.serve_streams(PROTOCOL, self._take)
        return made

    def _take(self, stream: OpenStream) -> None:
        task = asyncio.create_task(echo(stream))
        self._echoing.add(task)

    async def close(self) -> None:
        """End all."""
        for task in self._echoing:
            task.cancel()
        await asyncio.gather(*self._echoing, return_exceptions=True)
        for peer in self._peers:
            await peer.close()


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    """Nobody yet; whoever is started is ended."""
    town = Town(tmp_path)
    try:
        yield town
    finally:
        await town.close()


async def talk(peer: Peer, other: Peer, host: Host, version: int, transport: str) -> Talk:
    """Have a peer connect to another over one version of IP and one transport alone, and open a
    stream."""
    place = f"/ip{version}/{host.addresses[version]}/{transport}/{PORT}"
    entry = f"{place}{'/quic-v1' if transport == 'udp' else ''}/p2p/{other.peer_id}"
    await peer.connect(other.peer_id, [entry], SECONDS)
    return Talk(await peer.open_stream(other.peer_id, PROTOCOL, SECONDS))


async def connections(peer: Peer, others: list[Peer]) -> list[str]:
    """The first address of the connection to each of these; empty where there is none."""
    return [next(iter(await peer.connected_at(other.peer_id)), "") for other in others]


def change_ipv6(host: Host) -> None:
    """Take the address of IPv6 from a host, and give it another of the same network."""
    old = ip_address(host.addresses[6])
    new = host.addresses[6] = str(old + 0x1000)
    host.ip(
        f"address add {new}/128 dev {host.device} nodad",
        f"address del {old}/128 dev {host.device}",
    )


@pytest.mark.soak  # three processes and a minute
def test_nodes_that_exchange_over_ipv4_do_not_notice(lab: Lab, tmp_path: Path) -> None:
    server, home, other = (lab.public(name, ip=(4, 6)) for name in ("server", "home", "other"))
    swarm = Swarm(tmp_path, method="noloco")
    swarm.serve(server, "--relay-peers", "0", deadline=START)
    a, b = [swarm.node(host, "--record-life", "15") for host in (home, other)]
    until_exchanged((a, b), 2, START)
    before = a.until(bool, "an answer")
    change_ipv6(home)
    a.until(lambda _: a.events("addresses.changed"), "it sees its new address", START)
    until_exchanged((a, b), 4, START)
    after = a.until(bool, "an answer")
    assert after["exchanges"]["failed"] == before["exchanges"]["failed"], "no exchange broke off"
    assert not a.events("swarm.lost") and after["swarm"]["state"] == "connected"
