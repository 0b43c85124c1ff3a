"""Membership in a swarm: our record goes out, others' come in, through the DHT and directly."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

import grpc

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY, peers_key
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.peer_channel import OTHER_CERTIFICATE
from lowcomm_node.net.targets import places_of
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.system.tasks import Tasks, endure, repeat
from lowcomm_protocol.errors import LowcommError, Reason, Refusals, What, in_words
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import (
    MAX_ENTRY_POINTS,
    MAX_RECORD_BYTES,
    PeerInfo,
    Phase,
    SelfReport,
    is_from_future,
    read_record,
    write_record,
)
from lowcomm_protocol.peers.roster import PROBE_EVERY, Roster
from lowcomm_protocol.spec.run import SignedRun

MEET_DEADLINE = 3.0
MAX_MET = 64
"""Peers that we greet when we come, change phase or go. The others read the DHT."""
PROBE_DEADLINE = 12.0
"""Seconds for a peer that is still unproven: a tunnel to it may have to be opened first."""
ACQUAINT_DEADLINE = 20.0
"""Seconds that a newcomer waits at most for peers in the DHT to prove that they are there."""
RUN_LIFE = 1800.0
Work = Callable[[], Awaitable[None]]
SMALL_SWARM, LONGEST_POLL = 4, 15.0
"""Swarm size above which lookups become rarer, since each brings all records from each keeper that
it asks, and the longest pause in seconds between two of them."""
REMOVALS_EVERY = 10.0
"""Seconds between two looks for removed peers: a removal must take effect within a minute."""
MAX_REFUSING = 8
"""Warnings that peers refuse us: the first ones say why."""


def look_pause(poll: float, record_life: float, peers: int) -> float:
    """Seconds until the next lookup in a run with ``peers`` peers, ourselves included. New peers
    introduce themselves, so lookups may be rare, but records must not expire in between."""
    return max(poll, min(LONGEST_POLL, record_life / 2, poll * peers / SMALL_SWARM))


@dataclass(kw_only=True)
class OwnRecord:
    """What this node announces of itself."""

    identity: Identity
    run_id: str
    certificate: bytes
    """Key of our TLS certificate."""
    addresses: tuple[str, ...]
    """``host:port`` of our Exchange service."""
    progress: Callable[[], tuple[int, int, float]]
    """Swarm step, own inner steps, tokens a second."""
    report: Callable[[], SelfReport] = SelfReport
    """What people see of us."""
    reading: Callable[[], bytes] = bytes
    """Pieces of packed text that we claim."""
    gives_text: Callable[[], bool] = lambda: False
    """Whether the whole of the run's packed text is here."""
    phase: Phase = Phase.JOINING
    last_issued: float = 0.0

    def follow(self, data: bytes, continues: bool) -> bool:
        """Whether a record under our peer id is newer than our last one.

        ``continues``: it may be ours from before a restart, so new ones are issued after it, or a
        clock set back would make them look outdated. Otherwise another process has our identity.
        """
        with suppress(LowcommError):
            info = read_record(data, time())
            if info.peer_id == self.identity.peer_id and info.issued > self.last_issued:
                self.last_issued = info.issued if continues else self.last_issued
                return True
        return False

    def sign(self, life: float, entry_points: tuple[str, ...], claim: bytes) -> bytes:
        """A serialized SignedRecord that is valid for ``life`` seconds from now."""
        swarm_step, steps, speed = self.progress()
        # The later of two records wins, so none is issued before the last, unless the clock was
        # ahead when that was issued.
        now, last = time(), self.last_issued
        self.last_issued = round(now if is_from_future(last, now) else max(now, last + 0.001), 3)
        info = PeerInfo(
            peer_id=self.identity.peer_id,
            run_id=self.run_id,
            phase=self.phase,
            issued=self.last_issued,
            expires=self.last_issued + life,
            addresses=self.addresses,
            certificate=self.certificate,
            gives_text=self.gives_text(),
            swarm_step=swarm_step,
            steps=steps,
            tokens_per_second=speed,
            entry_points=entry_points[:MAX_ENTRY_POINTS],
            claim=claim,
            reading=self.reading(),
            report=self.report(),
        )
        return write_record(info, self.identity)


@dataclass(kw_only=True, eq=False)
class Membership:
    """Keeps the roster fresh and our own record published."""

    own: OwnRecord
    signed: SignedRun
    roster: Roster
    discovery: Discovery
    channels: Channels
    settings: NodeSettings
    run_admission: RunAdmission
    refusals: Refusals
    warn: Callable[[str, str], None]
    withdraw: Callable[[str], None]
    """Warnings of this kind hold no longer."""
    on_removals: Callable[[], None]
    """Peers were removed, or admission was amended."""
    on_barred: Callable[[NotAdmitted], None]
    """The run does not admit us any more."""
    rejoin: Rejoin | None = None

    def __post_init__(self) -> None:
        self.dht_peers = 0
        self._removals_due = 0.0
        self._refusing: set[str] = set()
        """Peers that do not take us, as the owner was warned."""
        self._run_due = 0.0
        self._has_looked = self._is_twin_seen = False
        self._is_too_large = False
        """Whether more peers are alive than the run is for, and the owner was warned."""
        self._changed = asyncio.Event()
        self._greetings = Tasks()
        self._likely: frozenset[str] = frozenset()
        """Peers that the DHT has connected us to."""

    # what the daemon asks

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        return self.discovery.addresses()

    def count(self, *phases: Phase) -> int:
        """The number of alive peers in these phases, or in all."""
        alive = self.roster.alive(time())
        return sum(not phases or info.phase in phases for info in alive)

    def count_silent(self) -> int:
        """The number of peers with a record that have not proved recently to be there."""
        return len(self.roster.known(time())) - self.count()

    def donors(self) -> list[PeerInfo]:
        """Peers that can provide their state, the most advanced first."""
        can = (Phase.TRAINING, Phase.FINISHED)
        there = (info for info in self.roster.alive(time()) if info.phase in can)
        return sorted(there, key=lambda info: -info.swarm_step)

    def finished(self, is_over: Callable[[int], bool]) -> list[PeerInfo] | None:
        """The alive peers that have trained the run to its end; None while another still trains.
        ``is_over``: whether the run ends at a swarm step, or has ended before."""
        beside = (Phase.JOINING, Phase.SERVING)
        alive = [info for info in self.roster.alive(time()) if info.phase not in beside]
        ended = [info for info in alive if is_over(info.swarm_step)]
        return ended if len(ended) == len(alive) else None

    async def wait_changed(self, seconds: float) -> None:
        """Wait until the roster changes, or for ``seconds``."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def announce(self, phase: Phase) -> None:
        """Announce our new phase to the DHT, and directly to known peers."""
        self.own.phase = phase
        await asyncio.gather(self.publish(), self.greet_all())

    def meet(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Answer a peer's introduction."""
        self._hear_introduction(peer, introduction)
        self.discovery.answered(peer)
        return self._introduction()

    # the loop

    async def run(self) -> None:
        """Publish, look around, and watch the connection, until cancelled."""
        poll, life, roster = self.settings.poll, self.settings.record_life, self.roster

        def repeated(trouble: str, work: Work, pause: Callable[[], float]) -> Awaitable[None]:
            warn = partial(self.warn, "defect")
            return endure(trouble, partial(repeat, work, pause), warn)

        def until_look() -> float:
            return look_pause(poll, life, 1 + len(roster.known(time())))

        await asyncio.gather(
            # A record gets three chances in its life.
            repeated("our record is not published", self.publish, lambda: life / 3),
            repeated("no look for other peers", self.look, until_look),
            repeated("no probe of other peers", self._probe, lambda: PROBE_EVERY),
            repeated(
                "the run is not published", self._watch, lambda: 10.0 if self.dht_peers else 2.0
            ),
        )

    async def _watch(self) -> None:
        self.dht_peers = self.discovery.known_peers()
        if self.dht_peers and monotonic() >= self._run_due:
            await self._publish_run()
        self._look_at_size()

    def _look_at_size(self) -> None:
        """Warn once if the swarm has outgrown the groups of a run that can't hold more together."""
        sync, peers = self.signed.spec.sync, 1 + self.count()
        if self._is_too_large or not sync.realigns_among(peers):
            # A peer that comes and goes around the limit is no news.
            self._is_too_large = self._is_too_large and peers >= sync.group
            return
        self._is_too_large = True
        self.warn(
            "too-many-peers",
            f"{peers} peers are alive, but this run is for at most {sync.group} (group = "
            f"{sync.group}, consensus = 0): most exchanges become realignments, which carry fp32 "
            "and lose momentum, as `status` counts. Train elsewhere, or ask "
            'the creator for a run with a larger group or slice_rounds, or method = "lowcomm"',
        )

    async def republish(self) -> None:
        """Publish all records of ours at once: others have lost them, or were away."""
        await asyncio.gather(self.publish(), self._publish_run())

    async def _publish_run(self) -> None:
        # Every peer publishes the run, so that it outlives its bootstrap server.
        await self.discovery.publish(RUNS_KEY, self.signed.run_id, self.signed.to_bytes(), RUN_LIFE)
        await self.run_admission.publish(self.discovery)
        self._run_due = monotonic() + RUN_LIFE / 3

    async def look(self) -> None:
        """Read the records in the DHT, and greet new peers."""
        await self._look_for_removals()
        own = self.roster.own_peer_id
        records = await self.discovery.lookup(peers_key(self.signed.run_id))
        is_newer = self.own.follow(records.get(own, b""), not self._has_looked)
        if self._has_looked and is_newer and not self._is_twin_seen:
            self._is_twin_seen = True
            self.warn(
                "identity-in-use",
                f"another process takes part as {own}: end it, or start this one with "
                "a --home of its own; a copied home needs its identity.key moved away",
            )
        self._has_looked = True
        news = [info for data in records.values() if (info := self._hear(data)) is not None]
        await self._probe()
        for info in news:
            # Entry points are dialed: a record that anybody may publish must not choose them.
            if self.roster.liveness.is_proved(info.peer_id, time()):
                self._learn_entry_points(info)
        if self.rejoin is not None:
            self.rejoin.listed(set(records) - {own})
        try:
            self.run_admission.check_ourselves(time())
        except NotAdmitted as error:
            self.on_barred(error)

    async def acquaint(self) -> None:
        """Look around, as a newcomer, until peers have proved to be there, or none is likely to."""
        await self.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(ACQUAINT_DEADLINE):
                while self._is_unacquainted():
                    await self.wait_changed(PROBE_EVERY)
                    await self._probe()

    def _is_unacquainted(self) -> bool:
        """Whether a likely peer is still untried, or any peer while none has answered."""
        now, liveness = time(), self.roster.liveness
        known = [info.peer_id for info in self.roster.known(now)]
        if any(liveness.is_proved(peer, now) for peer in known):
            known = [peer for peer in known if peer in self._likely]
        is_untried = any(liveness.is_untried(peer, now) for peer in known)
        return is_untried or (bool(self._greetings) and bool(known))

    async def _probe(self) -> None:
        """Call some of the peers without a recent sign of life."""
        now, liveness = time(), self.roster.liveness
        known = {info.peer_id: info for info in self.roster.known(now)}
        unproved = {peer for peer in known if not liveness.is_proved(peer, now)}
        # Connections and places matter for unproved peers alone, and to list them costs the more,
        # the larger the swarm is.
        self._likely = await self.discovery.connected_peers() if unproved else frozenset()
        places = (
            (peer, places_of(info.addresses, info.entry_points) if peer in unproved else ())
            for peer, info in known.items()
        )
        room = max(0, liveness.at_once(now) - len(self._greetings))
        for peer in liveness.due(places, now, self._likely, room):
            task = self._greetings.start(self._greet(known[peer], PROBE_DEADLINE))
            task.add_done_callback(lambda _: self._changed.set())

    def sign_of_life(self, peer_id: str) -> None:
        """Note that a peer has answered us, or called us, and has authenticated."""
        now, liveness = time(), self.roster.liveness
        is_new, info = not liveness.is_proved(peer_id, now), self.roster.get(peer_id, now)
        liveness.heard(peer_id, now)
        if peer_id in self._refusing:
            self._refusing.discard(peer_id)
            if not self._refusing:
                self.withdraw("not-taken")
        if is_new and info is not None:
            self._changed.set()
            self._learn_entry_points(info)

    def _learn_entry_points(self, info: PeerInfo) -> None:
        # Only addresses of the peer itself: its record must not send us to third parties.
        own = f"/p2p/{info.peer_id}"
        entry_points = [entry for entry in info.entry_points if entry.endswith(own)]
        self.discovery.add_entry_points(entry_points)
        if self.rejoin is not None:
            if info.phase is Phase.LEFT:
                self.rejoin.left(info.peer_id)
            else:
                self.rejoin.learned(info.peer_id, entry_points)

    async def _look_for_removals(self) -> None:
        if monotonic() < self._removals_due:
            return
        self._removals_due = monotonic() + REMOVALS_EVERY
        try:
            newer = await self.run_admission.look(self.discovery)
        except (LowcommError, OSError) as error:
            reason = f"what is known of invites and removals could not be kept: {error}"
            self.warn("not-kept", reason)
            newer = True
        if newer:
            self._changed.set()
            self.on_removals()

    def _hear_introduction(self, peer: str, introduction: pb.Introduction) -> None:
        """Take in a peer's record, and the uses of invites that it knows."""
        if introduction.record.ByteSize() > MAX_RECORD_BYTES:  # before it is copied
            self.refusals.count(What.RECORD, Reason.TOO_LARGE)
            return
        if introduction.HasField("record"):  # a peer may call only to see whether we answer
            self._hear(introduction.record.SerializeToString(), sender=peer)
        self.run_admission.admission.hear_uses(introduction.uses, time())
        if self.run_admission.hear_amendments(introduction.amendments):
            self._changed.set()
            self.on_removals()

    def _hear(self, data: bytes, sender: str | None = None) -> PeerInfo | None:
        info = self.roster.hear(data, time(), sender)
        if info is not None:
            self._changed.set()
        return info

    async def publish(self) -> None:
        """Publish our record."""
        key, life = peers_key(self.signed.run_id), self.settings.record_life
        try:
            await self.discovery.publish(key, self.roster.own_peer_id, self._record(), life)
        except LowcommError as error:
            reason = f"our record could not be published: {error}"
            self.warn("record-not-published", reason)

    async def greet_all(self) -> None:
        """Ask the alive peers for fresh records, since those in the DHT may be some seconds old."""
        known = self.roster.alive(time())[:MAX_MET]
        await asyncio.gather(*(self._greet(info) for info in known))

    async def _greet(self, info: PeerInfo, deadline: float = MEET_DEADLINE) -> None:
        """Exchange newest records with a peer. One that does not answer is no error."""
        try:
            async with asyncio.timeout(deadline):
                stub, own = await self.channels.stub(info), self._introduction()
                metadata = self.channels.metadata(info.peer_id)
                answer = await stub.Describe(own, metadata=metadata, timeout=deadline)
            self._hear_introduction(info.peer_id, answer)
            self.discovery.answered(info.peer_id)
            self.sign_of_life(info.peer_id)
            self.roster.liveness.reached(places_of(info.addresses, info.entry_points))
            return
        except grpc.aio.AioRpcError as error:
            self._take_refusal(info, error.code(), error.details() or "")
        except (grpc.RpcError, LowcommError, TimeoutError):
            pass
        # Records cost nothing: channels to peers that never answered would add up.
        if not self.roster.liveness.is_proved(info.peer_id, time()):
            await self.channels.forget(info.peer_id)

    def _take_refusal(self, info: PeerInfo, code: grpc.StatusCode, details: str) -> None:
        if code is grpc.StatusCode.UNAVAILABLE and OTHER_CERTIFICATE in details:
            # Somebody else answers at its address, perhaps in between us, so the text of the
            # refusal counts for nothing.
            self.refusals.count(What.CONNECTION, Reason.OTHER_CERTIFICATE)
            return
        is_new = info.peer_id not in self._refusing and len(self._refusing) < MAX_REFUSING
        if code is grpc.StatusCode.UNAUTHENTICATED and is_new:
            self._refusing.add(info.peer_id)
            reason = f"{info.peer_id[-6:]} does not take us: {in_words(details)}"
            self.warn("not-taken", reason)

    def _introduction(self) -> pb.Introduction:
        alive = frozenset(info.peer_id for info in self.roster.alive(time()))
        return pb.Introduction(
            record=pb.SignedRecord.FromString(self._record()),
            uses=self.run_admission.admission.uses_to_tell(alive),
            amendments=self.run_admission.course.chain.data,
        )

    def _record(self) -> bytes:
        life, claim = self.settings.record_life, self.run_admission.claim
        return self.own.sign(life, self.entry_points, claim)
