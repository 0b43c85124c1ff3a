"""One node in one run: it listens, is a member, serves others, trains (training.py), and leaves."""

import asyncio
from contextlib import suppress
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING

from lowcomm_node.catalogue import Waiting
from lowcomm_node.errors import ConfigError, NotAdmitted, RetryLater, TrainerError
from lowcomm_node.fetch.catch_up import state_form
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import FileDownload, Provider, VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.fetch.text import RunText
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.net.channels import Endpoint
from lowcomm_node.net.targets import places_of
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.net.unsent import keep_little_unsent
from lowcomm_node.node.entry import GOODBYE_DEADLINE, Entry
from lowcomm_node.node.messages import Generate, Ready, WriteSnapshot
from lowcomm_node.node.report import NodeState
from lowcomm_node.node.training import Training
from lowcomm_node.storage.snapshots import Snapshots
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import ask_server, name_of
from lowcomm_node.swarm.hosts import any_host, in_numbers, listening
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import Tasks, endure, repeat
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import MAX_LOSS, MAX_NAME, Phase, SelfReport, as_sample
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.plan import largest_jump
from lowcomm_protocol.spec.amendments import Amendment
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.state import tolerated_lag

if TYPE_CHECKING:
    from lowcomm_node.node.reading import TextReader

LEAVE_PATIENCE = 15.0
"""Seconds for running exchanges to end when the node leaves."""
HURRY_PATIENCE = 2.0
"""The same where whatever ends the node will not wait: Docker kills it after 10 s."""
SAMPLE_TOKENS, POLL_TRAINING = 96, 5.0
SAMPLE_EVERY, SAMPLE_SHARE = 60.0, 0.01
"""Least seconds between two samples for the swarm's page, and largest share of training's time."""


class Run:
    """One node in one run that has admitted it. Answers calls of peers (net.service.Handlers)."""

    def __init__(
        self,
        state: NodeState,
        entry: Entry,
        signed: SignedRun,
        admission: RunAdmission,
        trains: bool = True,
    ) -> None:
        """``trains``: else it gives packed text away."""
        self._signed = signed
        self._trains = trains
        self._state = state
        self._entry = entry
        self._settings = settings = entry.settings
        self._board = board = entry.board
        self._admission = admission
        self._bandwidth = bandwidth = state.allowance.bandwidth
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
            files, bandwidth.up, lambda peer: not admission.admission.barred(peer, time())
        )
        """Gives files of the run, and our state once there is one, to others."""
        self.text = state.text = RunText(
            settings,
            signed.spec.data,
            self._fetch_text,
            board.warning("mirror-refused"),
        )
        self._pieces.packs = self.text.by_digest
        self._provider = Provider(
            settings,
            signed,
            files,
            self._fetch_file,
            board.showing("run-files"),
            self.text,
            board.showing("text"),
        )
        self.endpoint = state.endpoint = Endpoint(
            gatekeeper,
            self,
            entry.discovery,
            entry.discovery.targets,
            bandwidth,
            state.allowance.peer_limit,
            entry.refusals,
        )
        self._roster = Roster(
            self._peer_id,
            signed.run_id,
            admission.admission,
            entry.refusals,
            lambda info: places_of(info.addresses, info.entry_points),
            lambda: admission.spec.sync.cells,
        )
        self.exchanger = state.exchanger = Exchanger(
            peer_id=self._peer_id,
            spec=signed.spec,
            roster=self._roster,
            channels=self.endpoint.channels,
            deadlines=Deadlines(longest=settings.exchange_deadline),
            tell=board.tell,
            bandwidth=bandwidth,
        )
        self.training = Training(state, signed, admission, self.exchanger)
        self.training.on_built = self._serve_state
        self._drop_removed = partial(self.exchanger.drop, admission.admission.barred)
        self.training.on_removals = self._drop_removed
        # Calls of peers: exchanges, and pieces of files and of our state.
        self.swap, self.fetch = self.exchanger.serve, self._pieces.serve
        self._reader: TextReader | None = None
        if signed.spec.data.parts and trains:
            from lowcomm_node.node import reading  # NumPy: most daemons never need it

            reader = self._reader = reading.TextReader(state, signed, entry.identity, self.text)
            self.training.on_state, self.training.on_text = reader.take_over, reader.hear
            state.reading = reader.describe
        self._snapshots: Snapshots | None = None
        self._sample, self._sample_step, self._sample_pause = "", 0, POLL_TRAINING
        self._tasks = Tasks()
        self.barred: NotAdmitted | None = None
        """Why the run does not take us any more."""

    async def take_part(self) -> None:
        """Take part until the run is over or the node shall leave. Raises NodeError."""
        departure = self._state.departure
        host, announce = listening(self._settings, self._entry.remembered)
        port = await self.endpoint.listen(
            any_host() if host == "0.0.0.0" else host, self._settings.port
        )
        try:
            addresses = await in_numbers(self._settings.announce)
            addresses = addresses or tuple(f"{address}:{port}" for address in announce)
            membership = self._join(addresses)
            if not self._trains:
                await departure.unless_wanted(self._serve_text(membership))
            elif not await departure.unless_wanted(self._ended_before(membership)):
                await departure.unless_wanted(self.training.run(membership, self._provider))
        finally:
            try:
                await self._leave()
            finally:
                await self._close()

    # membership

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and return ours. Raises RetryLater."""
        if self._state.membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return self._state.membership.meet(peer, introduction)

    def _join(self, addresses: tuple[str, ...]) -> Membership:
        """Become a member, and start what runs beside training."""

        def leave(error: NotAdmitted) -> None:
            self.barred = self.barred or error
            self._state.departure.wanted.set()

        entry, board = self._entry, self._board
        membership = self._state.membership = Membership(
            own=OwnRecord(
                identity=entry.identity,
                run_id=self._signed.run_id,
                certificate=self.endpoint.certificate.public_key,
                addresses=addresses,
                progress=board.position,
                report=self._describe_ourselves,
                reading=self._reader.claims if self._reader else bytes,
                gives_text=self.text.is_whole,
            ),
            signed=self._signed,
            roster=self._roster,
            discovery=entry.discovery,
            channels=self.endpoint.channels,
            settings=self._settings,
            run_admission=self._admission,
            refusals=entry.refusals,
            warn=board.warn,
            withdraw=board.withdraw,
            on_removals=self._drop_removed,
            on_barred=leave,
            rejoin=entry.rejoin,
        )
        self.endpoint.on_sign_of_life(membership.sign_of_life)
        entry.rejoin.publish = membership.republish
        entry.rejoin.on_move = self._move
        self._admission.on_news = self._hear_amendments
        warn = board.warning("defect")
        self._tasks.start(membership.run())
        if self._reader is not None:
            self._tasks.start(self._reader.run(membership))
        self._tasks.start(self._state.availability.run(warn))
        self._tasks.start(endure("the kernel may hold much unsent", keep_little_unsent, warn))
        if self._settings.show_sample:
            sampling = partial(repeat, self._write_sample, lambda: self._sample_pause)
            self._tasks.start(endure("no sample is written", sampling, warn))
        return membership

    def _describe_ourselves(self) -> SelfReport:
        progress, loss = self._board.progress, self._board.progress.val_loss_last or 0.0
        return SelfReport(
            name=self._settings.name or "",
            release=release()[:MAX_NAME],
            tokens=progress.tokens or 0,
            held_out_loss=loss if 0 <= loss < MAX_LOSS else 0.0,
            exchanges=self.exchanger.history.outcomes[Outcome.APPLIED],
            sample=self._sample,
            sample_step=self._sample_step,
        )

    async def _write_sample(self) -> None:
        """Let the model write for the swarm's page, seldom enough that training loses little."""
        if self._board.phase != "training":
            return
        began, step = monotonic(), self._board.position()[0]
        request = Generate(prompt="", tokens=SAMPLE_TOKENS, temperature=0.8, seed=step)
        with suppress(TrainerError):
            text = (await self._state.supervisor.trainer.ask(request)).text
            self._sample, self._sample_step = as_sample(text), step
        self._sample_pause = max(SAMPLE_EVERY, (monotonic() - began) / SAMPLE_SHARE)

    def _hear_amendments(self, news: list[Amendment]) -> None:
        self._entry.tell_amendments(news)
        self._tasks.start(self.training.amend())

    def _move(self) -> None:
        """Publish the new addresses of this machine, unless the owner decides what is published."""
        membership = self._state.membership
        if membership is not None and not self._settings.announce:
            _, hosts = listening(self._settings, self._entry.remembered)
            port = self.endpoint.port
            membership.own.addresses = tuple(f"{host}:{port}" for host in hosts)

    async def _ended_before(self, membership: Membership) -> bool:
        """Whether others have trained the run to its end, and this home has not begun it: training
        it alone from its beginning would help nobody. The owner sees why."""
        run, is_over = self._signed, self.training.course.is_over
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
        rest = "nobody serves its last state any more"
        if served:
            copies = "`lowcomm-node join --stay` copies its last state"
            rest = f"{copies}, which {len(served)} of them serve"
        ended = f"the run {name_of(run)} is over: its peers have trained it to its end"
        self._board.warn("run-ended", f"{ended}, swarm step {step}; {rest}")
        self._board.enter("finished", None)
        return True

    # text, files and state for others

    async def _serve_text(self, membership: Membership) -> None:
        """Give the run's packed text and its tokenizer to others, until we shall leave; what is
        missing is fetched. Raises ConfigError, DataError, DiskFull."""
        if not self._signed.spec.data.parts:
            name = name_of(self._signed)
            raise ConfigError(
                f"{name} has no packed text to give away: name another run with --run."
            )
        await self._provider.open_text()
        serving = Waiting("serving-text", "giving text to others; this node does not train")
        self._board.enter("serving", serving)
        await membership.announce(Phase.SERVING)
        for store in self.text.stores:
            if not store.file.is_own:  # pieces of those are checked when a peer asks
                pieces = range(store.part.piece_count)
                await store.have(pieces, self._board.showing("serving-text"))
        self._board.show(serving)
        await membership.announce(Phase.SERVING)  # now it gives all
        await asyncio.Event().wait()

    def _serve_state(self, ready: Ready) -> None:
        """Serve our state to joiners from now on, whenever the trainer runs."""
        if self._snapshots is not None:
            return
        folder = self._settings.paths.snapshots(self._signed.fingerprint)
        training, sync = self.training, self._signed.spec.sync

        async def make() -> tuple[str, int]:
            trainer = self._state.supervisor.trainer
            written = await trainer.ask(WriteSnapshot(folder=str(folder)))
            return written.path, written.swarm_step

        self._snapshots = Snapshots(
            folder,
            make,
            lambda: self._board.position()[0],
            stale=tolerated_lag(sync) // 2,
            useless=largest_jump(sync.interval),
        )
        form = state_form(self._signed, ready, training.course.longest)
        self._pieces.state = form, self._snapshots
        self.exchanger.around.sharing = lambda: self._pieces.turns.serving

    async def _fetch_file(self, download: FileDownload) -> None:
        """Get a file of the run from peers. Raises DiskFull."""
        fetch = Fetch(
            self.exchanger.channels,
            download,
            lambda: self._roster.alive(time()),
            self._bandwidth.down,
            self._board.warning("file-refused"),
            gives_up=False,
        )
        show = self._board.showing("fetching-file")
        await fetch.run(lambda text: show(download.describe(text, fetch.serving > 0)))

    def _fetch_text(self, store: PackStore) -> Fetch:
        """What gets the pieces of packed text that a store wants from peers."""
        return Fetch(
            self.exchanger.channels,
            store,
            lambda: store.rank(self._roster.alive(time())),
            self._bandwidth.down,
            self._board.warning("file-refused"),
            gives_up=False,
        )

    # the end

    async def _leave(self) -> None:
        departure, training = self._state.departure, self.training
        departure.begin()
        ended = self._board.phase == "finished" or departure.is_stopped
        with suppress(TimeoutError):
            if self._state.supervisor.runs and not ended:
                patience = HURRY_PATIENCE if departure.hurry else LEAVE_PATIENCE
                async with asyncio.timeout(training.leave_seconds):
                    await training.conclude(patience, evaluates=not departure.hurry)
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_DEADLINE):
                if self._state.membership is not None:
                    await self._state.membership.announce(Phase.LEFT)

    async def _close(self) -> None:
        try:
            await self.endpoint.close()
        finally:
            await self._provider.close()
            await self.text.close()
            if self._snapshots is not None:
                await self._snapshots.close()
            await self._tasks.cancel()
