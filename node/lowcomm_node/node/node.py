"""The life of a node, from its start to its goodbye.

starting    lock the home, read the identity, open the control API
joining     enter the DHT, find the run, check its signature, and whether it takes us
loading     start the trainer: data, model, newest checkpoint
syncing     copy the state of a peer that is ahead; wait for the peers that the run begins with
training    until the run is over or the owner says finish
serving     give packed text to others instead of training
paused      its owner wants it so: saved, the trainer ended; then loading again
restarting  the trainer failed: loading again after a while
finishing   end exchanges, save, evaluate
left        goodbye is said
"""

import asyncio
import sys
from contextlib import ExitStack

from lowcomm_node.fetch.files import check_named
from lowcomm_node.household.borrowing import Borrowing
from lowcomm_node.node.controls import Controls
from lowcomm_node.node.entry import LEAVE_DEADLINE, Departure, Entry
from lowcomm_node.node.process import Trainer
from lowcomm_node.node.report import NodeState
from lowcomm_node.node.run import Run
from lowcomm_node.node.supervisor import Supervisor
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.settings import NodeSettings, unused
from lowcomm_node.status.events import Board
from lowcomm_node.status.journal import Recorder
from lowcomm_node.status.words import contribution, tell_farewell
from lowcomm_node.storage.files import ephemeral_identity, home_lock, load_or_create_identity
from lowcomm_node.system.machine import keep_freed_memory
from lowcomm_node.web.http import Listening, serve_metrics
from lowcomm_node.web.server import ControlServer


class Node:
    """A node. ``run`` is its whole life; ``controls`` answers at any time meanwhile."""

    def __init__(
        self,
        settings: NodeSettings,
        trainer: Trainer | None = None,
        availability: Availability | None = None,
        trains: bool = True,
    ) -> None:
        """``trainer``: the first one, perhaps launched already; ``trains``: else it gives packed
        text away.

        Raises ConfigError if the file of a pause is damaged.
        """
        self.settings = settings
        self._trains = trains
        self.board = Board()
        warn = self.board.warning("defect")
        self.state = NodeState(
            settings=settings,
            board=self.board,
            supervisor=Supervisor(lambda: Trainer(settings.nice), first=trainer, warn=warn),
            availability=availability or Availability(settings),
            allowance=Allowance(settings),
            departure=Departure(
                lambda: self.part.training.leave_seconds if self.part else LEAVE_DEADLINE
            ),
        )
        self.part: Run | None = None
        """Its part in a run; None before it takes part in one."""
        self.controls = Controls(self.state)
        self.control = ControlServer(self.controls, self.board, settings.paths)
        self._recorder = Recorder(self.board, self.controls.status)

    async def run(self) -> int:
        """Live; the exit code. Raises NodeError or another LowcommError that ended it."""
        settings, state = self.settings, self.state
        state.departure.main = asyncio.current_task()
        keep_freed_memory()
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with home_lock(settings.paths.lock), ExitStack() as stack:
            key_file = settings.paths.identity
            if settings.ephemeral:
                identity, key_file = stack.enter_context(ephemeral_identity())
            else:
                identity = load_or_create_identity(key_file)
            state.peer_id = identity.peer_id
            await self.control.start(settings.control_port, state.peer_id)
            metrics: Listening | None = None
            borrowing = Borrowing(settings.home, settings.lenders, lambda: state.supervisor.pid)
            try:
                state.workers = borrowing.open()
                if settings.metrics is not None:
                    metrics = serve_metrics(self.controls.status, settings.metrics)
                await self._live(Entry(settings, identity, key_file, self.board, state.refusals))
            except asyncio.CancelledError:
                self.board.enter("left", None)
                return 130
            finally:
                await state.supervisor.stop()  # also if it was launched and nothing came of it
                await borrowing.close()
                await self.control.close(self._farewell())
                if metrics is not None:
                    await metrics.close()
        if self.part is not None and self.part.barred is not None:
            raise self.part.barred
        return 0

    async def _live(self, entry: Entry) -> None:
        state, departure = self.state, self.state.departure
        state.rejoin = entry.rejoin
        try:
            await entry.open()
            state.discovery = entry.discovery
            run = state.run = await departure.unless_wanted(entry.find_run())
            if run is not None:
                check_named(run.spec, self.settings)  # before anything is downloaded
                self._recorder.open(self.settings.paths.journal(run.fingerprint))
                for text in unused(self.settings, run.spec):
                    self.board.warn("settings", text)
                admission = await departure.unless_wanted(entry.be_admitted(run))
                if admission is not None:
                    state.admission = admission
                    self.part = Run(state, entry, run, admission, self._trains)
                    await self.part.take_part()
        finally:
            await state.supervisor.stop()
            state.discovery = None
            await entry.close()
            self.board.enter("left", None)
            await self._recorder.close()

    def _farewell(self) -> str:
        """Why the node ends, and what to do with the model, for those who watch its page."""
        error = sys.exception() or (self.part and self.part.barred)
        why = "The node has left: `lowcomm-node join` goes on where it stopped."
        if error is not None:
            why = f"The node has ended: {error}"
        elif self.part is not None and self.part.training.is_over:
            why = "The run is over, and the node has left it."
        if self.state.ready is None:
            return why
        given = contribution(self.controls.status())
        return f"{why}\n{tell_farewell(given, self.settings.home)}"
