"""Membership in a swarm: our record goes out, others' come in, through the DHT and directly."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import randrange
from statistics import median_low
from time import monotonic, time

import grpc
from cachetools import LRUCache

from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY, shard_key
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.peer_channel import OTHER_CERTIFICATE
from lowcomm_node.net.targets import places_of
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.system.tasks import Tasks, endure, repeat
from lowcomm_protocol.errors import LowcommError, Reason, Refusals, What, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.pulse import MAX_PULSE_BYTES
from lowcomm_protocol.peers.records import MAX_RECORD_BYTES, PeerInfo, Phase
from lowcomm_protocol.peers.roster import PROBE_EVERY, Roster
from lowcomm_protocol.peers.shards import shard_of
from lowcomm_protocol.peers.view import ACTIVE, SHUFFLED
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
SMALL_SWARM, LONGEST_POLL = 4, 60.0
"""Swarm size above which lookups become rarer, since each brings all records of a shard, and the
longest pause in seconds between two of them."""
REMOVALS_EVERY, RAREST_REMOVALS = 10.0, 600.0
"""Seconds between two looks for removed peers, of a swarm of up to ACTIVE peers and at most: links
tell of a removal within seconds."""
MAX_TOLD = 1024
"""Peers of which we remember what record of ours they have."""
MAX_REFUSING = 8
"""Warnings that peers refuse us: the first ones say why."""


RENEWALS = 3
"""Records signed in the life of one, at least."""
FIRST_RENEWAL, OF_PEER = 10.0, 2.0
"""Seconds from one record to the next among few peers, and for each of more: small swarms see fresh
figures, and keepers of a shard have the same to do in any."""


def look_pause(poll: float, record_life: float, peers: int) -> float:
    """Seconds until the next lookup in a run with ``peers`` peers, ourselves included. New peers
    introduce themselves, so lookups may be rare, but records must not expire in between."""
    return max(poll, min(LONGEST_POLL, record_life / 2, poll * peers / SMALL_SWARM))


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
        self._told: LRUCache[str, int] = LRUCache(MAX_TOLD)
        """When the record was issued that a peer has of us, milliseconds."""
        self._refusing: set[str] = set()
        """Peers that do not take us, as the owner was warned."""
        self._run_due = 0.0
        self._looks = 0
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

    @property
    def about(self) -> tuple[int, int]:
        """About how many other peers there are, and the number of shards that say so; 0: we know
        each."""
        size = self.roster.size
        alive = self.count()
        return (max(alive, size.peers - 1), size.shards) if size.shards else (alive, 0)

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
        answer = self._introduction(peer, introduction.known_ms)
        answer.full = not self.roster.heard(peer, time(), wanted=introduction.wants_links)
        removals = self.run_admission.admission.removals
        if removals.version > introduction.removals:
            answer.removal_list = removals.data
        return answer

    # the loop

    async def run(self) -> None:
        """Publish, look around, and watch the connection, until cancelled."""
        poll, life, roster = self.settings.poll, self.settings.record_life, self.roster

        def repeated(trouble: str, work: Work, pause: Callable[[], float]) -> Awaitable[None]:
            warn = partial(self.warn, "defect")
            return endure(trouble, partial(repeat, work, pause), warn)

        await asyncio.gather(
            repeated(
                "our record is not published", partial(self.publish, True), self._renewal_pause
            ),
            repeated(
                "no look for other peers",
                self.look,
                lambda: look_pause(poll, life, 1 + len(roster.known(time()))),
            ),
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
        sync, peers = self.run_admission.spec.sync, 1 + self.about[0]
        most = sync.group * sync.cells
        if self._is_too_large or not sync.realigns_among(peers):
            # A peer that comes and goes around the limit is no news.
            self._is_too_large = self._is_too_large and peers >= most
            return
        self._is_too_large = True
        self.warn(
            "too-many-peers",
            f"{peers} peers are alive, but this run is for at most {most} (group = {sync.group}, "
            f"cells = {sync.cells}, consensus = 0): most exchanges become realignments, which "
            "carry fp32 and lose momentum, as `status` counts. The creator can change that: "
            f"lowcomm-node amend --set sync.cells={sync.cells_for(peers)}",
        )

    async def republish(self) -> None:
        """Publish all records of ours at once: others have lost them, or were away."""
        await asyncio.gather(self.publish(), self._publish_run())

    async def _publish_run(self) -> None:
        # Peers publish the run, so that it outlives its bootstrap server.
        if not self._is_at_door:
            return
        await self.discovery.publish(RUNS_KEY, self.signed.run_id, self.signed.to_bytes(), RUN_LIFE)
        await self.run_admission.publish(self.discovery)
        self._run_due = monotonic() + RUN_LIFE / 3

    async def look(self) -> None:
        """Read the records of a shard in the DHT, and greet new peers."""
        await self._look_for_removals()
        own, size = self.roster.own_peer_id, self.roster.size
        # The own shard and another one in turn: no few keepers decide whom we know.
        is_own = not size.bits or self._looks % 2 == 0
        number = self._own_shard if is_own else randrange(1 << size.bits)
        self._looks += 1
        key = shard_key(self.signed.run_id, size.bits, number)
        records = await self.discovery.lookup(key, few=size.bits > 0)
        if is_own:
            self._follow_own(records)
        before = size.bits
        has_moved = size.count(len({*records, own} if is_own else records), is_own)
        news = [info for data in records.values() if (info := self._hear(data)) is not None]
        if has_moved:
            depths = [info.bits for info in self.roster.alive(time())]
            if size.bits > before and depths:
                size.follow(median_low(depths))
            await self.publish()
        await self._probe()
        for info in news:
            # Entry points are dialed: a record that anybody may publish must not choose them.
            if self.roster.liveness.is_proved(info.peer_id, time()):
                self._learn_entry_points(info)
        if self.rejoin is not None and is_own:
            self.rejoin.listed({*records, *self.roster.view.active} - {own})
        try:
            self.run_admission.check_ourselves(time())
        except NotAdmitted as error:
            self.on_barred(error)

    def _follow_own(self, records: Mapping[str, bytes]) -> None:
        """Look for another process with our identity."""
        own = self.roster.own_peer_id
        is_newer = self.own.follow(records.get(own, b""), not self._has_looked)
        if self._has_looked and is_newer and not self._is_twin_seen:
            self._is_twin_seen = True
            self.warn(
                "identity-in-use",
                f"another process takes part as {own}: end it, or start this one with "
                "a --home of its own; a copied home needs its identity.key moved away",
            )
        self._has_looked = True

    @property
    def _own_shard(self) -> int:
        return shard_of(self.signed.run_id, self.roster.own_peer_id, self.roster.size.bits)

    @property
    def _is_at_door(self) -> bool:
        return self.roster.size.is_at_door(self.roster.own_peer_id, time())

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
        now, roster = time(), self.roster
        # The DHT's connections matter for candidates alone.
        wants = bool(roster.view.wanted and roster.view.passive)
        self._likely = await self.discovery.connected_peers() if wants else frozenset()
        room = max(0, roster.liveness.at_once(now) - len(self._greetings))
        for info in roster.due(now, self._likely, room):
            task = self._greetings.start(self._greet(info, PROBE_DEADLINE))
            task.add_done_callback(lambda _: self._changed.set())

    def sign_of_life(self, peer_id: str) -> None:
        """Note that a peer has answered us, or called us, and has authenticated."""
        now, liveness = time(), self.roster.liveness
        is_new, info = not liveness.is_proved(peer_id, now), self.roster.get(peer_id, now)
        self.roster.heard(peer_id, now)
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
        rarer = max(1.0, self.roster.size.peers / ACTIVE)
        self._removals_due = monotonic() + min(REMOVALS_EVERY * rarer, RAREST_REMOVALS)
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
        """Take in a peer's record and pulse, records that it hands over, and the uses of invites,
        removals and amendments that it knows."""
        passed = introduction.passed[:SHUFFLED]
        if max(map(pb.SignedRecord.ByteSize, (introduction.record, *passed))) > MAX_RECORD_BYTES:
            self.refusals.count(What.RECORD, Reason.TOO_LARGE)  # before it is copied
            return
        now = time()
        if introduction.HasField("record"):  # a peer may call only to see whether we answer
            self._hear(introduction.record.SerializeToString(), sender=peer)
        if introduction.pulse.ByteSize() <= MAX_PULSE_BYTES and introduction.HasField("pulse"):
            pulse = introduction.pulse.SerializeToString()
            if self.roster.hear_pulse(pulse, now, peer):
                self._changed.set()
        for record in passed:
            self.roster.hear(record.SerializeToString(), now, listed=False)
        self.run_admission.admission.hear_uses(introduction.uses, now)
        newer = self.run_admission.hear_amendments(introduction.amendments)
        if introduction.removal_list:
            with suppress(LowcommError):
                newer |= self.run_admission.admission.hear_removals(introduction.removal_list)
        if newer:
            self._changed.set()
            self.on_removals()

    def _hear(self, data: bytes, sender: str | None = None) -> PeerInfo | None:
        info = self.roster.hear(data, time(), sender)
        if info is not None:
            self._changed.set()
        return info

    async def publish(self, renews: bool = False) -> None:
        """Publish our record in its shard, in the one above, whose peers may not have moved yet,
        and in turn at the door; ``renews``: with the figures of this moment."""
        life, own, run_id = self.settings.record_life, self.roster.own_peer_id, self.signed.run_id
        bits = self.roster.size.bits
        depths = {bits, max(0, bits - 1)} | ({0} if self._is_at_door else set())
        record = self._record(renews)
        keys = [shard_key(run_id, depth, shard_of(run_id, own, depth)) for depth in sorted(depths)]
        if self.rejoin is not None:
            self.rejoin.record = keys[-1], own
        try:
            publish = self.discovery.publish
            await asyncio.gather(*(publish(key, own, record, life) for key in keys))
        except LowcommError as error:
            reason = f"our record could not be published: {error}"
            self.warn("record-not-published", reason)

    async def greet_all(self) -> None:
        """Ask the alive peers for fresh records, since those in the DHT may be some seconds old."""
        known = self.roster.alive(time())[:MAX_MET]
        await asyncio.gather(*(self._greet(info) for info in known))

    async def _greet(self, info: PeerInfo, deadline: float = MEET_DEADLINE) -> None:
        """Exchange pulses with a peer, and what one lacks. One that does not answer is no error."""
        try:
            async with asyncio.timeout(deadline):
                stub, own = await self.channels.stub(info), self._introduction(info.peer_id)
                own.wants_links = self.roster.view.wanted
                metadata = self.channels.metadata(info.peer_id)
                answer = await stub.Describe(own, metadata=metadata, timeout=deadline)
            self._hear_introduction(info.peer_id, answer)
            self.discovery.answered(info.peer_id)
            self.sign_of_life(info.peer_id)
            if answer.full:
                self.roster.heard(info.peer_id, time(), full=True)
            elif answer.known_ms < self.own.last_issued * 1000 - 0.5:
                self._told.pop(info.peer_id, None)
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

    def _introduction(self, receiver: str, known_ms: int | None = None) -> pb.Introduction:
        """What we tell a peer; ``known_ms``: when the record was issued that it says it has of us,
        in milliseconds."""
        now, admission = time(), self.run_admission.admission
        alive = frozenset(info.peer_id for info in self.roster.alive(now))
        theirs, record = self.roster.get(receiver, now), self._record()
        introduction = pb.Introduction(
            pulse=pb.SignedRecord.FromString(self.own.pulse(self.roster.size.bits)),
            known_ms=round(theirs.issued * 1000) if theirs is not None else 0,
            uses=admission.uses_to_tell(alive),
            amendments=self.run_admission.course.chain.data,
            removals=admission.removals.version,
        )
        introduction.passed.extend(
            map(pb.SignedRecord.FromString, self.roster.to_pass(receiver, now))
        )
        issued_ms = round(self.own.last_issued * 1000)
        if known_ms is None:
            known_ms = self._told.get(receiver, 0)
        if known_ms < issued_ms:
            introduction.record.ParseFromString(record)
            self._told[receiver] = issued_ms
        return introduction

    def _record(self, renews: bool = False) -> bytes:
        life, claim = self.settings.record_life, self.run_admission.claim
        pause = 0.0 if renews else self._renewal_pause()
        return self.own.record(life, self.entry_points, claim, pause)

    def _renewal_pause(self) -> float:
        usual = max(FIRST_RENEWAL, OF_PEER * len(self.roster.view.active))
        return min(self.settings.record_life / RENEWALS, usual)
