"""The life of a node: starting, joining, loading, syncing, training, leaving. Wires the rest; decides nothing itself.

starting    lock the home, read the identity, open the control API
joining     enter the DHT, find the run, check its signature, and whether it takes us
loading     start the trainer: data, model, newest checkpoint
syncing     copy the state of a peer that is ahead; wait for the peers that the run begins with
training    until the run is over or the owner says finish
paused      its owner wants it so: saved, the trainer ended; then loading again
restarting  the trainer failed: loading again after a while
finishing   end exchanges, evaluate, save
left        goodbye is said
"""

import asyncio
import datetime
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from time import monotonic, time
from typing import Any

from lowcomm_node.admitting import Standing
from lowcomm_node.allocator import keep_freed_memory
from lowcomm_node.allotment import Allotment
from lowcomm_node.availability.availability import Availability
from lowcomm_node.catching_up import CatchingUp, state_form
from lowcomm_node.control.server import ControlServer
from lowcomm_node.discovery.doors import nobody_answers
from lowcomm_node.discovery.interface import Discovery
from lowcomm_node.discovery.keys import peers_key
from lowcomm_node.discovery.known import KnownDoors
from lowcomm_node.discovery.lifeline import Lifeline
from lowcomm_node.discovery.p2pd import runtime_folder
from lowcomm_node.doctor.examining import examine_node
from lowcomm_node.errors import (
    ConfigError,
    NodeError,
    NoPeers,
    NotAdmitted,
    RetryLater,
    TrainerError,
    TrainerLost,
)
from lowcomm_node.exchange.channels import Channels
from lowcomm_node.exchange.congestion import CongestionWatch
from lowcomm_node.exchange.donor import Donor
from lowcomm_node.exchange.exchanger import Exchanger
from lowcomm_node.exchange.pinging import Echo, match_peer
from lowcomm_node.exchange.security import Gatekeeper, make_certificate
from lowcomm_node.exchange.service import ExchangeServer, ExchangeService
from lowcomm_node.exchange.stream import CalleeStream
from lowcomm_node.exchange.throttle import flow_options
from lowcomm_node.exchange.traffic import Traffic
from lowcomm_node.exchange.tunnel import Tunnels
from lowcomm_node.files import HomeLock, ephemeral_identity, load_or_create_identity
from lowcomm_node.finding import find_run, open_discovery, remembered_run
from lowcomm_node.logs import log
from lowcomm_node.membership import Membership, any_host, listening
from lowcomm_node.news import News
from lowcomm_node.owner import Allowance
from lowcomm_node.probing.prober import FOR_A_NODE, Prober
from lowcomm_node.report import report, report_peers
from lowcomm_node.settings import NodeSettings
from lowcomm_node.snapshots import Snapshots
from lowcomm_node.supervision.failures import Failures
from lowcomm_node.supervision.supervisor import Supervisor
from lowcomm_node.trainer.interface import Ready, TrainerSettings
from lowcomm_node.trainer.process import Trainer, TrainerProcess
from lowcomm_protocol import exchange as ex
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import Phase
from lowcomm_protocol.refusals import Refusals
from lowcomm_protocol.roster import Roster
from lowcomm_protocol.run import SignedRun
from lowcomm_protocol.snapshot import tolerated_lag

START_DEADLINE = 300.0
"""Seconds that a node waits for the peers that a run begins with; then it begins with those that are there."""
LEAVE_DEADLINE = 45.0
PAUSE_PATIENCE = 5.0
"""Seconds for exchanges that are under way to end when the owner pauses the node."""
NOT_SAVED = "checkpoints pause, training goes on, saving is tried again less and less often:"
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
        self.failures = Failures(settings.checkpoint_every)
        self.availability = availability or Availability.of(settings)
        self.news = News()
        self.phase = "starting"
        self._waiting: str | None = None
        self.began = self.changed = monotonic()
        """When it was made, and when its phase or what it waits for changed last."""
        self.run_: SignedRun | None = None
        self.ready: Ready | None = None
        self.exchanger: Exchanger | None = None
        self.membership: Membership | None = None
        self.channels: Channels | None = None
        self.discovery: Discovery | None = None
        """While it is in the DHT."""
        self.lifeline: Lifeline | None = None
        self.serving: tuple[int, bytes] | None = None
        """Port and certificate (DER) of the Exchange service, once it listens."""
        self._prober: Prober | None = None
        self._donor: Donor | None = None
        self._snapshots: Snapshots | None = None
        self._examining = asyncio.Lock()
        self.refusals = Refusals()
        """Records, calls and connections that this node refused."""
        self.allowance = Allowance(settings)
        self.peer_id = ""
        self.progress: dict[str, Any] = {}
        self.checkpoint: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self._finish = asyncio.Event()
        self._hurry = False
        """Whether its owner wants it to leave without waiting for exchanges."""
        self._over = asyncio.Event()
        self._failure: NodeError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._main: asyncio.Task[Any] | None = None
        self._server: ExchangeServer | None = None

    # what the command line asks

    @property
    def waiting(self) -> str | None:
        """What it waits for now."""
        return self._waiting

    @waiting.setter
    def waiting(self, text: str | None) -> None:
        if text != self._waiting:
            self.changed = monotonic()
        self._waiting = text

    def status(self) -> dict[str, Any]:
        """Everything that ``status`` and the panel show."""
        return report(self)

    def peers(self) -> list[dict[str, Any]]:
        """The peers that are alive, and how exchanges with them went."""
        return report_peers(self)

    def rounds(self, limit: int) -> list[dict[str, Any]]:
        """The last exchanges, newest last."""
        return list(self.exchanger.history.rounds)[-limit:] if self.exchanger else []

    def subscribe(self) -> asyncio.Queue[dict[str, Any]]:
        """Events from now on; a queue that is full loses the oldest."""
        return self.news.subscribe()

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        """The counterpart of ``subscribe``."""
        self.news.unsubscribe(queue)

    def limits(self) -> dict[str, Any]:
        """The owner's limits on traffic, and what is used of them."""
        return self.allowance.describe()

    async def change_limits(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Take other limits, at once and for the next start. Raises ConfigError."""
        self.settings = self.allowance.change(self.settings, changes)
        self._tell({"event": "limits", **self.limits()})
        if self._server is not None:
            flow = flow_options(self.settings.max_down)
            self.channels.renew(flow)
            await self._server.renew(flow)
            await self.channels.trim()
        return self.limits()

    def request_finish(self) -> None:
        """End the running exchanges, save, say goodbye, leave."""
        self._finish.set()

    def request_stop(self, now: bool = True) -> None:
        """Give up the running exchanges, save, say goodbye, leave; ``now``: without saving."""
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
        if self.ready is None:
            raise TrainerError(f"The model is not loaded yet (the node is {self.phase}): try again in a moment.")
        if not self.supervisor.runs:
            raise TrainerError(f"The model is not loaded now, for the node is {self.phase}: `status` tells why.")
        return await self.supervisor.trainer.generate(prompt, tokens, temperature, seed)

    async def doctor(self, peers: Sequence[str]) -> list[dict[str, Any]]:
        """What is wrong with this machine or its network; ``peers`` are asked first. Takes a minute or so. Raises RetryLater."""
        try:
            async with asyncio.timeout(EXAMINE_DEADLINE), self._examining:
                return [finding.to_json() for finding in await examine_node(self, peers)]
        except TimeoutError:
            raise RetryLater(f"The examination took longer than {EXAMINE_DEADLINE:.0f} s: try again.") from None

    async def ping(self, peer: str) -> dict[str, Any]:
        """Latency and rate on each route to a peer, which is named as ``peers`` does. Raises ConfigError, NodeError."""
        if self.membership is None or self.exchanger is None:
            raise NodeError(f"The node knows no peers yet (it is {self.phase}): try again in a moment.")
        info = match_peer(peer, self.membership.roster.alive(time()))
        routes = await self.channels.ping(info, self.exchanger.bandwidth)
        return {"peer_id": info.peer_id, "routes": [route.to_json() for route in routes]}

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
                self._enter("left", None)
                return 130
            finally:
                await self.supervisor.stop()  # also if it was launched and nothing came of it
                await control.close()
        if self._failure is not None:
            raise self._failure
        return 0

    async def _live(self) -> None:
        kept = remembered_run(self.settings)
        known = self._known_doors(kept) if kept is not None else None
        self._remembered = [address for door in (known.doors() if known else ()) for address in door.addresses]
        discovery = open_discovery(
            self.settings,
            self.identity,
            require_peers=False,
            key_file=self._key_file,
            refusals=self.refusals,
            remembered=self._remembered,
        )
        self.lifeline = Lifeline(discovery, self.settings.peers, known, self._tell, self._warn)
        try:
            self._enter(
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
                self.lifeline.keep(self._known_doors(self.run_))
            self._tasks.append(asyncio.create_task(self.lifeline.run()))
            self.standing = Standing(self.settings, self.run_, self.peer_id, time())
            await self.standing.look(discovery)
            self.standing.check_ourselves(time())
            await self._take_part(discovery)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.supervisor.stop()
            self.discovery = None
            if self._prober is not None:
                await self._prober.close()
            await self.lifeline.save()
            await discovery.close()
            self._enter("left", None)

    async def _find_run(self, discovery: Discovery, kept: SignedRun | None) -> SignedRun:
        """The run of the swarm; if nobody answers, the one that this home keeps. Raises NoPeers if there is none."""
        assert self.lifeline is not None
        self.waiting = None  # the lifeline tells
        if await self.lifeline.enter(0.0 if kept is not None else self.settings.join_deadline):
            self.waiting = "no run is published yet"
            return await find_run(discovery, self.settings, kept)
        if kept is None:
            raise NoPeers(nobody_answers(self.lifeline.unanswered()))
        self._warn(f"{self.lifeline.reason}: training alone on what this home knows of the run, until a peer answers")
        return kept

    def _known_doors(self, run: SignedRun) -> KnownDoors:
        return KnownDoors(self.settings.paths.doors(run.fingerprint), time())

    async def _take_part(self, discovery: Discovery) -> None:
        assert self.run_ is not None and self.lifeline is not None
        admission = self.standing.admission
        gatekeeper = Gatekeeper(
            self.identity,
            self.run_.run_id,
            time,
            admission=admission,
            claim=self.standing.claim,
            refusals=self.refusals,
        )
        traffic, tunnels = Traffic(), Tunnels(discovery, self.run_.run_id)
        allowance, flow = self.allowance, flow_options(self.settings.max_down)
        self.channels = Channels(gatekeeper, tunnels, traffic, self.refusals, allowance.company, flow)
        roster = Roster(self.peer_id, self.run_.run_id, admission, self.refusals)
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=self.run_.spec,
            roster=roster,
            channels=self.channels,
            deadline=self.settings.exchange_deadline,
            tell=self._tell,
            bandwidth=allowance.bandwidth,
        )
        certificate = make_certificate(datetime.datetime.now(datetime.UTC))
        echo = Echo(allowance.bandwidth)
        service = ExchangeService(gatekeeper, self, tunnels, traffic, echo, allowance.company, self.refusals)
        server = ExchangeServer(certificate, service, flow)
        server.listen_locally(runtime_folder())
        host, announce = listening(self.settings, self._remembered)
        port = await server.start(any_host() if host == "0.0.0.0" else host, self.settings.port)
        self._server, self.serving = server, (port, certificate.der)
        try:
            if self._prober is not None:
                self._prober.keep_to(allowance.bandwidth.up, allowance.bandwidth.down)
            await tunnels.serve(server.local)
            told = self.settings.announce or tuple(f"{address}:{port}" for address in announce)
            self.membership = self._make_membership(discovery, roster, certificate.der, told)
            self.lifeline.publish_with(self.membership.republish, (peers_key(self.run_.run_id), self.peer_id))
            self.lifeline.on_move(lambda: self._move(port))
            watches = (CongestionWatch(self._tell).run(), service.strangers.run(port))
            works = (self.membership.run(), self.availability.run(), *watches)
            self._tasks += [asyncio.create_task(work) for work in works]
            await self._unless_finished(self._take_turns())
        finally:
            try:
                await self._leave(server)
            finally:
                await tunnels.close()

    def _make_membership(
        self, discovery: Discovery, roster: Roster, certificate: bytes, addresses: tuple[str, ...]
    ) -> Membership:
        assert self.run_ is not None and self.channels is not None
        return Membership(
            identity=self.identity,
            run=self.run_,
            roster=roster,
            discovery=discovery,
            channels=self.channels,
            settings=self.settings,
            certificate=certificate,
            addresses=addresses,
            progress=self._own_progress,
            warn=self._warn,
            standing=self.standing,
            refusals=self.refusals,
            on_removals=self._drop_removed,
            on_barred=self._leave_barred,
            lifeline=self.lifeline,
        )

    async def _take_turns(self) -> None:
        """Train until the run is over; between two turns pause, or start the trainer again after a failure."""
        while True:
            if self.availability.hold is not None:
                await self._pause()
            try:
                if await self._until_held(self._turn()):
                    return
            except TrainerError as error:
                await self._recover(error)

    async def _until_held(self, turn: Coroutine[Any, Any, None]) -> bool:
        """Take a turn; whether it came to its end, or the owner wants a pause. Raises TrainerLost if the trainer is."""
        task = asyncio.create_task(turn)
        lost, held = (asyncio.create_task(one) for one in (self.supervisor.wait_lost(), self.availability.wait_held()))
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
        assert self.exchanger and self.membership and self.run_
        await self._start_trainer()
        await self._sync_and_train("looking for peers", drifted=False)
        while not await self._is_over():
            await self.exchanger.close("copies the state of a peer", 0.0)
            await self.supervisor.train(False)
            self._warn("we have drifted too far from most peers for exchanges to bring us back: copying their state")
            await self._sync_and_train("back to the swarm", drifted=True)
        await self._conclude()
        self._enter("finished", "the run is over: serving its state to others" if self.settings.stay else None)
        await self.membership.announce(Phase.FINISHED)
        if self.settings.stay:
            await asyncio.Event().wait()

    async def _sync_and_train(self, why: str, drifted: bool) -> None:
        """Come to where the swarm is, and train and exchange from there on."""
        assert self.exchanger and self.membership
        self._enter("syncing", why)
        await self.membership.announce(Phase.SYNCING)
        await self._catch_up(drifted)
        await self._wait_for_start()
        await self.supervisor.trainer.evaluate()
        self.exchanger.open = True
        self._enter("training", None)
        await self.membership.announce(Phase.TRAINING)
        await self.supervisor.train(True)

    async def _is_over(self) -> bool:
        """Wait until the run is over; False if we have drifted away from the others before."""
        assert self.exchanger
        waits = {asyncio.create_task(event.wait()) for event in (self._over, self.exchanger.drifted)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return self._over.is_set()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _start_trainer(self) -> None:
        assert self.exchanger
        self._enter("restarting" if self.ready else "joining", "starting the trainer: text, model, newest checkpoint")
        self._over.clear()  # what it has saved may be from before the end
        self.ready = await self.supervisor.start(self._trainer_settings())
        for skipped in self.ready.skipped:
            self._warn(f"checkpoint skipped: {skipped}")
        self._take_over(self.ready)
        self._donor = self._donor or self._make_donor(self.ready)

    def _make_donor(self, ready: Ready) -> Donor:
        """Serve our state to joiners from now on, whenever the trainer runs."""
        assert self.run_ and self.exchanger
        folder, barred = self.settings.paths.snapshots(self.run_.fingerprint), self.standing.admission.barred
        self._snapshots = Snapshots(
            folder,
            lambda: self.supervisor.trainer.snapshot(str(folder)),
            lambda: self._own_progress()[0],
            stale=tolerated_lag(self.run_.spec.sync) // 2,
        )
        form, up = state_form(self.run_, ready), self.allowance.bandwidth.up
        donor = Donor(form, self._snapshots, up, lambda peer: not barred(peer, time()))
        self.exchanger.joiners = lambda: donor.joiners
        return donor

    def _take_over(self, ready: Ready) -> None:
        """Go on with the state that the trainer has built, resumed or adopted."""
        assert self.exchanger
        self.exchanger.take_over(ready, self.supervisor.trainer)
        self.progress |= {"steps": ready.steps, "swarm_step": ready.swarm_step, "tokens": ready.tokens}

    async def _pause(self) -> None:
        """Save, end the trainer, and wait until the owner lets us train."""
        assert self.exchanger and self.membership and self.availability.hold
        hold = self.availability.hold
        self.exchanger.open = False  # who calls us until all know it is told that we do not train
        self._enter("paused", f"{hold.text}; saving")
        self._tell({"event": "paused", "rule": hold.rule.value, "reason": hold.text, "until": hold.until})
        await self.membership.announce(Phase.PAUSED)
        if self.supervisor.runs:
            await self.exchanger.close("the node pauses", PAUSE_PATIENCE)  # why is nobody's business
            await self._save()
        await self.supervisor.stop()
        self.waiting, self.progress["tokens_per_second"] = None, 0.0  # the report tells why
        await self.membership.announce(Phase.PAUSED)
        await self.availability.wait_free()
        self._tell({"event": "resumed"})

    async def _recover(self, error: TrainerError) -> None:
        """Clean up after a trainer that failed, and wait for a while. Raises NodeError if another try is no use."""
        assert self.exchanger and self.membership
        if self.ready is None and not isinstance(error, TrainerLost):
            raise error  # it has never run, and says why
        failure = await self.supervisor.explain(error)
        wait = self.failures.failed(failure)
        if wait is None:
            self._failure = (ConfigError if error.exit_code == ConfigError.exit_code else TrainerError)(
                self.failures.farewell()
            )
            log.error("trainer.given_up", reason=str(self._failure))
        told = f"{failure.reason.rstrip('.')} (failure {self.failures.count} in a row, at step {failure.step})"
        self._enter("restarting", told)
        self._warn(f"the trainer failed: {told}")
        await self.exchanger.close("the trainer failed", 0.0)
        await self.supervisor.stop()
        if wait is None:
            assert self._failure is not None
            raise self._failure
        self.waiting = f"{told}: starting it again in {wait:.0f} s"
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self.membership.announce(Phase.SYNCING)
                await self.availability.wait_held()

    async def _catch_up(self, drifted: bool) -> None:
        """Copy the state of peers that are ahead by more than a merge can heal, or if we have drifted away."""
        assert self.exchanger and self.membership and self.ready and self.run_
        catching_up = CatchingUp(
            run=self.run_,
            trainer=self.supervisor.trainer,
            channels=self.channels,
            membership=self.membership,
            trusts=self.exchanger.trusts,
            down=self.allowance.bandwidth.down,
            allotment=Allotment(self.settings.home, self.settings.max_disk),
            folder=self.settings.paths.incoming(self.run_.fingerprint),
            show=self._show,
            warn=self._warn,
            tell=self._tell,
        )
        copied = await catching_up.run_from(self.exchanger.swarm_step, state_form(self.run_, self.ready), drifted)
        if copied is not None:
            self.ready = copied
            self._take_over(copied)
        elif drifted:
            self.exchanger.endure_drift()

    def _show(self, waiting: str) -> None:
        self.waiting = waiting

    async def _wait_for_start(self) -> None:
        """At the very beginning of a run, wait for the peers that it begins with."""
        assert self.membership and self.ready and self.run_
        wanted = self.run_.spec.run.start_peers
        deadline = monotonic() + START_DEADLINE
        while self.ready.swarm_step == 0 and not self.membership.anybody_training():
            there = 1 + self.membership.count_ready()
            if there >= wanted:
                return
            if monotonic() > deadline:
                self._warn(f"only {there} of {wanted} peers came within {START_DEADLINE:.0f} s: beginning with them")
                return
            self.waiting = f"the run begins with {wanted} peers: {there} are here"
            await self.membership.wait_changed(0.5)

    async def _conclude(self) -> None:
        """Exchanges end, then a last evaluation and a checkpoint."""
        assert self.exchanger
        self._enter("finishing", "ending the exchanges that are under way")
        await self.exchanger.close("the node leaves")
        self.waiting = "evaluating and saving"
        with suppress(TrainerError):
            await self.supervisor.train(False)
            await self.supervisor.trainer.evaluate()
        await self._save()

    async def _save(self) -> None:
        """A checkpoint of where it stands; no more steps."""
        try:
            await self.supervisor.train(False)
            saved = await self.supervisor.trainer.save()
            self.checkpoint = {"step": saved["swarm_step"], "path": saved["path"]}
        except TrainerError as error:
            self._warn(f"the last checkpoint could not be saved: {error}")

    async def _leave(self, server: ExchangeServer) -> None:
        assert self.exchanger
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_DEADLINE):
                sound = self._failure is None or isinstance(self._failure, NotAdmitted)
                if self.supervisor.runs and self.phase != "finished" and sound and not self._stopped_now():
                    await (self._hurry_out() if self._hurry else self._conclude())
                if self.membership is not None:
                    await self.membership.say_goodbye()
        self._server = None
        await server.close()
        if self._snapshots is not None:
            self._snapshots.close()
        await self.channels.close()

    async def _hurry_out(self) -> None:
        """Save, and let no exchange hold us up."""
        assert self.exchanger
        self._enter("finishing", "saving")
        await self.exchanger.close("the node leaves", 0.0)
        await self._save()

    def _stopped_now(self) -> bool:
        return self._main is not None and self._main.cancelling() > 0

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

    # news of the trainer

    def _on_news(self, event: dict[str, Any]) -> None:
        assert self.exchanger
        match event["event"]:
            case "step":
                self.progress |= {key: value for key, value in event.items() if key != "event"}
                self.failures.stepped(event["steps"])
                self.exchanger.on_step(event["swarm_step"], event["steps"], event["tokens"])
                self.news.tell(event, quiet=True)
                return
            case "evaluated":
                self.progress.setdefault("val_loss_first", event["loss"])
                self.progress["val_loss_last"] = event["loss"]
            case "saved":
                self.checkpoint = {"step": event["swarm_step"], "path": event["path"]}
                if event["after_trouble"]:
                    self.warnings = [warning for warning in self.warnings if not warning.startswith(NOT_SAVED)]
                    self._tell({"event": "saving-again"})
            case "not-saved":
                self._warn(f"{NOT_SAVED} {event['reason']}")
            case "finished":
                self._over.set()
        self._tell(event)

    # who may take part

    def _drop_removed(self) -> None:
        """Give up the exchanges with peers that have just been removed; new ones are refused where they begin."""
        assert self.exchanger
        barred, now = self.standing.admission.barred, time()
        for round_ in list(self.exchanger.running.values()):
            gone = [peer for peer in round_.exchange.partners if barred(peer, now)]
            if gone:
                round_.handle(ex.GaveUp(reason=f"{gone[0][-6:]} was removed from the run by its creator"))

    def _leave_barred(self, error: NotAdmitted) -> None:
        """The run does not take us any more: save, and leave."""
        if self._failure is None:
            self._failure = error
            self._finish.set()

    # calls of other peers (exchange.service.Handlers)

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap."""
        assert self.exchanger
        await self.exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Serve a joiner, as long as it may take part."""
        if self._donor is None:
            raise RetryLater("has no state to hand over yet: ask another peer, or later.")
        await self._donor.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own."""
        assert self.membership
        return self.membership.meet(peer, introduction)

    # small things

    def _move(self, port: int) -> None:
        """The addresses of this machine have changed: tell the new ones, unless the owner decides what is told."""
        if self.membership is not None and not self.settings.announce:
            _, hosts = listening(self.settings, self._remembered)
            self.membership.addresses = tuple(f"{host}:{port}" for host in hosts)

    def _own_progress(self) -> tuple[int, int, float]:
        get = self.progress.get
        return int(get("swarm_step", 0)), int(get("steps", 0)), float(get("tokens_per_second", 0.0))

    def _trainer_settings(self) -> TrainerSettings:
        assert self.run_ is not None
        settings = self.settings
        return TrainerSettings(
            spec=self.run_.spec.canonical().decode(),
            peer_id=self.peer_id,
            checkpoints=str(settings.paths.checkpoints(self.run_.fingerprint)),
            data_cache=str(settings.paths.data),
            data=settings.data,
            tokenizer=settings.tokenizer,
            device=settings.device,
            threads=settings.threads,
            max_memory=settings.max_memory,
            max_vram=settings.max_vram,
            home=str(settings.home),
            max_disk=settings.max_disk,
            keep=settings.keep,
            checkpoint_every=settings.checkpoint_every,
        )

    def _enter(self, phase: str, waiting: str | None) -> None:
        changed = phase != self.phase
        self.phase, self.waiting = phase, waiting
        if changed:
            self.changed = monotonic()
            self._tell({"event": "phase", "phase": phase})

    def _warn(self, text: str) -> None:
        self.warnings = [*self.warnings, text][-20:]
        self._tell({"event": "warning", "text": text})

    def _tell(self, event: dict[str, Any]) -> None:
        self.news.tell(event)
        log.info(event["event"], **{key: value for key, value in event.items() if key not in ("event", "time")})
