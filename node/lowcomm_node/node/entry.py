"""A node enters the swarm, and leaves it: the DHT, its run, its admission, its last deadline."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from lowcomm_node.catalogue import Waiting
from lowcomm_node.dht.hivemind import Discovery, nobody_answers
from lowcomm_node.errors import NoPeers
from lowcomm_node.node.process import REAP_DEADLINE, STOP_DEADLINE
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.status.events import Board, RunAmended
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.find_run import find_run, open_discovery, remembered_run
from lowcomm_node.swarm.probes import FOR_A_NODE, Prober
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.swarm.remembered_peers import read_remembered
from lowcomm_node.system.tasks import Tasks, endure, first_of
from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.amendments import Amendment
from lowcomm_protocol.spec.run import SignedRun, check_trainable

T = TypeVar("T")
LEAVE_DEADLINE = 45.0
"""Seconds for a leaving node to end exchanges, save and evaluate, beside its steps and disk."""
GOODBYE_DEADLINE = 5.0
END_DEADLINE = 15.0
"""Seconds to close connections and end p2pd, when all that matters is done."""


class Entry:
    """Place of a node in the swarm, from its first call until it leaves."""

    def __init__(
        self,
        settings: NodeSettings,
        identity: Identity,
        key_file: Path,
        board: Board,
        refusals: Refusals,
    ) -> None:
        """``key_file``: the key of ``identity``. Raises ConfigError on a malformed address."""
        self.settings = settings
        self.identity = identity
        self.board = board
        self.refusals = refusals
        self._kept = remembered_run(settings)
        file_of = settings.paths.remembered_peers
        known = read_remembered(file_of(self._kept.fingerprint), time()) if self._kept else []
        self.remembered = [address for peer in known for address in peer.addresses]
        """Addresses of the swarm at earlier times."""
        self.discovery: Discovery = open_discovery(
            settings,
            identity,
            require_peers=False,
            key_file=key_file,
            refusals=refusals,
            remembered=self.remembered,
        )
        self.rejoin = Rejoin(
            self.discovery,
            settings.peers,
            board.tell,
            lambda text: board.warn("clock", text) if text else board.withdraw("clock"),
        )
        # Answers others who ask how they are reached.
        self._prober = Prober(self.discovery, self.discovery.addresses, FOR_A_NODE)
        self._tasks = Tasks()

    async def open(self) -> None:
        """Enter the DHT. Raises NodeError."""
        known_at = ", ".join([*self.settings.peers, *self.remembered][:8])
        looking = Waiting("looking-for-swarm", f"looking for the swarm at {known_at}")
        self.board.enter("joining", looking)
        if self._kept is not None:
            file = self.settings.paths.remembered_peers(self._kept.fingerprint)
            await self.rejoin.keep(file)
        await self.discovery.start()
        await self._prober.serve()

    async def find_run(self) -> SignedRun:
        """The run of the swarm; if nobody answers, the one that this home keeps.

        Raises NoPeers if there is none.
        """
        kept = self._kept
        self.board.show(None)  # the status shows why
        if await self.rejoin.enter(0.0 if kept is not None else self.settings.join_deadline):
            show = self.board.showing("looking-for-run")
            show("looking for the run")
            chosen = self.board.warning("run-chosen")
            return await find_run(self.discovery, self.settings, kept, show, chosen)
        if kept is None:
            raise NoPeers(nobody_answers(self.rejoin.unanswered()))
        alone = "training alone on what this home knows of the run, until a peer answers"
        self.board.warn("started-alone", f"{self.rejoin.reason}: {alone}")
        return kept

    async def be_admitted(self, run: SignedRun) -> RunAdmission:
        """Check that the run admits us, and stay in its swarm from now on.

        Raises NotAdmitted, VersionError.
        """
        check_trainable(run.spec)
        await self.rejoin.keep(self.settings.paths.remembered_peers(run.fingerprint))
        trouble, warn = "the node does not come back to its swarm", self.board.warning("defect")
        self._tasks.start(endure(trouble, self.rejoin.run, warn))
        admission = RunAdmission(self.settings, run, self.identity.peer_id, time())
        admission.on_news = self.tell_amendments
        admission.on_trouble = self.board.warning("amendment")
        await admission.look(self.discovery)
        admission.check_ourselves(time())
        return admission

    def tell_amendments(self, news: list[Amendment]) -> None:
        """Report changes by the run's creator to the owner."""
        step = self.board.position()[0]
        for amendment in news:
            late = f"; we are at {step}, so it holds at once" if 0 < amendment.at <= step else ""
            self.board.tell(RunAmended(text=f"{amendment}{late}", **amendment.to_json()))

    async def close(self) -> None:
        """Leave the DHT, and remember who answered."""
        await self._tasks.cancel()
        await self._prober.close()
        await self.rejoin.save()
        await self.discovery.close()


class Departure:
    """Requests by the owner, by a signal, or by the run that this node leaves."""

    def __init__(self, saving: Callable[[], float]) -> None:
        """``saving``: seconds that the node may take to end exchanges, save and evaluate."""
        self.wanted = asyncio.Event()
        """Set once the node shall leave in peace."""
        self.hurry = False
        """Whether it leaves without waiting long for exchanges."""
        self.main: asyncio.Task[Any] | None = None
        """Task that ends the node when it is cancelled."""
        self._saving = saving
        self._by: float | None = None
        """Deadline, once it has begun to leave (monotonic seconds)."""

    @property
    def left(self) -> float | None:
        """Seconds that it may still take; below 0 where it should be gone. None while it stays."""
        return None if self._by is None else self._by - monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether it ends at once, without saving."""
        return self.main is not None and self.main.cancelling() > 0

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Result of ``work``; None if the node shall leave before that is done."""
        results: list[T] = []

        async def keep() -> None:
            results.append(await work)

        await first_of(keep(), self.wanted.wait())
        return results[0] if results else None

    def begin(self) -> None:
        """Count the seconds from now on."""
        rest = GOODBYE_DEADLINE + STOP_DEADLINE + REAP_DEADLINE + END_DEADLINE
        self._by = monotonic() + self._saving() + rest

    def finish(self) -> None:
        """End the running exchanges, save, say goodbye, leave."""
        self.begin()
        self.wanted.set()

    def stop(self, now: bool = True) -> None:
        """Save, end the running exchanges soon, leave; ``now``: leave without saving."""
        if now:
            self.begin()
            if self.main is not None:
                self.main.cancel()
        else:
            self.hurry = True
            self.finish()
