"""Questions and orders of the owner to a running node, for the control API and ``join``."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import time
from typing import Any, TypeVar

from lowcomm_node.catalogue import CATALOGUE, Explanation
from lowcomm_node.doctor.findings import Finding, Observations
from lowcomm_node.doctor.run import examine_node, subject_of
from lowcomm_node.errors import ConfigError, NodeError, RetryLater, TrainerError
from lowcomm_node.fetch import Gathered
from lowcomm_node.fetch.catch_up import Gatherer, state_form
from lowcomm_node.net.ping import match_peer
from lowcomm_node.node.messages import Generate, Save
from lowcomm_node.node.report import NodeState, report, report_limits, report_peers
from lowcomm_node.owner.limits import keep_settings
from lowcomm_node.owner.sources import change_settings
from lowcomm_node.status.events import LimitsChanged
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.journal import MOST, Journal
from lowcomm_node.status.model import Hours, Limits, Ping
from lowcomm_node.status.words import Health, judge_health
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.sync.history import ExchangeEnded

GATHER_DEADLINE, EXAMINE_DEADLINE = 780.0, 150.0
"""Seconds; clients wait a little longer (web.api)."""
T = TypeVar("T")


class Controls:
    """May be asked at any time, from the event loop of the node (control.server.Controlled)."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self.request_finish, self.request_stop = node.departure.finish, node.departure.stop
        self.resume = node.availability.resume
        self.status, self.peers = partial(report, node), partial(report_peers, node)
        self.limits = partial(report_limits, node.allowance)
        self._examining = asyncio.Lock()
        self._gathering = asyncio.Lock()

    def health(self) -> Health:
        """Whether the node is well."""
        return judge_health(self.status())

    def pause(self, seconds: float | None) -> None:
        """Hold training now. Raises ConfigError where the node never trains; OSError, DiskFull."""
        if self._node.board.phase == "serving":
            raise ConfigError(
                "This node gives text away and does not train, so nothing can pause: limit its "
                "traffic by `lowcomm-node limits --max-up`, or end it by `lowcomm-node finish`."
            )
        self._node.availability.pause(seconds)

    def last_exchanges(self, limit: int) -> list[ExchangeEnded]:
        """The last exchanges since the start, newest last."""
        exchanger = self._node.exchanger
        return list(exchanger.history.exchanges)[-max(1, limit) :] if exchanger else []

    async def samples(self, since: int, most: int) -> list[Sample]:
        """Figures of the past, oldest first. Raises NodeError."""
        count = max(1, min(most, MOST))
        return await self._from_journal(lambda journal: journal.samples(since, count))

    async def exchanges(self, limit: int, since: int) -> list[ExchangeEnded]:
        """The last exchanges in the journal, newest last. Raises NodeError."""
        return await self._from_journal(lambda journal: journal.exchanges(max(1, limit), since))

    async def _from_journal(self, read: Callable[[Journal], list[T]]) -> list[T]:
        """Read the journal in a thread; nothing where there is none yet."""
        run = self._node.run
        if run is None:
            return []
        path = self._node.settings.paths.journal(run.fingerprint)
        return await asyncio.to_thread(lambda: read(Journal(path)) if path.exists() else [])

    def messages(self) -> Mapping[str, Mapping[str, Explanation]]:
        """The meaning and the remedy of each code."""
        return CATALOGUE

    async def change_limits(self, changes: Mapping[str, Any]) -> Limits:
        """Take other limits, at once and for the next start. Raises ConfigError."""
        node = self._node
        self._node.settings = node.allowance.change(self._node.settings, changes)
        node.board.tell(LimitsChanged(**vars(self.limits())))
        if node.endpoint is not None:
            await node.endpoint.renew()
        return self.limits()

    def schedule(self, hours: str) -> Hours:
        """Change the hours of training, now and for later starts. Raises ConfigError."""
        node, changes = self._node, {"schedule": hours}
        changed = change_settings(node.settings, changes)
        keep_settings(changed.paths.config, changes)
        node.settings = changed
        node.availability.follow(changed.schedule)
        return Hours(schedule=None if changed.schedule is None else str(changed.schedule))

    async def generate(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        seed: int,
        chat: Sequence[str],
        before: bool,
    ) -> str:
        """Sample text from the fast weights, or their answer in a conversation; ``before``: without
        the adapter of the run.

        Raises TrainerError while there is no model yet.
        """
        supervisor = self._node.supervisor
        if self._node.ready is None or not supervisor.runs:
            raise TrainerError(
                f"The model is not loaded, for the node is {self._node.board.phase}: `lowcomm-node "
                "status` tells why, and `lowcomm-node status --wait` when it trains."
            )
        request = Generate(
            prompt=prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            chat=tuple(chat),
            before=before,
        )
        return (await supervisor.trainer.ask(request)).text

    async def doctor(self, peers: Sequence[str]) -> Sequence[Finding]:
        """Findings about this machine and its network, within a minute or so.

        ``peers`` are asked first. Raises RetryLater.
        """
        node, membership, endpoint = self._node, self._node.membership, self._node.endpoint
        members = membership.roster.alive(time()) if membership else ()
        settings, discovery = node.settings, node.discovery
        seen = Observations(
            home=settings.home,
            peers=settings.peers,
            status=report(node),
            members=report_peers(node),
        )
        announced = membership.own.addresses if membership else ()
        service = (endpoint.port, endpoint.certificate.der) if endpoint else (None, b"")
        subject = subject_of(discovery, settings, *service, announced) if discovery else None
        entries = [*map(str, peers), *settings.peers]
        entries += [entry for info in members for entry in info.entry_points]
        try:
            async with asyncio.timeout(EXAMINE_DEADLINE), self._examining:
                return await examine_node(seen, discovery, subject, entries)
        except TimeoutError:
            raise RetryLater(
                f"The examination took longer than {EXAMINE_DEADLINE:.0f} s: try again."
            ) from None

    async def gather(self) -> Gathered:
        """Save a checkpoint, and fetch the slow weights of up to three peers, for an export.

        Raises NodeError, RetryLater.
        """
        if self._gathering.locked():
            raise RetryLater("An export gathers weights of peers already: wait for its end.")
        async with self._gathering:
            node = self._node
            if node.supervisor.runs:
                await node.supervisor.trainer.ask(Save())
            run, ready, course = node.run, node.ready, node.course
            membership, exchanger = node.membership, node.exchanger
            if not (run and ready and course and membership and exchanger):
                raise NodeError(f"The node does not train yet (it is {node.board.phase}).")
            if run.spec.sync.consensus == 0:
                reason = "all peers of this run hold the same slow weights"
                return Gathered(folder="", missing=reason)
            gatherer = Gatherer(
                form=state_form(run, ready, course.longest),
                sync=run.spec.sync,
                channels=exchanger.channels,
                down=exchanger.bandwidth.down,
                disk_quota=DiskQuota(self._node.settings.home, self._node.settings.max_disk),
            )
            await membership.greet_all()
            there = [info for info in membership.donors() if exchanger.peer.trusts(info.peer_id)]
            folder = self._node.settings.paths.gathered(run.fingerprint)
            return await gatherer.gather(
                there, exchanger.peer.position.swarm_step, folder, GATHER_DEADLINE
            )

    async def ping(self, peer: str) -> Ping:
        """Latency and rate on each route to a peer, named as ``peers`` does.

        Raises ConfigError, NodeError.
        """
        node = self._node
        if node.membership is None or node.exchanger is None:
            raise NodeError(
                f"The node knows no peers yet (it is {node.board.phase}): try again in a moment."
            )
        info = match_peer(peer, node.membership.roster.alive(time()))
        routes = await node.exchanger.channels.ping(info, node.exchanger.bandwidth)
        return Ping(peer_id=info.peer_id, routes=tuple(routes))
