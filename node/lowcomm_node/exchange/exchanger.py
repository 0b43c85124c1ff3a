"""Every exchange of this node: what is due, what is under way, who is accepted.

    step of the trainer ─► due? ─► Exchange.start ─┐
    call of a peer ─► consider ─► Accepted ────────┤
                                                   ▼
            Exchange.handle(event) ─► effects: dial, capture, send, confirm, apply, end
                     ▲                                  │  carried out here, as tasks
                     └──────────── their results ◄──────┘

``Exchange`` decides; nothing in this file does. The trainer captures and applies; this file only passes slot numbers on.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from time import monotonic, time
from typing import Any

import grpc

from lowcomm_node.errors import LinkLost, TrainerError
from lowcomm_node.exchange import offers
from lowcomm_node.exchange.channels import Channels
from lowcomm_node.exchange.history import History, Outcome
from lowcomm_node.exchange.link import Link
from lowcomm_node.exchange.round import Round
from lowcomm_node.exchange.stream import CalleeStream, CallerStream
from lowcomm_node.logs import log
from lowcomm_node.trainer.interface import Again, Ready
from lowcomm_node.trainer.process import Trainer
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol import exchange as ex
from lowcomm_protocol.clock import is_supported
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.matching import Offer, Readiness, Refusal, candidates, consider, wins_crossing
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import Phase
from lowcomm_protocol.roster import Roster
from lowcomm_protocol.run import RunSpec
from lowcomm_protocol.schedule import FragmentProgress, SyncSchedule

HELLO_DEADLINE = 10.0
MAX_JUMP_INTERVALS = 10
"""How many intervals one peer's swarm step may be ahead of everybody else's."""


class Exchanger:
    """Begins, accepts and carries out exchanges."""

    def __init__(
        self,
        *,
        peer_id: str,
        spec: RunSpec,
        ready: Ready,
        trainer: Trainer,
        roster: Roster,
        channels: Channels,
        deadline: float,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.peer_id, self.spec, self.roster = peer_id, spec, roster
        self.trainer, self.channels = trainer, channels
        self.history = History()
        self.running: dict[int, Round] = {}
        self.open = False
        """Whether we exchange now: training, and not leaving."""
        self._longest = deadline
        self._tell = tell
        self._closing: set[asyncio.Task[None]] = set()
        self.take_over(ready)

    def take_over(self, ready: Ready) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state."""
        self._ready = ready
        self.swarm_step, self.steps, self.tokens = ready.swarm_step, ready.steps, ready.tokens
        progress = [FragmentProgress(**counters) for counters in ready.progress]
        self.schedule = SyncSchedule(self.spec.sync.interval, progress)
        self._slow_digests = [bytes.fromhex(digest) for digest in ready.slow_digests]

    # what is due

    def on_step(self, swarm_step: int, steps: int, tokens: int) -> None:
        """Take in one inner step, and begin the exchanges that are due."""
        self.swarm_step, self.steps, self.tokens = swarm_step, steps, tokens
        if not self.open or self.spec.sync.group == 1:
            return
        for fragment in self.schedule.due(swarm_step):
            if fragment not in self.running:
                self._begin(fragment)

    def _begin(self, fragment: int) -> None:
        slot = self._arena.take() if len(self.running) < self._at_once else None
        if slot is None:
            return  # as many are under way as fit; it stays due
        offer = self._offer(fragment, self.schedule.round_of(fragment, self.swarm_step))
        round_ = self._new_round(offer, slot, self._candidates(offer), called=False)
        self._carry_out(round_, round_.exchange.start())

    def _candidates(self, offer: Offer) -> list[str]:
        training = [info.peer_id for info in self.roster.in_phase(Phase.TRAINING, time())]
        return candidates(self.spec.run.seed, offer.fragment, offer.round, self.peer_id, training, self.spec.sync.group)

    def _new_round(self, offer: Offer, slot: int, peers: list[str], called: bool) -> Round:
        exchange = ex.Exchange(me=self.peer_id, candidates=peers, group=self.spec.sync.group)
        round_ = Round(exchange, offer, slot, monotonic(), called)
        self.running[offer.fragment] = round_
        loop, deadline = asyncio.get_running_loop(), self.deadline
        gathering = min(HELLO_DEADLINE, deadline / 2)
        round_.timers = [
            loop.call_later(gathering, self._dispatch, round_, ex.GatheringClosed()),
            loop.call_later(deadline, self._dispatch, round_, ex.DeadlinePassed()),
            # Confirmations get a grace of their own; then the exchange is over whatever happens.
            loop.call_later(deadline + HELLO_DEADLINE, self._dispatch, round_, ex.DeadlinePassed()),
        ]
        return round_

    def _offer(self, fragment: int, number: int) -> Offer:
        progress = self.schedule[fragment]
        return Offer(
            protocol=PROTOCOL_VERSION,
            run_id=self.spec.run_id,
            plan=self._ready.plan,
            codec=self.spec.sync.codec,
            fragment=fragment,
            stage=0,
            round=number,
            swarm_step=self.swarm_step,
            steps=self.steps - progress.merged_steps,
            tokens=self.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=self._slow_digests[fragment] if self.spec.sync.consensus == 0 else b"",
        )

    @property
    def deadline(self) -> float:
        """Seconds that an exchange may take: learned from those that went well, within the owner's bound."""
        usual = self.history.usual_seconds()
        return self._longest if usual is None else min(self._longest, 10.0 + 4 * usual)

    # calls of other peers

    async def serve(self, peer: str, stream: CalleeStream) -> None:
        """Answer one call of an authenticated peer; returns when its stream is done."""
        try:
            async with asyncio.timeout(HELLO_DEADLINE):
                frame = await stream.receive()
        except TimeoutError:
            raise LinkLost("called without saying hello in time") from None
        if frame is None or frame.WhichOneof("kind") != "hello":
            raise ProtocolViolation("called without saying hello")
        theirs = offers.from_message(frame.hello)
        refusal = self._consider(peer, theirs)
        if refusal is not None:
            self.history.we_refused(peer, refusal)
            await stream.send(offers.refuse(refusal))
            return
        round_ = self._round_for(peer, theirs)
        link = round_.links[peer] = Link(peer, stream)
        self._dispatch(round_, ex.Accepted(peer=peer, offer=theirs, called_us=True))
        if round_.exchange.stage is ex.Stage.GATHERING and not round_.called and round_.exchange.group == 2:
            raise ProtocolViolation("was accepted into an exchange that is still gathering")
        await link.send(pb.Frame(accept=offers.to_message(round_.offer)))
        reading = asyncio.create_task(self._read(round_, link))
        dropped = asyncio.create_task(stream.wait_dropped())
        try:
            await asyncio.wait({reading, dropped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A caller that drops its call cancels this handler, and whatever it wrote last may never arrive.
            self._lose(round_, peer, "ended the stream")
            for task in (reading, dropped):
                task.cancel()
            await asyncio.gather(reading, dropped, return_exceptions=True)

    def _consider(self, peer: str, theirs: Offer) -> Refusal | None:
        round_ = self.running.get(theirs.fragment)
        if round_ is not None and round_.exchange.is_calling(peer) and wins_crossing(self.peer_id, peer):
            return Refusal.CROSSED
        known = theirs.fragment < len(self.schedule)
        ready = Readiness(
            training=self.open,
            busy=round_ is not None and not round_.exchange.has_room_for(peer),
            has_room=round_ is not None or (len(self.running) < self._at_once and self._arena.free > 0),
            # Whoever waits for this very peer takes part, however few steps ago it merged.
            min_steps=0 if round_ is not None else self.spec.sync.min_steps,
            step_is_supported=is_supported(
                theirs.swarm_step,
                self.swarm_step,
                (info.swarm_step for info in self.roster.alive(time()) if info.peer_id != peer),
                MAX_JUMP_INTERVALS * self.spec.sync.interval,
            ),
            fragment_count=len(self.schedule),
        )
        ours = self._offer(theirs.fragment if known else 0, theirs.round)
        refusal = consider(theirs, ours, ready)
        if refusal is None and self.roster.get(peer, time()) is None:
            return Refusal.NOT_ALLOWED
        return refusal

    def _round_for(self, peer: str, theirs: Offer) -> Round:
        round_ = self.running.get(theirs.fragment)
        if round_ is not None:
            call = round_.calls.pop(peer, None)
            if call is not None:
                call.cancel()  # calls crossed, and theirs goes on
            return round_
        slot = self._arena.take()
        assert slot is not None
        offer = self._offer(theirs.fragment, theirs.round)
        pairs = self.spec.sync.group == 2
        round_ = self._new_round(offer, slot, [] if pairs else self._candidates(offer), called=True)
        round_.exchange.expect(peer)
        if not pairs:
            self._carry_out(round_, round_.exchange.start())
        return round_

    # effects

    def _dispatch(self, round_: Round, event: ex.Event) -> None:
        try:
            effects = round_.exchange.handle(event)
        except ProtocolViolation as error:
            peer = getattr(event, "peer", "")
            effects = round_.exchange.handle(ex.Lost(peer=peer, reason=str(error)))
        self._carry_out(round_, effects)

    def _carry_out(self, round_: Round, effects: list[ex.Effect]) -> None:
        for effect in effects:
            match effect:
                case ex.Dial(peer=peer):
                    round_.calls[peer] = self._start(round_, self._dial(round_, peer))
                case ex.Capture():
                    self._start(round_, self._capture(round_))
                case ex.SendContent(peer=peer):
                    self._start(round_, self._send_content(round_, peer))
                case ex.SendConfirm(peer=peer, members=members):
                    self._start(round_, self._send_confirm(round_, peer, members))
                case ex.Abandon(peer=peer, reason=reason):
                    self._start(round_, self._abandon(round_, peer, reason))
                case ex.Apply(members=members, swarm_step=step):
                    self._start(round_, self._apply(round_, members, step))
                case ex.End(reason=reason):
                    self._start(round_, self._end(round_, reason))

    def _start(self, round_: Round, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        round_.tasks.add(task)
        task.add_done_callback(partial(self._on_done, round_))
        return task

    def _on_done(self, round_: Round, task: asyncio.Task[None]) -> None:
        round_.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect of ours: it costs this exchange, not the node
            log.error("exchange.defect", fragment=round_.fragment, error=repr(error), exc_info=error)
            self._dispatch(round_, ex.GaveUp(reason=f"a defect: {error!r}; please report it with the log"))

    async def _dial(self, round_: Round, peer: str) -> None:
        stream: CallerStream | None = None
        try:
            info = self.roster.get(peer, time())
            if info is None:
                raise LinkLost("has left")
            stub = await self.channels.stub(info)
            stream = CallerStream(stub.Swap(metadata=self.channels.metadata(peer), timeout=2 * self._longest + 60))
            await stream.send(pb.Frame(hello=offers.to_message(round_.offer)))
            async with asyncio.timeout(HELLO_DEADLINE):
                answer = await stream.receive()
            await self._on_answer(round_, peer, stream, answer)
        except (LowcommError, grpc.RpcError) as error:
            self._lose(round_, peer, str(error))
        except TimeoutError:
            self._lose(round_, peer, "did not answer in time")
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            raise

    async def _on_answer(self, round_: Round, peer: str, stream: CallerStream, answer: pb.Frame | None) -> None:
        kind = answer.WhichOneof("kind") if answer is not None else None
        if answer is not None and kind == "refuse":
            reason, detail = offers.read_refusal(answer.refuse)
            self.history.they_refused(peer, reason)
            round_.calls.pop(peer, None)
            self._dispatch(round_, ex.Refused(peer=peer, reason=reason, detail=detail))
            await stream.close()
            return
        if answer is None or kind != "accept":
            raise ProtocolViolation("answered our offer with something else")
        theirs = offers.from_message(answer.accept)
        if (theirs.fragment, theirs.plan, theirs.codec) != (round_.fragment, round_.offer.plan, round_.offer.codec):
            raise ProtocolViolation("accepted something else than we offered")
        others = (info.swarm_step for info in self.roster.alive(time()) if info.peer_id != peer)
        if not is_supported(theirs.swarm_step, self.swarm_step, others, MAX_JUMP_INTERVALS * self.spec.sync.interval):
            raise ProtocolViolation(f"claims swarm step {theirs.swarm_step}, which nobody else supports")
        link = round_.links[peer] = Link(peer, stream)
        self._dispatch(round_, ex.Accepted(peer=peer, offer=theirs))
        await self._read(round_, link)

    async def _read(self, round_: Round, link: Link) -> None:
        """Read a member's contribution and confirmation, and report them as events."""
        try:
            await round_.members_known.wait()
            slot = self._arena.take()
            if slot is None:
                raise LinkLost("no slot is free for its contribution")
            round_.slots.append(slot)
            await link.read(
                self._arena.view(slot, round_.most),
                round_.least,
                lambda size, again: self._take_in(round_, link, slot, size, again),
                lambda blocks: self._start(round_, self._resend(round_, link, blocks)) and None,
                lambda members: self._dispatch(round_, ex.Confirmed(peer=link.peer, members=members)),
            )
        except LowcommError as error:
            self._lose(round_, link.peer, str(error))
            link.stream.cancel()
            return
        await round_.done.wait()
        await link.stream.close()

    async def _take_in(self, round_: Round, link: Link, slot: int, size: int, again: bool) -> Again | None:
        """Have a contribution decoded, or what of it came again; what is missing still."""
        await round_.captured.wait()
        if again:
            await self.trainer.patch(round_.fragment, link.peer, slot, size)
        elif missing := await self.trainer.receive(round_.fragment, link.peer, slot, size):
            return missing
        self._dispatch(round_, ex.Verified(peer=link.peer))
        return None

    async def _resend(self, round_: Round, link: Link, blocks: bytes) -> None:
        """Send blocks of our contribution again; nobody else reads our slot, because only pairs ask."""
        try:
            if round_.content is None or link.bytes_sent < round_.content[0] or round_.exchange.group != 2:
                raise ProtocolViolation("asked for what was not sent yet")
            size, digest = await self.trainer.resend(round_.fragment, blocks, round_.slot)
            await link.send_content(self._arena.view(round_.slot, size), digest)
        except LowcommError as error:
            self._lose(round_, link.peer, str(error))

    def _lose(self, round_: Round, peer: str, reason: str) -> None:
        if round_.exchange.is_open(peer):
            self.history.lost(peer, reason)
            if peer in round_.links:
                round_.links[peer].stream.cancel()  # or the other end would wait for what can't come any more
        self._dispatch(round_, ex.Lost(peer=peer, reason=reason))

    async def _capture(self, round_: Round) -> None:
        theirs = [round_.exchange.offer_of(peer) for peer in round_.exchange.partners]
        # Slow weights that should be equal and are not (a confirmation was lost): everybody sees it in the offers.
        round_.realign = any(offer and offer.slow_digest != round_.offer.slow_digest for offer in theirs)
        round_.least, round_.most = self._ready.sizes[round_.fragment]
        if round_.realign:
            round_.least = round_.most = self._ready.realign_sizes[round_.fragment]
        round_.members_known.set()
        try:
            captured = await self.trainer.capture(round_.fragment, round_.slot, round_.realign)
        except TrainerError as error:
            self._dispatch(round_, ex.GaveUp(reason=f"our contribution could not be captured: {error}"))
            return
        round_.content = (captured.size, captured.digest)
        round_.captured.set()
        self._dispatch(round_, ex.Captured())

    async def _send_content(self, round_: Round, peer: str) -> None:
        assert round_.content is not None
        size, digest = round_.content
        try:
            await round_.links[peer].send_content(self._arena.view(round_.slot, size), digest)
        except LowcommError as error:
            self._lose(round_, peer, str(error))

    async def _send_confirm(self, round_: Round, peer: str, members: bytes) -> None:
        try:
            await round_.links[peer].send_confirm(members)
        except LowcommError as error:
            self._lose(round_, peer, str(error))

    async def _abandon(self, round_: Round, peer: str, reason: str) -> None:
        call = round_.calls.pop(peer, None)
        link = round_.links.get(peer)
        if link is None:
            if call is not None:
                call.cancel()
            return
        try:
            async with asyncio.timeout(2.0):
                await link.send_abandon(reason)
        except (LowcommError, TimeoutError):
            pass
        link.stream.cancel()

    # the end of an exchange

    async def _apply(self, round_: Round, members: tuple[str, ...], swarm_step: int) -> None:
        offers_ = {peer: round_.exchange.offer_of(peer) or round_.offer for peer in members}
        try:
            merged = await self.trainer.merge(
                round_.fragment, {peer: offer.tokens for peer, offer in offers_.items()}, swarm_step
            )
        except TrainerError as error:
            await self._end(round_, f"the outer step failed: {error}")
            return
        self.swarm_step = max(self.swarm_step, merged.swarm_step)
        self.schedule.merged(round_.fragment, merged.swarm_step, merged.merged_steps, merged.merged_tokens)
        self._slow_digests[round_.fragment] = bytes.fromhex(merged.slow_digest)
        self._finish(round_, Outcome.APPLIED, "realigned" if round_.realign else "")

    async def _end(self, round_: Round, reason: str) -> None:
        if round_.members_known.is_set():
            with suppress(TrainerError):
                await self.trainer.drop(round_.fragment)
            outcome = Outcome.FAILED
        else:
            outcome = Outcome.NO_PARTNER
        if not round_.called:
            self.schedule.skip(round_.fragment, self.swarm_step)
        self._finish(round_, outcome, reason)

    def _finish(self, round_: Round, outcome: Outcome, reason: str) -> None:
        for timer in round_.timers:
            timer.cancel()
        del self.running[round_.fragment]
        round_.done.set()
        entry = self.history.record(round_, outcome, reason, self.swarm_step)
        self._tell({"event": f"exchange.{outcome.value}", **entry})
        task = asyncio.create_task(self._close(round_))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, round_: Round) -> None:
        """Let last confirmations reach the other end, then give the slots back."""
        me = asyncio.current_task()
        pending = {task for task in round_.tasks if task is not me}
        if pending:
            await asyncio.wait(pending, timeout=HELLO_DEADLINE)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for slot in (round_.slot, *round_.slots):
            self._arena.give_back(slot)

    async def close(self, reason: str) -> None:
        """Take part in no more exchanges; those under way may end within their deadline, then they are given up."""
        self.open = False
        try:
            async with asyncio.timeout(self.deadline):
                while self.running:
                    await next(iter(self.running.values())).done.wait()
        except TimeoutError:
            for round_ in list(self.running.values()):
                self._dispatch(round_, ex.GaveUp(reason=reason))
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=HELLO_DEADLINE + 1)

    @property
    def _arena(self) -> Any:
        assert self.trainer.arena is not None
        return self.trainer.arena

    @property
    def _at_once(self) -> int:
        return max(1, self._ready.slots // max(1, self.spec.sync.group))
