"""Who may take part in a run, as this node knows it, and this node's own claim.

    claim      proves the invite by which we came; kept, since the earliest claims on it count
    uses       claims of others, so that a used-up invite stays so when we start again
    removals   the newest list of removed peers: from the DHT, or written by `lowcomm-node remove`
    course     follows the creator's changes of the run, admission included: from the DHT and
               peers, or written by `lowcomm-node amend`

All lie in the folder of the run. A damaged file counts as missing; the swarm sends it again.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import amendments_key, peers_key, removals_key
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import read_small, write_atomic
from lowcomm_node.system.logs import log
from lowcomm_protocol.errors import (
    AdmissionError,
    LowcommError,
    SignatureError,
    SpecError,
    VersionError,
)
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import (
    MAX_REMOVALS_BYTES,
    Removals,
    Token,
    read_claim,
    read_token,
)
from lowcomm_protocol.peers.records import MAX_CLAIM_BYTES, read_record
from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, Amendment, SpecTimeline, read_chain
from lowcomm_protocol.spec.run import RunSpec, SignedRun

REMOVALS_LIFE, AMENDMENTS_LIFE = 1800.0, 1800.0
"""Seconds for which the DHT keeps them."""
MAX_USES_BYTES = 4 * 1024**2


class RunAdmission:
    """Admission to one run and its amendments, as this node knows them, with its own claim."""

    def __init__(self, settings: NodeSettings, run: SignedRun, peer_id: str, now: float) -> None:
        """Read what the home keeps. Raises NotAdmitted if the given invite is not for us."""
        self._run = run
        self.course = SpecTimeline(run.spec)
        self.on_news: Callable[[list[Amendment]], None] = lambda news: None
        """Called with new amendments."""
        self.on_trouble: Callable[[str], None] = lambda reason: None
        """Called once with the reason why a chain signed by the creator can't be followed."""
        self._refused: bytes = b""
        self._amendments = settings.paths.amendments(run.fingerprint)
        self._amendments_key = amendments_key(run.run_id, run.creator)
        self._hear_chain(read_small(self._amendments, MAX_CHAIN_BYTES))
        saved = settings.paths.checkpoints(run.fingerprint)
        self._reached = max(CheckpointStore(saved).steps(), default=0) if saved.is_dir() else 0
        """Our own swarm step. Before we train: the highest in the records of the run's peers."""
        self._trains = False
        self._spec = self.course.at(self._reached)
        self.rules = Rules.of(run, self._spec)
        self.admission = Admission(self.rules)
        self._settings = settings
        self._peer_id = peer_id
        self.claim = b""
        self._removals = settings.paths.removals(run.fingerprint)
        self._removals_key = removals_key(run.run_id, run.creator)
        self._uses = settings.paths.uses(run.fingerprint)
        self.admission.load(read_small(self._uses, MAX_USES_BYTES), now)
        self._kept = self.admission.to_bytes()
        self._read_removals()
        self.claim = _own_claim(settings, run, self.rules, peer_id, now)

    @property
    def spec(self) -> RunSpec:
        """The settings in force at our swarm step."""
        return self._spec

    def check_ourselves(self, now: float) -> None:
        """Raise NotAdmitted if the run does not admit us, or not any more."""
        try:
            self.admission.check(self._peer_id, self.claim, now)
        except AdmissionError as error:
            raise NotAdmitted(str(error), reason=error.reason) from None

    def hear_amendments(self, data: bytes) -> bool:
        """Take in a peer's chain of amendments. Returns whether it is newer than ours."""
        newer = self._hear_chain(data)
        if newer:
            self._follow_amendments(time())
        return newer

    def _hear_chain(self, data: bytes) -> bool:
        """Take in an untrusted chain. Returns whether it is newer than ours."""
        if not data or data in (self.course.chain.data, self._refused):
            return False
        try:
            chain = read_chain(data, self._run.creator)
            if chain.run_id != self._run.run_id or chain.order <= self.course.chain.order:
                return False
            before = len(self.course.chain.links)
            self.course = SpecTimeline(self._run.spec, chain)
        except (SpecError, VersionError) as error:
            self._refused = data
            self.on_trouble(
                f"the creator has amended the run in a way that this node can't follow: {error}"
            )
            return False
        except LowcommError as error:
            log.debug("amendments.refused", reason=str(error))
            return False
        self.on_news(list(chain.links[before:]))
        return True

    def reach(self, swarm_step: int) -> bool:
        """Note the swarm step that our training has reached. Returns whether that changes who may
        join."""
        self._reached = swarm_step
        self._trains = True
        return self._follow_amendments(time())

    def _follow_amendments(self, now: float) -> bool:
        """Apply the amendments in force at the current swarm step. Returns whether admission
        changes."""
        spec = self.course.at(self._reached)
        if spec is self._spec:
            return False
        self._spec = spec
        rules = Rules.of(self._run, spec)
        if rules == self.rules:
            return False
        self.rules = self.admission.rules = rules
        with suppress(NotAdmitted):  # `check_ourselves` raises it again
            self.claim = _own_claim(self._settings, self._run, rules, self._peer_id, now)
        return True

    async def _hear_steps(self, discovery: Discovery) -> bool:
        """Before we train, learn the run's swarm step from peers' records. Returns whether
        admission changes. A false record makes us apply early what the creator has signed."""
        if self._trains or all(link.at <= self._reached for link in self.course.chain.links):
            return False
        now = time()
        for data in (await discovery.lookup(peers_key(self._run.run_id))).values():
            with suppress(LowcommError):
                self._reached = max(self._reached, read_record(data, now).swarm_step)
        return self._follow_amendments(now)

    async def look(self, discovery: Discovery) -> bool:
        """Compare removals and amendments with the DHT, and publish ours if newer. Returns whether
        anything has changed. Raises DiskFull, OSError if news can't be kept."""
        kept = await asyncio.to_thread(read_small, self._amendments, MAX_CHAIN_BYTES)
        chain = (await discovery.lookup(self._amendments_key)).get(self.rules.creator, b"")
        newer = self._read_removals() | self._hear_chain(kept) | self._hear_chain(chain)
        newer |= self._follow_amendments(time()) | await self._hear_steps(discovery)
        removals = (await discovery.lookup(self._removals_key)).get(self.rules.creator, b"")
        with suppress(LowcommError):
            newer |= bool(removals) and self.admission.hear_removals(removals)
        if (self.course.chain.data, self.admission.removals.data) != (chain, removals):
            await self.publish(discovery)
        if (data := self.course.chain.data) and data != kept:
            await asyncio.to_thread(write_atomic, self._amendments, data)
        # Serialize here: the thread must not read dictionaries that the event loop changes.
        await asyncio.to_thread(self._keep, self.admission.removals.data, self.admission.to_bytes())
        return newer

    async def publish(self, discovery: Discovery) -> None:
        """Keep removals and amendments alive in the DHT, since their creator may be away."""
        creator, chain = self.rules.creator, self.course.chain.data
        if chain:
            with suppress(LowcommError):
                await discovery.publish(self._amendments_key, creator, chain, AMENDMENTS_LIFE)
        if data := self.admission.removals.data:
            await discovery.publish(self._removals_key, creator, data, REMOVALS_LIFE)

    def _read_removals(self) -> bool:
        data = read_small(self._removals, MAX_REMOVALS_BYTES)
        with suppress(LowcommError):
            return bool(data) and self.admission.hear_removals(data)
        return False

    def _keep(self, data: bytes, uses: bytes) -> None:
        if data and data != read_small(self._removals, MAX_REMOVALS_BYTES):
            write_atomic(self._removals, data)
        if uses != self._kept:
            write_atomic(self._uses, uses, 0o600)
            self._kept = uses


def newest_removals(run: SignedRun, path: Path, heard: bytes) -> Removals:
    """The newer of the home's list and the DHT's; empty if there is neither."""
    admission = Admission(Rules.of(run))
    for data in (read_small(path, MAX_REMOVALS_BYTES), heard):
        with suppress(LowcommError):
            if data:
                admission.hear_removals(data)
    return admission.removals


def given_token(settings: NodeSettings) -> Token | None:
    """The invite that the owner has set."""
    return read_token(settings.invite.get_secret_value()) if settings.invite is not None else None


def _own_claim(
    settings: NodeSettings, run: SignedRun, rules: Rules, peer_id: str, now: float
) -> bytes:
    """This node's claim; empty if it needs none. Raises NotAdmitted."""
    if rules.admission != "invite":
        return b""
    path, token = settings.paths.claim(run.fingerprint), given_token(settings)
    claim = None
    with suppress(LowcommError):  # a kept claim may be damaged
        data = b"" if settings.ephemeral else read_small(path, MAX_CLAIM_BYTES)
        kept = read_claim(data, peer_id)
        kept.verify(rules.creator)
        claim = kept
    # Keep an older claim on the same invite, since earlier claims take precedence.
    if token is None or (claim is not None and claim.invite.key == token.invite.key):
        return claim.data if claim is not None else b""
    _check_token(token, rules, peer_id, now)
    claim = token.claim(peer_id, now)
    if not settings.ephemeral:
        write_atomic(path, claim.data, 0o600)
    return claim.data


def _check_token(token: Token, rules: Rules, peer_id: str, now: float) -> None:
    try:
        token.invite.verify(rules.creator)
        token.invite.check_for(rules.run_id, peer_id, now)
    except SignatureError:
        raise NotAdmitted(
            f"The invite was not signed by the creator of this run ({rules.creator}): ask that one "
            "for an invite."
        ) from None
    except AdmissionError as error:
        raise NotAdmitted(str(error), reason=error.reason) from None
