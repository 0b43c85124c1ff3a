"""A fresh connection to somebody who asked for it: does the right peer answer?

Our own libp2p may be connected already, and remembers addresses. So each call of libp2p comes from
a p2pd of its own, which lives as long as the call.
"""

import asyncio
import ssl
from hashlib import sha256

from lowcomm_node.errors import NodeError
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.control import Control
from lowcomm_node.net.hivemind_client import load_hivemind
from lowcomm_node.net.p2pd import P2pDaemon
from lowcomm_protocol.peers.probes import Kind, Target

DIAL_DEADLINE = 5.0
"""Seconds for TCP and TLS, or QUIC: the second SYN goes out after one, the third after three."""
_TRANSPORTS = {Kind.TCP: "tcp/{}", Kind.QUIC: "udp/{}/quic-v1"}


async def is_reached(host: str, peer_id: str, target: Target) -> bool:
    """Whether a fresh connection to a port of ``host``, an IP address, leads to the named peer.

    Takes DIAL_DEADLINE at most; for libp2p also the start of a process.
    """
    if target.kind is Kind.DIRECT:
        return await _shows_certificate(host, target)
    return await _answers_as(EntryPoint(peer_id, multiaddress(host, target.kind, target.port)))


def multiaddress(host: str, kind: Kind, port: int) -> str:
    """Where libp2p is dialed."""
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/{_TRANSPORTS[kind].format(port)}"


async def shown_certificate(host: str, port: int) -> bytes | None:
    """The certificate (DER) shown at an address. Raises OSError if nobody speaks TLS there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the caller compares the digest
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="lowcomm")
    try:
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()


async def _shows_certificate(host: str, target: Target) -> bool:
    try:
        async with asyncio.timeout(DIAL_DEADLINE):
            shown = await shown_certificate(host, target.port)
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    return shown is not None and sha256(shown).digest() == target.certificate


async def _answers_as(entry: EntryPoint) -> bool:
    """Whether libp2p finds that very peer there."""
    caller = P2pDaemon(None, ["/ip4/127.0.0.1/tcp/0"], punching=False)
    try:
        await asyncio.gather(caller.start(), load_hivemind())
        await Control(caller.control).connect(entry.peer_id, [entry], DIAL_DEADLINE)
    except NodeError:
        return False
    finally:
        await caller.stop()
    return True
