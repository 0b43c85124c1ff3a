"""Training in one run: turns of the trainer, between pauses of the owner and failures.

run ──► turn: start the trainer ─► sync ─► train and exchange ─► conclude ──► run is over
  ▲      │                          ▲          │
  │      │                          └─ drifted ┘
  │      ├─ the owner wants a pause: save, end the trainer, wait ─┐
  │      └─ the trainer failed: wait a while ─────────────────────┤
  └───────────────────────────────────────────────────────────────┘
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, time

from lowcomm_node.catalogue import Waiting
from lowcomm_node.errors import ConfigError, TrainerError, TrainerLost
from lowcomm_node.fetch.catch_up import CatchUp, state_form
from lowcomm_node.fetch.files import Provider
from lowcomm_node.node.entry import LEAVE_DEADLINE
from lowcomm_node.node.ipc import FailureKind, TrainerEvent
from lowcomm_node.node.messages import (
    Amend,
    Cooling,
    Evaluate,
    Evaluated,
    Evaluating,
    Finished,
    Held,
    InnerStepTaken,
    LenderAwaited,
    NotSaved,
    PieceRead,
    Ready,
    Save,
    Saved,
    TextAwaited,
    Tokenizing,
    TrainerSettings,
)
from lowcomm_node.node.report import NodeState
from lowcomm_node.node.supervisor import Failures
from lowcomm_node.status.events import Board, Paused, Resumed, SavingAgain
from lowcomm_node.status.model import CheckpointStatus
from lowcomm_node.status.words import tokenizing_in_words
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import first_of
from lowcomm_protocol.exchange.events import Outcome, StateCopied
from lowcomm_protocol.peers.records import Phase
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.run import SignedRun

START_DEADLINE = 300.0
"""Seconds that a node waits for the first peers of a run; then it begins with those that came."""
PAUSE_PATIENCE = 5.0
"""Seconds for running exchanges to end when the owner pauses the node."""
LONGEST_LEAVE = 300.0
SAVED_BYTES, DISK_RATE = 20, 50e6
"""Bytes of a checkpoint for each parameter, and bytes a second: an estimate until a save was
measured."""
UNCHECKED = (
    "this run does not say which tokenizer it uses, so nobody checks it: with another file than "
    "its creator's this node spoils what others learn. Compare the SHA-256 of both"
)
NOT_SAVED = "checkpoints pause, training goes on, saving is tried again less and less often:"
STARTING = "starting the trainer: kernels (compiled the first time), text, model, checkpoint"
TOKENIZED = "starting the trainer: the text is tokenized; model, newest checkpoint"
DRIFTED = (
    "we have drifted too far from most peers for exchanges to bring us back: copying their state"
)
LOST = "{device} can't be used, training goes on without it: {reason}"
HELD = Waiting("slow-disk", "a checkpoint is being written: the disk is slower than training")
EVALUATING = Waiting("evaluating", "evaluating on held-out text")


class Training:
    """Training of one node in one run."""

    def __init__(
        self, state: NodeState, signed: SignedRun, admission: RunAdmission, exchanger: Exchanger
    ) -> None:
        self.on_built: Callable[[Ready], None] = lambda ready: None
        """Gets each state that a new trainer has built."""
        self.on_removals: Callable[[], None] = lambda: None
        """Called once removals that were announced for a swarm step hold."""
        self.on_state: Callable[[Ready], None] = lambda ready: None
        """Gets each state that a trainer has built, resumed or adopted."""
        self.on_text: Callable[[PieceRead | TextAwaited], None] = lambda event: None
        """Gets the trainer's news on packed text."""
        self._state = state
        self._signed = signed
        self._admission = admission
        self._exchanger = exchanger
        self._settings = state.settings
        self._board = state.board
        self._supervisor = state.supervisor
        self._availability = state.availability
        self._failures = Failures(state.settings.checkpoint_every)
        self._amended = asyncio.Event()
        self._over = asyncio.Event()  # set once the trainer has come to the end of the run
        self._save_seconds: float | None = None  # of the last save
        self._supervisor.on_news = self.hear

    @property
    def course(self) -> SpecTimeline:
        """The settings of the run over its swarm steps, as they are known now."""
        return self._admission.course

    @property
    def is_over(self) -> bool:
        """Whether this node has come to the end of the run."""
        return self.course.is_over(self._board.position()[0])

    # news of the trainer

    def hear(self, event: TrainerEvent) -> None:
        """Act on one event of the trainer, and report those that matter to the owner."""
        board = self._board
        match event:
            case InnerStepTaken():
                board.tell(event)
                self._failures.stepped(event.steps)
                self._exchanger.on_step(event.swarm_step, event.steps, event.tokens, event.seconds)
                if self._admission.reach(event.swarm_step):
                    # The next look at the swarm sees whether we may stay ourselves.
                    self.on_removals()
                return
            case PieceRead() | TextAwaited():
                self.on_text(event)
                return
            case Evaluating():
                if board.waiting in (None, EVALUATING) or board.phase in ("syncing", "finishing"):
                    board.show(EVALUATING)
                return
            case Held():
                board.show(HELD)
                return
            case Cooling():
                if event.why:
                    board.show(Waiting("gpu-hot", event.why))
                elif board.waiting and board.waiting.code == "gpu-hot":
                    board.show(None)
                return
            case LenderAwaited():
                if event.why:
                    board.show(Waiting("lender-awaited", event.why))
                elif board.waiting and board.waiting.code == "lender-awaited":
                    starts = board.phase in ("joining", "restarting")
                    board.show(Waiting("starting-trainer", STARTING) if starts else None)
                return
            case Tokenizing():
                board.tokenizing = event
                if event.total and event.done >= event.total:  # the trainer builds the model
                    board.show(Waiting("starting-trainer", TOKENIZED))
                else:
                    board.show(Waiting("tokenizing", tokenizing_in_words(event)))
                return
            case Evaluated():
                self._no_longer(EVALUATING)
            case Saved():
                self._no_longer(HELD)
                self._save_seconds = event.seconds
                if event.after_trouble:
                    board.withdraw("not-saved")
                    board.tell(SavingAgain())
            case NotSaved():
                self._no_longer(HELD)
                board.withdraw("not-saved")
                board.warn("not-saved", f"{NOT_SAVED} {event.reason}")
            case Finished():
                self._over.set()
            case _:
                pass
        board.tell(event)

    def _no_longer(self, waiting: Waiting) -> None:
        if self._board.waiting == waiting:
            self._board.show(None)

    async def amend(self) -> None:
        """Have the trainer follow the course of the run as it is known now."""
        self._amended.set()
        if self._supervisor.runs:  # else the next start brings it
            with suppress(TrainerError):
                amendments = self.course.chain.data.decode()
                await self._supervisor.trainer.ask(Amend(amendments=amendments))

    # turns

    async def run(self, membership: Membership, provider: Provider) -> None:
        """Train until the run is over. Raises NodeError.

        Between two turns the node pauses, or starts the trainer again after a failure.
        """
        while True:
            if self._availability.hold is not None:
                await self._pause(membership)
            try:
                turn = self._turn(membership, provider)
                lost, held = self._supervisor.wait_lost(), self._availability.held.wait()
                if await first_of(turn, lost, held) == 0:
                    return
            except TrainerError as error:
                await self._recover(membership, error)

    async def _turn(self, membership: Membership, provider: Provider) -> None:
        """Start the trainer, sync, and train until the run is over. Raises TrainerError."""
        await self._start_trainer(provider)
        why = "looking for peers"
        while True:
            await self._sync_and_train(membership, why, drifted=False)
            # The end counts, if we have drifted away from the others as well.
            while await first_of(self._over.wait(), self._exchanger.drifted.wait()) != 0:
                await self._exchanger.close("copies the state of a peer", 0.0)
                await self._supervisor.train(False)
                self._board.warn("drifted", DRIFTED)
                await self._sync_and_train(membership, "back to the swarm", drifted=True)
            await self.conclude()
            if not await self._goes_on(membership):
                return
            why = "the run goes on: its creator has made it longer"

    async def _start_trainer(self, provider: Provider) -> None:
        data = self._signed.spec.data
        if not self._state.ready and data.tokenizer == "local" and not data.tokenizer_sha256:
            self._board.warn("tokenizer-unchecked", UNCHECKED)
        looking = Waiting("run-files", "looking for the files of the run")
        self._board.enter("restarting" if self._state.ready else "joining", looking)
        self._over.clear()  # what it has saved may be from before the end
        tokenizer, start, packs = await provider.provide()
        self._board.show(Waiting("starting-trainer", STARTING))
        settings, fingerprint = self._settings, self._signed.fingerprint
        try:
            ready = await self._supervisor.start(
                TrainerSettings(
                    spec=self._signed.document.decode(),
                    amendments=self.course.chain.data.decode(),
                    peer_id=self._state.peer_id,
                    checkpoints=str(settings.paths.checkpoints(fingerprint)),
                    slow=str(settings.paths.slow(fingerprint)),
                    data_cache=str(settings.paths.data),
                    tokenizer=tokenizer,
                    start=start,
                    packs=packs,
                    workers=self._state.workers,
                    **settings.model_dump(mode="json", exclude={"invite", "tokenizer"}),
                )
            )
        finally:
            self._board.tokenizing = None
        self._availability.follow_gpus([one.gpu for one in ready.devices])
        warn_of_devices(self._board, ready)
        for skipped in ready.skipped:
            self._board.warn("checkpoint-skipped", f"checkpoint skipped: {skipped}")
        await self.amend()  # what was heard while it was built
        self._take_over(ready)
        self.on_built(ready)

    async def _sync_and_train(self, membership: Membership, why: str, drifted: bool) -> None:
        """Come to where the swarm is, and train and exchange from there on."""
        self._board.enter("syncing", Waiting("looking-for-peers", why))
        await membership.announce(Phase.SYNCING)
        await self._catch_up(membership, drifted)
        await self._wait_for_start(membership)
        await self._supervisor.trainer.ask(Evaluate())
        self._exchanger.exchanging = True
        self._board.enter("training", None)
        await membership.announce(Phase.TRAINING)
        await self._supervisor.train(True)

    async def _catch_up(self, membership: Membership, drifted: bool) -> None:
        """Copy the state of peers that are too far ahead for a merge, or if we have drifted."""
        assert self._state.ready
        settings = self._settings
        catch_up = CatchUp(
            run=self._signed,
            trainer=self._supervisor.trainer,
            channels=self._exchanger.channels,
            membership=membership,
            trusts=self._exchanger.peer.trusts,
            down=self._exchanger.bandwidth.down,
            disk_quota=DiskQuota(settings.home, settings.max_disk),
            folder=settings.paths.incoming(self._signed.fingerprint),
            show=self._board.showing("copying-state"),
            warn=self._board.warn,
            tell=self._board.tell,
        )
        began = monotonic()
        copied = await catch_up.run_from(
            self._exchanger.peer.position.swarm_step,
            state_form(self._signed, self._state.ready, self.course.longest),
            drifted,
        )
        if copied is not None:
            self._take_over(copied)
            if drifted:
                self._exchanger.stimulate(StateCopied(seconds=monotonic() - began))
        elif drifted:
            self._exchanger.endure_drift()

    def _take_over(self, ready: Ready) -> None:
        """Go on with the state that the trainer has built, resumed or adopted."""
        self._state.ready = ready
        self._exchanger.take_over(ready, self._supervisor.trainer)
        self.on_state(ready)
        self._board.advance(steps=ready.steps, swarm_step=ready.swarm_step, tokens=ready.tokens)

    async def _wait_for_start(self, membership: Membership) -> None:
        """At the very beginning of a run, wait for the peers that it begins with."""
        ready, roster = self._state.ready, membership.roster
        assert ready
        needed = self._signed.spec.run.start_peers
        deadline = monotonic() + START_DEADLINE
        while ready.swarm_step == 0 and not roster.in_phase(Phase.TRAINING, time()):
            present = 1 + membership.count(Phase.SYNCING, Phase.TRAINING, Phase.FINISHED)
            if present >= needed:
                return
            if monotonic() > deadline:
                few = f"only {present} of {needed} peers came within {START_DEADLINE:.0f} s"
                self._board.warn("few-peers", f"{few}: beginning with them")
                return
            text = f"the run begins with {needed} peers: {present} are here"
            self._board.show(Waiting("first-peers", text))
            await membership.wait_changed(0.5)

    async def _goes_on(self, membership: Membership) -> bool:
        """Whether the creator has made the run longer. A node that stays waits for that."""
        serving = Waiting("run-over", "the run is over: serving its state to others")
        while self.is_over:
            self._board.enter("finished", serving if self._settings.stay else None)
            await membership.announce(Phase.FINISHED)
            if not self._settings.stay:
                return False
            self._amended.clear()
            await self._amended.wait()
        self._over.clear()
        return True

    # between two turns

    async def _pause(self, membership: Membership) -> None:
        """Save, end the trainer, and wait until the owner lets us train."""
        hold = self._availability.hold
        assert hold
        # Peers that call us before all know are answered that we do not train.
        self._exchanger.exchanging = False
        self._board.enter("paused", Waiting("pausing", f"{hold.reason}; saving"))
        self._board.tell(Paused(**vars(hold)))
        await membership.announce(Phase.PAUSED)
        if self._supervisor.runs:
            # The reason that peers get is no more than this.
            await self._exchanger.close("the node pauses", PAUSE_PATIENCE)
            await self._save()
        await self._supervisor.stop()
        self._board.show(None)  # the report tells why
        self._board.advance(tokens_per_second=0.0)
        await membership.announce(Phase.PAUSED)
        await self._availability.free.wait()
        self._board.tell(Resumed())

    async def _recover(self, membership: Membership, error: TrainerError) -> None:
        """Clean up after a failed trainer, and wait. Raises NodeError if another try is no use."""
        never_ran = self._state.ready is None and not isinstance(error, TrainerLost)
        failure = await self._supervisor.explain(error)
        if never_ran and failure.kind is not FailureKind.LENDER:
            raise error  # which says why
        pause_seconds = self._failures.failed(failure)
        row = f"failure {self._failures.count} in a row, " if self._failures.count else ""
        text = f"{failure.reason.rstrip('.')} ({row}at step {failure.step})"
        self._board.enter("restarting", Waiting("trainer-failed", text))
        self._board.warn("trainer-failed", f"the trainer failed: {text}")
        await self._exchanger.close("the trainer failed", 0.0)
        await self._supervisor.stop()
        if pause_seconds is None:
            reason = self._failures.farewell()
            log.error("trainer.given_up", reason=reason)
            is_config = error.exit_code == ConfigError.exit_code
            raise ConfigError(reason) if is_config else TrainerError(reason)
        again = f"{text}: starting it again in {pause_seconds:.0f} s"
        self._board.show(Waiting("trainer-failed", again))
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_seconds):
                await membership.announce(Phase.SYNCING)
                await self._availability.held.wait()

    # the end

    @property
    def leave_seconds(self) -> float:
        """Seconds that leaving may take: a save waits for a step, and may be of gigabytes."""
        if self._state.ready is None:
            return LEAVE_DEADLINE
        guess = SAVED_BYTES * self._state.ready.parameters / DISK_RATE
        saving = guess if self._save_seconds is None else self._save_seconds
        step = self._exchanger.peer.budget.step_seconds
        return min(LONGEST_LEAVE, LEAVE_DEADLINE + 2 * (step + saving))

    async def conclude(self, patience: float | None = None, evaluates: bool = True) -> None:
        """Save, let running exchanges end within ``patience`` seconds, and evaluate a last time.

        Saves at once, and again if an exchange is applied after that: a node that is killed
        meanwhile has lost nothing.
        """
        ending = "saving, and ending the exchanges that are under way"
        self._board.enter("finishing", Waiting("leaving", ending))
        applied = self._exchanger.history.outcomes[Outcome.APPLIED]
        await asyncio.gather(self._save(), self._exchanger.close("the node leaves", patience))
        if self._exchanger.history.outcomes[Outcome.APPLIED] > applied:
            await self._save()
        if evaluates:
            with suppress(TrainerError):
                await self._supervisor.trainer.ask(Evaluate())

    async def _save(self) -> None:
        """Stop stepping, and write a checkpoint."""
        try:
            await self._supervisor.train(False)
            saved = await self._supervisor.trainer.ask(Save())
            self._board.checkpoint = CheckpointStatus(step=saved.swarm_step, path=saved.path)
            # It takes its last steps after its last word on them.
            self._board.advance(swarm_step=saved.swarm_step, steps=saved.steps, tokens=saved.tokens)
        except TrainerError as error:
            text = f"the last checkpoint could not be saved: {error}"
            self._board.warn("not-saved", text)


def warn_of_devices(board: Board, ready: Ready) -> None:
    """Warn of what the owner wants of devices and can't have; withdraw what holds no longer."""
    lost = (LOST.format(device=one, reason=why) for one, why in ready.lost.items())
    for code, text in (("gpu-power", ready.unlimited), ("device-lost", "; ".join(lost))):
        board.withdraw(code)
        if text:
            board.warn(code, text)
