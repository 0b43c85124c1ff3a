"""Every exchange of this node: drives the machine of the peer
(``lowcomm_protocol/exchange/peer.py``).

    steps of the trainer, calls of peers, timers ─► events ─► Peer.handle ─► effects ─►
    ExchangeDriver, counters

Nothing is decided here. The trainer captures and applies; the daemon only passes slot numbers on.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from time import monotonic, time
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.node.ipc import Arena
from lowcomm_node.node.messages import Ready
from lowcomm_node.node.process import Trainer
from lowcomm_node.sync import frames, history
from lowcomm_node.sync.cells import Giver
from lowcomm_node.sync.driver import ABANDON_DEADLINE, ExchangeDriver, answer_in_time
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import OF_FEW, Shares
from lowcomm_node.system.tasks import start
from lowcomm_protocol.errors import Offence, ProtocolViolation
from lowcomm_protocol.exchange import events, kinds
from lowcomm_protocol.exchange.budget import LIFE, Deadlines
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.matching import Refusal
from lowcomm_protocol.peers.records import Phase
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.names import Table
from lowcomm_protocol.spec.run import RunSpec

LONG_WAIT = 10.0
"""Seconds of waiting for a peer in vain from which on the owner hears of it."""
DRIVERS: Table[type[ExchangeDriver]] = Table(
    "kind of exchange",
    {
        kinds.PAIR.name: "lowcomm_node.sync.pair_driver:PairDriver",
        kinds.GROUP.name: "lowcomm_node.sync.group_driver:GroupDriver",
    },
)
"""What carries out an exchange, by the name of its kind. Only groups load NumPy and numba, for the
sizes of their shards."""


class RosterView:
    """`events.PeerView` of the roster and of our line."""

    def __init__(self, roster: Roster, bandwidth: Bandwidth) -> None:
        self.roster = roster
        self.bandwidth = bandwidth
        self.sharing: Callable[[], int] = lambda: 0
        """How many peers copy our state now: they share the line."""

    def partners(self) -> list[str]:
        roster = self.roster
        return [i.peer_id for i in roster.partners(time()) if roster.in_cell(i.peer_id)]

    def of_other_cells(self) -> list[str]:
        """The peers of other cells that train and are alive."""
        roster = self.roster
        return [i.peer_id for i in roster.partners(time()) if not roster.in_cell(i.peer_id)]

    def training(self) -> list[tuple[str, int]]:
        return [
            (info.peer_id, info.swarm_step) for info in self.roster.in_phase(Phase.TRAINING, time())
        ]

    def furthest(self, but: str) -> int:
        return max(
            (info.swarm_step for info in self.roster.alive(time()) if info.peer_id != but),
            default=0,
        )

    def knows(self, peer: str) -> bool:
        return self.roster.get(peer, time()) is not None and self.roster.in_cell(peer)

    def has_room_for(self, place: str, callers: Sequence[str], free: int) -> bool:
        shares = Shares(OF_FEW)
        for caller in callers:
            shares.take(caller)
        return shares.has_room(place, free)

    def transfer_seconds(self, size: int, streams: int) -> float:
        return self.bandwidth.seconds(size, streams)


class Exchanger:
    """Begins, accepts and carries out exchanges."""

    def __init__(
        self,
        *,
        peer_id: str,
        spec: RunSpec,
        roster: Roster,
        channels: Channels,
        deadlines: Deadlines,
        tell: Callable[[history.ExchangeEnded], None],
        bandwidth: Bandwidth | None = None,
    ) -> None:
        """Every call is refused until ``take_over`` brings a trainer."""
        self.bandwidth = bandwidth or Bandwidth()
        self.channels = channels
        self.around = RosterView(roster, self.bandwidth)
        self.peer = Peer(peer_id, spec, roster.run_id, self.around, deadlines)
        if self.peer.kind is not None:
            DRIVERS[self.peer.kind.name]  # loaded before there is something to wait for
        self.history = history.History()
        self.giver = Giver(self)
        self._drivers: dict[int, ExchangeDriver] = {}
        """Exchanges under way, by number."""
        self.drifted = asyncio.Event()
        """Set while the state of others is to be copied."""
        self._ready: Ready | None = None
        self._trainer: Trainer | None = None
        self._tell = tell
        self._calls: dict[int, tuple[CalleeStream, asyncio.Future[ExchangeDriver | Refusal]]] = {}
        """Calls of peers that the machine considers, and what it answers."""
        self._called = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def take_over(self, ready: Ready, trainer: Trainer) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state.

        Exchanges that still end keep to the trainer and the memory that they began with.
        """
        self._ready = ready
        self._trainer = trainer
        self.drifted.clear()
        count, kind = len(ready.sizes), self.peer.kind
        event = events.TrainerReady(
            plan=ready.plan,
            sizes=ready.sizes,
            realign_sizes=ready.realign_sizes,
            exchanges=max(1, ready.slots // (kind.slots if kind else 1)),
            swarm_step=ready.swarm_step,
            steps=ready.steps,
            tokens=ready.tokens,
            progress=tuple(FragmentProgress(**counters) for counters in ready.progress),
            slow_digests=tuple(bytes.fromhex(digest) for digest in ready.slow_digests),
            momentum_digests=tuple(
                bytes.fromhex(digest) for digest in ready.momentum_digests or ("",) * count
            ),
        )
        self.stimulate(event)

    # events in, effects out

    def stimulate(self, event: events.PeerEvent) -> None:
        """Tell the machine what happened, and carry out what it decides."""
        for effect in self.peer.handle(monotonic(), event):
            self._carry_out(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due, loop = self.peer.next_timer, asyncio.get_running_loop()
        self._timer = None
        if due is not None:
            delay = max(0.0, due - monotonic())
            self._timer = loop.call_later(delay, self.stimulate, events.Tick())

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Began(exchange=number):
                self._begin(number)
            case events.Accept(exchange=number, call=call, peer=peer):
                stream, answer = self._calls[call]
                self._drivers[number].link(peer, stream)
                answer.set_result(self._drivers[number])
            case events.Refuse(call=call, peer=peer, reason=reason):
                self.history.refused(peer, reason, by_us=True)
                self._calls[call][1].set_result(reason)
            case events.CancelCall(exchange=number, peer=peer):
                self._drivers[number].cancel_call(peer)
            case events.CutOff(exchange=number, peer=peer, reason=reason, tells=tells):
                self.history.lost(peer, reason, effect.cause)
                self._drivers[number].cut_off(peer, reason if tells else "")
            case events.RanLate(exchange=number):
                self._drivers[number].explain_late()
            case events.Unanswered(peer=peer):
                self.roster.liveness.missed(peer, time())
            case events.Penalty():
                self._log_deed(effect)
            case events.Over(exchange=number, outcome=outcome, reason=reason):
                self._on_over(self._drivers.pop(number), outcome, reason)
            case events.Drifted():
                self.drifted.set()
            case _:
                self._drivers[effect.exchange].carry_out(effect)

    def _begin(self, number: int) -> None:
        one = self.peer.exchange(number)
        assert one is not None
        self._drivers[number] = DRIVERS[one.kind.name](self, one)

    def trainer_now(self) -> tuple[Ready, Trainer, Arena]:
        """The trainer of exchanges that begin now, and the memory that it shares with us."""
        assert self._ready is not None
        assert self._trainer is not None
        assert self._trainer.arena is not None
        return self._ready, self._trainer, self._trainer.arena

    def _on_over(self, driver: ExchangeDriver, outcome: events.Outcome, reason: str) -> None:
        self._tell(self.history.record(driver, outcome, reason, self.peer.position.swarm_step))
        task = start(self._close(driver))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, driver: ExchangeDriver) -> None:
        # Its slots must not go to another exchange while a task of it may still write to them.
        await driver.close()
        driver.give_back()
        self.stimulate(events.Released(exchange=driver.one.number))

    def _log_deed(self, held: events.Penalty) -> None:
        peer, deed, reason = held.peer, held.deed, held.reason
        if held.forgiven:
            log.info("peer.stumbled", peer=peer, reason=reason)
            return
        write = log.warning if deed is Offence.HEAVY else log.info
        write("peer.held", peer=peer, deed=deed.value, reason=reason, score=held.score)

    # what happens at this node

    @property
    def running(self) -> dict[int, ExchangeDriver]:
        """Exchanges under way, by fragment."""
        return {driver.fragment: driver for driver in self._drivers.values()}

    def drop(self, barred: Callable[[str, float], bool]) -> None:
        """Give up the exchanges with peers that may not take part any more."""
        now = time()
        for driver in list(self._drivers.values()):
            gone = [peer for peer in driver.one.partners if barred(peer, now)]
            if gone:
                why = f"{gone[0][-6:]} was removed from the run by its creator"
                driver.tell(events.GaveUp(reason=why, cause=events.Cause.REMOVED))

    @property
    def exchanging(self) -> bool:
        """Whether we exchange now: training, and not leaving."""
        return self.peer.open

    @exchanging.setter
    def exchanging(self, value: bool) -> None:
        self.stimulate(events.Opened() if value else events.Closed())

    def on_step(self, swarm_step: int, steps: int, tokens: int, seconds: float = 0.0) -> None:
        """Take in one inner step, and begin the exchanges that are due."""
        step = events.Stepped(swarm_step=swarm_step, steps=steps, tokens=tokens, seconds=seconds)
        self.stimulate(step)

    def endure_drift(self) -> None:
        """Nobody could hand over a state: train on as we are."""
        self.stimulate(events.DriftEndured())
        self.drifted.clear()

    @property
    def resting(self) -> str | None:
        """Why we train on though we are far from most peers; None if we are not, or are about to
        copy their state."""
        return self.peer.drift.resting(monotonic())

    @property
    def hindrance(self) -> str | None:
        """Why no exchange can begin within the limits of our owner; None if one can."""
        needs = self.peer.budget.hindrance(monotonic())
        return needs and history.hindrance_in_words(needs, self.peer.budget.deadlines.longest)

    @property
    def interval(self) -> history.IntervalStatus | None:
        """How often a fragment is exchanged, and why no more often; None while we do not
        exchange."""
        peer = self.peer
        if peer.kind is None or not peer.open:
            return None
        around = history.Circumstances(
            written=peer.spec.sync.interval,
            fragments=max(1, len(peer.position.schedule)),
            hindrance=self.hindrance,
            line_seconds=peer.budget.lines.usual(monotonic()),
            step_seconds=peer.budget.step_seconds,
        )
        return history.interval_of(self.history.exchanges, peer.position.swarm_step, around)

    @property
    def kept_waiting(self) -> str | None:
        """Peers that keep exchanges waiting in vain for long, in words; None if there are none."""
        known = self.peer.trust.keeping_us(monotonic() - LIFE)
        long = [(peer, seconds) for peer, seconds in known if seconds >= LONG_WAIT]
        if not long:
            return None
        worst = sorted(long, key=itemgetter(1), reverse=True)[:4]
        peers = ", ".join(f"{peer[-6:]} for {seconds:.0f} s" for peer, seconds in worst)
        return (
            f"{len(long)} of the peers kept exchanges waiting, and nothing came of them ({peers}): "
            "they are left out for longer each time; see `lowcomm-node peers`"
        )

    def standing(self, peer: str) -> dict[str, Any]:
        """What ``peers`` shows of how we judge a peer."""
        return {
            "score": round(self.peer.trust.score(peer, self.peer.position.steps), 2),
            "left_out": not self.peer.trusts(peer),
            "held_against": self.peer.trust.reason(peer),
        }

    # calls

    async def serve(self, peer: str, stream: CalleeStream) -> None:
        """Answer one call of an authenticated peer; returns when its stream is done."""
        frame = await self._hear_hello(peer, stream)
        try:
            if frame.WhichOneof("kind") == "ask" and self.roster.get(peer, time()):
                self.roster.liveness.heard(peer, time())
                await self.giver.give(peer, stream, frame.ask)
                return
            if frame.WhichOneof("kind") != "hello":
                raise ProtocolViolation("called without saying hello")
            theirs = frames.from_message(frame.hello)
        except ProtocolViolation as error:
            self.stimulate(events.Misbehaved(peer=peer, deed=Offence.HEAVY, reason=str(error)))
            raise
        self.heard(peer)
        self._called += 1
        call = self._called
        self._calls[call] = stream, asyncio.get_running_loop().create_future()
        try:
            self.stimulate(events.Called(call=call, peer=peer, offer=theirs, place=stream.place))
            # Mostly there already. It waits while our own call is open, which has a deadline; a
            # caller that does not wait cancels this handler.
            answer = await self._calls[call][1]
        except asyncio.CancelledError:
            self._on_dropped(call, peer)
            raise
        finally:
            del self._calls[call]
        if isinstance(answer, ExchangeDriver):
            await answer.answer(peer, stream)
            return
        await answer_in_time(stream, frames.refuse(answer), self.peer.budget.deadlines.hello)

    def _on_dropped(self, call: int, peer: str) -> None:
        _, answer = self._calls[call]
        accepted = answer.result() if answer.done() and not answer.cancelled() else None
        if isinstance(accepted, ExchangeDriver):  # at the same moment
            accepted.lose(peer, "ended the stream")
        else:
            self.stimulate(events.CallDropped(call=call))

    async def _hear_hello(self, peer: str, stream: CalleeStream) -> Any:
        try:
            async with asyncio.timeout(self.peer.budget.deadlines.hello):
                frame = await stream.receive()
        except TimeoutError:
            why = "called without saying hello in time"
            self.stimulate(events.Misbehaved(peer=peer, deed=Offence.STUMBLE, reason=why))
            raise LinkLost(why) from None
        if frame is None:  # calls cross, and exchanges end before they begin
            raise LinkLost("called, and ended the stream before it said hello")
        return frame

    async def call(self, peer: str) -> CallerStream:
        """Open a stream to a peer. Raises LinkLost."""
        info = self.roster.get(peer, time())
        if info is None:
            raise LinkLost("has left")
        stub = await self.channels.stub(info)
        # Ends a call that all our own deadlines have missed. gRPC would keep it for ever.
        timeout = 2 * self.peer.budget.deadlines.longest + 60
        call = stub.Swap(metadata=self.channels.metadata(peer), timeout=timeout)
        return CallerStream(call, self.channels.traffic.of(peer))

    @property
    def roster(self) -> Roster:
        """Who takes part in the run."""
        return self.around.roster

    def heard(self, peer: str, refusal: Refusal | None = None) -> None:
        """A peer has made an offer, or has accepted or refused ours."""
        self.roster.liveness.met(peer, time())
        if refusal is not None:
            self.history.refused(peer, refusal)

    # the end

    async def close(self, reason: str, patience: float | None = None) -> None:
        """Take part in no more exchanges; those under way may end within their deadline, then they
        are given up.

        ``patience``: seconds that they get at most.
        """
        self.exchanging = False
        self.drifted.clear()
        deadlines = self.peer.budget.deadlines
        latest = max((driver.one.deadline for driver in self._drivers.values()), default=0.0)
        most = min(latest, deadlines.longest, latest if patience is None else patience)
        try:
            async with asyncio.timeout(most):
                while self._drivers:
                    await next(iter(self._drivers.values())).done.wait()
            last_words = deadlines.hello + 1
        except TimeoutError:
            self.stimulate(events.GaveUp(reason=reason))
            last_words = ABANDON_DEADLINE + 1
        with suppress(TimeoutError):
            async with asyncio.timeout(last_words):
                # An exchange that is given up ends, and then closes its streams.
                while self._drivers:
                    await next(iter(self._drivers.values())).done.wait()
                while self._closing:
                    await asyncio.wait(self._closing)
