"""A node that takes part: turns of training, and what lies between them.

run ──► turn: start the trainer ─► sync ─► train and exchange ─► conclude ──► the run is over
 ▲       │                          ▲          │
 │       │                          └─ drifted ┘
 │       ├─ the owner wants a pause: save, end the trainer, wait ─┐
 │       └─ the trainer failed: wait a while ─────────────────────┤
 └────────────────────────────────────────────────────────────────┘
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from time import monotonic, time
from typing import Any

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.errors import ConfigError, NodeError, TrainerError, TrainerLost
from lowcomm_node.fetch.catch_up import CatchUp, state_form
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import FileDownload, Provided, Provider
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.node.messages import Amend, Evaluate, Ready, Save, Snapshot, TrainerSettings
from lowcomm_node.node.news import News
from lowcomm_node.node.supervisor import Failures, Supervisor
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.status.events import Board, Paused, Resumed
from lowcomm_node.status.model import CheckpointStatus
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.snapshots import Snapshots
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.logs import log
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.peers.records import Phase
from lowcomm_protocol.plan import largest_jump
from lowcomm_protocol.spec.amendments import Course
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.state import tolerated_lag

START_DEADLINE = 300.0
"""Seconds that a node waits for the first peers of a run; then it begins with those that came."""
PAUSE_PATIENCE = 5.0
"""Seconds for exchanges that are under way to end when the owner pauses the node."""
UNCHECKED = (
    "this run does not say which tokenizer it uses, so nobody checks it: with another file than "
    "its creator's this node spoils what others learn. Compare the SHA-256 of both"
)
LEAVE_DEADLINE = 45.0
"""Seconds for a node that leaves to end exchanges, save and evaluate, beside its steps and its
disk."""
LONGEST_LEAVE = 300.0
LEAVE_PATIENCE = 15.0
"""Seconds for exchanges that are under way to end when the node leaves."""
HURRY_PATIENCE = 2.0
"""The same where whoever ends the node will not wait: Docker kills it after 10 s."""
SAVED_BYTES, DISK_RATE = 20, 50e6
"""Bytes of a checkpoint for each parameter, and bytes a second: an estimate until a save was
measured."""


class Training:
    """All turns of one node in one run."""

    def __init__(
        self,
        *,
        settings: NodeSettings,
        run: SignedRun,
        supervisor: Supervisor,
        availability: Availability,
        membership: Membership,
        exchanger: Exchanger,
        admission: RunAdmission,
        board: Board,
        pieces: PieceServer,
    ) -> None:
        """``pieces``: gives files of the run, and our state, to others."""
        self._settings = settings
        self._run = run
        self._supervisor = supervisor
        self._availability = availability
        self._board = board
        self._membership = membership
        self._exchanger = exchanger
        self._barred = admission.admission.barred
        """Whether a peer may not take part at a time; such a one is handed no state."""
        self._provider = Provider(
            settings, run, pieces.files, self._fetch, board.showing(WaitCode.RUN_FILES)
        )
        self._failures = Failures(settings.checkpoint_every)
        self._amending = admission.amending
        self._amended = asyncio.Event()
        self._pieces = pieces
        self._snapshots: Snapshots | None = None
        """Copies of our state that others take, once there is a state."""
        self.news = News(board, self._failures, exchanger)
        self.ready: Ready | None = None
        """What the trainer has built, resumed or adopted last."""

    async def run(self) -> None:
        """Train until the run is over. Raises NodeError.

        Between two turns the node pauses, or starts the trainer again after a failure.
        """
        while True:
            if self._availability.hold is not None:
                await self._pause()
            try:
                if await self._until_held(self._turn()):
                    return
            except TrainerError as error:
                await self._recover(error)

    async def conclude(self, patience: float | None = None) -> None:
        """Save, let exchanges under way end within so many seconds, and evaluate a last time."""
        await self._save_while_exchanges_end(patience)
        with suppress(TrainerError):
            await self._supervisor.trainer.ask(Evaluate())

    @property
    def leave_seconds(self) -> float:
        """How long leaving may take: a save waits for the end of a step, and may be of
        gigabytes."""
        if self.ready is None:
            return LEAVE_DEADLINE
        guess = SAVED_BYTES * self.ready.parameters / DISK_RATE
        saving = guess if self.news.save_seconds is None else self.news.save_seconds
        return min(
            LONGEST_LEAVE, LEAVE_DEADLINE + 2 * (self._exchanger.peer.budget.step_seconds + saving)
        )

    async def hurry_out(self) -> None:
        """Save, and let no exchange hold us up for long."""
        await self._save_while_exchanges_end(HURRY_PATIENCE)

    async def _save_while_exchanges_end(self, patience: float | None) -> None:
        """Save at once, and again if an exchange is applied after that.

        A node that is killed meanwhile has lost nothing.
        """
        ending = "saving, and ending the exchanges that are under way"
        self._board.enter("finishing", Waiting(WaitCode.LEAVING, ending))
        applied = self._exchanger.history.outcomes[Outcome.APPLIED]
        await asyncio.gather(self._save(), self._exchanger.close("the node leaves", patience))
        if self._exchanger.history.outcomes[Outcome.APPLIED] > applied:
            await self._save()

    async def close(self) -> None:
        """Hand over nothing more; to be called when no joiner is served any more."""
        await self._provider.close()
        if self._snapshots is not None:
            self._snapshots.close()

    # amendments

    @property
    def course(self) -> Course:
        """The settings of the run over its swarm steps, as they are known now."""
        return self._amending.course

    async def amend(self) -> None:
        """Have the trainer follow the course of the run as it is known now."""
        self._amended.set()
        if self._supervisor.runs:  # else the next start brings it
            with suppress(TrainerError):
                await self._supervisor.trainer.ask(
                    Amend(amendments=self.course.chain.data.decode())
                )

    # a turn

    async def _until_held(self, turn: Coroutine[Any, Any, None]) -> bool:
        """Take a turn; False if the owner wants a pause. Raises TrainerLost."""
        task = asyncio.create_task(turn)
        lost, held = (
            asyncio.create_task(one)
            for one in (self._supervisor.wait_lost(), self._availability.wait_held())
        )
        try:
            await asyncio.wait({task, lost, held}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                await lost
            if task.done():
                await task
            return task.done()
        finally:
            for one in (task, lost, held):
                one.cancel()
            await asyncio.gather(task, lost, held, return_exceptions=True)

    async def _turn(self) -> None:
        """Start the trainer, sync, and train until the run is over. Raises TrainerError."""
        await self._start_trainer()
        why = Waiting(WaitCode.LOOKING_FOR_PEERS, "looking for peers")
        while True:
            await self._sync_and_train(why, drifted=False)
            while not await self._is_over():
                await self._exchanger.close("copies the state of a peer", 0.0)
                await self._supervisor.train(False)
                self._board.warn(
                    WarningCode.DRIFTED,
                    "we have drifted too far from most peers for exchanges to bring us back: "
                    "copying their state",
                )
                back = Waiting(WaitCode.LOOKING_FOR_PEERS, "back to the swarm")
                await self._sync_and_train(back, drifted=True)
            await self.conclude()
            if not await self._goes_on():
                return
            longer = "the run goes on: its creator has made it longer"
            why = Waiting(WaitCode.LOOKING_FOR_PEERS, longer)

    async def _goes_on(self) -> bool:
        """Whether the creator has made the run longer. A node that stays waits for that."""
        stay = self._settings.stay
        serving = Waiting(WaitCode.RUN_OVER, "the run is over: serving its state to others")
        while self.is_over:
            self._board.enter("finished", serving if stay else None)
            await self._membership.announce(Phase.FINISHED)
            if not stay:
                return False
            self._amended.clear()
            await self._amended.wait()
        self.news.over.clear()
        return True

    @property
    def is_over(self) -> bool:
        """Whether this node has come to the end of the run."""
        return self.course.is_over(self._board.position()[0])

    async def _start_trainer(self) -> None:
        phase = "restarting" if self.ready else "joining"
        data = self._run.spec.data
        if not self.ready and data.tokenizer == "local" and not data.tokenizer_sha256:
            self._board.warn(WarningCode.TOKENIZER_UNCHECKED, UNCHECKED)
        self._board.enter(phase, Waiting(WaitCode.RUN_FILES, "looking for the files of the run"))
        self.news.over.clear()  # what it has saved may be from before the end
        provided = await self._provider.provide()
        starting = (
            "starting the trainer: kernels (compiled the first time), text, model, checkpoint"
        )
        self._board.show(Waiting(WaitCode.STARTING_TRAINER, starting))
        try:
            ready = await self._supervisor.start(self._trainer_settings(provided))
        finally:
            self._board.tokenizing = None
        for skipped in ready.skipped:
            self._board.warn(WarningCode.CHECKPOINT_SKIPPED, f"checkpoint skipped: {skipped}")
        await self.amend()  # what was heard while it was built
        self._take_over(ready)
        if self._snapshots is None:
            self._serve_state(ready)

    async def _fetch(self, download: FileDownload) -> None:
        """Get a file of the run from peers. Raises DiskFull."""
        fetch = Fetch(
            self._exchanger.channels,
            download,
            lambda: self._membership.roster.alive(time()),
            self._exchanger.bandwidth.down,
            self._board.warning(WarningCode.FILE_REFUSED),
            gives_up=False,
        )
        show = self._board.showing(WaitCode.FETCHING_FILE)
        await fetch.run(lambda text: show(download.describe(text, fetch.serving > 0)))

    async def _sync_and_train(self, why: Waiting, drifted: bool) -> None:
        """Come to where the swarm is, and train and exchange from there on."""
        self._board.enter("syncing", why)
        await self._membership.announce(Phase.SYNCING)
        await self._catch_up(drifted)
        await self._wait_for_start()
        await self._supervisor.trainer.ask(Evaluate())
        self._exchanger.exchanging = True
        self._board.enter("training", None)
        await self._membership.announce(Phase.TRAINING)
        await self._supervisor.train(True)

    async def _is_over(self) -> bool:
        """Wait until the run is over; False if we have drifted away from the others before."""
        waits = {
            asyncio.create_task(event.wait()) for event in (self.news.over, self._exchanger.drifted)
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return self.news.over.is_set()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _catch_up(self, drifted: bool) -> None:
        """Copy the state of peers that are too far ahead for a merge, or if we have drifted."""
        assert self.ready
        settings = self._settings
        catch_up = CatchUp(
            run=self._run,
            trainer=self._supervisor.trainer,
            channels=self._exchanger.channels,
            membership=self._membership,
            trusts=self._exchanger.peer.trusts,
            down=self._exchanger.bandwidth.down,
            disk_quota=DiskQuota(settings.home, settings.max_disk),
            folder=settings.paths.incoming(self._run.fingerprint),
            show=self._board.showing(WaitCode.COPYING_STATE),
            warn=self._board.warn,
            tell=self._board.tell,
        )
        began = monotonic()
        copied = await catch_up.run_from(
            self._exchanger.peer.position.swarm_step,
            state_form(self._run, self.ready, self.course.longest),
            drifted,
        )
        if copied is not None:
            self._take_over(copied)
            if drifted:
                self._exchanger.copied(monotonic() - began)
        elif drifted:
            self._exchanger.endure_drift()

    async def _wait_for_start(self) -> None:
        """At the very beginning of a run, wait for the peers that it begins with."""
        assert self.ready
        wanted = self._run.spec.run.start_peers
        deadline = monotonic() + START_DEADLINE
        while self.ready.swarm_step == 0 and not self._membership.anybody_training():
            there = 1 + self._membership.count_ready()
            if there >= wanted:
                return
            if monotonic() > deadline:
                self._board.warn(
                    WarningCode.FEW_PEERS,
                    f"only {there} of {wanted} peers came within {START_DEADLINE:.0f} s: beginning "
                    "with them",
                )
                return
            told = f"the run begins with {wanted} peers: {there} are here"
            self._board.show(Waiting(WaitCode.FIRST_PEERS, told))
            await self._membership.wait_changed(0.5)

    # between two turns

    async def _pause(self) -> None:
        """Save, end the trainer, and wait until the owner lets us train."""
        hold = self._availability.hold
        assert hold
        self._exchanger.exchanging = (
            False  # who calls us until all know it is told that we do not train
        )
        self._board.enter("paused", Waiting(WaitCode.PAUSING, f"{hold.text}; saving"))
        self._board.tell(Paused(rule=hold.rule.value, reason=hold.text, until=hold.until))
        await self._membership.announce(Phase.PAUSED)
        if self._supervisor.runs:
            await self._exchanger.close(
                "the node pauses", PAUSE_PATIENCE
            )  # why is nobody's business
            await self._save()
        await self._supervisor.stop()
        self._board.show(None)  # the report tells why
        self._board.advance(tokens_per_second=0.0)
        await self._membership.announce(Phase.PAUSED)
        await self._availability.wait_free()
        self._board.tell(Resumed())

    async def _recover(self, error: TrainerError) -> None:
        """Clean up after a failed trainer, and wait. Raises NodeError if another try is no use."""
        if self.ready is None and not isinstance(error, TrainerLost):
            raise error  # it has never run, and says why
        failure = await self._supervisor.explain(error)
        wait = self._failures.failed(failure)
        told = (
            f"{failure.reason.rstrip('.')} (failure {self._failures.count} in a row, at step "
            f"{failure.step})"
        )
        self._board.enter("restarting", Waiting(WaitCode.TRAINER_FAILED, told))
        self._board.warn(WarningCode.TRAINER_FAILED, f"the trainer failed: {told}")
        await self._exchanger.close("the trainer failed", 0.0)
        await self._supervisor.stop()
        if wait is None:
            raise self._given_up(error)
        again = f"{told}: starting it again in {wait:.0f} s"
        self._board.show(Waiting(WaitCode.TRAINER_FAILED, again))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._membership.announce(Phase.SYNCING)
                await self._availability.wait_held()

    def _given_up(self, error: TrainerError) -> NodeError:
        reason = self._failures.farewell()
        log.error("trainer.given_up", reason=reason)
        return (
            ConfigError(reason)
            if error.exit_code == ConfigError.exit_code
            else TrainerError(reason)
        )

    async def _save(self) -> None:
        """A checkpoint of where it stands; no more steps."""
        try:
            await self._supervisor.train(False)
            saved = await self._supervisor.trainer.ask(Save())
            self._board.checkpoint = CheckpointStatus(step=saved.swarm_step, path=saved.path)
            # It takes its last steps after its last word on them.
            self._board.advance(swarm_step=saved.swarm_step, steps=saved.steps, tokens=saved.tokens)
        except TrainerError as error:
            told = f"the last checkpoint could not be saved: {error}"
            self._board.warn(WarningCode.NOT_SAVED, told)

    def _take_over(self, ready: Ready) -> None:
        """Go on with the state that the trainer has built, resumed or adopted."""
        self.ready = ready
        self._exchanger.take_over(ready, self._supervisor.trainer)
        self._board.advance(steps=ready.steps, swarm_step=ready.swarm_step, tokens=ready.tokens)

    def _serve_state(self, ready: Ready) -> None:
        """Serve our state to joiners from now on, whenever the trainer runs."""
        folder = self._settings.paths.snapshots(self._run.fingerprint)

        async def make() -> tuple[str, int]:
            made = await self._supervisor.trainer.ask(Snapshot(folder=str(folder)))
            return made.name, made.swarm_step

        self._snapshots = Snapshots(
            folder,
            make,
            lambda: self._board.position()[0],
            stale=tolerated_lag(self._run.spec.sync) // 2,
            useless=largest_jump(self._run.spec.sync.interval),
        )
        form = state_form(self._run, ready, self.course.longest)
        self._pieces.serve_state(form, self._snapshots)
        self._exchanger.around.joiners = lambda: self._pieces.turns.serving

    def _trainer_settings(self, provided: Provided) -> TrainerSettings:
        settings = self._settings
        return TrainerSettings(
            spec=self._run.document.decode(),
            amendments=self.course.chain.data.decode(),
            peer_id=self._exchanger.peer.me,
            checkpoints=str(settings.paths.checkpoints(self._run.fingerprint)),
            slow=str(settings.paths.slow(self._run.fingerprint)),
            data_cache=str(settings.paths.data),
            data=settings.data,
            field=settings.field,
            tokenizer=provided.tokenizer,
            start=provided.start,
            device=settings.device,
            threads=settings.threads,
            max_memory=settings.max_memory,
            max_vram=settings.max_vram,
            micro_batch=settings.micro_batch,
            activation_checkpointing=settings.activation_checkpointing,
            home=str(settings.home),
            max_disk=settings.max_disk,
            keep=settings.keep,
            checkpoint_every=settings.checkpoint_every,
        )
