"""A node's part in one run: it listens, is a member, trains and exchanges."""

import asyncio
from contextlib import suppress
from time import time

from lowcomm_node.catalogue import WarningCode
from lowcomm_node.dht.interface import by_peer
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.net.endpoint import Endpoint
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.node.departure import GOODBYE_DEADLINE, Departure
from lowcomm_node.node.entry import Entry
from lowcomm_node.node.ipc import Event
from lowcomm_node.node.lifecycle import LEAVE_DEADLINE, LEAVE_PATIENCE, Training
from lowcomm_node.node.messages import Stepped
from lowcomm_node.node.peer_calls import PeerCalls
from lowcomm_node.node.supervisor import Supervisor
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import ask_server, name_of
from lowcomm_node.swarm.hosts import any_host, in_numbers
from lowcomm_node.swarm.membership import Listeners, Membership, OwnRecord
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import start
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.peers.records import MAX_LOSS, MAX_NAME, Told
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.amendments import Amendment
from lowcomm_protocol.spec.run import SignedRun


class Participation:
    """One node in one run that has admitted it."""

    def __init__(
        self,
        run: SignedRun,
        entry: Entry,
        admission: RunAdmission,
        supervisor: Supervisor,
        availability: Availability,
        allowance: Allowance,
    ) -> None:
        self._run = run
        self._entry = entry
        self._settings = entry.settings
        self._board = entry.board
        self._admission = admission
        self._supervisor = supervisor
        self._availability = availability
        self._peer_id = entry.identity.peer_id
        self._gatekeeper = Gatekeeper(
            entry.identity,
            run.run_id,
            time,
            admission=admission.admission,
            claim=admission.claim,
            refusals=entry.refusals,
        )
        self._calls = PeerCalls()
        self._pieces = self._calls.pieces = PieceServer(
            VerifiedFiles(),
            allowance.bandwidth.up,
            lambda peer: not admission.admission.barred(peer, time()),
        )
        self.endpoint = Endpoint(
            self._gatekeeper,
            self._calls,
            entry.discovery,
            allowance.bandwidth,
            allowance.peer_limit,
            entry.refusals,
        )
        self._roster = Roster(self._peer_id, run.run_id, admission.admission, entry.refusals)
        self.exchanger = self._calls.exchanger = Exchanger(
            peer_id=self._peer_id,
            spec=run.spec,
            roster=self._roster,
            channels=self.endpoint.channels,
            deadlines=Deadlines(longest=self._settings.exchange_deadline),
            tell=self._board.tell,
            bandwidth=allowance.bandwidth,
        )
        self._release = release()[:MAX_NAME]
        self.membership: Membership | None = None
        """Once others can call us."""
        self.training: Training | None = None
        self.barred: NotAdmitted | None = None
        """Why the run does not take us any more."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, departure: Departure) -> None:
        """Take part until the run is over or the node shall leave. Raises NodeError."""
        host, announce = self._entry.hosts()
        port = await self.endpoint.listen(
            runtime_folder(), any_host() if host == "0.0.0.0" else host, self._settings.port
        )
        try:
            addresses = await in_numbers(self._settings.announce)
            addresses = addresses or tuple(f"{address}:{port}" for address in announce)
            self.membership = self._make_membership(addresses, departure)
            self.training = self._make_training(self.membership)
            self._begin(self.membership, self.training)
            if not await departure.unless_wanted(self._is_over(self.membership)):
                await departure.unless_wanted(self.training.run())
        finally:
            try:
                await self._leave(departure)
            finally:
                await self._close()

    def hear(self, event: Event) -> None:
        """Take in what the trainer tells."""
        assert self.training, "which starts the trainer"
        self.training.news.hear(event)
        if isinstance(event, Stepped) and self._admission.reach(event.swarm_step):
            # and the next look at the swarm sees whether we may stay ourselves
            self._drop_removed()

    @property
    def leave_seconds(self) -> float:
        """How long leaving may take."""
        return self.training.leave_seconds if self.training is not None else LEAVE_DEADLINE

    async def _is_over(self, membership: Membership) -> bool:
        """Whether others have trained the run to its end, and this home has not begun it: training
        it alone from its beginning would help nobody. The owner sees why."""
        run, is_over = self._run, self._admission.amending.course.is_over
        has_begun = any(self._settings.paths.checkpoints(run.fingerprint).glob("step-*"))
        if has_begun or run.spec.sync.group == 1:  # alone: what others have reached is theirs
            return False
        # A server may believe what a single peer told it before anybody had begun. Then the creator
        # begins all the same, and those who find it training join it.
        servers = by_peer(self._settings.peers) if run.creator != self._peer_id else ()
        asking = (ask_server(self._entry.discovery, one, run.run_id) for one in servers)
        steps = [one.swarm_step for one in await asyncio.gather(*asking)]
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

    # its parts

    def _make_membership(self, addresses: tuple[str, ...], departure: Departure) -> Membership:
        def leave(error: NotAdmitted) -> None:
            self.barred = self.barred or error
            departure.wanted.set()

        own = OwnRecord(
            identity=self._entry.identity,
            run_id=self._run.run_id,
            certificate=self.endpoint.certificate.digest,
            addresses=addresses,
            progress=self._board.position,
            told=self._told,
        )
        return Membership(
            own=own,
            run=self._run,
            roster=self._roster,
            discovery=self._entry.discovery,
            channels=self.endpoint.channels,
            settings=self._settings,
            run_admission=self._admission,
            refusals=self._entry.refusals,
            listeners=Listeners(
                warn=self._board.warn,
                withdraw=self._board.withdraw,
                on_removals=self._drop_removed,
                on_barred=leave,
            ),
            rejoin=self._entry.rejoin,
        )

    def _told(self) -> Told:
        progress, loss = self._board.progress, self._board.progress.val_loss_last or 0.0
        return Told(
            name=self._settings.name or "",
            release=self._release,
            tokens=progress.tokens or 0,
            held_out_loss=loss if 0 <= loss < MAX_LOSS else 0.0,
            exchanges=self.exchanger.history.outcomes[Outcome.APPLIED],
        )

    def _make_training(self, membership: Membership) -> Training:
        return Training(
            settings=self._settings,
            run=self._run,
            supervisor=self._supervisor,
            availability=self._availability,
            membership=membership,
            exchanger=self.exchanger,
            admission=self._admission,
            board=self._board,
            pieces=self._pieces,
        )

    def _begin(self, membership: Membership, training: Training) -> None:
        """Connect the parts, and start what runs beside training."""
        self._calls.membership = membership
        self.endpoint.on_sign_of_life(membership.sign_of_life)
        self._entry.rejoin.publish_with(
            membership.republish, (peers_key(self._run.run_id), self._peer_id)
        )
        self._entry.rejoin.on_move(self._move)
        self._admission.amending.on_news = self._hear_amendments
        warn = self._board.warning(WarningCode.DEFECT)
        works = [
            membership.run(),
            self._availability.run(warn),
            self.endpoint.watch(self._board.tell, warn),
        ]
        self._tasks += map(start, works)

    # the end

    async def _leave(self, departure: Departure) -> None:
        departure.begin()
        with suppress(TimeoutError):
            if self.training is not None and self._has_something_to_save(departure):
                async with asyncio.timeout(self.training.leave_seconds):
                    await (
                        self.training.hurry_out()
                        if departure.hurry
                        else self.training.conclude(LEAVE_PATIENCE)
                    )
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_DEADLINE):
                if self.membership is not None:
                    await self.membership.say_goodbye()

    def _has_something_to_save(self, departure: Departure) -> bool:
        ended = self._board.phase == "finished" or departure.is_stopped
        return self._supervisor.runs and not ended

    async def _close(self) -> None:
        try:
            await self.endpoint.close()
        finally:
            if self.training is not None:
                await self.training.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # news

    def _drop_removed(self) -> None:
        self.exchanger.drop(self._admission.admission.barred)

    def _hear_amendments(self, news: list[Amendment]) -> None:
        """Tell the owner, and have the trainer follow."""
        self._entry.tell_amendments(news)
        if self.training is not None:
            self._tasks.append(start(self.training.amend()))

    def _move(self) -> None:
        """Publish the new addresses of this machine, unless the owner decides what is published."""
        if self.membership is not None and not self._settings.announce:
            _, hosts = self._entry.hosts()
            port = self.endpoint.port
            self.membership.own.addresses = tuple(f"{host}:{port}" for host in hosts)
