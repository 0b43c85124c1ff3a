"""Publishes what the creator of a run has signed: the run, its amendments, who was removed from it.

Commands import this when they run: it loads the DHT, which takes seconds.
"""

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol, TypeVar

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY, amendments_key, removals_key
from lowcomm_node.errors import ConfigError, LinkLost, NoPeers, NotRunning, Unhealthy
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import ephemeral_identity, read_small, write_atomic
from lowcomm_node.swarm.admission import AMENDMENTS_LIFE, REMOVALS_LIFE, newest_removals
from lowcomm_node.swarm.find_run import ask_server, open_discovery
from lowcomm_node.swarm.probes import CONNECT_DEADLINE
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import Removals, write_removals
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, Chain, newest, write_amendment
from lowcomm_protocol.spec.run import SignedRun

PUBLISH_DEADLINE = 30.0
ASK_EVERY = 1.0
ASKED = 3
"""Most questions to a server whether it keeps a run: it may just be receiving it."""
RUN_LIFE = 1800.0


class Signed(Protocol):
    """Something that was signed for the DHT."""

    @property
    def data(self) -> bytes:
        """Bytes on the wire."""
        ...


Made = TypeVar("Made", bound=Signed)


async def publish_run(
    settings: NodeSettings, identity: Identity, run: SignedRun
) -> dict[str, Keeping]:
    """Publish a run; returns whether each server that ``--peers`` names keeps it. Raises
    NoPeers."""
    discovery = open_discovery(settings, identity)
    try:
        await discovery.start()
        data = run.to_bytes()
        if not await _publish(discovery, RUNS_KEY, run.run_id, data, RUN_LIFE, lambda _: True):
            raise NoPeers(
                f"The run could not be published within {PUBLISH_DEADLINE:.0f} s: is the bootstrap "
                "server closed to new runs?"
            )
        servers = by_peer(settings.peers)
        known = RememberedPeers(settings.paths.remembered_peers(run.fingerprint), time())
        for peer, addresses in servers.items():  # for amendments, and for this home's node
            known.answered(peer, addresses, time(), named=True)
        known.save()
        asking = (_ask(discovery, peer, servers[peer], run.run_id) for peer in servers)
        return dict(zip(servers, await asyncio.gather(*asking), strict=True))
    finally:
        await discovery.close()


async def publish_removals(
    settings: NodeSettings, identity: Identity, run: SignedRun, names: frozenset[str], undo: bool
) -> Removals:
    """Publish the list of the removed with these names added, or taken away. Raises NoPeers."""
    path = settings.paths.removals(run.fingerprint)

    def write(heard: bytes) -> Removals:
        before = newest_removals(run, path, heard)
        ids = before.ids - names if undo else before.ids | names
        return write_removals(identity, run.run_id, before.version + 1, ids)

    key = removals_key(run.run_id, identity.peer_id)
    return await _publish_next(settings, key, identity.peer_id, path, REMOVALS_LIFE, write)


async def publish_amendment(
    settings: NodeSettings,
    identity: Identity,
    run: SignedRun,
    at: int | None,
    changes: Mapping[str, Any],
) -> Chain:
    """Publish one more amendment of a run; ``at`` None: in force at once. Raises NoPeers."""
    path = settings.paths.amendments(run.fingerprint)

    def write(heard: bytes) -> Chain:
        kept = read_small(path, MAX_CHAIN_BYTES)
        chain = newest(run.spec, run.run_id, [kept, heard]).chain
        last = chain.links[-1].at if chain.links else 0
        return write_amendment(identity, run, chain, last if at is None else at, changes)

    key = amendments_key(run.run_id, identity.peer_id)
    return await _publish_next(settings, key, identity.peer_id, path, AMENDMENTS_LIFE, write)


def with_entry_points(settings: NodeSettings, run: SignedRun) -> NodeSettings:
    """These settings; if they name no address, with those of our own node, or else those at which
    the swarm of the run was entered before.

    Raises ConfigError, Unhealthy.
    """
    if settings.peers:
        return settings
    return settings.model_copy(update={"peers": _entry_points(settings, run)})


def _entry_points(settings: NodeSettings, run: SignedRun) -> tuple[str, ...]:
    try:
        with ControlClient(settings.home) as client:
            return client.status().entry_points
    except NotRunning:
        path = settings.paths.remembered_peers(run.fingerprint)
        known = [peer.addresses[0] for peer in RememberedPeers(path, time()).peers()]
        if known:
            return tuple(known)
        raise ConfigError(
            "No address of the swarm is known, and no node runs in "
            f"{shlex.quote(str(settings.home))}: give one with --peers."
        ) from None
    except Unhealthy as error:
        raise Unhealthy(f"{error} Or give an address of the swarm with --peers.") from None


async def _publish_next(
    settings: NodeSettings,
    key: str,
    creator: str,
    path: Path,
    life: float,
    write: Callable[[bytes], Made],
) -> Made:
    """Publish for ``life`` seconds what ``write`` makes of the record in the DHT; keep it in
    ``path``.

    Under a passing identity: our node may run under ours. Raises NoPeers.
    """
    settings = settings.model_copy(update={"dht_port": 0})
    with ephemeral_identity() as (passing, key_file):
        discovery = open_discovery(settings, passing, key_file=key_file)
        try:
            await discovery.start()
            made = write((await discovery.lookup(key)).get(creator, b""))
            write_atomic(path, made.data)
            if await _publish(discovery, key, creator, made.data, life, made.data.__eq__):
                return made
        finally:
            await discovery.close()
    raise NoPeers(
        f"It could not be published within {PUBLISH_DEADLINE:.0f} s. It is kept in {path}, and the "
        "node of this home will publish it when it runs; or try again."
    )


async def _publish(
    discovery: Discovery,
    key: str,
    subkey: str,
    data: bytes,
    life: float,
    is_it: Callable[[bytes], bool],
) -> bool:
    """Publish a record until others hold it; whether they did in time."""
    deadline = monotonic() + PUBLISH_DEADLINE
    while monotonic() < deadline:
        await discovery.publish(key, subkey, data, life)
        # A store that says yes may not have arrived: read it back, from others than ourselves.
        held = await discovery.held_by_others(key, subkey)
        if held is not None and is_it(held):
            return True
        await asyncio.sleep(ASK_EVERY)
    return False


async def _ask(discovery: Discovery, peer: str, addresses: Sequence[str], run_id: str) -> Keeping:
    """Whether a server keeps a run, asked until it has received it."""
    keeping = Keeping(reason="it did not answer")
    for _ in range(ASKED):
        with suppress(LinkLost):
            await discovery.connect(peer, addresses, CONNECT_DEADLINE)
        keeping = await ask_server(discovery, peer, run_id, only_tell=False)
        if keeping.kept:
            break
        await asyncio.sleep(ASK_EVERY)
    return keeping
