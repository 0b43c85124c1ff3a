"""One node in one run: it listens, is a member, trains, exchanges, and leaves.

take_part ──► turn: start the trainer ─► sync ─► train and exchange ─► conclude ──► run is over
    ▲          │                          ▲          │
    │          │                          └─ drifted ┘
    │          ├─ the owner wants a pause: save, end the trainer, wait ─┐
    │          └─ the trainer failed: wait a while ─────────────────────┤
    └───────────────────────────────────────────────────────────────────┘
"""

import asyncio
from contextlib import suppress
from time import monotonic, time

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.errors import (
    ConfigError,
    NotAdmitted,
    RetryLater,
    TrainerError,
    TrainerLost,
)
from lowcomm_node.fetch.catch_up import CatchUp, state_form
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import FileDownload, Provided, Provider, VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.net.endpoint import Endpoint
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.node.entry import GOODBYE_DEADLINE, LEAVE_DEADLINE, Departure, Entry
from lowcomm_node.node.ipc import TrainerEvent
from lowcomm_node.node.messages import (
    Amend,
    Evaluate,
    Evaluated,
    Evaluating,
    Finished,
    Held,
    InnerStepTaken,
    NotSaved,
    Ready,
    Save,
    Saved,
    Tokenizing,
    TrainerSettings,
    WriteSnapshot,
)
from lowcomm_node.node.supervisor import Failures, Supervisor
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.status.events import Paused, Resumed, SavingAgain
from lowcomm_node.status.model import CheckpointStatus
from lowcomm_node.status.words import tokenizing_in_words
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.snapshots import Snapshots
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import ask_server, name_of
from lowcomm_node.swarm.hosts import any_host, in_numbers
from lowcomm_node.swarm.membership import Listeners, Membership
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.logs import log
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import first_of, start
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import MAX_LOSS, MAX_NAME, Phase, Told
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.plan import largest_jump
from lowcomm_protocol.spec.amendments import Amendment, SpecTimeline
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.state import tolerated_lag

START_DEADLINE = 300.0
"""Seconds that a node waits for the first peers of a run; then it begins with those that came."""
PAUSE_PATIENCE = 5.0
"""Seconds for running exchanges to end when the owner pauses the node."""
LEAVE_PATIENCE = 15.0
"""Seconds for running exchanges to end when the node leaves."""
HURRY_PATIENCE = 2.0
"""The same where whatever ends the node will not wait: Docker kills it after 10 s."""
LONGEST_LEAVE = 300.0
SAVED_BYTES, DISK_RATE = 20, 50e6
"""Bytes of a checkpoint for each parameter, and bytes a second: an estimate until a save was
measured."""
UNCHECKED = (
    "this run does not say which tokenizer it uses, so nobody checks it: with another file than "
    "its creator's this node spoils what others learn. Compare the SHA-256 of both"
)
NOT_SAVED = "checkpoints pause, training goes on, saving is tried again less and less often:"
TOKENIZED = "starting the trainer: the text is tokenized; model, newest checkpoint"
HELD = Waiting(
    WaitCode.SLOW_DISK, "a checkpoint is being written: the disk is slower than training"
)
EVALUATING = Waiting(WaitCode.EVALUATING, "evaluating on held-out text")


class Run:
    """One node in one run that has admitted it. Answers calls of peers (net.service.Handlers)."""

    def __init__(
        self,
        signed: SignedRun,
        entry: Entry,
        admission: RunAdmission,
        supervisor: Supervisor,
        availability: Availability,
        allowance: Allowance,
    ) -> None:
        self.signed = signed
        self._entry = entry
        self._settings = settings = entry.settings
        self._board = entry.board
        self._admission = admission
        self._supervisor = supervisor
        supervisor.on_news = self.hear
        self._availability = availability
        self._bandwidth = allowance.bandwidth
        self._peer_id = entry.identity.peer_id
        gatekeeper = Gatekeeper(
            entry.identity,
            signed.run_id,
            time,
            admission=admission.admission,
            claim=admission.claim,
            refusals=entry.refusals,
        )
        files = VerifiedFiles()
        self._pieces = PieceServer(
            files,
            allowance.bandwidth.up,
            lambda peer: not admission.admission.barred(peer, time()),
        )
        """Gives files of the run, and our state once there is one, to others."""
        self._provider = Provider(
            settings, signed, files, self._fetch_file, self._board.showing(WaitCode.RUN_FILES)
        )
        self.endpoint = Endpoint(
            gatekeeper,
            self,
            entry.discovery,
            entry.discovery.targets,
            allowance.bandwidth,
            allowance.peer_limit,
            entry.refusals,
        )
        self._roster = Roster(self._peer_id, signed.run_id, admission.admission, entry.refusals)
        self.exchanger = Exchanger(
            peer_id=self._peer_id,
            spec=signed.spec,
            roster=self._roster,
            channels=self.endpoint.channels,
            deadlines=Deadlines(longest=settings.exchange_deadline),
            tell=self._board.tell,
            bandwidth=allowance.bandwidth,
        )
        self._failures = Failures(settings.checkpoint_every)
        self._release = release()[:MAX_NAME]
        self._amended = asyncio.Event()
        self._over = asyncio.Event()
        """Set once the trainer has come to the end of the run."""
        self._save_seconds: float | None = None
        """Duration of the last save."""
        self._snapshots: Snapshots | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.membership: Membership | None = None
        """Once others can call us."""
        self.ready: Ready | None = None
        """State that the trainer has built, resumed or adopted last."""
        self.barred: NotAdmitted | None = None
        """Why the run does not take us any more."""

    async def take_part(self, departure: Departure) -> None:
        """Take part until the run is over or the node shall leave. Raises NodeError."""
        host, announce = self._entry.hosts()
        port = await self.endpoint.listen(
            any_host() if host == "0.0.0.0" else host, self._settings.port
        )
        try:
            addresses = await in_numbers(self._settings.announce)
            addresses = addresses or tuple(f"{address}:{port}" for address in announce)
            membership = self._join(addresses, departure)
            if not await departure.unless_wanted(self._ended_before(membership)):
                await departure.unless_wanted(self._train(membership))
        finally:
            try:
                await self._leave(departure)
            finally:
                await self._close()

    @property
    def course(self) -> SpecTimeline:
        """The settings of the run over its swarm steps, as they are known now."""
        return self._admission.amending.course

    @property
    def is_over(self) -> bool:
        """Whether this node has come to the end of the run."""
        return self.course.is_over(self._board.position()[0])

    # calls of peers

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Take part in an exchange that a peer has called us for."""
        await self.exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Give pieces of files, and of our state, to a peer that may take part.

        Raises RetryLater.
        """
        await self._pieces.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and return ours. Raises RetryLater."""
        if self.membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return self.membership.meet(peer, introduction)

    # news of the trainer

    def hear(self, event: TrainerEvent) -> None:
        """Act on one event of the trainer, and report those that matter to the owner."""
        board = self._board
        match event:
            case InnerStepTaken():
                board.tell(event)
                self._failures.stepped(event.steps)
                self.exchanger.on_step(event.swarm_step, event.steps, event.tokens, event.seconds)
                if self._admission.reach(event.swarm_step):
                    # The next look at the swarm sees whether we may stay ourselves.
                    self._drop_removed()
                return
            case Evaluating():
                if board.waiting in (None, EVALUATING) or board.phase in ("syncing", "finishing"):
                    board.show(EVALUATING)
                return
            case Held():
                board.show(HELD)
                return
            case Tokenizing():
                board.tokenizing = event
                is_done = event.total and event.done >= event.total  # the trainer builds the model
                starting = Waiting(WaitCode.STARTING_TRAINER, TOKENIZED)
                reading = Waiting(WaitCode.TOKENIZING, tokenizing_in_words(event))
                board.show(starting if is_done else reading)
                return
            case Evaluated():
                self._no_longer(EVALUATING)
            case Saved():
                self._no_longer(HELD)
                self._save_seconds = event.seconds
                if event.after_trouble:
                    board.withdraw(WarningCode.NOT_SAVED)
                    board.tell(SavingAgain())
            case NotSaved():
                self._no_longer(HELD)
                board.withdraw(WarningCode.NOT_SAVED)
                board.warn(WarningCode.NOT_SAVED, f"{NOT_SAVED} {event.reason}")
            case Finished():
                self._over.set()
            case _:
                pass
        board.tell(event)

    def _no_longer(self, waiting: Waiting) -> None:
        if self._board.waiting == waiting:
            self._board.show(None)

    # news of the swarm

    def _drop_removed(self) -> None:
        self.exchanger.drop(self._admission.admission.barred)

    def _hear_amendments(self, news: list[Amendment]) -> None:
        self._entry.tell_amendments(news)
        self._tasks.append(start(self.amend()))

    async def amend(self) -> None:
        """Have the trainer follow the course of the run as it is known now."""
        self._amended.set()
        if self._supervisor.runs:  # else the next start brings it
            with suppress(TrainerError):
                amendments = self.course.chain.data.decode()
                await self._supervisor.trainer.ask(Amend(amendments=amendments))

    def _move(self) -> None:
        """Publish the new addresses of this machine, unless the owner decides what is published."""
        if self.membership is not None and not self._settings.announce:
            _, hosts = self._entry.hosts()
            port = self.endpoint.port
            self.membership.own.addresses = tuple(f"{host}:{port}" for host in hosts)

    # joining

    def _join(self, addresses: tuple[str, ...], departure: Departure) -> Membership:
        """Become a member, and start what runs beside training."""

        def leave(error: NotAdmitted) -> None:
            self.barred = self.barred or error
            departure.wanted.set()

        entry, board = self._entry, self._board
        membership = self.membership = Membership(
            own=OwnRecord(
                identity=entry.identity,
                run_id=self.signed.run_id,
                certificate=self.endpoint.certificate.public_key,
                addresses=addresses,
                progress=board.position,
                told=self._describe_ourselves,
            ),
            run=self.signed,
            roster=self._roster,
            discovery=entry.discovery,
            channels=self.endpoint.channels,
            settings=self._settings,
            run_admission=self._admission,
            refusals=entry.refusals,
            listeners=Listeners(
                warn=board.warn,
                withdraw=board.withdraw,
                on_removals=self._drop_removed,
                on_barred=leave,
            ),
            rejoin=entry.rejoin,
        )
        self.endpoint.on_sign_of_life(membership.sign_of_life)
        own_record = peers_key(self.signed.run_id), self._peer_id
        entry.rejoin.publish_with(membership.republish, own_record)
        entry.rejoin.on_move = self._move
        self._admission.amending.on_news = self._hear_amendments
        warn = board.warning(WarningCode.DEFECT)
        works = [
            membership.run(),
            self._availability.run(warn),
            self.endpoint.watch(board.tell, warn),
        ]
        self._tasks += map(start, works)
        return membership

    def _describe_ourselves(self) -> Told:
        progress, loss = self._board.progress, self._board.progress.val_loss_last or 0.0
        return Told(
            name=self._settings.name or "",
            release=self._release,
            tokens=progress.tokens or 0,
            held_out_loss=loss if 0 <= loss < MAX_LOSS else 0.0,
            exchanges=self.exchanger.history.outcomes[Outcome.APPLIED],
        )

    async def _ended_before(self, membership: Membership) -> bool:
        """Whether others have trained the run to its end, and this home has not begun it: training
        it alone from its beginning would help nobody. The owner sees why."""
        run, is_over = self.signed, self.course.is_over
        has_begun = any(self._settings.paths.checkpoints(run.fingerprint).glob("step-*"))
        if has_begun or run.spec.sync.group == 1:  # alone: what others have reached is theirs
            return False
        # A server may believe what a single peer told it before anybody had begun. Then the creator
        # begins all the same, and those who find it training join it.
        servers = by_peer(self._settings.peers) if run.creator != self._peer_id else ()
        asking = (ask_server(self._entry.discovery, server, run.run_id) for server in servers)
        steps = [answer.swarm_step for answer in await asyncio.gather(*asking)]
        await membership.look()
        known = self._roster.known(time())
        if not any(map(is_over, (*steps, *(info.swarm_step for info in known)))):
            return False
        await membership.acquaint()
        served = membership.finished(is_over)
        step = max((*steps, *(info.swarm_step for info in served or ())), default=0)
        if served is None or not is_over(step) or (served and self._settings.stay):
            return False
        rest = (
            f"`lowcomm-node join --stay` copies its last state, which {len(served)} of them serve"
            if served
            else "nobody serves its last state any more"
        )
        self._board.warn(
            WarningCode.RUN_ENDED,
            f"the run {name_of(run)} is over: its peers have trained it to its end, swarm step "
            f"{step}; {rest}",
        )
        self._board.enter("finished", None)
        return True

    # turns of training

    async def _train(self, membership: Membership) -> None:
        """Train until the run is over. Raises NodeError.

        Between two turns the node pauses, or starts the trainer again after a failure.
        """
        while True:
            if self._availability.hold is not None:
                await self._pause(membership)
            try:
                turn = self._turn(membership)
                lost, held = self._supervisor.wait_lost(), self._availability.held.wait()
                if await first_of(turn, lost, held) == 0:
                    return
            except TrainerError as error:
                await self._recover(membership, error)

    async def _turn(self, membership: Membership) -> None:
        """Start the trainer, sync, and train until the run is over. Raises TrainerError."""
        await self._start_trainer()
        why = Waiting(WaitCode.LOOKING_FOR_PEERS, "looking for peers")
        while True:
            await self._sync_and_train(membership, why, drifted=False)
            # The end counts, if we have drifted away from the others as well.
            while await first_of(self._over.wait(), self.exchanger.drifted.wait()) != 0:
                await self.exchanger.close("copies the state of a peer", 0.0)
                await self._supervisor.train(False)
                self._board.warn(
                    WarningCode.DRIFTED,
                    "we have drifted too far from most peers for exchanges to bring us back: "
                    "copying their state",
                )
                back = Waiting(WaitCode.LOOKING_FOR_PEERS, "back to the swarm")
                await self._sync_and_train(membership, back, drifted=True)
            await self.conclude()
            if not await self._goes_on(membership):
                return
            longer = "the run goes on: its creator has made it longer"
            why = Waiting(WaitCode.LOOKING_FOR_PEERS, longer)

    async def _start_trainer(self) -> None:
        data = self.signed.spec.data
        if not self.ready and data.tokenizer == "local" and not data.tokenizer_sha256:
            self._board.warn(WarningCode.TOKENIZER_UNCHECKED, UNCHECKED)
        looking = Waiting(WaitCode.RUN_FILES, "looking for the files of the run")
        self._board.enter("restarting" if self.ready else "joining", looking)
        self._over.clear()  # what it has saved may be from before the end
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

    async def _sync_and_train(self, membership: Membership, why: Waiting, drifted: bool) -> None:
        """Come to where the swarm is, and train and exchange from there on."""
        self._board.enter("syncing", why)
        await membership.announce(Phase.SYNCING)
        await self._catch_up(membership, drifted)
        await self._wait_for_start(membership)
        await self._supervisor.trainer.ask(Evaluate())
        self.exchanger.exchanging = True
        self._board.enter("training", None)
        await membership.announce(Phase.TRAINING)
        await self._supervisor.train(True)

    async def _catch_up(self, membership: Membership, drifted: bool) -> None:
        """Copy the state of peers that are too far ahead for a merge, or if we have drifted."""
        assert self.ready
        settings = self._settings
        catch_up = CatchUp(
            run=self.signed,
            trainer=self._supervisor.trainer,
            channels=self.exchanger.channels,
            membership=membership,
            trusts=self.exchanger.peer.trusts,
            down=self._bandwidth.down,
            disk_quota=DiskQuota(settings.home, settings.max_disk),
            folder=settings.paths.incoming(self.signed.fingerprint),
            show=self._board.showing(WaitCode.COPYING_STATE),
            warn=self._board.warn,
            tell=self._board.tell,
        )
        began = monotonic()
        copied = await catch_up.run_from(
            self.exchanger.peer.position.swarm_step,
            state_form(self.signed, self.ready, self.course.longest),
            drifted,
        )
        if copied is not None:
            self._take_over(copied)
            if drifted:
                self.exchanger.copied(monotonic() - began)
        elif drifted:
            self.exchanger.endure_drift()

    async def _wait_for_start(self, membership: Membership) -> None:
        """At the very beginning of a run, wait for the peers that it begins with."""
        assert self.ready
        wanted = self.signed.spec.run.start_peers
        deadline = monotonic() + START_DEADLINE
        while self.ready.swarm_step == 0 and not membership.roster.in_phase(Phase.TRAINING, time()):
            present = 1 + membership.count(Phase.SYNCING, Phase.TRAINING, Phase.FINISHED)
            if present >= wanted:
                return
            if monotonic() > deadline:
                self._board.warn(
                    WarningCode.FEW_PEERS,
                    f"only {present} of {wanted} peers came within {START_DEADLINE:.0f} s: "
                    "beginning with them",
                )
                return
            text = f"the run begins with {wanted} peers: {present} are here"
            self._board.show(Waiting(WaitCode.FIRST_PEERS, text))
            await membership.wait_changed(0.5)

    async def _goes_on(self, membership: Membership) -> bool:
        """Whether the creator has made the run longer. A node that stays waits for that."""
        stay = self._settings.stay
        serving = Waiting(WaitCode.RUN_OVER, "the run is over: serving its state to others")
        while self.is_over:
            self._board.enter("finished", serving if stay else None)
            await membership.announce(Phase.FINISHED)
            if not stay:
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
        self.exchanger.exchanging = False
        self._board.enter("paused", Waiting(WaitCode.PAUSING, f"{hold.reason}; saving"))
        self._board.tell(Paused(**vars(hold)))
        await membership.announce(Phase.PAUSED)
        if self._supervisor.runs:
            # The reason that peers get is no more than this.
            await self.exchanger.close("the node pauses", PAUSE_PATIENCE)
            await self._save()
        await self._supervisor.stop()
        self._board.show(None)  # the report tells why
        self._board.advance(tokens_per_second=0.0)
        await membership.announce(Phase.PAUSED)
        await self._availability.free.wait()
        self._board.tell(Resumed())

    async def _recover(self, membership: Membership, error: TrainerError) -> None:
        """Clean up after a failed trainer, and wait. Raises NodeError if another try is no use."""
        if self.ready is None and not isinstance(error, TrainerLost):
            raise error  # it has never run, and says why
        failure = await self._supervisor.explain(error)
        wait = self._failures.failed(failure)
        text = (
            f"{failure.reason.rstrip('.')} (failure {self._failures.count} in a row, at step "
            f"{failure.step})"
        )
        self._board.enter("restarting", Waiting(WaitCode.TRAINER_FAILED, text))
        self._board.warn(WarningCode.TRAINER_FAILED, f"the trainer failed: {text}")
        await self.exchanger.close("the trainer failed", 0.0)
        await self._supervisor.stop()
        if wait is None:
            reason = self._failures.farewell()
            log.error("trainer.given_up", reason=reason)
            is_config = error.exit_code == ConfigError.exit_code
            raise ConfigError(reason) if is_config else TrainerError(reason)
        again = f"{text}: starting it again in {wait:.0f} s"
        self._board.show(Waiting(WaitCode.TRAINER_FAILED, again))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await membership.announce(Phase.SYNCING)
                await self._availability.held.wait()

    # state

    def _take_over(self, ready: Ready) -> None:
        """Go on with the state that the trainer has built, resumed or adopted."""
        self.ready = ready
        self.exchanger.take_over(ready, self._supervisor.trainer)
        self._board.advance(steps=ready.steps, swarm_step=ready.swarm_step, tokens=ready.tokens)

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
            self._board.warn(WarningCode.NOT_SAVED, text)

    def _serve_state(self, ready: Ready) -> None:
        """Serve our state to joiners from now on, whenever the trainer runs."""
        folder, sync = (
            self._settings.paths.snapshots(self.signed.fingerprint),
            self.signed.spec.sync,
        )

        async def make() -> tuple[str, int]:
            made = await self._supervisor.trainer.ask(WriteSnapshot(folder=str(folder)))
            return made.name, made.swarm_step

        self._snapshots = Snapshots(
            folder,
            make,
            lambda: self._board.position()[0],
            stale=tolerated_lag(sync) // 2,
            useless=largest_jump(sync.interval),
        )
        form = state_form(self.signed, ready, self.course.longest)
        self._pieces.serve_state(form, self._snapshots)
        self.exchanger.around.sharing = lambda: self._pieces.turns.serving

    async def _fetch_file(self, download: FileDownload) -> None:
        """Get a file of the run from peers. Raises DiskFull."""
        fetch = Fetch(
            self.exchanger.channels,
            download,
            lambda: self._roster.alive(time()),
            self._bandwidth.down,
            self._board.warning(WarningCode.FILE_REFUSED),
            gives_up=False,
        )
        show = self._board.showing(WaitCode.FETCHING_FILE)
        await fetch.run(lambda text: show(download.describe(text, fetch.serving > 0)))

    def _trainer_settings(self, provided: Provided) -> TrainerSettings:
        settings, fingerprint = self._settings, self.signed.fingerprint
        return TrainerSettings(
            spec=self.signed.document.decode(),
            amendments=self.course.chain.data.decode(),
            peer_id=self._peer_id,
            checkpoints=str(settings.paths.checkpoints(fingerprint)),
            slow=str(settings.paths.slow(fingerprint)),
            data_cache=str(settings.paths.data),
            tokenizer=provided.tokenizer,
            start=provided.start,
            home=str(settings.home),
            **{name: getattr(settings, name) for name in TrainerSettings.OF_OWNER},
        )

    # the end

    @property
    def leave_seconds(self) -> float:
        """How long leaving may take: a save waits for the end of a step, and may be of
        gigabytes."""
        if self.ready is None:
            return LEAVE_DEADLINE
        guess = SAVED_BYTES * self.ready.parameters / DISK_RATE
        saving = guess if self._save_seconds is None else self._save_seconds
        step = self.exchanger.peer.budget.step_seconds
        return min(LONGEST_LEAVE, LEAVE_DEADLINE + 2 * (step + saving))

    async def conclude(self, patience: float | None = None) -> None:
        """Save, let running exchanges end within ``patience`` seconds, and evaluate a last time."""
        await self._save_while_exchanges_end(patience)
        with suppress(TrainerError):
            await self._supervisor.trainer.ask(Evaluate())

    async def _save_while_exchanges_end(self, patience: float | None) -> None:
        """Save at once, and again if an exchange is applied after that: a node that is killed
        meanwhile has lost nothing."""
        ending = "saving, and ending the exchanges that are under way"
        self._board.enter("finishing", Waiting(WaitCode.LEAVING, ending))
        applied = self.exchanger.history.outcomes[Outcome.APPLIED]
        await asyncio.gather(self._save(), self.exchanger.close("the node leaves", patience))
        if self.exchanger.history.outcomes[Outcome.APPLIED] > applied:
            await self._save()

    async def _leave(self, departure: Departure) -> None:
        departure.begin()
        ended = self._board.phase == "finished" or departure.is_stopped
        with suppress(TimeoutError):
            if self._supervisor.runs and not ended:
                async with asyncio.timeout(self.leave_seconds):
                    if departure.hurry:
                        await self._save_while_exchanges_end(HURRY_PATIENCE)
                    else:
                        await self.conclude(LEAVE_PATIENCE)
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_DEADLINE):
                if self.membership is not None:
                    await self.membership.announce(Phase.LEFT)

    async def _close(self) -> None:
        try:
            await self.endpoint.close()
        finally:
            await self._provider.close()
            if self._snapshots is not None:
                self._snapshots.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
