"""The life of a node, from its start to its goodbye. Wires the rooms; decides nothing itself.

starting    lock the home, read the identity, open the control API
joining     enter the DHT, find the run, check its signature, and whether it takes us
loading     start the trainer: data, model, newest checkpoint
syncing     copy the state of a peer that is ahead; wait for the peers that the run begins with
training    until the run is over or the owner says finish
paused      its owner wants it so: saved, the trainer ended; then loading again
restarting  the trainer failed: loading again after a while
finishing   end exchanges, save, evaluate
left        goodbye is said
"""

import asyncio
import datetime
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic, time

from lowcomm_node.control.server import ControlServer
from lowcomm_node.daemon.controls import Controls
from lowcomm_node.daemon.departure import GOODBYE_DEADLINE, Departure
from lowcomm_node.daemon.lifecycle import LEAVE_DEADLINE, LEAVE_PATIENCE, Training
from lowcomm_node.daemon.peer_calls import PeerCalls
from lowcomm_node.daemon.report import View
from lowcomm_node.dht.interface import Discovery
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.dht.knocks import nobody_answers
from lowcomm_node.errors import NoPeers, NotAdmitted
from lowcomm_node.ipc.lines import Event
from lowcomm_node.ipc.messages import Stepped
from lowcomm_node.libp2p.p2pd import runtime_folder
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.probing.prober import FOR_A_NODE, Prober
from lowcomm_node.status.board import Board
from lowcomm_node.status.events import RunAmended
from lowcomm_node.storage.files import HomeLock, ephemeral_identity, load_or_create_identity
from lowcomm_node.supervision.process import Trainer, TrainerProcess
from lowcomm_node.supervision.supervisor import Supervisor
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import find_run, open_discovery, remembered_run
from lowcomm_node.swarm.hosts import any_host, in_numbers, listening
from lowcomm_node.swarm.membership import Listeners, Membership
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_node.swarm.proofs_of_work import Prover
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.system.malloc import keep_freed_memory
from lowcomm_node.transport.bandwidth import flow_options
from lowcomm_node.transport.channels import Channels
from lowcomm_node.transport.congestion import CongestionWatch
from lowcomm_node.transport.ping import Echo
from lowcomm_node.transport.server import ExchangeServer
from lowcomm_node.transport.service import ExchangeService
from lowcomm_node.transport.tls import Gatekeeper, make_certificate
from lowcomm_node.transport.traffic import Traffic
from lowcomm_node.transport.tunnel.tunnels import Tunnels
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.refusals import Refusals
from lowcomm_protocol.spec.amendments import Amendment
from lowcomm_protocol.spec.run import SignedRun


class Daemon:
    """One node. ``run`` lives its whole life; ``controls`` may be asked at any time meanwhile."""

    def __init__(
        self,
        settings: NodeSettings,
        trainer: Trainer | None = None,
        availability: Availability | None = None,
    ) -> None:
        """``trainer``: the first one, perhaps launched already.

        Raises ConfigError if the file of a pause is damaged.
        """
        self.settings = settings
        self.supervisor = Supervisor(lambda: TrainerProcess(settings.nice), self._on_news, trainer)
        self.availability = availability or Availability.of(settings)
        self.board = Board()
        self.began = monotonic()
        self.run_: SignedRun | None = None
        self.exchanger: Exchanger | None = None
        self.membership: Membership | None = None
        self.training: Training | None = None
        self.channels: Channels | None = None
        self.discovery: Discovery | None = None
        """While it is in the DHT."""
        self.rejoin: Rejoin | None = None
        self.serving: tuple[int, bytes] | None = None
        self._prober: Prober | None = None
        self._prover: Prover | None = None
        self.refusals = Refusals()
        self.allowance = Allowance(settings)
        self.peer_id = ""
        self._departure = Departure(self._leave_seconds)
        self.controls = Controls(settings, self._view, self._departure)
        self._barred: NotAdmitted | None = None
        """Why the run does not take us any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._server: ExchangeServer | None = None

    def _view(self) -> View:
        training = self.training
        return View(
            peer_id=self.peer_id,
            began=self.began,
            leaving=self._departure.left,
            board=self.board,
            supervisor=self.supervisor,
            availability=self.availability,
            allowance=self.allowance,
            refusals=self.refusals,
            run=self.run_,
            course=training.course if training else None,
            ready=training.ready if training else None,
            donor=training.donor if training else None,
            rejoin=self.rejoin,
            membership=self.membership,
            exchanger=self.exchanger,
            channels=self.channels,
            discovery=self.discovery,
            server=self._server,
            serving=self.serving,
        )

    # the life

    async def run(self) -> int:
        """Live; the exit code. Raises NodeError or another LowcommError that ended it."""
        self._departure.attend()
        keep_freed_memory()
        self.settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with HomeLock(self.settings.paths.lock), ExitStack() as stack:
            self._key_file = self.settings.paths.identity
            if self.settings.ephemeral:
                self.identity, self._key_file = stack.enter_context(ephemeral_identity())
            else:
                self.identity = load_or_create_identity(self._key_file)
            self.peer_id = self.identity.peer_id
            control = ControlServer(self.controls, self.settings.paths.control)
            await control.start(self.settings.control_port, self.peer_id)
            try:
                await self._live()
            except asyncio.CancelledError:
                self.board.enter("left", None)
                return 130
            finally:
                await self.supervisor.stop()  # also if it was launched and nothing came of it
                await control.close()
        if self._barred is not None:
            raise self._barred
        return 0

    async def _live(self) -> None:
        kept = remembered_run(self.settings)
        known = self._remembered_peers(kept) if kept is not None else None
        self._remembered = [
            address for peer in (known.peers() if known else ()) for address in peer.addresses
        ]
        discovery = open_discovery(
            self.settings,
            self.identity,
            require_peers=False,
            key_file=self._key_file,
            refusals=self.refusals,
            remembered=self._remembered,
        )
        self.rejoin = Rejoin(
            discovery, self.settings.peers, known, self.board.tell, self.board.warn
        )
        try:
            known_at = ", ".join([*self.settings.peers, *self._remembered][:8])
            self.board.enter("joining", f"looking for the swarm at {known_at}")
            await discovery.start()
            self.discovery = discovery
            self._prober = Prober(discovery, discovery.addresses, FOR_A_NODE)
            await self._prober.serve()
            self.run_ = await self._departure.unless_wanted(self._find_run(discovery, kept))
            if self.run_ is None:
                return
            if kept is None or kept.run_id != self.run_.run_id:
                self.rejoin.keep(self._remembered_peers(self.run_))
            self._tasks.append(asyncio.create_task(self.rejoin.run()))
            self.run_admission = RunAdmission(self.settings, self.run_, self.peer_id, time())
            self.run_admission.amending.on_news = self._hear_amendments
            self.run_admission.amending.on_trouble = self.board.warn
            await self.run_admission.look(discovery)
            if self.run_admission.rules.asks_for_work(self.peer_id) and not await self._prove():
                return
            self.run_admission.check_ourselves(time())
            await self._take_part(discovery)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.supervisor.stop()
            self.discovery = None
            if self._prober is not None:
                await self._prober.close()
            await self.rejoin.save()
            await discovery.close()
            self.board.enter("left", None)

    async def _find_run(self, discovery: Discovery, kept: SignedRun | None) -> SignedRun:
        """The run of the swarm; if nobody answers, the one that this home keeps.

        Raises NoPeers if there is none.
        """
        assert self.rejoin is not None
        self.board.show(None)  # the status tells why
        if await self.rejoin.enter(0.0 if kept is not None else self.settings.join_deadline):
            self.board.show("looking for the run")
            return await find_run(discovery, self.settings, kept, self.board.show)
        if kept is None:
            raise NoPeers(nobody_answers(self.rejoin.unanswered()))
        alone = "training alone on what this home knows of the run, until a peer answers"
        self.board.warn(f"{self.rejoin.reason}: {alone}")
        return kept

    async def _prove(self) -> bool:
        """Find the proof of work that the run asks for; False if the owner says finish first."""
        assert self.run_ is not None
        path = None if self.settings.ephemeral else self.settings.paths.work(self.run_.fingerprint)
        self._prover = Prover(self.run_admission.rules, self.peer_id, path, self.board.show)
        proof = await self._departure.unless_wanted(self._prover.prove())
        if proof is not None:
            self.run_admission.claim = proof
        return proof is not None

    def _remembered_peers(self, run: SignedRun) -> RememberedPeers:
        return RememberedPeers(self.settings.paths.remembered_peers(run.fingerprint), time())

    async def _take_part(self, discovery: Discovery) -> None:
        assert self.run_ is not None and self.rejoin is not None
        admission = self.run_admission.admission
        gatekeeper = Gatekeeper(
            self.identity,
            self.run_.run_id,
            time,
            admission=admission,
            claim=self.run_admission.claim,
            refusals=self.refusals,
        )
        if self._prover is not None:
            self._tasks.append(
                asyncio.create_task(self._prover.renew(partial(self._show_proof, gatekeeper)))
            )
        traffic, tunnels = Traffic(), Tunnels(discovery, self.run_.run_id)
        allowance, flow = self.allowance, flow_options(self.settings.max_down)
        self.channels = Channels(
            gatekeeper,
            tunnels,
            traffic,
            self.refusals,
            allowance.peer_limit,
            flow,
            discovery.targets,
        )
        roster = Roster(self.peer_id, self.run_.run_id, admission, self.refusals)
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=self.run_.spec,
            roster=roster,
            channels=self.channels,
            deadlines=Deadlines(longest=self.settings.exchange_deadline),
            tell=self.board.tell,
            bandwidth=allowance.bandwidth,
        )
        certificate = make_certificate(datetime.datetime.now(datetime.UTC))
        echo = Echo(allowance.bandwidth)
        service = ExchangeService(
            gatekeeper,
            PeerCalls(self._view),
            tunnels,
            traffic,
            echo,
            allowance.peer_limit,
            self.refusals,
        )
        server = ExchangeServer(certificate, service, flow)
        server.listen_locally(runtime_folder())
        host, announce = listening(self.settings, self._remembered)
        port = await server.start(any_host() if host == "0.0.0.0" else host, self.settings.port)
        self._server = server
        self.serving = (port, certificate.der)
        try:
            if self._prober is not None:
                self._prober.keep_to(allowance.bandwidth.up, allowance.bandwidth.down)
            await tunnels.serve(server.local)
            told = await in_numbers(self.settings.announce) or tuple(
                f"{address}:{port}" for address in announce
            )
            self.membership = self._make_membership(discovery, roster, certificate.digest, told)
            service.on_caller = self.channels.on_answer = self.membership.sign_of_life
            self.rejoin.publish_with(
                self.membership.republish, (peers_key(self.run_.run_id), self.peer_id)
            )
            self.rejoin.on_move(lambda: self._move(port))
            watches = (CongestionWatch(self.board.tell).run(), service.unauthenticated.run(port))
            works = (self.membership.run(), self.availability.run(), *watches)
            self._tasks += [asyncio.create_task(work) for work in works]
            self.training = self._make_training()
            await self._departure.unless_wanted(self.training.run())
        finally:
            try:
                await self._leave(server)
            finally:
                await tunnels.close()

    def _make_membership(
        self, discovery: Discovery, roster: Roster, certificate: bytes, addresses: tuple[str, ...]
    ) -> Membership:
        assert self.run_ is not None and self.channels is not None
        own = OwnRecord(
            identity=self.identity,
            run_id=self.run_.run_id,
            certificate=certificate,
            addresses=addresses,
            progress=self.board.position,
        )
        listeners = Listeners(
            warn=self.board.warn, on_removals=self._drop_removed, on_barred=self._leave_barred
        )
        return Membership(
            own=own,
            run=self.run_,
            roster=roster,
            discovery=discovery,
            channels=self.channels,
            settings=self.settings,
            run_admission=self.run_admission,
            refusals=self.refusals,
            listeners=listeners,
            rejoin=self.rejoin,
        )

    def _make_training(self) -> Training:
        assert self.run_ and self.membership and self.exchanger and self.channels
        return Training(
            settings=self.settings,
            run=self.run_,
            peer_id=self.peer_id,
            supervisor=self.supervisor,
            availability=self.availability,
            membership=self.membership,
            exchanger=self.exchanger,
            channels=self.channels,
            bandwidth=self.allowance.bandwidth,
            barred=self.run_admission.admission.barred,
            amending=self.run_admission.amending,
            board=self.board,
        )

    def _leave_seconds(self) -> float:
        return self.training.leave_seconds if self.training is not None else LEAVE_DEADLINE

    async def _leave(self, server: ExchangeServer) -> None:
        assert self.exchanger
        self._departure.begin()
        with suppress(TimeoutError):
            if self.training is not None and self._has_something_to_save():
                async with asyncio.timeout(self.training.leave_seconds):
                    await (
                        self.training.hurry_out()
                        if self._departure.hurry
                        else self.training.conclude(LEAVE_PATIENCE)
                    )
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_DEADLINE):
                if self.membership is not None:
                    await self.membership.say_goodbye()
        self._server = None
        await server.close()
        if self.training is not None:
            self.training.close()
        if self.channels is not None:
            await self.channels.close()

    def _has_something_to_save(self) -> bool:
        ended = self.board.phase == "finished" or self._departure.is_stopped
        return self.supervisor.runs and not ended

    def _on_news(self, event: Event) -> None:
        assert self.training  # which starts the trainer
        self.training.news.hear(event)
        if isinstance(event, Stepped) and self.run_admission.reach(event.swarm_step):
            # and the next look at the swarm sees whether we may stay ourselves
            self._drop_removed()

    # who may take part

    def _show_proof(self, gatekeeper: Gatekeeper, proof: bytes) -> None:
        """Another week has begun."""
        if not self.run_admission.rules.asks_for_work(self.peer_id):
            return  # its creator has amended who may join
        self.run_admission.claim = proof
        gatekeeper.show(proof)

    def _drop_removed(self) -> None:
        """Give up the exchanges with peers that have just been removed."""
        assert self.exchanger
        barred, now = self.run_admission.admission.barred, time()
        for driver in list(self.exchanger.running.values()):
            gone = [peer for peer in driver.one.partners if barred(peer, now)]
            if gone:
                driver.tell(
                    base.GaveUp(reason=f"{gone[0][-6:]} was removed from the run by its creator")
                )

    def _hear_amendments(self, news: list[Amendment]) -> None:
        """Tell the owner what the run's creator has changed, and have the trainer follow."""
        step = self.board.position()[0]
        for amendment in news:
            late = f"; we are at {step}, so it holds at once" if 0 < amendment.at <= step else ""
            self.board.tell(RunAmended(text=f"{amendment}{late}", **amendment.to_json()))
        if self.training is not None:
            self._tasks.append(asyncio.create_task(self.training.amend()))

    def _leave_barred(self, error: NotAdmitted) -> None:
        """The run does not take us any more: save, and leave."""
        self._barred = self._barred or error
        self._departure.wanted.set()

    def _move(self, port: int) -> None:
        """Publish the new addresses of this machine, unless the owner decides what is published."""
        if self.membership is not None and not self.settings.announce:
            _, hosts = listening(self.settings, self._remembered)
            self.membership.own.addresses = tuple(f"{host}:{port}" for host in hosts)
