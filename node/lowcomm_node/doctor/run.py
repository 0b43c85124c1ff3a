"""Looks at this machine, its network and its node, and runs the checks on what was seen."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
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
from lowcomm_node.storage.files import ephemeral_identity
from lowcomm_node.swarm.find_run import open_discovery
from lowcomm_node.swarm.hosts import listening


async def check(seen: Observations, checks: Iterable[Check] = CHECKS) -> tuple[Finding, ...]:
    """All findings, in the order of the checks. Each runs in a thread, for it may look around."""
    found = await asyncio.gather(*(asyncio.to_thread(one, seen) for one in checks))
    return tuple(finding for finding in found if finding is not None)


async def examine_node(
    seen: Observations, discovery: Discovery | None, subject: Subject | None, entries: Iterable[str]
) -> tuple[Finding, ...]:
    """Findings of a node that runs, with its identity, ports and peers; ``entries`` are asked.

    ``discovery``, ``subject``: None while it is not in the DHT.
    """
    if discovery is None or subject is None:
        status = seen.status
        trouble = status and (status.waiting or f"the node is {status.phase}")
        return await check(replace(seen, trouble=trouble or ""))
    dht_peers = discovery.known_peers()
    survey = await ask_others(discovery, subject, entries)
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
                subject = subject_of(discovery, settings, port, certificate, announced)
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


def subject_of(
    discovery: Discovery,
    settings: NodeSettings,
    port: int | None,
    certificate: bytes,
    announced: Sequence[str],
) -> Subject:
    """Our own ports; ``port``, ``certificate``, ``announced``: of the Exchange service."""
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
