"""The records of the DHT: their names, and what makes one valid.

A value tells by its first byte what it is, because a storer knows only the hash of a key:

    R  a signed run            subkey = run id     under RUNS_KEY
    P  a signed peer record    subkey = peer id    under peers_key(run id)

Anything else is refused, so a stranger can neither overwrite a record nor fill the DHT with records of other kinds.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.records import read_record
from lowcomm_protocol.run import read_signed_run

RUNS_KEY = "lowcomm/v1/runs"
MAX_LIFE = 3600.0
_RUN, _PEER = b"R", b"P"
_REMEMBERED = 8192


@dataclass(frozen=True)
class Provenance:
    """Where a stored value belongs, and until when its signer vouches for it."""

    key: str
    expires: float
    """Unix time, seconds; infinite for a run, which only the DHT lets expire."""


def peers_key(run_id: str) -> str:
    """Where the peers of a run tell of themselves."""
    return f"lowcomm/v1/peers/{run_id}"


def pack(key: str, value: bytes) -> bytes:
    """A value as it is stored."""
    return (_RUN if key == RUNS_KEY else _PEER) + value


def unpack(stored: bytes) -> bytes:
    """The counterpart of ``pack``."""
    return stored[1:]


def key_of(stored: bytes, subkey: str, now: float) -> str | None:
    """The key under which a stored value belongs, if it is valid for this subkey at Unix time ``now``; else None."""
    found = provenance(stored, subkey, now)
    return found.key if found else None


def provenance(stored: bytes, subkey: str, now: float) -> Provenance | None:
    """Check a stored value from a stranger: None unless whom the subkey names has signed it, and it is still good."""
    try:
        if stored[:1] == _RUN:
            return Provenance(RUNS_KEY, math.inf) if read_signed_run(unpack(stored)).run_id == subkey else None
        if stored[:1] == _PEER:
            info = read_record(unpack(stored), now)
            return Provenance(peers_key(info.run_id), info.expires) if info.peer_id == subkey else None
    except (LowcommError, ValueError):  # ValueError: text that no encoding can express, such as a lone surrogate
        return None
    return None


class Provenances:
    """``provenance`` that remembers: each reader gets every record from several storers, again and again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Provenance] = OrderedDict()

    def check(self, stored: bytes, subkey: str, now: float) -> Provenance | None:
        """See ``provenance``. Only what was valid is remembered: what is not may become so, as clocks go on."""
        digest = sha256(subkey.encode(errors="replace") + b"\0" + stored).digest()
        found = self._known.get(digest)
        if found is None:
            found = provenance(stored, subkey, now)
            if found is None:
                return None
            self._known[digest] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found if found.expires > now else None
