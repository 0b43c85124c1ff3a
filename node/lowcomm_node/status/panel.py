"""The panels of ``join``, ``status`` and ``demo``: from statuses to a rich renderable.

Pure: no clock, no terminal. Rows stay where they are, so that nothing jumps or flickers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowcomm_node.status.model import Limits, Status, SwarmStatus
from lowcomm_node.status.words import mean_loss
from lowcomm_node.sync.history import ExchangeEnded, IntervalStatus
from lowcomm_node.system.machine import EVERYBODY
from lowcomm_node.system.units import (
    MISSING,
    clean,
    loss,
    quantity,
    seconds,
    short_peer,
    size,
    write_rate,
)
from lowcomm_protocol.exchange.events import Outcome

ROUNDS = 4
"""Rows kept for the last rounds."""
PHASE_STYLES = {
    "training": "green",
    "paused": "blue",
    "finished": "cyan",
    "finishing": "cyan",
    "left": "dim",
}
_OUTCOME_STYLES = {Outcome.APPLIED: "green", Outcome.NO_PARTNER: "yellow", Outcome.FAILED: "red"}
_LABEL_WIDTH = 9


def node_panel(status: Status, rounds: Sequence[ExchangeEnded] = ()) -> RenderableType:
    """One node: phase, progress, losses, exchanges, traffic, and why it waits."""
    rows = Table.grid(padding=(0, 1), expand=True)
    rows.add_column(style="dim", width=_LABEL_WIDTH, no_wrap=True)
    rows.add_column(ratio=1, overflow="ellipsis")
    rows.add_row("phase", _phase(status))
    rows.add_row("step", _progress(status))
    rows.add_row("loss", _losses(status))
    rows.add_row("speed", _speed(status))
    rows.add_row("exchange", _exchange(status))
    rows.add_row("counts", _counts(status))
    rows.add_row("peers", _peers(status))
    for trouble in _troubles(status.swarm):
        rows.add_row("swarm", Text(clean(trouble), "yellow"))
    if status.phase in ("finished", "left") and status.checkpoint:
        rows.add_row("model", Text(clean(status.checkpoint.path)))
    if status.run and status.run.description:
        rows.add_row("about", Text(clean(status.run.description)))
    for amendment in status.run.amendments if status.run else ():
        state = "in force" if amendment.in_force else "to come"
        rows.add_row("amended", Text(clean(f"{amendment.text} ({state})")))
    if status.interval is not None and status.interval.cause is not None:
        rows.add_row("interval", Text(interval_text(status.interval), "yellow"))
    if status.limits.max_up or status.limits.max_down:
        rows.add_row("limits", _line(limits_text(status.limits)))
    for index in range(ROUNDS):
        recent = list(rounds)[-ROUNDS:][::-1]
        rows.add_row(
            "rounds" if index == 0 else "",
            _round(recent[index]) if index < len(recent) else Text(""),
        )
    if status.refusals:
        # The first sign of an attack, or of a clock that is wrong.
        counts = "   ".join(f"{clean(name)} {count}" for name, count in status.refusals.items())
        rows.add_row("refused", Text(counts, "yellow"))
    for warning in status.warnings:
        rows.add_row("warning", Text(clean(warning), "yellow"))
    title = Text("lowcomm", "bold")
    if status.run is not None:
        run = status.run
        title = Text.assemble((clean(run.name), "bold"), (f"@{clean(run.fingerprint)}", "dim"))
    subtitle = Text(f"{short_peer(status.peer_id)} · {seconds(status.uptime)}", "dim")
    return _panel(rows, title, subtitle)


def swarm_panel(
    title: str, statuses: Sequence[Status | None], elapsed: float, width: int = 80
) -> RenderableType:
    """A demo: a row a node (None: not up yet), totals, exchanges and every reason to wait.

    ``width`` in columns decides how many figures a row shows.
    """
    known = [status for status in statuses if status is not None]
    notes = [
        Text(
            f"node {index + 1}: {clean(status.waiting)}",
            "yellow",
            no_wrap=True,
            overflow="ellipsis",
        )
        for index, status in enumerate(statuses)
        if status is not None and status.waiting and status.phase != "finished"
    ]
    parts: list[RenderableType] = [
        _swarm_progress(known, len(statuses)),
        Text(""),
        _swarm_table(statuses, width),
        Text(""),
        _under_way(statuses),
    ]
    # One line is always kept for a reason to wait, because one comes and goes at every sync.
    parts += notes or [Text("")]
    return _panel(Group(*parts), Text(clean(title), "bold"), Text(seconds(elapsed)))


def _panel(content: RenderableType, title: Text, subtitle: Text) -> Panel:
    return Panel(
        content,
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="dim",
        padding=(0, 1),
    )


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _phase(status: Status) -> Text:
    phase = clean(status.phase)
    style = PHASE_STYLES.get(phase, "yellow")
    # The reason may wrap: it is the one thing that a reader must get whole.
    waiting = f" · {clean(status.waiting)}" if status.waiting else ""
    return Text.assemble((phase, f"bold {style}"), (waiting, "yellow"))


def _progress(status: Status) -> RenderableType:
    step = status.trainer.swarm_step or 0
    total = status.trainer.total_steps or (status.run.steps if status.run else None)
    return _bar(step, total, f"{step} / {total or MISSING}")


def _bar(done: float, total: float | None, text: str, style: str = "green") -> RenderableType:
    # Without a total the bar stands empty; rich's own form for that moves, and this panel does not.
    completed = min(done, total) if total else 0
    bar = ProgressBar(
        total=total or 1, completed=completed, complete_style=style, finished_style=style
    )
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(bar, Text(text, no_wrap=True))
    return grid


def _losses(status: Status) -> Text:
    trainer = status.trainer
    first = trainer.val_loss_first
    return _line(
        (loss(trainer.loss), "bold"),
        ("   held-out ", "dim"),
        (loss(trainer.val_loss_last), "bold"),
        (f" from {loss(first)}" if first is not None else "", "dim"),
        (f"   {trainer.skipped_steps} steps skipped" if trainer.skipped_steps else "", "yellow"),
    )


def _speed(status: Status) -> Text:
    trainer = status.trainer
    rate = trainer.learning_rate
    yields = trainer.priority is not None and trainer.priority.behind == EVERYBODY
    return _line(
        f"{quantity(trainer.tokens_per_second)} tokens/s",
        (f"   {clean(trainer.device or MISSING)}{', yields' if yields else ''}", "dim"),
        (f"   {quantity(trainer.parameters)} parameters", "dim"),
        (f"   lr {rate:.2e}" if rate is not None else "", "dim"),
    )


def _exchange(status: Status) -> RenderableType:
    if not status.exchanges_running:
        since = status.exchanges.since_applied
        last = "" if since is None else f"; the last was applied {seconds(since)} ago"
        return Text(f"none under way{last}", "dim")
    first, *others = status.exchanges_running
    partners = ", ".join(short_peer(partner) for partner in first.partners) or MISSING
    done = first.bytes_sent + first.bytes_received
    more = f" and {len(others)} more" if others else ""
    stage = f"{clean(first.stage)}, {size(done)}"
    text = f"fragment {first.fragment} with {partners}{more}: {stage}"
    return _bar(done, first.bytes_expected, text if len(text) <= 50 else f"{stage}{more}", "cyan")


def _counts(status: Status) -> Text:
    counts = status.exchanges
    parts = [(f"{counts.completed} completed", "green" if counts.completed else "dim")]
    # Refusals of single peers belong to `peers`: an exchange that all refused is one without a
    # partner.
    for count, word in (
        (counts.no_partner, "no partner"),
        (counts.failed, "failed"),
        (counts.in_doubt, "in doubt"),
        (counts.realigned, "realigned"),
    ):
        parts.append((f"{count} {word}", "yellow" if count else "dim"))
    return Text.assemble(*(piece for part in parts for piece in (part, "   ")))


def _peers(status: Status) -> Text:
    silent = status.silent_peers
    return _line(
        f"{status.peers}",
        (f" ({status.dht_peers} in the DHT)", "dim"),
        (f"   {silent} do not answer" if silent else "", "dim"),
        f"   ↑ {size(status.bytes_sent)}   ↓ {size(status.bytes_received)}",
    )


def _troubles(swarm: SwarmStatus | None) -> list[str]:
    """Why we are not in the swarm, or which of the owner's addresses do not answer."""
    if swarm is None:
        return []
    if swarm.reason:
        return [swarm.reason]
    shut = [door for door in swarm.doors if door.named and door.reason]
    return [f"{door.address} does not answer: {door.reason}" for door in shut[:3]]


def limits_text(limits: Limits) -> str:
    """What is used of the owner's limits on traffic, in a line."""
    up = f"↑ {write_rate(limits.up)} of {write_rate(limits.max_up)}"
    down = f"↓ {write_rate(limits.down)} of {write_rate(limits.max_down)}"
    return f"{up}   {down}   {limits.peers} of {limits.max_peers} peers"


def interval_text(interval: IntervalStatus) -> str:
    """How often a fragment is exchanged, and why no more often."""
    effective = interval.effective
    every = "" if effective is None else f"every {effective:.0f} steps, "
    return clean(f"{every}written {interval.written}: {interval.reason}")


def _round(entry: ExchangeEnded) -> Text:
    partners = ", ".join(short_peer(partner) for partner in entry.partners)
    applied = entry.outcome is Outcome.APPLIED
    detail = f"with {partners}, {seconds(entry.seconds)}" if applied else entry.reason
    return _line(
        (f"{datetime.fromtimestamp(entry.time).astimezone():%H:%M:%S} ", "dim"),
        f"step {entry.swarm_step:>5} ",
        (f"fragment {entry.fragment} ", "dim"),
        (entry.outcome.value, _OUTCOME_STYLES[entry.outcome]),
        (f" {clean(detail)}", "dim"),
    )


def _swarm_progress(known: Sequence[Status], nodes: int) -> RenderableType:
    total = max((status.trainer.total_steps or 0 for status in known), default=0)
    # The slowest node decides when the demo ends; one that is not up yet is at zero.
    slowest = min((status.trainer.swarm_step or 0 for status in known), default=0)
    step = slowest if len(known) == nodes else 0
    return _bar(step, total, f"{step} / {total or MISSING}")


def _swarm_table(statuses: Sequence[Status | None], width: int) -> Table:
    columns = [column for column in _COLUMNS if width >= column.width]
    table = Table(
        box=None,
        expand=True,
        padding=(0, 1, 0, 0),
        header_style="dim",
        show_footer=True,
        footer_style="dim",
    )
    known = [status for status in statuses if status is not None]
    table.add_column("node", no_wrap=True)
    for index, one in enumerate(columns):
        side = "left" if index == 0 else "right"
        table.add_column(one.heading, footer=one.total(known), justify=side, no_wrap=True)
    for index, status in enumerate(statuses):
        cells = [
            Text(MISSING, "dim") if status is None else Text(one.cell(status), one.style)
            for one in columns
        ]
        table.add_row(_node_phase(index, status), *cells)
    return table


def _node_phase(index: int, status: Status | None) -> Text:
    phase = "starting" if status is None else clean(status.phase)
    return Text.assemble(f"{index + 1} ", (phase, PHASE_STYLES.get(phase, "yellow")))


def _under_way(statuses: Sequence[Status | None]) -> Text:
    known = [
        (str(index + 1), status) for index, status in enumerate(statuses) if status is not None
    ]
    numbers = {status.peer_id: number for number, status in known}
    meetings: dict[tuple[int | str, ...], str] = {}
    for number, status in known:
        for one in status.exchanges_running:
            members = sorted(
                [number, *(numbers.get(peer) or short_peer(peer) for peer in one.partners)]
            )
            # Every member tells of the same meeting: it is shown once.
            meetings[(one.fragment, *members)] = f"{' ⇄ '.join(members)} fragment {one.fragment}"
    text = "   ".join(meetings.values())
    said, style = (f"exchanges {text}", "cyan") if text else ("no exchange under way", "dim")
    return Text(said, style, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class _Column:
    """A column of the swarm's table."""

    heading: str
    width: int
    """Least width of the panel that shows it."""
    cell: Callable[[Status], str]
    total: Callable[[Sequence[Status]], str] = lambda known: ""
    style: str = ""


_COLUMNS = (
    _Column("peer", 90, lambda status: short_peer(status.peer_id), style="dim"),
    _Column("step", 0, lambda status: str(status.trainer.swarm_step or 0)),
    _Column("loss", 76, lambda status: loss(status.trainer.loss)),
    _Column(
        "held-out",
        0,
        lambda status: loss(status.trainer.val_loss_last),
        lambda known: f"mean {mean_loss(one.trainer.val_loss_last for one in known)}",
    ),
    _Column(
        "tokens/s",
        68,
        lambda status: quantity(status.trainer.tokens_per_second),
        lambda known: quantity(sum(one.trainer.tokens_per_second or 0 for one in known)),
    ),
    _Column("met", 56, lambda status: str(status.exchanges.completed)),
    _Column(
        "missed", 100, lambda status: str(status.exchanges.no_partner + status.exchanges.failed)
    ),
    _Column(
        "sent",
        56,
        lambda status: size(status.bytes_sent),
        lambda known: size(sum(one.bytes_sent for one in known)),
    ),
)
