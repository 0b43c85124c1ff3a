"""From where those come who store something here."""

import asyncio

from lowcomm_node.dht import callers
from lowcomm_node.dht.callers import Callers, bringer
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import Connection
from lowcomm_protocol.identity import Identity

RELAY = Identity(b"r" * 32).peer_id


class Daemon:
    """What p2pd tells of its connections, and how often it was asked."""

    def __init__(self, **addresses: str) -> None:
        self.addresses, self.asked, self.now = addresses, 0, 100.0

    async def connections(self) -> list[Connection]:
        self.asked += 1
        if not self.addresses:
            raise LinkLost("p2pd is gone")
        return [Connection(peer, address) for peer, address in self.addresses.items()]


async def test_a_caller_is_known_by_the_address_of_its_connection_or_by_its_relay(monkeypatch):
    monkeypatch.setattr(callers, "LOOK_EVERY", 0.0)
    daemon = Daemon(
        ada="/ip4/203.0.113.7/tcp/4001",
        bob="/ip6/2001:db8:1:2::3/udp/4001/quic-v1",
        cleo=f"/ip4/198.51.100.1/tcp/4001/p2p/{RELAY}/p2p-circuit",
    )
    known = Callers(daemon.connections, lambda: daemon.now)
    assert await known.networks_of("ada") == ("203.0.113.7", "203.0.113.0/24")
    assert await known.networks_of("bob") == ("2001:db8:1:2::/64", "2001:db8:1::/48")
    assert await known.networks_of("cleo") == (f"relay {RELAY}",)
    assert daemon.asked == 1, "one list serves all that are on it"
    assert await known.networks_of("nobody") == ("unknown",)
    daemon.addresses = {"ada": "/ip4/192.0.2.1/tcp/4001"}
    daemon.now += callers.LASTS
    assert await known.networks_of("ada") == ("192.0.2.1", "192.0.2.0/24")
    daemon.addresses = {}
    assert await known.networks_of("nobody") == ("unknown",), "p2pd is gone: nothing is raised"


async def test_each_call_has_a_bringer_of_its_own():
    daemon = Daemon(ada="/ip4/203.0.113.7/tcp/4001", bob="/ip4/203.0.113.8/tcp/4001")
    known = Callers(daemon.connections, lambda: daemon.now)

    async def call(peer: str) -> str:
        await known.enter(peer)
        await asyncio.sleep(0)
        found = bringer()
        assert found is not None
        return f"{found.peer_id} {found.networks[0]}"

    told = await asyncio.gather(*(asyncio.create_task(call(peer)) for peer in ("ada", "bob")))
    assert told == ["ada 203.0.113.7", "bob 203.0.113.8"]
    assert bringer() is None, "what we publish ourselves"
