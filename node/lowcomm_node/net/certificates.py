"""Fetches the certificates of peers, found by the SHA-256 in their signed records.

gRPC can pin a whole certificate only. So the first direct call to a peer fetches it over a TLS
connection of its own, sends nothing before the digest matches, and then caches it. A peer keeps one
certificate for as long as its process lives.
"""

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from lowcomm_node.errors import LinkLost

FETCH_DEADLINE = 10.0
HEAD_START = 0.5
"""Seconds before the next address is tried beside this one."""
MAX_CERTIFICATES = 1024
MAX_CERTIFICATE_BYTES = 2048
ELSEWHERE = "somebody else answers there, with another certificate than the one in its record"


class OtherCertificate(LinkLost):
    """Somebody else answers at a peer's address."""


class Certificates:
    """Certificates (DER) by their SHA-256. The least recently used is evicted."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    async def fetch(self, digest: bytes, addresses: Sequence[str]) -> bytes:
        """The certificate (DER) with this SHA-256, as one of the addresses (``host:port``) presents
        it.

        Raises OtherCertificate if all that answer present another one, LinkLost if none answers.
        """
        if digest not in self._known:
            if not digest:
                raise LinkLost("tells no certificate: it can't be called directly")
            self._keep(digest, await _first(digest, addresses))
        self._known.move_to_end(digest)
        return self._known[digest]

    def _keep(self, digest: bytes, der: bytes) -> None:
        self._known[digest] = der
        while len(self._known) > MAX_CERTIFICATES:
            self._known.popitem(last=False)


async def _first(digest: bytes, addresses: Sequence[str]) -> bytes:
    """The first matching certificate among the addresses, tried with a head start each."""
    tries: set[asyncio.Task[bytes]] = set()
    waiting, errors = list(addresses), list[LinkLost]()
    try:
        async with asyncio.timeout(FETCH_DEADLINE):
            while waiting or tries:
                if waiting:
                    tries.add(asyncio.create_task(_fetch(digest, waiting.pop(0))))
                patience = HEAD_START if waiting else None
                done, tries = await asyncio.wait(
                    tries, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, LinkLost):
                        raise error
                    errors.append(error)
    except TimeoutError:
        raise LinkLost(f"did not answer within {FETCH_DEADLINE:.0f} s") from None
    finally:
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    raise next(
        (error for error in errors if isinstance(error, OtherCertificate)),
        LinkLost("can't be reached"),
    )


async def _fetch(digest: bytes, address: str) -> bytes:
    host, _, port = address.rpartition(":")
    try:
        shown = await shown_certificate(host.strip("[]"), int(port))
    # Ssl.SSLError is an OSError; a name that no encoding can express is a ValueError
    except (OSError, ValueError):
        raise LinkLost("can't be reached") from None
    if shown is None or len(shown) > MAX_CERTIFICATE_BYTES or sha256(shown).digest() != digest:
        raise OtherCertificate(ELSEWHERE)
    return shown


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
