"""Peers and bootstrap servers that answered, kept as entry points for the next start.

    {"version": 1, "doors": [{"peer_id": ..., "addresses": [...], "answered": Unix time, "named":
    bool}, ...]}

Addresses come from other peers, and anybody may have written the file, so everything is checked
when it is read. A damaged file counts as empty.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import is_peer_id, parse_entry_point
from lowcomm_node.storage.files import write_atomic

MAX_REMEMBERED = 64
MAX_NAMED = 16
"""Peers named by the owner, which are never displaced by others."""
MAX_ADDRESSES = 4
"""Of one peer."""
MAX_BYTES = 128 * 1024
MAX_AGE = 30 * 86_400.0
"""Seconds before a peer that has not answered is forgotten."""
_VERSION = 1


@dataclass(frozen=True)
class RememberedPeer:
    """A peer that has answered."""

    peer_id: str
    addresses: tuple[str, ...]
    answered: float
    """Unix time, seconds, of its last answer."""
    named: bool = False
    """Whether the owner has named it."""


class RememberedPeers:
    """The entry points of one run, in a file. Time is an argument: Unix time, seconds."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._peers = {peer.peer_id: peer for peer in _read(path, now)}
        self._written = self._content()

    def peers(self) -> list[RememberedPeer]:
        """All of them, named ones first, then by last answer."""
        return sorted(self._peers.values(), key=lambda peer: (not peer.named, -peer.answered))

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._peers

    def answered(
        self, peer_id: str, addresses: Sequence[str], now: float, named: bool = False
    ) -> None:
        """Remember a peer. Beyond MAX_REMEMBERED the oldest are forgotten."""
        before = self._peers.get(peer_id)
        good = [text for text in addresses if _leads_to(text, peer_id)]
        kept = tuple(dict.fromkeys([*good, *(before.addresses if before else ())]))[:MAX_ADDRESSES]
        if kept:
            self._peers[peer_id] = RememberedPeer(
                peer_id, kept, now, named or (before is not None and before.named)
            )
        self._peers = {peer.peer_id: peer for peer in _newest(self._peers.values())}

    def save(self) -> None:
        """Write changes atomically. Raises DiskFull, OSError."""
        content = self._content()
        if content != self._written:
            write_atomic(self._path, content, 0o600)
            self._written = content

    def _content(self) -> bytes:
        peers = [
            {
                "peer_id": peer.peer_id,
                "addresses": peer.addresses,
                "answered": peer.answered,
                "named": peer.named,
            }
            for peer in self.peers()
        ]
        return json.dumps({"version": _VERSION, "doors": peers}, indent=1).encode()


def _newest(peers: Any) -> list[RememberedPeer]:
    newest = sorted(peers, key=lambda peer: -peer.answered)
    named = [peer for peer in newest if peer.named][:MAX_NAMED]
    others = [peer for peer in newest if peer not in named]
    return [*named, *others[: MAX_REMEMBERED - len(named)]]


def _read(path: Path, now: float) -> list[RememberedPeer]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        content = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return []
    if (
        not isinstance(content, dict)
        or content.get("version") != _VERSION
        or not isinstance(content.get("doors"), list)
    ):
        return []
    found = [
        peer
        for entry in content["doors"][: 4 * MAX_REMEMBERED]
        if (peer := _read_peer(entry, now)) is not None
    ]
    return _newest({peer.peer_id: peer for peer in found}.values())


def _read_peer(entry: Any, now: float) -> RememberedPeer | None:
    if not isinstance(entry, dict):
        return None
    peer_id, addresses, answered = (
        entry.get("peer_id"),
        entry.get("addresses"),
        entry.get("answered"),
    )
    if not isinstance(peer_id, str) or not is_peer_id(peer_id) or not isinstance(addresses, list):
        return None
    if (
        not isinstance(answered, int | float)
        or isinstance(answered, bool)
        or not math.isfinite(answered)
    ):
        return None
    # An entry from the future counts as the oldest possible, or it would never be forgotten.
    answered = float(answered) if answered <= now else now - MAX_AGE
    good = [
        text
        for text in addresses[:MAX_ADDRESSES]
        if isinstance(text, str) and _leads_to(text, peer_id)
    ]
    if not good or now - answered > MAX_AGE:
        return None
    return RememberedPeer(peer_id, tuple(dict.fromkeys(good)), answered, entry.get("named") is True)


def _leads_to(text: str, peer_id: str) -> bool:
    try:
        return str(parse_entry_point(text)) == text and parse_entry_point(text).peer_id == peer_id
    except ConfigError:
        return False
