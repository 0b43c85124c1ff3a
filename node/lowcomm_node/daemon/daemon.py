"""The life of a node: starting, joining, loading, syncing, training, leaving. Wires the rest; decides nothing itself.

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic, time
from typing import Any

from lowcomm_node.control.server import ControlServer
from lowcomm_node.daemon.lifecycle import LEAVE_DEADLINE, LEAVE_PATIENCE, Training
from lowcomm_node.daemon.report import View, report, report_limits, report_peers
from lowcomm_node.dht.interface import Discovery
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.dht.knocks import nobody_answers
from lowcomm_node.doctor.report import Finding
from lowcomm_node.doctor.run import RunningNode, examine_node
from lowcomm_node.errors import NodeError, NoPeers, NotAdmitted, RetryLater, TrainerError
from lowcomm_node.libp2p.p2pd import runtime_folder
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.probing.prober import FOR_A_NODE, Prober
from lowcomm_node.status.board import Board
from lowcomm_node.status.events import LimitsChanged, Notice, RunAmended
from lowcomm_node.status.model import Limits, PeerStatus, Ping, Status
from lowcomm_node.status.wire import read
from lowcomm_node.storage.files import HomeLock, ephemeral_identity, load_or_create_identity
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import find_run, open_discovery, remembered_run
from lowcomm_node.swarm.hosts import any_host, in_numbers, listening
from lowcomm_node.swarm.membership import Listeners, Membership
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_node.swarm.proofs_of_work import Prover
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.malloc import keep_freed_memory
from lowcomm_node.trainer.lines import Event
from lowcomm_node.trainer.messages import Stepped
from lowcomm_node.trainer.process import REAP_DEADLINE, STOP_DEADLINE, Trainer, TrainerProcess
from lowcomm_node.trainer.supervisor import Supervisor
from lowcomm_node.transport.bandwidth import flow_options
from lowcomm_node.transport.channels import Channels
from lowcomm_node.transport.congestion import CongestionWatch
from lowcomm_node.transport.ping import Echo, match_peer
from lowcomm_node.transport.server import ExchangeServer
from lowcomm_node.transport.service import ExchangeService
from lowcomm_node.transport.stream import CalleeStream
from lowcomm_node.transport.tls import Gatekeeper, make_certificate
from lowcomm_node.transport.traffic import Traffic
from lowcomm_node.transport.tunnel.tunnels import Tunnels
from lowcomm_protocol.exchange import base
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.refusals import Refusals
from lowcomm_protocol.spec.amendments import Amendment
from lowcomm_protocol.spec.run import SignedRun

GOODBYE_DEADLINE = 5.0
END_DEADLINE = 15.0
"""Seconds to close connections and end p2pd, when all that matters is done."""
EXAMINE_DEADLINE = 150.0
"""Seconds; whoever asks waits a little longer (control.client.EXAMINING)."""


class Daemon:
    """One node. ``run`` lives its whole life; the other methods may be called at any time from the same event loop."""

    def __init__(
        self, settings: NodeSettings, trainer: Trainer | None = None, availability: Availability | None = None
    ) -> None:
        """``trainer``: the first one; it may be launched already. Raises ConfigError if the file of a pause is damaged."""
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
        """Port and certificate (DER) of the Exchange service, once it listens."""
        self._prober: Prober | None = None
        self._prover: Prover | None = None
        self._examining = asyncio.Lock()
        self.refusals = Refusals()
        """Records, calls and connections that this node refused."""
        self.allowance = Allowance(settings)
        self.peer_id = ""
        self._finish = asyncio.Event()
        self._hurry = False
        """Whether its owner wants it to leave without waiting for exchanges."""
        self._leaves_by: float | None = None
        """When it must have left, once it has begun to (monotonic seconds)."""
        self._barred: NotAdmitted | None = None
        """Why the run does not take us any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._main: asyncio.Task[Any] | None = None
        self._server: ExchangeServer | None = None

    # what the command line asks

    def status(self) -> Status:
        """Everything that ``status`` and the panel show."""
        return report(self._view())

    def peers(self) -> list[PeerStatus]:
        """The peers that are alive, and how exchanges with them went."""
        return report_peers(self._view())

    def rounds(self, limit: int) -> list[ExchangeEnded]:
        """The last exchanges, newest last."""
        rounds = list(self.exchanger.history.rounds)[-limit:] if self.exchanger else []
        return [read(ExchangeEnded, entry) for entry in rounds]

    def _view(self) -> View:
        training = self.training
        return View(
            peer_id=self.peer_id,
            began=self.began,
            leaving=self.leaving,
            board=self.board,
            supervisor=self.supervisor,
            hold=self.availability.hold,
            allowance=self.allowance,
            refusals=self.refusals,
            run=self.run_,
            course=training.course if training else None,
            ready=training.ready if training else None,
            rejoin=self.rejoin,
            membership=self.membership,
            exchanger=self.exchanger,
            channels=self.channels,
        )

    def subscribe(self) -> asyncio.Queue[Notice]:
        """Events from now on; a queue that is full loses the oldest."""
        return self.board.subscribe()

    def unsubscribe(self, queue: asyncio.Queue[Notice]) -> None:
        """The counterpart of ``subscribe``."""
        self.board.unsubscribe(queue)

    def limits(self) -> Limits:
        """The owner's limits on traffic, and what is used of them."""
        return report_limits(self.allowance)

    async def change_limits(self, changes: Mapping[str, Any]) -> Limits:
        """Take other limits, at once and for the next start. Raises ConfigError."""
        self.settings = self.allowance.change(self.settings, changes)
        self.board.tell(LimitsChanged(**vars(self.limits())))
        if self._server is not None and self.channels is not None:
            flow = flow_options(self.settings.max_down)
            self.channels.renew(flow)
            await self._server.renew(flow)
            await self.channels.trim()
        return self.limits()

    @property
    def leaving(self) -> float | None:
        """Seconds that it may still take to leave; below 0 where it should have left. None while it does not leave."""
        return None if self._leaves_by is None else self._leaves_by - monotonic()

    def request_finish(self) -> None:
        """End the running exchanges, save, say goodbye, leave."""
        self._begin_to_leave()
        self._finish.set()

    def request_stop(self, now: bool = True) -> None:
        """Save, end the running exchanges soon, say goodbye, leave; ``now``: without saving."""
        self._begin_to_leave()
        if not now:
            self._hurry = True
            self._finish.set()
        elif self._main is not None:
            self._main.cancel()

    def pause(self, seconds: float | None) -> None:
        """Save, end the trainer and with it what it takes of the GPU; until ``resume``, or for so many seconds."""
        self.availability.pause(seconds)

    def resume(self) -> None:
        """Train again, whatever keeps the node from that now."""
        self.availability.resume()

    async def generate(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        """Sample text from the fast weights. Raises TrainerError while there is no model yet."""
        if self.training is None or self.training.ready is None:
            raise TrainerError(f"The model is not loaded yet (the node is {self.board.phase}): try again in a moment.")
        if not self.supervisor.runs:
            raise TrainerError(f"The model is not loaded now, for the node is {self.board.phase}: `status` tells why.")
        return await self.supervisor.trainer.generate(prompt, tokens, temperature, seed)

    async def doctor(self, peers: Sequence[str]) -> Sequence[Finding]:
        """What is wrong with this machine or its network; ``peers`` are asked first. Takes a minute or so. Raises RetryLater."""
        try:
            async with asyncio.timeout(EXAMINE_DEADLINE), self._examining:
                return await examine_node(self._shown(), peers)
        except TimeoutError:
            raise RetryLater(f"The examination took longer than {EXAMINE_DEADLINE:.0f} s: try again.") from None

    def _shown(self) -> RunningNode:
        """What the doctor is shown of us."""
        membership = self.membership
        members = membership.roster.alive(time()) if membership is not None else ()
        port, certificate = self.serving or (None, b"")
        return RunningNode(
            settings=self.settings,
            status=self.status(),
            members=self.peers(),
            discovery=self.discovery,
            entry_points=[entry for info in members for entry in info.entry_points],
            addresses=membership.own.addresses if membership is not None else (),
            port=port,
            certificate=certificate,
        )

    async def ping(self, peer: str) -> Ping:
        """Latency and rate on each route to a peer, which is named as ``peers`` does. Raises ConfigError, NodeError."""
        if self.membership is None or self.exchanger is None or self.channels is None:
            raise NodeError(f"The node knows no peers yet (it is {self.board.phase}): try again in a moment.")
        info = match_peer(peer, self.membership.roster.alive(time()))
        routes = await self.channels.ping(info, self.exchanger.bandwidth)
        return Ping(peer_id=info.peer_id, routes=tuple(routes))

    # the life

    async def run(self) -> int:
        """Live; the exit code. Raises NodeError or another LowcommError that ended it."""
        self._main = asyncio.current_task()
        keep_freed_memory()
        self.settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with HomeLock(self.settings.paths.lock), ExitStack() as stack:
            self._key_file = self.settings.paths.identity
            if self.settings.ephemeral:
                self.identity, self._key_file = stack.enter_context(ephemeral_identity())
            else:
                self.identity = load_or_create_identity(self._key_file)
            self.peer_id = self.identity.peer_id
            control = ControlServer(self, self.settings.paths.control)
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
        self._remembered = [address for door in (known.peers() if known else ()) for address in door.addresses]
        discovery = open_discovery(
            self.settings,
            self.identity,
            require_peers=False,
            key_file=self._key_file,
            refusals=self.refusals,
            remembered=self._remembered,
        )
        self.rejoin = Rejoin(discovery, self.settings.peers, known, self.board.tell, self.board.warn)
        try:
            self.board.enter(
                "joining", f"looking for the swarm at {', '.join([*self.settings.peers, *self._remembered][:8])}"
            )
            await discovery.start()
            self.discovery = discovery
            self._prober = Prober(discovery, discovery.addresses, FOR_A_NODE)
            await self._prober.serve()
            self.run_ = await self._unless_finished(self._find_run(discovery, kept))
            if self.run_ is None:
                return
            if kept is None or kept.run_id != self.run_.run_id:
                self.rejoin.keep(self._remembered_peers(self.run_))
            self._tasks.append(asyncio.create_task(self.rejoin.run()))
            self.run_admission = RunAdmission(self.settings, self.run_, self.peer_id, time())
            self.run_admission.amending.on_news, self.run_admission.amending.on_trouble = (
                self._hear_amendments,
                self.board.warn,
            )
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
        """The run of the swarm; if nobody answers, the one that this home keeps. Raises NoPeers if there is none."""
        assert self.rejoin is not None
        self.board.show(None)  # the status tells why
        if await self.rejoin.enter(0.0 if kept is not None else self.settings.join_deadline):
            self.board.show("looking for the run")
            return await find_run(discovery, self.settings, kept, self.board.show)
        if kept is None:
            raise NoPeers(nobody_answers(self.rejoin.unanswered()))
        self.board.warn(
            f"{self.rejoin.reason}: training alone on what this home knows of the run, until a peer answers"
        )
        return kept

    async def _prove(self) -> bool:
        """Find the proof of work that the run asks for; False if the owner says finish first."""
        assert self.run_ is not None
        path = None if self.settings.ephemeral else self.settings.paths.work(self.run_.fingerprint)
        self._prover = Prover(self.run_admission.rules, self.peer_id, path, self.board.show)
        proof = await self._unless_finished(self._prover.prove())
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
            self._tasks.append(asyncio.create_task(self._prover.renew(partial(self._show_proof, gatekeeper))))
        traffic, tunnels = Traffic(), Tunnels(discovery, self.run_.run_id)
        allowance, flow = self.allowance, flow_options(self.settings.max_down)
        self.channels = Channels(
            gatekeeper, tunnels, traffic, self.refusals, allowance.peer_limit, flow, discovery.targets
        )
        roster = Roster(self.peer_id, self.run_.run_id, admission, self.refusals)
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=self.run_.spec,
            roster=roster,
            channels=self.channels,
            deadline=self.settings.exchange_deadline,
            tell=lambda entry: self.board.tell(read(ExchangeEnded, entry)),
            bandwidth=allowance.bandwidth,
        )
        certificate = make_certificate(datetime.datetime.now(datetime.UTC))
        echo = Echo(allowance.bandwidth)
        service = ExchangeService(gatekeeper, self, tunnels, traffic, echo, allowance.peer_limit, self.refusals)
        server = ExchangeServer(certificate, service, flow)
        server.listen_locally(runtime_folder())
        host, announce = listening(self.settings, self._remembered)
        port = await server.start(any_host() if host == "0.0.0.0" else host, self.settings.port)
        self._server, self.serving = server, (port, certificate.der)
        try:
            if self._prober is not None:
                self._prober.keep_to(allowance.bandwidth.up, allowance.bandwidth.down)
            await tunnels.serve(server.local)
            told = await in_numbers(self.settings.announce) or tuple(f"{address}:{port}" for address in announce)
            self.membership = self._make_membership(discovery, roster, certificate.digest, told)
            service.on_caller = self.channels.on_answer = self.membership.sign_of_life
            self.rejoin.publish_with(self.membership.republish, (peers_key(self.run_.run_id), self.peer_id))
            self.rejoin.on_move(lambda: self._move(port))
            watches = (CongestionWatch(self.board.tell).run(), service.unauthenticated.run(port))
            works = (self.membership.run(), self.availability.run(), *watches)
            self._tasks += [asyncio.create_task(work) for work in works]
            self.training = self._make_training()
            await self._unless_finished(self.training.run())
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
        listeners = Listeners(warn=self.board.warn, on_removals=self._drop_removed, on_barred=self._leave_barred)
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

    def _begin_to_leave(self) -> None:
        seconds = self.training.leave_seconds if self.training is not None else LEAVE_DEADLINE
        self._leaves_by = monotonic() + seconds + GOODBYE_DEADLINE + STOP_DEADLINE + REAP_DEADLINE + END_DEADLINE

    async def _leave(self, server: ExchangeServer) -> None:
        assert self.exchanger
        self._begin_to_leave()
        with suppress(TimeoutError):
            if self.training is not None and self._has_something_to_save():
                async with asyncio.timeout(self.training.leave_seconds):
                    await (self.training.hurry_out() if self._hurry else self.training.conclude(LEAVE_PATIENCE))
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
        stopped_now = self._main is not None and self._main.cancelling() > 0
        return self.supervisor.runs and self.board.phase != "finished" and not stopped_now

    def _on_news(self, event: Event) -> None:
        assert self.training  # which starts the trainer
        self.training.on_news(event)
        if isinstance(event, Stepped) and self.run_admission.reach(event.swarm_step):
            self._drop_removed()  # and the next look at the swarm sees whether we may stay ourselves

    async def _unless_finished(self, work: Any) -> Any:
        """Wait for ``work``, but no longer than until the owner says finish; None then."""
        task = asyncio.ensure_future(work)
        finish = asyncio.ensure_future(self._finish.wait())
        try:
            await asyncio.wait({task, finish}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for waiter in (task, finish):
                waiter.cancel()
            await asyncio.gather(task, finish, return_exceptions=True)

    # who may take part

    def _show_proof(self, gatekeeper: Gatekeeper, proof: bytes) -> None:
        """Another week has begun."""
        if not self.run_admission.rules.asks_for_work(self.peer_id):
            return  # its creator has amended who may join
        self.run_admission.claim = proof
        gatekeeper.show(proof)

    def _drop_removed(self) -> None:
        """Give up the exchanges with peers that have just been removed; new ones are refused where they begin."""
        assert self.exchanger
        barred, now = self.run_admission.admission.barred, time()
        for round_ in list(self.exchanger.running.values()):
            gone = [peer for peer in round_.exchange.partners if barred(peer, now)]
            if gone:
                round_.handle(base.GaveUp(reason=f"{gone[0][-6:]} was removed from the run by its creator"))

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
        self._finish.set()

    # calls of other peers (exchange.service.Handlers)

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap."""
        assert self.exchanger
        await self.exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Serve a joiner, as long as it may take part."""
        donor = self.training.donor if self.training is not None else None
        if donor is None:
            raise RetryLater("has no state to hand over yet: ask another peer, or later.")
        await donor.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own."""
        if self.membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return self.membership.meet(peer, introduction)

    # small things

    def _move(self, port: int) -> None:
        """The addresses of this machine have changed: tell the new ones, unless the owner decides what is told."""
        if self.membership is not None and not self.settings.announce:
            _, hosts = listening(self.settings, self._remembered)
            self.membership.own.addresses = tuple(f"{host}:{port}" for host in hosts)
