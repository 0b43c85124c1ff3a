"""The records of the DHT: their names, and what makes one valid.

A value tells by its first byte what it is, because a storer knows only the hash of a key:

    R  a signed run            subkey = run id     under RUNS_KEY
    P  a signed peer record    subkey = peer id    under peers_key(run id)
    L  a removal list          subkey = creator    under removals_key(run id, creator)
    A  amendments of a run     subkey = creator    under amendments_key(run id, creator)

Anything else is refused, so a stranger can neither overwrite a record nor fill the DHT with records
of other kinds. Who has seen a run, because it has looked it up or stores it, also knows who may
join it, and neither stores nor believes a record of anybody else. Who has not stores what is
otherwise valid: the peers of the run, who read it, check.
"""

import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from lowcomm_node.dht.interface import MAX_VALUE
from lowcomm_protocol.errors import LowcommError, RecordError, VersionError
from lowcomm_protocol.peers.admission import Rules
from lowcomm_protocol.peers.records import read_record
from lowcomm_protocol.peers.removals import read_removals
from lowcomm_protocol.refusals import Reason, Refusals, What
from lowcomm_protocol.spec.amendments import Chain, read_chain
from lowcomm_protocol.spec.run import name_signed_run, read_signed_run

RUNS_KEY = "lowcomm/v1/runs"
MAX_LIFE = 3600.0
_RUN, _PEER, _REMOVALS, _AMENDMENTS = b"R", b"P", b"L", b"A"
_REMOVALS_PREFIX, _AMENDMENTS_PREFIX = "lowcomm/v1/removals/", "lowcomm/v1/amendments/"
_REMEMBERED = 8192
_MAX_RULES = 256
Admissions = tuple[tuple[int, Any, frozenset[str]], ...]


@dataclass(frozen=True)
class Provenance:
    """Where a stored value belongs, and until when its signer vouches for it."""

    key: str
    expires: float
    """Unix time, seconds; infinite for what only the DHT lets expire."""
    owner: str = ""
    """Who signed it."""
    order: int = 0
    """Of two values of one signer the higher holds, whichever expires later: an old one can't be
    replayed over a new one."""


def peers_key(run_id: str) -> str:
    """Where the peers of a run tell of themselves."""
    return f"lowcomm/v1/peers/{run_id}"


def removals_key(run_id: str, creator: str) -> str:
    """Where the creator of a run tells whom it has removed; nobody else's list belongs there."""
    return f"{_REMOVALS_PREFIX}{run_id}/{creator}"


def amendments_key(run_id: str, creator: str) -> str:
    """Where the creator of a run tells what it has changed of it."""
    return f"{_AMENDMENTS_PREFIX}{run_id}/{creator}"


def pack(key: str, value: bytes) -> bytes:
    """A value as it is stored."""
    if key == RUNS_KEY:
        return _RUN + value
    kinds = {_REMOVALS_PREFIX: _REMOVALS, _AMENDMENTS_PREFIX: _AMENDMENTS}
    return next((kind for prefix, kind in kinds.items() if key.startswith(prefix)), _PEER) + value


def unpack(stored: bytes) -> bytes:
    """The counterpart of ``pack``."""
    return stored[1:]


def key_of(stored: bytes, subkey: str, now: float) -> str | None:
    """The key under which a stored value belongs, if it is valid for this subkey at Unix time
    ``now``; else None."""
    found = provenance(stored, subkey, now)
    return found.key if found else None


def provenance(stored: bytes, subkey: str, now: float) -> Provenance | None:
    """Check a stored value from a stranger: None unless whom the subkey names has signed it, and it
    is still good."""
    return Provenances().check(stored, subkey, now)


class Provenances:
    """Checks stored values, and remembers: each reader gets every record from several storers,
    again and again."""

    def __init__(self, refusals: Refusals | None = None) -> None:
        self.refusals = refusals or Refusals()
        """What was refused, the same bytes counted once."""
        self._known: OrderedDict[bytes, Provenance] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._rules: OrderedDict[str, Rules] = OrderedDict()
        self._amended: OrderedDict[tuple[str, str], tuple[int, Admissions]] = OrderedDict()
        """By run and signer of a chain: how many amendments it has, and who may join by it, from
        which swarm step on."""
        self._steps: OrderedDict[str, int] = OrderedDict()
        """By run that was amended so: the highest swarm step that a record tells."""
        self._creators: OrderedDict[str, str] = OrderedDict()

    def check(self, stored: bytes, subkey: str, now: float) -> Provenance | None:
        """See ``provenance``. Only what was valid is remembered: what is not may become so, as
        clocks go on."""
        if len(stored) > MAX_VALUE + 1:
            self.refuse(Reason.TOO_LARGE)
            return None
        # The subkey's own hash, of fixed length: else a longer subkey with the rest of a value
        # would pass for what was checked.
        digest = sha256(sha256(subkey.encode(errors="replace")).digest() + stored).digest()
        found = self._known.get(digest)
        if found is None:
            try:
                found = self._examine(stored, subkey, now)
            # ValueError: text that no encoding can express
            except (LowcommError, ValueError) as error:
                if digest not in self._refused:
                    self.refuse(error.reason if isinstance(error, LowcommError) else Reason.MALFORMED)
                    _remember(self._refused, digest, None, _REMEMBERED)
                return None
            _remember(self._known, digest, found, _REMEMBERED)
        return found if found.expires > now else None

    def refuse(self, reason: Reason) -> None:
        """Count a record that is refused."""
        self.refusals.count(What.RECORD, reason)

    def _rules_of(self, run_id: str) -> Rules | None:
        """Who may join a run, as far as it was seen; its creator may have changed that."""
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

    def _follow(self, chain: Chain, signer: str) -> None:
        """Remember who may join by a chain; it counts for a run that its signer has created."""
        known, _ = self._amended.get((chain.run_id, signer), (0, ()))
        if chain.admissions and len(chain.links) >= known:
            _remember(self._amended, (chain.run_id, signer), (len(chain.links), chain.admissions), _MAX_RULES)

    def _reach(self, run_id: str, swarm_step: int) -> None:
        """Remember how far a run is, if who may join depends on it."""
        if (run_id, self._creators.get(run_id, "")) in self._amended and swarm_step > self._steps.get(run_id, 0):
            _remember(self._steps, run_id, swarm_step, _MAX_RULES)

    def _examine(self, stored: bytes, subkey: str, now: float) -> Provenance:
        kind, value = stored[:1], unpack(stored)
        if kind == _RUN:
            signed_for, creator = name_signed_run(value)
            found = Provenance(RUNS_KEY, math.inf, creator)
            with suppress(VersionError):  # those that can read it need it
                rules = Rules.of(read_signed_run(value))
                if not rules.lets_everybody_in and rules.run_id not in self._rules:
                    _remember(self._rules, rules.run_id, rules, _MAX_RULES)
            _remember(self._creators, signed_for, creator, _MAX_RULES)
        elif kind == _PEER:
            info = read_record(value, now)
            self._reach(info.run_id, info.swarm_step)
            rules = self._rules_of(info.run_id)
            claim = rules.check(info.peer_id, info.claim, now) if rules is not None else None
            if claim is not None and rules is not None:
                claim.verify(rules.creator)
            expires = min(info.expires, claim.invite.expires if claim is not None else math.inf)
            key, order, signed_for = peers_key(info.run_id), int(info.issued * 1000), info.peer_id
            found = Provenance(key, expires, info.peer_id, order)
        elif kind == _REMOVALS:
            removals, signed_for = read_removals(value, subkey), subkey
            found = Provenance(removals_key(removals.run_id, subkey), math.inf, subkey, removals.version)
        elif kind == _AMENDMENTS:
            chain, signed_for = read_chain(value, subkey), subkey
            found = Provenance(amendments_key(chain.run_id, subkey), math.inf, subkey, len(chain.links))
            self._follow(chain, subkey)
        else:
            raise RecordError("A value of an unknown kind is refused.")
        if signed_for != subkey:
            raise RecordError(f"A record of {signed_for} under another name is refused.", reason=Reason.MISPLACED)
        return found


def _remember(memory: OrderedDict[Any, Any], key: object, value: object, limit: int) -> None:
    """Keep the newest ``limit`` entries."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > limit:
        memory.popitem(last=False)
