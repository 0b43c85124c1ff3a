"""The records of the DHT: their names, and what makes one valid.

A value tells by its first byte what it is, because a storer knows only the hash of a key:

    R  a signed run            subkey = run id     under RUNS_KEY
    P  a signed peer record    subkey = peer id    under peers_key(run id)

Anything else is refused, so a stranger can neither overwrite a record nor fill the DHT with records of other kinds.
"""

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.records import read_record
from lowcomm_protocol.run import read_signed_run

RUNS_KEY = "lowcomm/v1/runs"
MAX_LIFE = 3600.0
_RUN, _PEER = b"R", b"P"


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
    """The key under which a stored value belongs, if it is valid for this subkey; else None."""
    try:
        if stored[:1] == _RUN:
            return RUNS_KEY if read_signed_run(unpack(stored)).run_id == subkey else None
        if stored[:1] == _PEER:
            info = read_record(unpack(stored), now)
            return peers_key(info.run_id) if info.peer_id == subkey else None
    except LowcommError:
        return None
    return None
