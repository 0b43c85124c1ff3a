"""Multiaddresses of DHT peers, such as ``/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...``."""

import ipaddress
import re
from dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import public_key_of

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."
_NAMES = ("dns", "dns4", "dns6")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?")


@dataclass(frozen=True)
class EntryPoint:
    """A peer, and where it can be dialed."""

    peer_id: str
    dial: str
    """The multiaddress without its peer id: hivemind would encode that in a form that libp2p can't connect to."""

    def __str__(self) -> str:
        return f"{self.dial}/p2p/{self.peer_id}"


def parse_entry_point(text: str) -> EntryPoint:
    """Read an address that a person or a stranger gave. Raises ConfigError that names it."""
    dial, marker, peer_id = text.strip().rpartition("/p2p/")
    try:
        public_key_of(peer_id)
        good = bool(marker) and len(text) <= 256 and is_dialable(dial)
    except SignatureError:
        good = False
    if not good:
        raise ConfigError(f"{text[:120]!r} is not the address of a peer: expected one such as {EXAMPLE}.")
    return EntryPoint(peer_id, dial)


def parse_announced(text: str, peer_id: str) -> str:
    """Read an address that this node's owner wants told to others. Raises ConfigError that names it."""
    dial, _, named = text.strip().partition("/p2p/")
    if not is_dialable(dial) or named not in ("", peer_id):
        raise ConfigError(
            f"{text[:120]!r} can't be announced: expected the address at which others reach this server, such as "
            "/dns4/bootstrap.example.org/tcp/31337, without a peer id or with its own."
        )
    return dial


def is_dialable(dial: str) -> bool:
    """Whether this is a host, a transport and a port, and nothing else."""
    empty, kind, host, transport, port, *rest = [*dial.split("/"), "", "", "", ""][: max(5, dial.count("/") + 1)]
    return (
        not empty
        and _is_host(kind, host)
        and port.isascii()
        and port.isdecimal()
        and 0 < int(port[:6]) < 65536
        and (transport, rest) in (("tcp", []), ("udp", ["quic-v1"]))
    )


def reach(dial: str) -> int:
    """How far an address reaches: 2 the internet, 1 this network, 0 this machine."""
    _, kind, host, *_ = [*dial.split("/"), "", ""]
    if kind in _NAMES:
        return 2
    address = ipaddress.ip_address(host)
    return 0 if address.is_loopback else 1 if address.is_private or address.is_link_local else 2


def _is_host(kind: str, host: str) -> bool:
    if kind in _NAMES:
        return _NAME.fullmatch(host) is not None
    try:
        return ipaddress.ip_address(host).version == {"ip4": 4, "ip6": 6}.get(kind) and "%" not in host
    except ValueError:
        return False
