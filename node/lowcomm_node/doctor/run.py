"""Looks at this machine, its network and its node, and runs the checks on what was seen."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_node.doctor.checks import CHECKS, Check
from lowcomm_node.doctor.findings import Finding, Observations, Subject
from lowcomm_node.doctor.survey import ask_others
from lowcomm_node.errors import NodeError, NoPeers
from lowcomm_node.net.p2pd import free_port
from lowcomm_node.net.targets import held_addresses, number_of
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_node.storage.files import ephemeral_identity
from lowcomm_node.swarm.find_run import open_discovery
from lowcomm_node.swarm.hosts import listening


@dataclass(frozen=True, kw_only=True)
class RunningNode:
    """A node that runs, as far as the doctor looks at it."""

    settings: NodeSettings
    status: Status
    members: Sequence[PeerStatus]
    """Peers of the run, as ``peers`` shows them."""
    discovery: Discovery | None
    """None while it is not in the DHT."""
    entry_points: Sequence[str]
    """Where the peers of its run enter the DHT."""
    addresses: Sequence[str]
    """Where others shall call it."""
    port: int | None
    """Of its Exchange service, once that listens."""
    certificate: bytes
    """DER; empty before."""


async def check(seen: Observations, checks: Iterable[Check] = CHECKS) -> tuple[Finding, ...]:
    """All findings, in the order of the checks. Each runs in a thread, for it may look around."""
    found = await asyncio.gather(*(asyncio.to_thread(one, seen) for one in checks))
    return tuple(finding for finding in found if finding is not None)


async def examine_node(node: RunningNode, peers: Sequence[str]) -> tuple[Finding, ...]:
    """Findings of a node that runs, with its identity, ports and peers; ``peers`` are asked
    first."""
    settings, discovery, status = node.settings, node.discovery, node.status
    seen = Observations(
        home=settings.home, peers=settings.peers, status=status, members=node.members
    )
    if discovery is None:
        trouble = status.waiting or f"the node is {status.phase}"
        return await check(replace(seen, trouble=trouble))
    subject = _subject(discovery, settings, node.port, node.certificate, node.addresses)
    dht_peers = discovery.known_peers()
    survey = await ask_others(discovery, subject, (*peers, *settings.peers, *node.entry_points))
    return await check(replace(seen, dht_peers=dht_peers, survey=survey))


async def examine_alone(settings: NodeSettings, absent: str, hangs: bool) -> tuple[Finding, ...]:
    """Findings where no node answers.

    The network is looked at under a throw-away identity if an address of the swarm is known.
    ``absent``: why no node answers; ``hangs``: although one runs. Raises ConfigError on a
    malformed address.
    """
    peers = settings.peers
    seen = Observations(home=settings.home, peers=peers, absent=absent, hangs=hangs)
    if peers:
        # A node that hangs holds its ports.
        free = {"port": 0, "dht_port": 0} if hangs else {}
        seen = await _look_at_network(settings.model_copy(update=free), seen)
    return await check(seen)


async def _look_at_network(settings: NodeSettings, seen: Observations) -> Observations:
    with ephemeral_identity() as (identity, key_file):
        discovery = open_discovery(settings, identity, key_file=key_file)
        discovery.max_clock_offset = inf  # a wrong clock is a finding
        try:
            await discovery.start()
            async with _serving(settings) as (port, certificate, announced):
                subject = _subject(discovery, settings, port, certificate, announced)
                return replace(
                    seen,
                    runs=len(await discovery.lookup(RUNS_KEY)),
                    survey=await ask_others(discovery, subject, settings.peers),
                    dht_peers=discovery.known_peers(),
                )
        except NoPeers as error:
            return replace(seen, trouble=str(error))
        except NodeError as error:
            return replace(seen, broken=str(error))
        finally:
            await discovery.close()


def _subject(
    discovery: Discovery,
    settings: NodeSettings,
    port: int | None,
    certificate: bytes,
    announced: Sequence[str],
) -> Subject:
    forwarded = int(settings.announce[0].rpartition(":")[2]) if settings.announce else None
    return Subject(
        peer_id=discovery.peer_id,
        hosts=own_hosts(),
        listens=tuple(address.rpartition("/p2p/")[0] for address in discovery.addresses()),
        direct=forwarded or port,
        certificate=certificate,
        announced=tuple(announced),
    )


def own_hosts() -> tuple[str, ...]:
    """IP addresses of this machine, loopback included."""
    # Of an interface the system names hardware addresses, too.
    numbers = filter(None, map(number_of, held_addresses()))
    return tuple(dict.fromkeys(map(str, numbers)))


@asynccontextmanager
async def _serving(settings: NodeSettings) -> AsyncIterator[tuple[int, bytes, Sequence[str]]]:
    """Answers calls as the Exchange service does: its port, its certificate, and where it is."""
    from grpc import aio  # kept quiet by lowcomm_node.net, if that is imported first

    certificate = make_certificate()
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    host, hosts = listening(settings)
    port = free_port(host, settings.port)
    server.add_secure_port(f"{host}:{port}", certificate.server_credentials())
    await server.start()
    try:
        yield port, certificate.der, settings.announce or [f"{host}:{port}" for host in hosts]
    finally:
        await server.stop(None)
