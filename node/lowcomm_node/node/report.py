"""The status of a node, and of its peers, from what the node has to show."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, time
from typing import Any

from lowcomm_node.catalogue import Waiting
from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.fetch.text import RunText
from lowcomm_node.net.channels import Endpoint
from lowcomm_node.node.entry import Departure
from lowcomm_node.node.messages import Ready
from lowcomm_node.node.supervisor import Supervisor
from lowcomm_node.owner.availability import Availability
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.status.events import Board, Warned
from lowcomm_node.status.model import (
    AmendmentStatus,
    Claims,
    ExchangeCounts,
    Limits,
    PeerStatus,
    RunStatus,
    Status,
    TextStatus,
    TrainerStatus,
)
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.sync.history import History
from lowcomm_node.system.release import release
from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.run import RunSpec, SignedRun

MOST_RELEASES = 8
FAILED_IN_A_ROW = 3
"""Exchanges after which ``status`` gives their reason: single ones fail wherever peers come and go.
"""


@dataclass(kw_only=True)
class NodeState:
    """Parts of a node; those that it has not made yet are None."""

    settings: NodeSettings
    board: Board
    supervisor: Supervisor
    availability: Availability
    allowance: Allowance
    departure: Departure
    refusals: Refusals = field(default_factory=Refusals)
    began: float = field(default_factory=monotonic)
    """When it started (monotonic seconds)."""
    peer_id: str = ""
    workers: tuple[tuple[str, str], ...] = ()
    """Lenders of this machine, and the sockets to their workers."""
    run: SignedRun | None = None
    admission: RunAdmission | None = None
    ready: Ready | None = None
    """State that the trainer has built, resumed or adopted last."""
    rejoin: Rejoin | None = None
    membership: Membership | None = None
    """Once others can call us."""
    exchanger: Exchanger | None = None
    discovery: Discovery | None = None
    """While it is in the DHT."""
    endpoint: Endpoint | None = None
    text: RunText | None = None
    """Packed text of the run."""
    reading: Callable[[int], Mapping[str, Any]] = lambda part: {}
    """Fields of `TextStatus` on the reading of a part: epoch, pieces_read, own_pieces, waiting."""

    @property
    def course(self) -> SpecTimeline | None:
        """The settings of the run over its swarm steps, as they are known now."""
        return self.admission.course if self.admission else None

    def spec_now(self, run: SignedRun) -> RunSpec:
        """Settings of the run at the swarm step of this node."""
        return self.course.at(self.board.position()[0]) if self.course else run.spec


def report(state: NodeState) -> Status:
    """The status of a node."""
    board, membership, exchanger = state.board, state.membership, state.exchanger
    history = exchanger.history if exchanger else History()
    alive = membership.roster.alive(time()) if membership else ()
    releases = Counter(one.report.release for one in alive if one.report.release)
    losses = [one.report.held_out_loss for one in alive if one.report.held_out_loss]
    drivers = exchanger.running.values() if exchanger else ()
    running = tuple(driver.describe(monotonic()) for driver in drivers)
    waiting = board.waiting or _why_alone(state)
    warnings = [*board.warnings]
    if exchanger is not None and (kept := exchanger.kept_waiting) is not None:
        warnings.append(Warned(code="kept-waiting", text=kept))
    return Status(
        peer_id=state.peer_id,
        release=release(),
        pid=os.getpid(),
        run=_run(state),
        phase=board.phase,
        joined=membership is not None,
        waiting=waiting.text if waiting else None,
        waiting_code=waiting.code if waiting else None,
        unchanged=monotonic() - board.changed,
        leaving=state.departure.left,
        swarm=state.rejoin.describe() if state.rejoin else None,
        pause=state.availability.hold,
        schedule=None if (hours := state.availability.schedule) is None else str(hours),
        uptime=monotonic() - state.began,
        trainer=_trainer(state),
        exchanges_running=running,
        exchanges=_count(history),
        text=_text(state),
        interval=exchanger.interval if exchanger else None,
        bytes_sent=history.bytes_sent + sum(one.bytes_sent for one in running),
        bytes_received=history.bytes_received + sum(one.bytes_received for one in running),
        limits=report_limits(state.allowance),
        peers=membership.count() if membership else 0,
        releases=dict(releases.most_common(MOST_RELEASES)),
        claims=Claims(val_loss=median(losses), told_by=len(losses)) if losses else None,
        silent_peers=membership.count_silent() if membership else 0,
        swarm_peers=membership.about[0] if membership else 0,
        shards=membership.about[1] if membership else 0,
        dht_peers=membership.dht_peers if membership else 0,
        checkpoint=board.checkpoint,
        addresses=tuple(membership.own.addresses) if membership else (),
        entry_points=tuple(membership.entry_points) if membership else (),
        tunnels=state.endpoint.channels.tunnels() if state.endpoint else {},
        refusals=state.refusals.counts(),
        warnings=tuple(one.text for one in warnings),
        warning_codes=tuple(one.code for one in warnings),
    )


def report_limits(allowance: Allowance) -> Limits:
    """The owner's limits on traffic, and what is used of them."""
    up, down, peers = allowance.bandwidth.up, allowance.bandwidth.down, allowance.peer_limit
    return Limits(
        max_up=up.rate,
        max_down=down.rate,
        max_peers=peers.most,
        up=up.used,
        down=down.used,
        peers=len(peers),
        turned_away=peers.turned_away,
    )


def report_peers(state: NodeState) -> list[PeerStatus]:
    """The peers of a node."""
    membership, exchanger = state.membership, state.exchanger
    if membership is None or exchanger is None:
        return []
    now = time()
    return [_peer(info, now, membership, exchanger) for info in membership.roster.alive(now)]


def _peer(info: PeerInfo, now: float, membership: Membership, exchanger: Exchanger) -> PeerStatus:
    history, route = exchanger.history.of(info.peer_id), exchanger.channels.describe(info.peer_id)
    return PeerStatus(
        peer_id=info.peer_id,
        phase=info.phase.value,
        swarm_step=info.swarm_step,
        steps=info.steps,
        tokens=info.report.tokens,
        tokens_per_second=info.tokens_per_second,
        val_loss=info.report.held_out_loss or None,
        address=info.addresses[0] if info.addresses else None,
        release=info.report.release or None,
        name=info.report.name,
        age=now - max(info.issued, info.as_of),
        completed=history.completed,
        refused=history.refused,
        failed=history.failed,
        last_reason=history.last_reason,
        last_code=history.last_code,
        **exchanger.standing(info.peer_id),
        **vars(route),
    )


def _run(state: NodeState) -> RunStatus | None:
    run = state.run
    if run is None:
        return None
    now = state.spec_now(run).run
    return RunStatus(
        name=run.spec.run.name,
        description=now.description,
        run_id=run.run_id,
        fingerprint=run.fingerprint,
        method=run.spec.sync.method,
        creator=run.creator,
        steps=now.steps,
        amendments=_amendments(state),
        chat=bool(run.spec.export.chat_template),
        adapts=run.spec.adapter is not None and not run.spec.adapter.train_also,
    )


def _amendments(state: NodeState) -> tuple[AmendmentStatus, ...]:
    """Amendments of the run, in force or to come."""
    if state.course is None:
        return ()
    step = state.board.position()[0]
    return tuple(
        AmendmentStatus(**one.to_json(), text=str(one), in_force=one.at <= step)
        for one in state.course.chain.links
    )


def _trainer(state: NodeState) -> TrainerStatus:
    ready, supervisor = state.ready, state.supervisor
    return TrainerStatus(
        state=state.board.phase,
        pid=supervisor.pid,
        failures=supervisor.restarts,
        last_failure=supervisor.last_failure,
        device=ready.device if ready else None,
        parameters=ready.parameters if ready else None,
        duty=ready.duty if ready else None,
        total_steps=state.spec_now(state.run).run.steps if state.run else None,
        remaining=_remaining(state),
        tokenizing=state.board.tokenizing,
        memory=supervisor.memory,
        accelerators=supervisor.accelerators,
        **vars(state.board.progress),
    )


def _remaining(state: NodeState) -> float | None:
    """Seconds until the end of the run at the recent rate."""
    now = state.board.progress
    if state.run is None or not now.tokens_per_second or now.swarm_step is None:
        return None
    spec = state.spec_now(state.run)
    steps = max(0, spec.run.steps - now.swarm_step)
    return steps * spec.tokens_per_step / now.tokens_per_second


def _text(state: NodeState) -> tuple[TextStatus, ...]:
    """The parts of the run's packed text, once they are open."""
    if state.run is None or state.text is None:
        return ()
    parts = state.spec_now(state.run).data.parts
    shares = sum(part.share for part in parts) or 1.0
    return tuple(
        TextStatus(
            name=part.name,
            share=part.share / shares,
            tokens=part.tokens,
            pieces=part.training_pieces,
            held=store.count_held(),
            missing=store.count_coming(),
            bytes_fetched=store.bytes_fetched,
            bytes_given=store.bytes_given,
            **state.reading(number),
        )
        for number, (part, store) in enumerate(zip(parts, state.text.stores, strict=False))
    )


def _count(history: History) -> ExchangeCounts:
    applied = history.outcomes[Outcome.APPLIED]
    return ExchangeCounts(
        completed=applied,
        refused=history.refusals,
        failed=history.outcomes[Outcome.FAILED],
        no_partner=history.outcomes[Outcome.NO_PARTNER],
        in_doubt=history.in_doubt,
        realigned=history.realigned,
        realigned_share=round(history.realigned / applied, 3) if applied else None,
        worst_block=max(history.worst_block.values(), default=None),
        since_applied=None if history.applied_at is None else monotonic() - history.applied_at,
    )


def _why_alone(state: NodeState) -> Waiting | None:
    """Why the node trains without exchanges; training itself never waits."""
    phase, exchanger, hold = state.board.phase, state.exchanger, state.availability.hold
    if phase == "paused" and hold is not None:
        return Waiting(hold.rule.value, hold.reason)
    if phase == "joining" and state.rejoin is not None:
        return _why_outside(state.rejoin)
    if phase != "training" or exchanger is None or state.run is None:
        return None
    if state.run.spec.sync.group == 1:
        return None
    members = state.membership
    if members is not None and members.count() == members.count(Phase.SERVING):
        return _why_nobody(members, state.rejoin)
    return why_no_exchange(exchanger)


def why_no_exchange(exchanger: Exchanger) -> Waiting | None:
    """Why nothing is exchanged though others are there."""
    if (hindrance := exchanger.hindrance) is not None:
        text = f"training on without exchanges of our own: {hindrance}"
        return Waiting("exchange-too-long", text)
    if (resting := exchanger.resting) is not None:
        return Waiting("far-from-peers", f"training on; {resting}")
    if (trouble := exchanger.peer.own_line.trouble) is not None:
        return Waiting("own-line", f"training on; {trouble}: see `lowcomm-node doctor`")
    last = list(exchanger.history.exchanges)[-FAILED_IN_A_ROW:]
    if sum(one.outcome is Outcome.FAILED for one in last) == FAILED_IN_A_ROW:
        text = f"training on; the last {FAILED_IN_A_ROW} exchanges failed: {last[-1].reason}"
        return Waiting("not-applied", text)
    return None


def _why_outside(rejoin: Rejoin) -> Waiting | None:
    """Why we are not in the swarm; None if we are."""
    reason = rejoin.reason
    if reason is None:
        return None
    return Waiting("swarm-unlisted" if rejoin.connected else "swarm-silent", reason)


def _why_nobody(membership: Membership, rejoin: Rejoin | None) -> Waiting:
    outside = _why_outside(rejoin) if rejoin is not None else None
    if outside is not None:
        return Waiting(outside.code, f"training alone: {outside.text}")
    count = membership.count_silent()
    silent = f": {count} have a record and do not answer" if count else ""
    which = "trains" if membership.count() else "is alive"
    text = f"training alone: no other peer {which}{silent}"
    return Waiting("nobody-alive", text)
