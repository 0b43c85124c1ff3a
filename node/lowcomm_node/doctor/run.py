"""Looks at this machine, its network and its node, and runs the checks on what was seen.

Others, bootstrap servers and peers, are asked how they see us:

our libp2p ── to up to MAX_HELPERS ── look          which address, over what, whose clock
           ── to each of them      ── dial back     our ports, called from there
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_node.doctor.checks import CHECKS, Check
from lowcomm_node.doctor.findings import Finding, Helper, Observations, Subject, Survey
from lowcomm_node.errors import NodeError, NoPeers
from lowcomm_node.net.addresses import EntryPoint, also_over_quic, host_of, valid_entries
from lowcomm_node.net.control import Streams
from lowcomm_node.net.p2pd import free_port
from lowcomm_node.net.targets import held_addresses, number_of, outward_address
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import ephemeral_identity
from lowcomm_node.swarm.find_run import open_discovery
from lowcomm_node.swarm.hosts import listening
from lowcomm_node.swarm.probes import CONNECT_DEADLINE, Asker
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.probes import ProbeKind

MAX_HELPERS = 3
MAX_TRIED = 8
"""Entry points that are tried to find helpers."""


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


# how others see us


async def ask_others(streams: Streams, subject: Subject, entries: Iterable[str]) -> Survey:
    """Ask the peers at ``entries`` (multiaddresses), the first ones first. Never raises."""
    async with AsyncExitStack() as stack:
        tried = distinct(entries, subject.peer_id)
        met = await asyncio.gather(*(_meet(stack, streams, entry) for entry in tried))
        answers = list(zip(tried, met, strict=True))
        silent = {str(entry): answer for entry, answer in answers if isinstance(answer, str)}
        askers = choose_helpers([answer for answer in met if not isinstance(answer, str)])
        if not askers:
            return Survey(subject=subject, silent=silent)
        calls = (_called_back(asker, helper, subject) for asker, helper in askers)
        return Survey(
            subject=subject,
            helpers=tuple(await asyncio.gather(*calls)),
            silent=silent,
            outward=outward_address(askers[0][1].host),
        )


def choose_helpers(askers: Sequence[tuple[Asker, Helper]]) -> list[tuple[Asker, Helper]]:
    """One helper at each address. A helper in our own network can call us in any case: it counts
    only if there is no other."""
    outside = [pair for pair in askers if pair[1].is_outside]
    by_host: dict[str, tuple[Asker, Helper]] = {}
    for pair in outside or askers:
        by_host.setdefault(pair[1].host, pair)
    return list(by_host.values())[:MAX_HELPERS]


def distinct(entries: Iterable[str], own_peer_id: str) -> list[EntryPoint]:
    """One address of each peer, ours and those through relays left out; MAX_TRIED at most."""
    found: dict[str, EntryPoint] = {}
    for entry in valid_entries(entries):
        if entry.relay is None and entry.peer_id != own_peer_id:
            found.setdefault(entry.peer_id, entry)
    return list(found.values())[:MAX_TRIED]


async def _meet(
    stack: AsyncExitStack, streams: Streams, entry: EntryPoint
) -> tuple[Asker, Helper] | str:
    """A stream of probes and the first look, or why there is none."""
    asker: Asker | None = None
    try:
        addresses = [str(one) for one in also_over_quic([entry])]
        await streams.connect(entry.peer_id, addresses, CONNECT_DEADLINE)
        asker = stack.enter_context(await Asker.open(streams, entry.peer_id))
        seen, offset = await asker.look()
    except LowcommError as error:
        if asker is None:
            return str(error)
        return f"answers, but not to probes ({error}): its release may be older"
    host = host_of(asker.address)
    if host is None:
        return "is reached through a relay only, so it does not see our address"
    return asker, Helper(entry, host, seen, offset)


async def _called_back(asker: Asker, helper: Helper, subject: Subject) -> Helper:
    """The helper, with which of our ports it reaches, or why it tried none."""
    targets = subject.targets(6 if ":" in helper.sees else 4)
    if not targets:
        return replace(helper, refused="there is no port of ours to call")
    try:
        reached = await asker.dial_back(subject.peer_id, targets)
    except LowcommError as error:
        return replace(helper, refused=str(error))
    kinds = (ProbeKind(target.kind) for target in targets)
    return replace(helper, reached=dict(zip(kinds, reached, strict=True)))
