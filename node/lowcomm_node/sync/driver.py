"""Carries out one exchange at this node: what its machine decides, and reports what comes of that
as events.

    Peer.handle ─► effect ─► carry_out ─► tasks: dial, capture, send, read, apply, abandon, end
    ─► events

Nothing is decided here. ``pair_driver.py`` and ``group_driver.py`` carry out what only pairs and
only groups do."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import grpc

from lowcomm_node.errors import LinkLost, PeerGaveUp, TooSlow, TrainerError, Unusable
from lowcomm_node.net.stream import CalleeStream, CallerStream, Stream
from lowcomm_node.node import messages
from lowcomm_node.sync import frames
from lowcomm_node.sync.history import ExchangeStatus
from lowcomm_node.sync.link import ContentLink
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Stages, in_time
from lowcomm_protocol.errors import MAX_REASON, LowcommError, Offence, ProtocolViolation
from lowcomm_protocol.exchange import base, events
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.messages import exchange_pb2 as pb

if TYPE_CHECKING:
    from lowcomm_node.sync.exchanger import Exchanger

ABANDON_DEADLINE = 2.0
"""Seconds to tell a peer why we give it up."""


class ExchangeDriver(ABC):
    """An exchange of one fragment, with its streams, slots and tasks."""

    LINK: ClassVar[type[ContentLink]]

    def __init__(self, exchanger: "Exchanger", one: Underway) -> None:
        self.exchanger = exchanger
        self.one = one
        self.peer = exchanger.peer
        """The machine, to look things up; events go through ``tell``."""
        # The node may go on with another trainer while this ends: it never meets that one's memory.
        self.ready, self.trainer, self.arena = exchanger.trainer_now()
        self.slots = self.arena.take(one.kind.slots)
        self.links: dict[str, Any] = {}
        self.calls: dict[str, asyncio.Task[None]] = {}
        """Calls of ours, by the peer that is called; they read what it sends, too."""
        self.shared: messages.Shared | None = None
        """Our contribution."""
        self.worst_block: float | None = None
        """How far contributions were apart where they were most, once they are merged."""
        self.stages = Stages()
        """Seconds that each stage took here."""
        self.worked = 0.0
        """Seconds in which our trainer had something to do for it: to finish its step first, to
        code, to decode."""
        self.done = asyncio.Event()
        self.mixes = False
        """Whether slow weights of another cell have come."""
        self._asked = 0
        self._asked_at = 0.0
        self._why_late = ""
        """What was missing when its deadline passed, and what to do about it."""
        self._members_known = asyncio.Event()
        self._captured = asyncio.Event()
        self._noted: dict[str, float] = {}
        """When what ``moments`` tells came about (monotonic seconds)."""
        self._abandoning: set[str] = set()
        """Peers that we send the reason why we give them up: their streams end after that."""
        self._tasks: set[asyncio.Task[None]] = set()

    # what pairs and groups do in their own ways

    @property
    @abstractmethod
    def expected(self) -> int:
        """Payload bytes that both directions will carry, as far as that is known."""

    @abstractmethod
    async def _read(self, link: Any) -> None:
        """Report what a member sends as events, to its last word. Raises LowcommError if the member
        is lost."""

    @abstractmethod
    async def _effect(self, effect: Any) -> None:
        """Carry out what only this kind of exchange asks for. Raises LowcommError if the peer that
        it is for is lost."""

    @abstractmethod
    def _prepare(self) -> None:
        """The members are known, and whether it is a realignment."""

    async def _prepare_missed(self) -> None:  # noqa: B027
        """Have ready what others lack, before our contribution goes; in a pair nobody hands over
        steps."""

    # what is shown of it

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.one.fragment

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that entered the streams."""
        return sum(link.bytes_sent for link in self.links.values())

    @property
    def bytes_received(self) -> int:
        """Payload bytes that came out of the streams."""
        return sum(link.bytes_received for link in self.links.values())

    @property
    def moments(self) -> dict[str, float]:
        """Seconds from its beginning to when the members were known (met), our contribution was
        captured, sent, those of the others received and decoded, and all had confirmed (decided),
        as far as it came."""
        ended = {"sent": "send", "received": "receive"}
        times = {name: self.stages.ended.get(stage) for name, stage in ended.items()}
        times |= {**self._noted, "decided": self.one.decided}
        return {name: round(at - self.one.began, 3) for name, at in times.items() if at is not None}

    def describe(self, now: float) -> ExchangeStatus:
        """What ``status`` shows of it."""
        one = self.one
        return ExchangeStatus(
            fragment=one.fragment,
            round=one.offer.round,
            stage=one.machine.stage.value,
            partners=one.partners,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            bytes_expected=self.expected,
            seconds=now - one.began,
        )

    def note(self, moment: str) -> None:
        """Remember that this has come about just now; of what comes about again the last time."""
        self._noted[moment] = monotonic()

    # events

    def tell(self, event: Any) -> None:
        """Tell the machine an event of this exchange."""
        self.exchanger.stimulate(event.of(exchange=self.one.number))

    def lose(self, peer: str, why: str | Exception) -> None:
        """Tell the machine that nothing can come from a peer any more."""
        cause, deed = events.Cause.LOST, None
        match why:
            case base.UNANSWERED:
                cause = events.Cause.UNANSWERED
            case Unusable():
                cause, deed = events.Cause.UNUSABLE, why.deed
            case ProtocolViolation():
                cause, deed = events.Cause.VIOLATED, Offence.HEAVY
            case PeerGaveUp():
                cause = events.Cause.GAVE_UP
            case TooSlow():
                cause = events.Cause.LATE
            case _:
                pass
        self.tell(
            events.Lost(
                peer=peer,
                reason=str(why)[:MAX_REASON],
                deed=deed,
                broke=isinstance(why, str | LinkLost) and not isinstance(why, PeerGaveUp),
                stands=isinstance(why, Unusable),
                cause=cause,
            )
        )

    def arrived(self, peer: str) -> None:
        """Tell the machine that a contribution has come whole."""
        self.tell(events.ContentCame(peer=peer, line=self.links[peer].line(monotonic())))

    # effects

    def carry_out(self, effect: events.Effect) -> None:
        """Carry out an effect of this exchange, at once or in a task.

        Tasks begin in this order, and a link sends in the order of asking: messages arrive as
        they were decided."""
        match effect:
            case events.Dial(peer=peer):
                self.calls[peer] = self._start(self._dial(peer))
            case events.Capture():
                self._start(self._capture())
            case events.Abandon(peer=peer, reason=reason):
                self._abandoning.add(peer)
                self._start(self._abandon(peer, reason))
            case events.Apply():
                self._start(self._apply(effect))
            case events.End(reason=reason):
                self._start(self._end(reason))
            case _:
                self._start(self._try(effect))

    def link(self, peer: str, stream: Stream) -> None:
        """Take in the stream to a peer that takes part."""
        one = self.one

        def time_left() -> float:
            return one.deadline - (monotonic() - one.began)

        link = self.LINK(
            peer,
            stream,
            self.exchanger.bandwidth,
            time_left,
            one.usual,
            lambda left: self.tell(
                events.Coming(peer=peer, seconds=monotonic() - one.began + left)
            ),
        )
        self.links[peer], link.stages = link, self.stages

    def cancel_call(self, peer: str) -> None:
        """Drop our own call, if it is open."""
        if (call := self.calls.pop(peer, None)) is not None:
            call.cancel()

    def cut_off(self, peer: str, reason: str) -> None:
        """Cancel the stream of a peer that is lost, or its other end would wait for what can't come
        any more.

        ``reason``: sent to it first; empty where its stream does not stand.
        """
        if reason:
            self._abandoning.add(peer)
            self._start(self._abandon(peer, reason))
        elif peer in self.links:
            self.links[peer].stream.cancel()

    def explain_late(self) -> None:
        """Note what has not come by the deadline, and the flag to raise where that is what cut it
        short."""
        budget, missing = self.peer.budget, ""
        if self.one.members and not self._captured.is_set():
            missing = ": our contribution was not ready"
            if budget.step_seconds >= 1:
                missing += f", a step takes {budget.step_seconds:.0f} s here"
        elif self.one.members:
            links = list(self.links.items())[:4]
            sent = [f"{peer[-6:]} had sent {100 * link.share_come:.0f} %" for peer, link in links]
            missing = f": {'; '.join(sent)}"
        longest, remedy = budget.deadlines.longest, ""
        if self.one.deadline >= longest:
            remedy = f"; --exchange-deadline allows {longest:g} s: raise it"
        self._why_late = self._why_late or f"({self.one.deadline:.3g} s{missing}{remedy})"

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

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect of ours: it costs this exchange, not the node
            what = {"fragment": self.fragment, "error": repr(error)}
            log.error("exchange.defect", **what, exc_info=error)
            why = f"a defect: {error!r}; please report it with the log"
            self.tell(events.GaveUp(reason=why, cause=events.Cause.OWN_FAULT))

    async def _try(self, effect: Any) -> None:
        try:
            await self._effect(effect)
        except LowcommError as error:
            self.lose(effect.peer, error)

    # streams

    async def answer(self, peer: str, stream: CalleeStream) -> None:
        """Accept the call of a peer, which is linked; returns when its stream is done."""
        link = self.links[peer]
        if peer not in self.one.partners:
            raise ProtocolViolation("called us where the exchange could not take it")
        waiting: set[asyncio.Task[Any]] = {asyncio.create_task(stream.dropped.wait())}
        try:
            # The effects of its call are tasks, which have not begun yet: our acceptance goes
            # first.
            accept = pb.Frame(accept=frames.to_message(self.one.offer))
            await answer_in_time(link, accept, self.peer.budget.deadlines.hello)
            waiting.add(self._start(self._follow(link)))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A caller that drops its call cancels this handler, and whatever it wrote last may
            # never arrive.
            self.lose(peer, "ended the stream")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _dial(self, peer: str) -> None:
        stream: CallerStream | None = None
        try:
            stream = await self.exchanger.call(peer)
            await stream.send(pb.Frame(hello=frames.to_message(self.one.offer)))
            async with asyncio.timeout(self.peer.budget.deadlines.hello):
                answer = await stream.receive()
            await self._on_answer(peer, stream, answer)
        except (LowcommError, grpc.RpcError) as error:
            self.lose(peer, error)
        except TimeoutError:
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
        if answer is None:
            raise LinkLost("ended the stream without an answer")
        self.exchanger.heard(peer)
        kind = answer.WhichOneof("kind")
        if kind == "refuse":
            reason = frames.read_refusal(answer.refuse)
            self.exchanger.heard(peer, reason)
            self.calls.pop(peer, None)
            self.tell(events.Refused(peer=peer, reason=reason))
            await stream.close()
            return
        if kind != "accept":
            raise ProtocolViolation("answered our offer with something else")
        theirs = frames.from_message(answer.accept)
        self.link(peer, stream)
        self.tell(events.Accepted(peer=peer, offer=theirs))
        if peer in self.one.partners:
            await self._follow(self.links[peer])
        elif peer not in self._abandoning:
            stream.cancel()

    async def _follow(self, link: ContentLink) -> None:
        """Read what a member sends to the end of the exchange."""
        try:
            await self._read(link)
        except LowcommError as error:
            self.lose(link.peer, error)
            if link.peer not in self._abandoning:
                link.stream.cancel()
            return
        # To a member whose exchange goes on, a closed stream means that we are lost.
        await self.done.wait()
        await link.close()

    async def _abandon(self, peer: str, reason: str) -> None:
        if (link := self.links.get(peer)) is None:
            self.cancel_call(peer)
            return
        call = self.calls.pop(peer, None)
        with suppress(LowcommError, TimeoutError):
            async with asyncio.timeout(ABANDON_DEADLINE):
                await link.send_abandon(reason)
                if call is not None:
                    # A call that is cancelled takes with it what was written last: the other end
                    # must read that first.
                    await asyncio.wait({call})
                    await link.close()
        link.stream.cancel()

    # our contribution

    async def _capture(self) -> None:
        try:
            self._prepare()
            self.note("met")
            self._members_known.set()
            with self.working():
                self.shared = await self.trainer.ask(
                    messages.CaptureContribution(
                        fragment=self.fragment,
                        slot=self.slots[0],
                        realign=self.one.realign,
                        ahead=self.one.ahead,
                        apart=self.one.apart,
                        members=self.one.members if self.one.kind.all_call else (),
                    )
                )
                await self._prepare_missed()
        except LowcommError as error:
            why = f"our contribution could not be captured: {error}"
            self.tell(events.GaveUp(reason=why, cause=events.Cause.OWN_FAULT))
            return
        self.note("captured")
        self._captured.set()
        self.tell(events.Captured())

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for the members, or for our capture. Raises LinkLost if the exchange is over
        before."""
        await event.wait()
        # Not only once it is done: what is captured may be dropped already.
        if self.one.machine.over:
            raise LinkLost("the exchange is over")

    async def decode(
        self, part: messages.Part, peer: str, **place: int
    ) -> messages.Retransmit | None:
        """Have what a member brought decoded, at ``slot``, ``offset`` and ``size``; what of it must
        come again."""
        request = messages.Receive(fragment=self.fragment, part=part, peer=peer, **place)
        with self.working():
            return (await self.trainer.ask(request)).again

    def _tokens(self, peers: Sequence[str]) -> dict[str, int]:
        """What weighs the contributions of these members, in this order."""
        return {peer: (self.one.machine.offer_of(peer) or self.one.offer).tokens for peer in peers}

    # the end

    async def _apply(self, effect: events.Apply) -> None:
        over = self._tokens(effect.members)
        if effect.shards:  # a group: the owners of the shards that are applied
            applied = zip(effect.members, effect.shards, strict=True)
            over = {owner: 0 for owner, is_applied in applied if is_applied}
        try:
            merged = await self.trainer.ask(
                messages.Merge(
                    fragment=self.fragment,
                    swarm_step=effect.swarm_step,
                    over=over,
                    keep_momentum=self.one.keep_momentum,
                )
            )
        except TrainerError as error:
            await self._end(f"the outer step failed: {error}")
            return
        self.worst_block = merged.worst_block
        for stage, seconds in merged.stages.items():
            self.stages.add(stage, seconds)
        details = ["realigned"] if self.one.realign else []
        if self.one.lacking and (missed := self.one.lacking.steps.get(self.peer.me)):
            details.append(f"took over {missed} missed step{'s' if missed > 1 else ''}")
        if self.mixes:
            details.append("mixed with another cell")
        if not all(effect.shards):
            details.append(f"{sum(effect.shards)} of {len(effect.shards)} shards")
        self._finish(
            events.Merged(
                swarm_step=merged.swarm_step,
                steps=merged.merged_steps,
                tokens=merged.merged_tokens,
                slow_digest=bytes.fromhex(merged.slow_digest),
                momentum_digest=bytes.fromhex(merged.momentum_digest),
                measured=self._measured().of(share=self._share()),
                detail=", ".join(details),
            )
        )

    async def _end(self, reason: str) -> None:
        if self.one.members:  # or nothing was captured
            with suppress(TrainerError):
                await self.trainer.ask(messages.Drop(fragment=self.fragment))
        reason = f"{reason} {self._why_late}" if self._why_late else reason
        self._finish(events.Dropped(reason=reason, measured=self._measured()))

    def _measured(self) -> events.Measured:
        now = monotonic()
        rates = [rate for link in self.links.values() if (rate := link.rate(now)) is not None]
        lines = [line for link in self.links.values() if (line := link.line(now)) is not None]
        return events.Measured(
            work=self.worked, rate=min(rates, default=None), line=max(lines, default=None)
        )

    def _share(self) -> float | None:
        """Bytes that went one way, in those that the fragment has at most."""
        if self.one.realign or self.one.lacking:
            return None  # in fp32, or with missed steps: it tells nothing of what others take
        most = self.one.kind.contents * self.ready.sizes[self.fragment][1]
        return max(self.bytes_sent, self.bytes_received) / most

    def _finish(self, event: events.PeerEvent) -> None:
        self.done.set()
        self._members_known.set()
        self._captured.set()
        self.tell(event)

    async def close(self) -> None:
        """Let last words reach the other ends, and end all tasks."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.peer.budget.deadlines.hello)
        left = set(self._tasks)  # some may have begun meanwhile
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def give_back(self) -> None:
        """Free the slots."""
        for slot in self.slots:
            self.arena.give_back(slot)


async def answer_in_time(
    stream: CalleeStream | ContentLink, frame: pb.Frame, seconds: float
) -> None:
    """Send the answer to a call. Raises LinkLost if the caller does not take it in time."""
    async with in_time(seconds, "did not take our answer in time"):
        await stream.send(frame)
