"""Multiaddresses of DHT peers, such as ``/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...``."""

from dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import public_key_of

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")


@dataclass(frozen=True)
class EntryPoint:
    """A peer, and where it can be dialed."""

    peer_id: str
    dial: str
    """The multiaddress without its peer id: hivemind would encode that in a form that libp2p can't connect to."""

    def __str__(self) -> str:
        return f"{self.dial}/p2p/{self.peer_id}"


def parse_entry_point(text: str) -> EntryPoint:
    """Read an address that a person gave. Raises ConfigError that names it."""
    dial, marker, peer_id = text.strip().rpartition("/p2p/")
    parts = dial.split("/")
    try:
        public_key_of(peer_id)
        good = bool(marker) and len(parts) >= 5 and parts[0] == "" and parts[1] in _HOSTS and parts[3] in ("tcp", "udp")
        good = good and parts[4].isdecimal() and 0 < int(parts[4]) < 65536 and len(text) <= 256
        good = good and (parts[5:] == ["quic-v1"] if parts[3] == "udp" else not parts[5:])
    except SignatureError:
        good = False
    if not good:
        raise ConfigError(f"{text[:120]!r} is not the address of a peer: expected one such as {EXAMPLE}.")
    return EntryPoint(peer_id, dial)
