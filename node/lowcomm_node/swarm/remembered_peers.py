"""Peers and bootstrap servers that answered, kept as entry points for the next start.

    {"version": 1, "doors": [{"peer_id": ..., "addresses": [...], "answered": Unix time, "named":
    bool}, ...]}

Addresses come from other peers, and anybody may have written the file, so everything is checked
when it is read. A damaged file counts as empty.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowcomm_node.net.addresses import is_peer_id, leading_to
from lowcomm_node.storage.files import write_atomic

MAX_REMEMBERED = 64
MAX_NAMED = 16
"""Peers named by the owner, which are never displaced by others."""
MAX_ADDRESSES = 4
"""Of one peer."""
MAX_BYTES = 128 * 1024
MAX_AGE = 30 * 86_400.0
"""Seconds before a peer that has not answered is forgotten."""


class RememberedPeer(BaseModel):
    """A peer that has answered."""

    model_config = ConfigDict(strict=True, frozen=True)

    peer_id: str
    addresses: list[str]
    answered: Annotated[float, Field(allow_inf_nan=False)]
    """Unix time, seconds, of its last answer."""
    named: bool = False
    """Whether the owner has named it."""


class _Content(BaseModel):
    """The file."""

    version: Literal[1]
    doors: list[Any]
    """Read one by one, so that a damaged one spoils no others."""


class RememberedPeers:
    """The entry points of one run, in a file. Time is an argument: Unix time, seconds."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._peers = {peer.peer_id: peer for peer in _read(path, now)}
        self._written = self._content()

    def peers(self) -> list[RememberedPeer]:
        """All of them, named ones first, then by last answer."""
        return sorted(self._peers.values(), key=lambda peer: (not peer.named, -peer.answered))

    def answered(
        self, peer_id: str, addresses: Sequence[str], now: float, named: bool = False
    ) -> None:
        """Remember a peer. Beyond MAX_REMEMBERED the oldest are forgotten."""
        before = self._peers.get(peer_id)
        known = [*addresses, *(before.addresses if before else ())]
        good = _leading_to(peer_id, known)
        if good:
            named = named or (before is not None and before.named)
            peer = RememberedPeer(peer_id=peer_id, addresses=good, answered=now, named=named)
            self._peers = _newest([*self._peers.values(), peer])

    def save(self) -> None:
        """Write changes atomically. Raises DiskFull, OSError."""
        content = self._content()
        if content != self._written:
            write_atomic(self._path, content, 0o600)
            self._written = content

    def _content(self) -> bytes:
        doors = [peer.model_dump() for peer in self.peers()]
        return json.dumps({"version": 1, "doors": doors}, indent=1).encode()


def _newest(peers: Iterable[RememberedPeer]) -> dict[str, RememberedPeer]:
    """The last entry of each peer, as far as there is room."""
    last = {peer.peer_id: peer for peer in peers}
    newest = sorted(last.values(), key=lambda peer: -peer.answered)
    named = [peer for peer in newest if peer.named][:MAX_NAMED]
    others = [peer for peer in newest if peer not in named]
    return {peer.peer_id: peer for peer in (*named, *others[: MAX_REMEMBERED - len(named)])}


def _read(path: Path, now: float) -> list[RememberedPeer]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        content = _Content.model_validate_json(data if len(data) <= MAX_BYTES else b"")
    except (OSError, ValueError):
        return []
    peers: list[RememberedPeer] = []
    for entry in content.doors[: 4 * MAX_REMEMBERED]:
        with suppress(ValidationError):
            peer = RememberedPeer.model_validate(entry)
            # One from the future counts as the oldest possible, or it would never be forgotten.
            answered = peer.answered if peer.answered <= now else now - MAX_AGE
            good = _leading_to(peer.peer_id, peer.addresses[:MAX_ADDRESSES])
            if good and is_peer_id(peer.peer_id) and now - answered <= MAX_AGE:
                peers.append(peer.model_copy(update={"addresses": good, "answered": answered}))
    return list(_newest(peers).values())


def _leading_to(peer_id: str, addresses: Sequence[str]) -> list[str]:
    """The first addresses of a peer; those that lead elsewhere are left out."""
    entries = (str(entry) for entry in leading_to(peer_id, addresses))
    return [text for text in dict.fromkeys(entries) if text in addresses][:MAX_ADDRESSES]
