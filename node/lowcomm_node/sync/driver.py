"""One exchange under way at this node: carries out its decisions, and reports what comes of that as events.

                 ┌──────────── Gathering.handle(event) ─► effects ────────────┐
    timers, calls of peers                                                    ▼
                 └──────────── results ◄──── tasks: dial, capture, send, read, apply, abandon, end

Nothing is decided here. ``sync/pair_driver.py`` and ``sync/group_driver.py`` carry out what only pairs and only groups do.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc

from lowcomm_node.errors import GaveUp, LinkLost, TrainerError, Unusable
from lowcomm_node.sync import offers
from lowcomm_node.sync.history import Outcome
from lowcomm_node.sync.link import Link
from lowcomm_node.system.logs import log
from lowcomm_node.trainer.messages import Merged
from lowcomm_node.transport.stream import CalleeStream, CallerStream, Stream
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.plan.matching import Offer, keeps_momentum, must_realign, steps_ahead

if TYPE_CHECKING:
    from lowcomm_node.sync.exchanger import Exchanger

HELLO_DEADLINE = 10.0
"""Seconds for the answer to a call, and for what is still to be told when contributions have come."""
ABANDON_DEADLINE = 2.0


class Round(ABC):
    """An exchange of one fragment, with its streams, slots, tasks and timers."""

    def __init__(
        self, node: "Exchanger", exchange: base.Gathering, offer: Offer, slots: Sequence[int], called: bool
    ) -> None:
        self.node, self.exchange = node, exchange
        # The node may go on with another trainer while this exchange ends: it never meets that one's memory.
        self.trainer, self.arena = node.trainer, node.arena
        self.offer = offer
        """What we bring."""
        self.slots = slots
        self.called = called
        """Whether a peer's call began it, not our own schedule."""
        self.place = ""
        """Where that call came from."""
        self.began = monotonic()
        self.deadline = 0.0
        """Seconds from then on."""
        self.links: dict[str, Any] = {}
        self.calls: dict[str, asyncio.Task[None]] = {}
        """Calls of ours, by the peer that is called; they read what it sends, too."""
        self.members: tuple[str, ...] = ()
        """Whose contributions are captured and coded, ours included; sorted. Empty while that is not known."""
        self.realign = self.keep_momentum = False
        self.ahead = 0
        """How many inner steps longer than we the other members claim to have trained."""
        self.worst_block: float | None = None
        """How far contributions were apart where they were most, once they are merged."""
        self.worked = 0.0
        """Seconds in which our trainer had something to do for it: to finish its step first, to code, to decode."""
        self._asked, self._asked_at = 0, 0.0
        self.decided: float | None = None
        """When it was known that it is applied."""
        self._why_late = ""
        """What was missing when its deadline passed, and what to do about it."""
        self.done = asyncio.Event()
        self._members_known, self._captured = asyncio.Event(), asyncio.Event()
        self._abandoning: set[str] = set()
        """Peers that are being told why we give them up: their streams end after that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._told: Counter[type] = Counter()
        """What of the timetable was told, by kind."""

    # what pairs and groups do in their own ways

    @property
    @abstractmethod
    def expected(self) -> int:
        """Payload bytes that both directions will carry, as far as that is known."""

    def timetable(self, deadline: float) -> list[tuple[float, Any]]:
        """What is told to the exchange after how many seconds."""
        return [
            (deadline, base.DeadlinePassed()),
            # What members still tell each other then gets a grace of its own; after it the exchange is over in any case.
            (deadline + HELLO_DEADLINE, base.DeadlinePassed()),
        ]

    @abstractmethod
    def _link(self, peer: str, stream: Stream) -> Link:
        """A link over a stream."""

    @abstractmethod
    async def _read(self, link: Any) -> None:
        """Report what a member sends as events, to its last word. Raises LowcommError if the member is lost."""

    @abstractmethod
    async def _effect(self, effect: Any) -> None:
        """Carry out what only this kind of exchange asks for. Raises LowcommError if the peer that it is for is lost."""

    @abstractmethod
    def _prepare(self) -> None:
        """The members are known, and whether it is a realignment. Raises LowcommError if they can't exchange."""

    @abstractmethod
    async def _code(self) -> None:
        """Have our contribution captured and coded. Raises TrainerError."""

    @abstractmethod
    async def _merge(self, effect: base.Apply) -> Merged:
        """Have the outer step taken. Raises TrainerError."""

    # what is shown of it

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.offer.fragment

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that entered the streams."""
        return sum(link.bytes_sent for link in self.links.values())

    @property
    def bytes_received(self) -> int:
        """Payload bytes that came out of the streams."""
        return sum(link.bytes_received for link in self.links.values())

    def describe(self, now: float) -> dict[str, Any]:
        """What ``status`` shows of it."""
        return {
            "fragment": self.fragment,
            "round": self.offer.round,
            "stage": self.exchange.stage.value,
            "partners": list(self.exchange.partners),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_expected": self.expected,
            "seconds": now - self.began,
        }

    # events in, effects out

    def set_timers(self, deadline: float) -> None:
        """Begin to count the seconds; again with more of them, where a member needs those."""
        for timer in self._timers:
            timer.cancel()
        loop, elapsed, self.deadline = asyncio.get_running_loop(), monotonic() - self.began, deadline
        told, self._timers = Counter(self._told), []
        for after, event in sorted(self.timetable(deadline), key=itemgetter(0)):
            if told[type(event)]:
                told[type(event)] -= 1
                continue
            # What is due is told now: the timer that was to tell it may be among those that were cancelled.
            self._timers.append(loop.call_later(max(0.0, after - elapsed), self._on_time, event))

    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - (monotonic() - self.began)

    def _on_time(self, event: Any) -> None:
        self._told[type(event)] += 1
        if isinstance(event, base.DeadlinePassed) and not self.exchange.over:
            self._why_late = self._why_late or self._explain_late()
        self.handle(event)

    def _explain_late(self) -> str:
        """What has not come by the deadline, and the flag to raise where that is what cut it short."""
        missing, step = "", self.node.step_seconds
        if self.members and not self._captured.is_set():
            missing = "our contribution was not ready" + (f", a step takes {step:.0f} s here" if step >= 1 else "")
        elif self.members:
            came = [
                f"{peer[-6:]} had sent {100 * link.share_come:.0f} %" for peer, link in list(self.links.items())[:4]
            ]
            missing = "; ".join(came)
        longest = self.node.longest
        remedy = "" if self.deadline < longest else f"; --exchange-deadline allows {longest:g} s: raise it"
        return f"({self.deadline:.3g} s{': ' if missing else ''}{missing}{remedy})"

    @contextmanager
    def working(self) -> Iterator[None]:
        """While our trainer has been asked for something."""
        if not self._asked:
            self._asked_at = monotonic()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self.worked += monotonic() - self._asked_at

    def _be_patient(self, theirs: Offer) -> None:
        """Wait as long as a member needs, within what our owner allows. Raises LinkLost."""
        if theirs.seconds > self.node.longest:
            raise LinkLost(
                f"needs {theirs.seconds} s for its steps and contents, and --exchange-deadline allows "
                f"{self.node.longest:.0f} s here: raise it to exchange with such peers"
            )
        self._allow(theirs.seconds)

    def _allow(self, seconds: float) -> None:
        deadline = self.node.deadline_for(seconds)
        if deadline > self.deadline:
            self.set_timers(deadline)

    def start(self) -> None:
        """Call candidates."""
        self._carry_out(self.exchange.start())

    def handle(self, event: Any) -> None:
        """Take in an event. What a peer must not do costs its stream."""
        try:
            effects = self.exchange.handle(event)
        except ProtocolViolation as error:
            self.lose(getattr(event, "peer", ""), error)
            return
        self._carry_out(effects)

    def lose(self, peer: str, why: str | Exception) -> None:
        """Go on without a peer, if anything was still to come from it; what no honest peer does is held against it."""
        reason = str(why)
        deed = why.deed if isinstance(why, Unusable) else Deed.HEAVY if isinstance(why, ProtocolViolation) else None
        if deed is not None:
            self.node.hold(peer, deed, reason)
        if self.exchange.is_open(peer):
            if self._has_begun(peer) and (
                isinstance(why, str) or (isinstance(why, LinkLost) and not isinstance(why, GaveUp))
            ):
                self.node.hold_stall(peer, reason)
            self.node.history.lost(peer, reason)
            if peer in self.links:
                self.links[peer].stream.cancel()  # or the other end would wait for what can't come any more
        self._carry_out(self.exchange.handle(base.Lost(peer=peer, reason=reason)))

    def _has_begun(self, peer: str) -> bool:
        """Whether we have a place, slots and a stream for a peer, which it has cost us if it goes now."""
        return bool(self.members) and peer in self.exchange.partners

    def _carry_out(self, effects: list[base.Effect]) -> None:
        # Tasks begin in this order, and a link sends in the order of asking: what is told arrives as it was decided.
        for effect in effects:
            match effect:
                case base.Dial(peer=peer):
                    self.calls[peer] = self._start(self._dial(peer))
                case base.Capture(members=members):
                    self.members = members
                    self._start(self._capture())
                case base.Abandon(peer=peer, reason=reason):
                    self._abandoning.add(peer)
                    self._start(self._abandon(peer, reason))
                case base.Apply():
                    self._start(self._apply(effect))
                case base.End(reason=reason):
                    self._start(self._end(reason))
                case _:
                    self._start(self._try(effect))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect of ours: it costs this exchange, not the node
            log.error("exchange.defect", fragment=self.fragment, error=repr(error), exc_info=error)
            self.handle(base.GaveUp(reason=f"a defect: {error!r}; please report it with the log"))

    async def _try(self, effect: Any) -> None:
        try:
            await self._effect(effect)
        except LowcommError as error:
            self.lose(effect.peer, error)

    # streams

    async def answer(self, peer: str, theirs: Offer, stream: CalleeStream) -> None:
        """Accept the call of a peer; returns when its stream is done."""
        self._be_patient(theirs)
        link = self.links[peer] = self._link(peer, stream)
        self.handle(base.Accepted(peer=peer, offer=theirs, called_us=True))
        if peer not in self.exchange.partners:
            raise ProtocolViolation("called us where the exchange could not take it")
        waiting = {asyncio.create_task(stream.wait_dropped())}
        try:
            # The effects of that are tasks, which have not begun yet: our acceptance goes first.
            await answer_in_time(link, pb.Frame(accept=offers.to_message(self.offer)))
            waiting.add(self._start(self._follow(link)))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A caller that drops its call cancels this handler, and whatever it wrote last may never arrive.
            self.lose(peer, "ended the stream")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _dial(self, peer: str) -> None:
        stream: CallerStream | None = None
        is_answered = False
        try:
            stream = await self.node.call(peer)
            await stream.send(pb.Frame(hello=offers.to_message(self.offer)))
            async with asyncio.timeout(HELLO_DEADLINE):
                answer = await stream.receive()
            if is_answered := answer is not None:
                self.node.met(peer)
            await self._on_answer(peer, stream, answer)
        except (LowcommError, grpc.RpcError) as error:
            if not is_answered:
                self.node.missed(peer)
            self.lose(peer, error)
        except TimeoutError:
            self.node.missed(peer)
            self.lose(peer, base.UNANSWERED)
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            raise
        else:
            return
        if stream is not None:
            stream.cancel()  # it may have accepted, and would wait for us

    async def _on_answer(self, peer: str, stream: CallerStream, answer: pb.Frame | None) -> None:
        kind = answer.WhichOneof("kind") if answer is not None else None
        if answer is not None and kind == "refuse":
            reason, detail = offers.read_refusal(answer.refuse)
            self.node.history.they_refused(peer, reason)
            self.calls.pop(peer, None)
            self.handle(base.Refused(peer=peer, reason=reason, detail=detail))
            await stream.close()
            return
        if answer is None:
            raise LinkLost("ended the stream without an answer")
        if kind != "accept":
            raise ProtocolViolation("answered our offer with something else")
        theirs = offers.from_message(answer.accept)
        if (theirs.fragment, theirs.plan, theirs.codec) != (self.fragment, self.offer.plan, self.offer.codec):
            raise ProtocolViolation("accepted something else than we offered")
        if not self.node.supports(peer, theirs.swarm_step):
            # Of two that were parted nobody can say who is right: it is not held against the other.
            await _decline(stream, f"nobody else supports swarm step {theirs.swarm_step}")
            raise LinkLost(f"claims swarm step {theirs.swarm_step}, which nobody else supports")
        self._be_patient(theirs)
        link = self.links[peer] = self._link(peer, stream)
        self.handle(base.Accepted(peer=peer, offer=theirs))
        await self._follow(link)

    async def _follow(self, link: Link) -> None:
        """Read what a member sends to the end of the exchange."""
        try:
            await self._read(link)
        except LowcommError as error:
            self.lose(link.peer, error)
            if link.peer not in self._abandoning:
                link.stream.cancel()
            return
        await self.done.wait()
        await link.close()

    async def _abandon(self, peer: str, reason: str) -> None:
        call = self.calls.pop(peer, None)
        link = self.links.get(peer)
        if link is None:
            if call is not None:
                call.cancel()
                if reason == base.UNANSWERED:
                    self.node.missed(peer)
            return
        with suppress(LowcommError, TimeoutError):
            async with asyncio.timeout(ABANDON_DEADLINE):
                await link.send_abandon(reason)
                if call is not None:
                    # A call that is cancelled takes with it what was written last: the other end must read that first.
                    await asyncio.wait({call})
                    await link.close()
        link.stream.cancel()

    # our contribution

    async def _capture(self) -> None:
        others = self.exchange.offers(self.members)
        # Slow weights that should be equal and are not (somebody has applied more): everybody sees it in the offers.
        self.realign = must_realign(self.offer, others)
        self.keep_momentum = self.realign and keeps_momentum(self.offer, others)
        if self.realign:  # in fp32, which takes longer
            sizes, fragment = self.node.ready, self.fragment
            larger = sizes.realign_sizes[fragment] / sizes.sizes[fragment][1]
            self._allow(larger * max(offer.seconds for offer in (self.offer, *others)))
        self.ahead = steps_ahead(self.offer, others, self.node.spec.sync.interval)
        try:
            self._prepare()
            self._members_known.set()
            with self.working():
                await self._code()
        except LowcommError as error:
            self.handle(base.GaveUp(reason=f"our contribution could not be captured: {error}"))
            return
        self._captured.set()
        self.handle(base.Captured())

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for the members, or for our capture. Raises LinkLost if the exchange is over before."""
        await event.wait()
        if self.exchange.over:  # not only once it is done: what is captured may be dropped already
            raise LinkLost("the exchange is over")

    def _tokens(self, peers: Sequence[str]) -> dict[str, int]:
        """What weighs the contributions of these members, in this order."""
        return {peer: (self.exchange.offer_of(peer) or self.offer).tokens for peer in peers}

    # the end

    async def _apply(self, effect: base.Apply) -> None:
        self.decided = monotonic()
        try:
            merged = await self._merge(effect)
        except TrainerError as error:
            await self._end(f"the outer step failed: {error}")
            return
        self.worst_block = merged.worst_block
        self.node.take_in(self, merged)
        told = ["realigned"] if self.realign else []
        if not all(effect.shards):
            told.append(f"{sum(effect.shards)} of {len(effect.shards)} shards")
        self._finish(Outcome.APPLIED, ", ".join(told))

    async def _end(self, reason: str) -> None:
        if self.members:
            with suppress(TrainerError):
                await self.trainer.drop(self.fragment)
        told = f"{reason} {self._why_late}" if self._why_late else reason
        self._finish(Outcome.FAILED if self.members else Outcome.NO_PARTNER, told)

    def _finish(self, outcome: Outcome, reason: str) -> None:
        for timer in self._timers:
            timer.cancel()
        self.done.set()
        self._members_known.set()
        self._captured.set()
        self.node.ended(self, outcome, reason)

    async def close(self) -> None:
        """Let last words reach the other ends, and end all tasks."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=HELLO_DEADLINE)
        left = set(self._tasks)  # some may have begun meanwhile
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _decline(stream: CallerStream, reason: str) -> None:
    """Tell a peer that has accepted why nothing comes of it: to one that hears nothing its own line looks broken."""
    with suppress(LowcommError, TimeoutError):
        async with asyncio.timeout(ABANDON_DEADLINE):
            await stream.send(pb.Frame(abandon=pb.Abandon(reason=reason)))
            await stream.close()


async def answer_in_time(stream: CalleeStream | Link, frame: pb.Frame) -> None:
    """Send the answer to a call. Raises LinkLost if the caller does not take it in time."""
    try:
        async with asyncio.timeout(HELLO_DEADLINE):
            await stream.send(frame)
    except TimeoutError:
        raise LinkLost("did not take our answer in time") from None
