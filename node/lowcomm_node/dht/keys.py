"""The records of the DHT: their keys, and what makes one valid.

The first byte of a value tells its kind, because a storer knows only the hash of a key:

    R  a signed run            subkey = run id     under RUNS_KEY
    P  a signed peer record    subkey = peer id    under peers_key(run id), the door
    S  depth, and the same     subkey = peer id    under shard_key(run id, depth, number of shard)
    L  a removal list          subkey = creator    under removals_key(run id, creator)
    A  amendments of a run     subkey = creator    under amendments_key(run id, creator)
    T  pieces of text read     subkey = peer id    under read_key(run id, part, epoch)

Other kinds are refused, so nobody can overwrite a foreign record or fill the DHT with other data. A
storer that has seen a run, by looking it up or storing it, also knows who may join it, and neither
stores nor believes other peers' records. A storer that has not seen it stores records that are
otherwise valid; the peers of the run check them when they read.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from cachetools import LRUCache

from lowcomm_protocol.errors import LowcommError, Reason, RecordError, Refusals, VersionError, What
from lowcomm_protocol.peers.admission import Rules
from lowcomm_protocol.peers.invites import read_removals
from lowcomm_protocol.peers.records import is_from_future, read_record
from lowcomm_protocol.peers.shards import MAX_BITS, MAX_LISTED, shard_of
from lowcomm_protocol.spec.amendments import read_chain
from lowcomm_protocol.spec.run import name_signed_run, read_signed_run

MAX_VALUE = 30 * 1024
"""Bytes of one record. Larger ones disturb hivemind's DHT."""
RUNS_KEY = "lowcomm/v1/runs"
MAX_LIFE = 3600.0
_RUN, _PEER, _SHARD, _REMOVALS, _AMENDMENTS, _READ = b"R", b"P", b"S", b"L", b"A", b"T"
_SHARDS_PREFIX = "lowcomm/v1/shards/"
_REMOVALS_PREFIX, _AMENDMENTS_PREFIX = "lowcomm/v1/removals/", "lowcomm/v1/amendments/"
_READ_PREFIX = "lowcomm/v1/read/"
MAX_REMEMBERED = 8192
"""Values that were checked."""
MAX_RULES = 256
"""Runs, and chains of amendments."""
Admissions = tuple[tuple[int, Any, frozenset[str]], ...]


@dataclass(frozen=True)
class Provenance:
    """Where a stored value belongs, and until when its signer vouches for it."""

    key: str
    expires: float
    """Unix time, seconds; infinite if only the DHT lets it expire."""
    owner: str = ""
    """Its signer."""
    order: int = 0
    """Of two values of one signer the higher order wins, whichever expires later, so that an old
    one can't be replayed."""
    issued: float = -math.inf
    """Unix time, seconds; of records that live for minutes only."""
    most: int | None = None
    """Records that a keeper keeps under the key; None: as many as fit."""


def peers_key(run_id: str) -> str:
    """Key of the peer records of a run, or of a sample of them: the door."""
    return f"lowcomm/v1/peers/{run_id}"


def shard_key(run_id: str, bits: int, number: int) -> str:
    """Key of the peer records of a shard; of depth 0 the door."""
    return f"{_SHARDS_PREFIX}{run_id}/{bits}/{number}" if bits else peers_key(run_id)


def removals_key(run_id: str, creator: str) -> str:
    """Key of the creator's list of removed peers. No other list belongs there."""
    return f"{_REMOVALS_PREFIX}{run_id}/{creator}"


def amendments_key(run_id: str, creator: str) -> str:
    """Key of the creator's amendments of a run."""
    return f"{_AMENDMENTS_PREFIX}{run_id}/{creator}"


def read_key(run_id: str, part: int, epoch: int) -> str:
    """Key of what the peers of a run have read of a part of its text in an epoch."""
    return f"{_READ_PREFIX}{run_id}/{part}/{epoch}"


def check_size(value: bytes) -> None:
    """Raise RecordError if a value is too large for the DHT."""
    if len(value) > MAX_VALUE:
        raise RecordError(
            f"A record of {len(value)} bytes is too large for the DHT: at most {MAX_VALUE}."
        )


def pack(key: str, value: bytes) -> bytes:
    """A value as it is stored."""
    if key == RUNS_KEY:
        return _RUN + value
    if key.startswith(_SHARDS_PREFIX):
        return _SHARD + bytes([int(key.split("/")[-2])]) + value
    kinds = {_REMOVALS_PREFIX: _REMOVALS, _AMENDMENTS_PREFIX: _AMENDMENTS, _READ_PREFIX: _READ}
    return next((kind for prefix, kind in kinds.items() if key.startswith(prefix)), _PEER) + value


def unpack(stored: bytes) -> bytes:
    """The value in a stored one."""
    return stored[2 if stored[:1] == _SHARD else 1 :]


class Provenances:
    """Checks stored values with a cache: a reader gets each record from several storers,
    repeatedly."""

    def __init__(self, refusals: Refusals | None = None) -> None:
        self.refusals = refusals or Refusals()
        """Refused records; the same bytes count once."""
        self._known: LRUCache[bytes, Provenance] = LRUCache(MAX_REMEMBERED)
        self._refused: LRUCache[bytes, bool] = LRUCache(MAX_REMEMBERED)
        self._rules: LRUCache[str, Rules] = LRUCache(MAX_RULES)
        self._amended: LRUCache[tuple[str, str], tuple[int, Admissions]] = LRUCache(MAX_RULES)
        """By run and signer of a chain: the number of amendments, and its admission rules by swarm
        step."""
        self._steps: LRUCache[str, int] = LRUCache(MAX_RULES)
        """By amended run: the highest swarm step in a record."""
        self._creators: LRUCache[str, str] = LRUCache(MAX_RULES)

    def check(self, stored: bytes, subkey: str, now: float) -> Provenance | None:
        """The provenance of an untrusted stored value at Unix time ``now``.

        None unless the subkey's peer has signed it, and it is current. Only valid values are
        cached: an invalid one may become valid with time.
        """
        if len(stored) > MAX_VALUE + 1:
            self.refusals.count(What.RECORD, Reason.TOO_LARGE)
            return None
        # Hash the subkey on its own: with plain concatenation, a longer subkey and a shorter value
        # could have the same digest.
        digest = sha256(sha256(subkey.encode(errors="replace")).digest() + stored).digest()
        found = self._known.get(digest)
        if found is None:
            try:
                found = self._examine(stored, subkey, now)
            # ValueError: text that can't be encoded.
            except (LowcommError, ValueError) as error:
                if digest not in self._refused:
                    known = isinstance(error, LowcommError)
                    reason = error.reason if known else Reason.MALFORMED
                    self.refusals.count(What.RECORD, reason)
                    self._refused[digest] = True
                return None
            self._known[digest] = found
        # A record that was taken while our own clock was ahead as well must not hide newer ones.
        return found if found.expires > now and not is_from_future(found.issued, now) else None

    def _examine(self, stored: bytes, subkey: str, now: float) -> Provenance:
        kind, value = stored[:1], unpack(stored)
        if kind == _RUN:
            found, signed_for = self._examine_run(value)
        elif kind in (_PEER, _SHARD):
            bits = stored[1] if kind == _SHARD and len(stored) > 1 else 0
            if bits > MAX_BITS or (kind == _SHARD and not bits):
                raise RecordError(f"A record in a shard of depth {bits} is refused.")
            found, signed_for = self._examine_peer(value, bits, now)
        elif kind == _REMOVALS:
            removals, signed_for = read_removals(value, subkey), subkey
            key = removals_key(removals.run_id, subkey)
            found = Provenance(key, math.inf, subkey, removals.version)
        elif kind == _AMENDMENTS:
            chain, signed_for = read_chain(value, subkey), subkey
            key = amendments_key(chain.run_id, subkey)
            found = Provenance(key, math.inf, subkey, len(chain.links))
            known, _ = self._amended.get((chain.run_id, subkey), (0, ()))
            if chain.admissions and len(chain.links) >= known:
                # These rules count if their signer has created the run.
                self._amended[chain.run_id, subkey] = len(chain.links), chain.admissions
        elif kind == _READ:
            found, signed_for = self._examine_statement(value, now)
        else:
            raise RecordError("A value of an unknown kind is refused.")
        if signed_for != subkey:
            raise RecordError(
                f"A record of {signed_for} under another name is refused.", reason=Reason.MISPLACED
            )
        return found

    def _examine_run(self, value: bytes) -> tuple[Provenance, str]:
        run_id, creator = name_signed_run(value)
        with suppress(VersionError):  # those that can read it need it
            rules = Rules.of(read_signed_run(value))
            if rules.admission != "open" and rules.run_id not in self._rules:
                self._rules[rules.run_id] = rules
        self._creators[run_id] = creator
        return Provenance(RUNS_KEY, math.inf, creator), run_id

    def _examine_peer(self, value: bytes, bits: int, now: float) -> tuple[Provenance, str]:
        info = read_record(value, now)
        self._reach(info.run_id, info.swarm_step)
        rules = self._rules_of(info.run_id)
        claim = rules.check(info.peer_id, info.claim, now) if rules is not None else None
        if claim is not None and rules is not None:
            claim.verify(rules.creator)
        expires = min(info.expires, claim.invite.expires if claim is not None else math.inf)
        key = shard_key(info.run_id, bits, shard_of(info.run_id, info.peer_id, bits))
        order = int(info.issued * 1000)
        found = Provenance(key, expires, info.peer_id, order, info.issued, MAX_LISTED)
        return found, info.peer_id

    def _examine_statement(self, value: bytes, now: float) -> tuple[Provenance, str]:
        from lowcomm_protocol.reading import read_statement  # NumPy: few runs have packed text

        read = read_statement(value)
        rules = self._rules_of(read.run_id)
        if rules is not None and rules.admission == "list":  # an invite would need a claim
            rules.check(read.peer_id, b"", now)
        key = read_key(read.run_id, read.part, read.epoch)
        return Provenance(key, math.inf, read.peer_id, read.issued_ms), read.peer_id

    def _rules_of(self, run_id: str) -> Rules | None:
        """The admission rules of a run, as far as known, with amendments."""
        known, creator = self._rules.get(run_id), self._creators.get(run_id, "")
        _, amended = self._amended.get((run_id, creator), (0, ()))
        reached = self._steps.get(run_id, 0)
        in_force = [(admission, members) for at, admission, members in amended if at <= reached]
        if not in_force:
            return known
        admission, members = in_force[-1]
        if known is None:
            return Rules(run_id, creator, admission, members)
        return replace(known, admission=admission, members=members)

    def _reach(self, run_id: str, swarm_step: int) -> None:
        """Remember how far a run is, if its admission depends on it."""
        is_amended = (run_id, self._creators.get(run_id, "")) in self._amended
        if is_amended and swarm_step > self._steps.get(run_id, 0):
            self._steps[run_id] = swarm_step
