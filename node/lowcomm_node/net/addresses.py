"""Multiaddresses of DHT peers, as text and as p2pd's bytes, and the entry points of a node.

    /ip4/203.0.113.7/tcp/31337/p2p/PEER                                    where a peer listens
    /ip4/203.0.113.7/udp/31337/quic-v1/p2p/PEER                            the same over QUIC
    /ip4/203.0.113.7/tcp/31337/p2p/RELAY/p2p-circuit/p2p/PEER              through a named relay

Other forms are rejected, since the addresses come from untrusted peers.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import base58

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.peers.records import MAX_MULTIADDRESS

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."
CIRCUIT = "/p2p-circuit"
MAX_BYTES = 512
"""Of an address to decode: twice the length of any that we accept."""
_P2P, _P2P_CIRCUIT = b"\xa5\x03", b"\xa2\x02"
"""Codes of these components in the bytes of an address."""
_ED25519, _RSA = bytes.fromhex("002408011220"), bytes.fromhex("1220")
"""Prefixes of peer ids. Ed25519 ids contain the key, as those of all nodes do; RSA ids, its hash,
as those of hivemind's own programs do."""
_NAMES = ("dns", "dns4", "dns6")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?")
_DIAL = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/%]+)/(tcp/([0-9]{1,5})|udp/([0-9]{1,5})/quic-v1)")


@dataclass(frozen=True)
class EntryPoint:
    """A peer, and where it can be dialed."""

    peer_id: str
    dial: str
    """The multiaddress without its peer id."""

    @property
    def relay(self) -> str | None:
        """The peer id of the relay in the address; None if the peer is dialed directly."""
        return relay_of(self.dial)

    @property
    def fits(self) -> bool:
        """Whether it is short enough for a record. A longer one would make the record invalid."""
        return len(str(self)) <= MAX_MULTIADDRESS

    def __str__(self) -> str:
        return f"{self.dial}/p2p/{self.peer_id}"


def parse_entry_point(text: str) -> EntryPoint:
    """Parse an address given by the owner or another peer. Raises ConfigError that names it."""
    dial, marker, peer_id = text.strip().rpartition("/p2p/")
    place, through, relay = dial.removesuffix(CIRCUIT).rpartition("/p2p/")
    is_relayed = bool(through) and dial.endswith(CIRCUIT)
    if is_relayed and (not is_peer_id(relay) or relay == peer_id):
        marker = ""
    is_short = bool(marker) and len(text) <= MAX_MULTIADDRESS
    if not is_short or not is_peer_id(peer_id) or not is_dialable(place if is_relayed else dial):
        raise ConfigError(
            f"{text[:120]!r} is not the address of a peer: expected one such as {EXAMPLE}."
        )
    return EntryPoint(peer_id, dial)


def valid_entries(addresses: Iterable[str]) -> Iterator[EntryPoint]:
    """The addresses of peers among these; malformed ones are skipped."""
    for text in addresses:
        with suppress(ConfigError):
            yield parse_entry_point(text)


def parse_announced(text: str, peer_id: str) -> str:
    """Parse an address that the owner wants announced. Raises ConfigError that names it."""
    dial, _, named = text.strip().partition("/p2p/")
    if not is_dialable(dial) or named not in ("", peer_id) or not EntryPoint(peer_id, dial).fits:
        raise ConfigError(
            f"{text[:120]!r} can't be announced: expected the address at which others reach this "
            "server, such as /dns4/bootstrap.example.org/tcp/31337, without a peer id or with its "
            "own."
        )
    return dial


def is_peer_id(text: str) -> bool:
    """Whether this is a libp2p peer id, in its canonical spelling."""
    try:
        raw = base58.b58decode(text) if len(text) <= 64 else b""
    except ValueError:
        return False
    # Decoding accepts trailing white space; without this check one peer would have many names.
    return (
        any(len(raw) == len(start) + 32 and raw.startswith(start) for start in (_ED25519, _RSA))
        and base58.b58encode(raw).decode() == text
    )


def is_dialable(dial: str) -> bool:
    """Whether this is a host, a transport and a port, and nothing else."""
    if (match := _DIAL.fullmatch(dial)) is None:
        return False
    kind, host, _, *ports = match.groups()
    if not 0 < int(ports[0] or ports[1]) < 65536:
        return False
    if kind in _NAMES:
        return _NAME.fullmatch(host) is not None
    try:
        return ipaddress.ip_address(host).version == int(kind[-1])
    except ValueError:
        return False


def relay_of(dial: str) -> str | None:
    """The peer id of the relay in an address; None if there is none."""
    return dial.removesuffix(CIRCUIT).rpartition("/p2p/")[2] if dial.endswith(CIRCUIT) else None


def _split(dial: str) -> tuple[str, str, str]:
    """Kind, host and port of an address, as far as it has them."""
    _, kind, host, _, port, *_ = [*dial.split("/"), "", "", "", ""]
    return kind, host, port


def host_of(dial: str) -> str | None:
    """The IP address in an address or of a connection; None if there is a relay or a name
    instead."""
    kind, host, _ = _split(dial)
    if kind not in ("ip4", "ip6") or relay_of(dial) is not None:
        return None
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def name_of(dial: str) -> str | None:
    """The host name in an address, as the owner wrote it; None if there is none."""
    kind, host, _ = _split(dial)
    return host or None if kind in _NAMES else None


def place_in(dial: str) -> str:
    """The key of quotas: the IP address of a connection, or its relay for all that come through
    it."""
    return host_of(dial) or f"relay {relay_of(dial) or 'unknown'}"


def port_of(dial: str) -> int | None:
    """The port in an address; None if there is none."""
    *_, port = _split(dial)
    return int(port) if port.isascii() and port.isdecimal() else None


def circuit(relay: EntryPoint) -> str:
    """The address of a peer through a relay that is dialed directly."""
    return f"{relay}{CIRCUIT}"


def quic_beside(entry: EntryPoint) -> EntryPoint | None:
    """The same peer over QUIC at the same port number, where all nodes listen; None if it is not
    TCP, or this machine: nothing blocks TCP there, and an unused QUIC port costs five seconds."""
    place, tcp, port = entry.dial.rpartition("/tcp/")
    if not tcp or not port.isdecimal() or reach(entry.dial) == 0:
        return None
    return EntryPoint(entry.peer_id, f"{place}/udp/{port}/quic-v1")


def also_over_quic(entries: Sequence[EntryPoint]) -> list[EntryPoint]:
    """Each TCP address, and the same over QUIC. p2pd prefers QUIC where UDP works. That keeps the
    NAT's port open, and known, for hole punching. And where TCP is blocked nothing else works."""
    beside = (quic_beside(entry) for entry in entries)
    return list(dict.fromkeys([*entries, *filter(None, beside)]))


def encode(dial: str) -> bytes:
    """The bytes of an address for p2pd, which refuses hivemind's own encoding of a relay's id."""
    from lowcomm_node.net.hivemind_parts import Multiaddr

    place, _, relay = dial.removesuffix(CIRCUIT).partition("/p2p/")
    encoded = Multiaddr(place).to_bytes()
    if not relay:
        return encoded
    peer_id = base58.b58decode(relay)
    return encoded + _P2P + bytes([len(peer_id)]) + peer_id + _P2P_CIRCUIT


def decode(data: bytes) -> str | None:
    """The text of an address; None if it is malformed or too long."""
    from lowcomm_node.net.hivemind_parts import Multiaddr

    try:
        return str(Multiaddr(data)) if len(data) <= MAX_BYTES else None
    except Exception:  # untrusted bytes can make it raise anything
        return None


def reach(dial: str) -> int:
    """How far an address reaches: 2 the internet, 1 this network, 0 this machine. With a relay: its
    reach."""
    kind, host, _ = _split(dial)
    if kind in _NAMES:
        return 2
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return 0
    return 2 if address.is_global and not address.is_multicast else 1


MAX_ENTRY_POINTS = 32
MAX_DIALED = 8
"""Addresses of one peer that are dialed. A record has no more."""
MAX_DETOURS = 4
"""Entry points of ours tried as relays for a peer whose own addresses name none."""


class EntryPoints:
    """The addresses that the owner has named, followed by the newest learned ones."""

    def __init__(self, peer_id: str, named: Sequence[str], learned: Sequence[str] = ()) -> None:
        """``peer_id``: ours. Raises ConfigError for a malformed address of the owner's."""
        self._peer_id = peer_id
        self.named = tuple(parse_entry_point(text) for text in named)
        self.learned: tuple[EntryPoint, ...] = ()
        self.add(learned)

    def __iter__(self) -> Iterator[EntryPoint]:
        return iter((*self.named, *self.learned))

    def add(self, addresses: Sequence[str]) -> None:
        """Remember addresses. Malformed ones are skipped; the oldest learned ones are evicted when
        full."""
        for entry in valid_entries(addresses):
            if entry.peer_id != self._peer_id and entry not in (*self.named, *self.learned):
                self.learned = (*self.learned, entry)
        surplus = len(self.named) + len(self.learned) - MAX_ENTRY_POINTS
        self.learned = self.learned[max(0, surplus) :]

    def entries_for(self, peer_id: str, addresses: Sequence[str]) -> list[EntryPoint]:
        """Where to dial a peer: at these addresses of it, or through other entry points as
        relays."""
        relays = [e for e in self if e.relay is None and e.peer_id not in (peer_id, self._peer_id)]
        detours = [EntryPoint(peer_id, circuit(relay)) for relay in relays[:MAX_DETOURS]]
        return list(dict.fromkeys([*leading_to(peer_id, addresses), *detours]))


def leading_to(peer_id: str, addresses: Sequence[str]) -> list[EntryPoint]:
    """The addresses that lead to this peer. They come from its record, so others are ignored."""
    return [it for it in valid_entries(addresses[:MAX_DIALED]) if it.peer_id == peer_id]


def by_peer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The addresses of each peer. Malformed ones are skipped."""
    entries: dict[str, tuple[str, ...]] = {}
    for entry in valid_entries(addresses):
        entries[entry.peer_id] = (*entries.get(entry.peer_id, ()), str(entry))
    return entries
