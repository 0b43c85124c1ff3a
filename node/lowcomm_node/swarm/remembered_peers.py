"""Peers and bootstrap servers that answered, kept in a file as entry points for the next start.

    {"version": 1, "doors": [{"peer_id": ..., "addresses": [...], "answered": Unix time, "named":
    bool}, ...]}

Addresses come from other peers, and anybody may have written the file, so everything is checked
when it is read. A damaged file counts as empty.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowcomm_node.net.addresses import leading_to
from lowcomm_node.storage.files import write_atomic

MAX_REMEMBERED = 64
MAX_BYTES = 256 * 1024


class RememberedPeer(BaseModel):
    """A peer that has answered."""

    model_config = ConfigDict(frozen=True)

    peer_id: str
    addresses: tuple[str, ...]
    answered: Annotated[float, Field(allow_inf_nan=False)]
    """Unix time, seconds, of its last answer."""
    named: bool = False
    """Whether the owner has named it."""


class _Content(BaseModel):
    version: Literal[1]
    doors: list[Any]
    """Read one by one, so that a damaged one spoils no others."""


def read_remembered(path: Path, now: float) -> list[RememberedPeer]:
    """The peers in a file, named ones first, then by last answer; ``now``: Unix time, seconds."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        content = _Content.model_validate_json(data if len(data) <= MAX_BYTES else b"")
    except (OSError, ValueError):
        return []
    peers: list[RememberedPeer] = []
    for entry in content.doors[:MAX_REMEMBERED]:
        with suppress(ValidationError):
            peer = RememberedPeer.model_validate(entry)
            good = tuple(map(str, leading_to(peer.peer_id, peer.addresses)))
            if good:
                answered = min(peer.answered, now)  # one from the future would stay for ever
                peers.append(peer.model_copy(update={"addresses": good, "answered": answered}))
    return sorted(peers, key=lambda peer: (not peer.named, -peer.answered))


def remember(path: Path, peers: Iterable[RememberedPeer], now: float) -> None:
    """Add peers that have answered. Beyond MAX_REMEMBERED the oldest are forgotten, and of them
    those last that the owner has named. Raises DiskFull, OSError."""
    known = {peer.peer_id: peer for peer in read_remembered(path, now)}
    for peer in peers:
        before = known.get(peer.peer_id, peer)
        known[peer.peer_id] = peer.model_copy(update={"named": peer.named or before.named})
    newest = sorted(known.values(), key=lambda peer: (not peer.named, -peer.answered))
    doors = [peer.model_dump() for peer in newest[:MAX_REMEMBERED]]
    write_atomic(path, json.dumps({"version": 1, "doors": doors}, indent=1).encode(), 0o600)
