"""hivemind's client of p2pd: quiet, imported off the event loop, with a deadline for each call."""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from socket import AF_INET, AF_INET6
from time import time
from typing import Any

from lowcomm_node.errors import NodeError
from lowcomm_node.net.addresses import EntryPoint, name_of
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_node.system.logs import log
from lowcomm_protocol.identity import peer_id_of

CALL_DEADLINE = 15.0
DIAL_DEADLINE = 5.0
KNOCK_DEADLINE = 6.0
"""QUIC gives up after five seconds. Only then does p2pd tell how each address failed."""
CLOSE_DEADLINE = 3.0
ROUTING_DEADLINE = 2.0
ASKED = 0.5
"""Seconds for p2pd to report an empty routing table. With entries it asks peers, and is slower."""
BACKED_OFF = "no answer (p2pd waits before it dials there again)"
NO_WAY = "no address of it can be dialed from here"
_FAILURES = (
    ("connection refused", "connection refused: nothing listens there"),
    ("peer id mismatch", "somebody else answers there: check the peer id"),
    ("network is unreachable", "network is unreachable: this machine has no way there"),
    ("no route to host", "no route to host"),
    ("no such host", "its name is not known to DNS"),
    ("dial backoff", BACKED_OFF),
    ("no good addresses", NO_WAY),
    ("i/o timeout", "no answer in time"),
    ("deadline exceeded", "no answer in time"),
    ("no recent network activity", "no answer in time"),
    ("did not answer in time", "no answer in time"),
)
"""Errors of p2pd and our words for them. Of several addresses the most informative comes first."""


async def load_hivemind() -> None:
    """Import what we use of hivemind on a thread: it takes a moment, and the event loop goes on."""

    def load() -> None:
        os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
        os.environ.setdefault("HIVEMIND_COLORS", "0")
        import lowcomm_node.net.hivemind_parts  # noqa: F401

        logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for all
        logger = logging.getLogger("hivemind")
        logger.handlers[:] = [_ToDebug()]
        logger.propagate = False

    await asyncio.to_thread(load)


class _ToDebug(logging.Handler):
    """hivemind's warnings address its developers. We report what matters to an owner ourselves."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a line at level debug."""
        log.debug("hivemind", message=record.getMessage()[:500])


async def attach(daemon: P2pDaemon, storing: Callable[[str], Awaitable[None]]) -> Any:
    """hivemind's client (``P2P``) of a running p2pd. Raises NodeError if p2pd does not answer.
    ``storing``: awaited with the caller's peer id before each request to store something here."""
    from lowcomm_node.net.hivemind_parts import P2P, Multiaddr

    class OwnP2P(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{daemon.control.parent}/"

        async def add_protobuf_handler(
            self, name: str, handler: Any, *rest: Any, **options: Any
        ) -> None:
            async def store(request: Any, context: Any) -> Any:
                await storing(context.remote_id.to_base58())
                return await handler(request, context)

            handle = store if name.endswith("rpc_store") else handler
            await super().add_protobuf_handler(name, handle, *rest, **options)

    try:
        async with asyncio.timeout(CALL_DEADLINE):
            return await OwnP2P.replicate(Multiaddr(f"/unix{daemon.control}"))
    except (TimeoutError, OSError, EOFError):
        raise NodeError(
            "p2pd started, but does not answer on its control socket: see its log with -v."
        ) from None


async def detach(p2p: Any) -> None:
    """The counterpart of ``attach``. It works after p2pd has died, too."""
    control = p2p._client.control
    tasks = list(filter(None, (control._read_task, control._write_task)))
    await p2p.shutdown()
    # Await their end here, or asyncio reports exceptions that were never retrieved.
    await asyncio.wait(tasks, timeout=CLOSE_DEADLINE)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


async def lookup_failure(entries: Sequence[EntryPoint]) -> str | None:
    """Why none of the names in these addresses can be looked up; None if one can, or an address is
    a number."""
    failure = None
    for entry in entries:
        name, kind = name_of(entry.dial), entry.dial.split("/")[1]
        if name is None:
            return None
        family = {"dns4": AF_INET, "dns6": AF_INET6}.get(kind, 0)
        try:
            async with asyncio.timeout(DIAL_DEADLINE):
                await asyncio.get_running_loop().getaddrinfo(name, None, family=family)
            return None
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "strerror", None) or "no answer in time"
            failure = f"its name {name} can't be looked up: {reason}"
    return failure


async def wait_routing(p2p: Any) -> None:
    """Wait until p2pd has put a peer just dialed into its routing table, which takes it a moment.

    Before that it finds no third peer by id alone, and hivemind would take all of them for silent.
    """
    from lowcomm_node.net.hivemind_parts import ControlFailure, PeerID

    nobody, empty = PeerID.from_base58(peer_id_of(bytes(32))), "failed to find any peer in table"
    with suppress(TimeoutError, OSError, EOFError):
        async with asyncio.timeout(ROUTING_DEADLINE):
            while True:
                try:
                    async with asyncio.timeout(ASKED):
                        await p2p._client.connect(nobody, [])
                except ControlFailure as failure:
                    if empty not in str(failure):
                        return
                await asyncio.sleep(0.05)


async def ping(node: Any, peer_id: str) -> float | None:
    """Exchange routing entries with a connected peer. Returns the seconds that its clock is ahead
    of ours (0 within the call's duration); None if it does not answer."""
    from lowcomm_node.net.hivemind_parts import DHTID, PeerID, dht_pb2

    protocol, peer = node.protocol, PeerID.from_base58(peer_id)
    asked = time()
    try:
        async with asyncio.timeout(DIAL_DEADLINE):
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
            answer = await protocol.get_stub(peer).rpc_ping(request)
            node_id = DHTID.from_bytes(answer.peer.node_id)
            if not math.isfinite(answer.dht_time):
                raise ValueError(f"its clock shows {answer.dht_time}")
    except Exception as error:  # a hostile answer can make hivemind raise anything
        log.debug("dht.silent", peer=peer_id, error=repr(error))
        await protocol.update_routing_table(None, peer, responded=False)
        return None
    await protocol.update_routing_table(node_id, peer, responded=True)
    # hivemind avoids a silent peer with growing pauses; this one has just answered.
    node.blacklist.register_success(peer)
    return answer.dht_time - min(max(answer.dht_time, asked), time())


def read_entry(entries: Mapping[Any, Any], subkey: str) -> bytes | None:
    """The value of a subkey among a peer's records under one key, unchecked."""
    from lowcomm_node.net.hivemind_parts import MSGPackSerializer

    entry = entries.get(subkey)
    try:
        value = MSGPackSerializer.loads(entry.value) if entry is not None else None
    except Exception:  # untrusted msgpack and its extension types can raise anything
        return None
    return value if isinstance(value, bytes) else None


def write_entry(value: bytes) -> bytes:
    """A value as the DHT stores it."""
    from lowcomm_node.net.hivemind_parts import MSGPackSerializer

    return MSGPackSerializer.dumps(value)


def in_words(failure: str) -> str:
    """An owner's words for p2pd's error."""
    return next((words for sign, words in _FAILURES if sign in failure), failure)
