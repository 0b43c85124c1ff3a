"""Examine this machine: as part of a node that runs, or for the time of the examination alone."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

from lowcomm_node.dht.interface import Discovery
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_node.doctor.case import Case, RunningNode
from lowcomm_node.doctor.findings import Finding
from lowcomm_node.doctor.judging import judge
from lowcomm_node.doctor.line import look_at_names, look_behind_silence
from lowcomm_node.doctor.machine import look_at_machine, own_hosts
from lowcomm_node.doctor.sights import Subject
from lowcomm_node.doctor.survey import distinct, survey
from lowcomm_node.errors import NodeError, NoPeers, PortInUse
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import ephemeral_identity
from lowcomm_node.swarm.find_run import open_discovery
from lowcomm_node.swarm.membership import listening
from lowcomm_node.transport.tls import make_certificate


async def examine_node(node: RunningNode, peers: Sequence[str]) -> tuple[Finding, ...]:
    """Findings of a node that runs, with its own identity, ports and peers; ``peers`` are asked before those."""
    settings, discovery = node.settings, node.discovery
    case = await _look(settings.home, [*peers, *settings.peers])
    case = replace(case, status=node.status, members=node.members, peers=settings.peers)
    if discovery is None:
        return judge(await _behind_silence(replace(case, trouble=node.trouble), [*peers, *settings.peers]))
    entries = [*peers, *settings.peers, *node.entry_points]
    direct = _announced(settings) or node.port
    subject = _subject(discovery, settings, direct, node.certificate, tuple(node.addresses))
    dht_peers = await discovery.check_connection()
    case = replace(case, subject=subject, dht_peers=dht_peers, survey=await survey(discovery, subject, entries))
    return judge(await _behind_silence(case, entries))


async def examine_alone(settings: NodeSettings, absent: str, hangs: bool) -> tuple[Finding, ...]:
    """Findings where no node answers: the network under a passing identity, if an address of the swarm is known.

    ``absent``: why none does; ``hangs``: although it runs. Raises ConfigError on a malformed address.
    """
    case = await _look(settings.home, settings.peers)
    case = replace(case, absent=absent, hangs=hangs)
    if hangs:  # it holds its ports
        settings = settings.model_copy(update={"port": 0, "dht_port": 0})
    if not settings.peers:
        return judge(case)
    with ephemeral_identity() as (identity, key_file):
        discovery = open_discovery(settings, identity, key_file=key_file)
        discovery.max_clock_offset = inf  # it is a finding
        try:
            await discovery.start()
            async with _serving(settings) as (port, certificate, told):
                subject = _subject(discovery, settings, _announced(settings) or port, certificate, told)
                runs = await discovery.lookup(RUNS_KEY)
                found = await survey(discovery, subject, settings.peers)
                case = replace(case, subject=subject, survey=found, runs=len(runs))
                case = replace(case, dht_peers=await discovery.check_connection())
                return judge(await _behind_silence(case, settings.peers))
        except NoPeers as error:
            return judge(await _behind_silence(replace(case, trouble=str(error)), settings.peers))
        except NodeError as error:
            return judge(replace(case, broken=str(error)))
        finally:
            await discovery.close()


async def _look(home: Path, peers: Iterable[str]) -> Case:
    told = tuple(peers)
    names = await look_at_names(told) if told else None
    machine = await asyncio.to_thread(look_at_machine, home)
    return Case(home=home, machine=machine, peers=told, names=names)


async def _behind_silence(case: Case, entries: Iterable[str]) -> Case:
    """With what answers in their place, where nobody answers as a peer."""
    if case.survey is not None and case.survey.helpers:
        return case
    return replace(case, silence=await look_behind_silence(distinct(entries, "")))


def _subject(
    discovery: Discovery, settings: NodeSettings, direct: int | None, certificate: bytes, told: tuple[str, ...]
) -> Subject:
    host, _ = listening(settings)
    return Subject(
        peer_id=discovery.peer_id,
        hosts=own_hosts(),
        listens=tuple(address.rpartition("/p2p/")[0] for address in discovery.addresses()),
        direct=direct,
        certificate=certificate,
        told=told,
        loopback=host in ("127.0.0.1", "[::1]"),
    )


def _announced(settings: NodeSettings) -> int | None:
    """The port that others are told to call, where it differs from the one that we listen on."""
    return int(settings.announce[0].rpartition(":")[2]) if settings.announce else None


@asynccontextmanager
async def _serving(settings: NodeSettings) -> AsyncIterator[tuple[int, bytes, tuple[str, ...]]]:
    """Something that answers calls as the Exchange service does: its port, its certificate, and where it is."""
    from grpc import aio  # kept quiet by lowcomm_node.transport, if that is imported first

    certificate = make_certificate(datetime.datetime.now(datetime.UTC))
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    host, hosts = listening(settings)
    try:
        port = server.add_secure_port(f"{host}:{settings.port}", certificate.server_credentials())
    except RuntimeError:
        raise PortInUse(f"Port {settings.port} of {host} is in use: choose another with --port.") from None
    await server.start()
    try:
        yield port, certificate.der, settings.announce or tuple(f"{host}:{port}" for host in hosts)
    finally:
        await server.stop(None)
