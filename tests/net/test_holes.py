"""Holes in NATs, by libp2p's connections alone: real p2pds in a laboratory, no nodes above them, so
that all pairs are quick."""

from collections.abc import AsyncIterator, Iterator
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from laboratory import Host, Lab
from nat import Block, Nat
from shaping import Link

from helpers.dht_peers import Peer
from lowcomm_node.net.addresses import CIRCUIT
from lowcomm_node.net.p2pd import RelayLimits, listeners

pytestmark = [pytest.mark.net, pytest.mark.timeout(180)]

CONE = {Nat.FULL_CONE, Nat.PORT_RESTRICTED}
SLICE = ({Nat.FULL_CONE, Nat.PORT_RESTRICTED}, {Nat.PORT_RESTRICTED, Nat.SYMMETRIC})
"""Pairs that CI looks at: one that is punched, one that is not. Two port restricted ones need both
holes at the same instant: a machine that is busy for a moment misses it, and the relay is taken."""
HOME = Link(delay=0.02)
SECONDS = 30.0
PORT = 31330


class Peers:
    """Peers of the DHT, each on a host of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers: list[Peer] = []

    async def peer(
        self, host: Host, entries: tuple[str, ...] = (), relay: RelayLimits | None = None
    ) -> Peer:
        """A started peer; one that relays can be reached, the others need relays."""
        # QUIC is looked for at the port of TCP.
        listen = listeners("::" if 6 in host.addresses else "0.0.0.0", PORT)
        made = Peer(
            self._folder / host.name,
            entries,
            listen=listen,
            relay=relay,
            wants_places=relay is None,
        )
        self._peers.append(made)
        with (
            host.inside()
        ):  # p2pd, and the socket by which it hands over streams, belong to the host
            await made.start()
        return made

    async def close(self) -> None:
        """End all."""
        for made in self._peers:
            await made.close()


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    """No peers yet; whatever is started is ended."""
    peers = Peers(tmp_path)
    try:
        yield peers
    finally:
        await peers.close()


async def connect(
    peers: Peers, lab: Lab, one: Host, other: Host, ip: int = 4
) -> tuple[list[str], list[str]]:
    """Have one peer connect to another; the addresses of the connections that either has to the
    other then."""
    server = await peers.peer(lab.public("server", ip=(ip,)), relay=RelayLimits())
    entries = tuple(
        entry for entry in server.addresses() if "/tcp/" in entry and "127.0.0.1" not in entry
    )[:1]
    ada, bob = [await peers.peer(host, entries) for host in (one, other)]
    await ada.connect(bob.peer_id, bob.addresses(), SECONDS)
    return list(await ada.connected_at(bob.peer_id)), list(await bob.connected_at(ada.peer_id))


def is_direct(addresses: list[str]) -> bool:
    """Whether one of these connections goes through no relay."""
    return any(not address.endswith(CIRCUIT) for address in addresses)


def pairs() -> Iterator[object]:
    for one, other in combinations_with_replacement(Nat, 2):
        yield pytest.param(
            one, other, marks=[] if {one, other} in SLICE else pytest.mark.soak, id=f"{one}-{other}"
        )


@pytest.mark.parametrize(("one", "other"), list(pairs()))
async def test_holes_are_punched_where_nats_let_them_be(
    peers: Peers, lab: Lab, one: Nat, other: Nat
) -> None:
    ours, theirs = await connect(
        peers, lab, lab.home("ada", nat=one, link=HOME), lab.home("bob", nat=other, link=HOME)
    )
    assert ours, "connected in any case"
    assert theirs
    punched = {one, other} <= CONE or Nat.FULL_CONE in (one, other)
    assert (is_direct(ours), is_direct(theirs)) == (punched, punched), (ours, theirs)


async def test_a_public_peer_is_reached_by_one_at_home_and_reaches_it(
    peers: Peers, lab: Lab
) -> None:
    ours, _ = await connect(peers, lab, lab.public("ada", link=HOME), lab.home("bob", link=HOME))
    assert is_direct(ours), "the one at home was asked to dial"


async def test_holes_in_two_firewalls_of_ipv6_are_punched(peers: Peers, lab: Lab) -> None:
    homes = [lab.home(name, ip=(6,), link=HOME) for name in ("ada", "bob")]
    ours, theirs = await connect(peers, lab, *homes, ip=6)
    assert is_direct(ours), ours
    assert is_direct(theirs), theirs


@pytest.mark.parametrize(
    ("protocol", "punched"), [("udp", False), pytest.param("tcp", True, marks=pytest.mark.soak)]
)
async def test_what_a_firewall_blocks_is_gone_around(
    peers: Peers, lab: Lab, protocol: str, punched: bool
) -> None:
    homes = [lab.home(name, nat=Nat.PORT_RESTRICTED, link=HOME) for name in ("ada", "bob")]
    assert homes[0].router is not None
    homes[0].router.block(Block(protocol))
    ours, _ = await connect(peers, lab, *homes)
    assert ours
    assert is_direct(ours) is punched, ours
