"""The panels of ``join``, ``status`` and ``demo``: from statuses to a rich renderable.

Pure: no clock, no terminal. Rows stay where they are, so that nothing jumps or flickers.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowcomm_node.status.model import Status, SwarmStatus
from lowcomm_node.status.words import (
    kinds_in_words,
    lenders_in_words,
    peers_in_words,
    slow_in_words,
    speed_in_words,
    text_in_words,
)
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.accelerator import Accelerator
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

EXCHANGES = 4
"""Rows kept for the last exchanges."""
PHASE_STYLES = {
    "training": "green",
    "serving": "green",
    "paused": "blue",
    "finished": "cyan",
    "finishing": "cyan",
    "left": "dim",
}
_OUTCOME_STYLES = {Outcome.APPLIED: "green", Outcome.NO_PARTNER: "dim", Outcome.FAILED: "yellow"}
_BUSY = ("busy", "crossed", "too-soon", "full", "no-partner")
"""Codes of exchanges without a partner for which nobody is to blame."""
MOST_WARNINGS = 3
_LABEL_WIDTH = 9
_panel = partial(
    Panel, title_align="left", subtitle_align="right", border_style="dim", padding=(0, 1)
)


# --- One node -------------------------------------------------------------------------------------


def node_panel(status: Status, exchanges: Sequence[ExchangeEnded] = ()) -> RenderableType:
    """One node: phase, progress, losses, exchanges, traffic, and why it waits."""
    run, trainer, limits = status.run, status.trainer, status.limits
    reads = status.phase != "serving"
    step, total = trainer.swarm_step or 0, trainer.total_steps or (run.steps if run else None)
    is_ending = trainer.remaining and status.phase == "training"
    left = f"   {seconds(trainer.remaining)} left" if is_ending else ""
    rows: list[tuple[str, RenderableType]] = [
        ("phase", _phase(status)),
        ("step", _bar(step, total, f"{step} / {total or MISSING}{left}")),
        ("loss", _losses(status)),
        ("speed", _speed(status)),
        *(("lender", Text(text)) for text in lenders_in_words(trainer)),
        *(("device", _device(one)) for one in status.trainer.accelerators),
        *(("", _warning(text)) for text in slow_in_words(status.trainer.accelerators)),
        ("exchange", _exchange(status)),
        ("", _counts(status)),
        ("peers", _peers(status)),
        *(
            ("text", Text(f"{clean(part.name)}: {text_in_words(part, reads)}"))
            for part in status.text
        ),
        *(("swarm", _warning(trouble)) for trouble in _troubles(status.swarm)),
    ]
    if status.phase in ("finished", "left") and status.checkpoint:
        rows.append(("model", Text(clean(status.checkpoint.path))))
    if run and run.description:
        rows.append(("about", Text(clean(run.description))))
    for amendment in run.amendments if run else ():
        state = "in force" if amendment.in_force else "to come"
        rows.append(("amended", Text(clean(f"{amendment.text} ({state})"))))
    if status.interval is not None and status.interval.cause is not None:
        effective, written = status.interval.effective, status.interval.written
        every = "longer" if effective is None else f"every {effective:.0f} steps"
        text = f"{every} instead of {written}: {status.interval.reason}"
        rows.append(("interval", Text(clean(text), "dim")))
    if limits.max_up or limits.max_down:
        up = f"↑ {write_rate(limits.up)} of {write_rate(limits.max_up)}"
        down = f"↓ {write_rate(limits.down)} of {write_rate(limits.max_down)}"
        peers = f"{limits.peers} of {limits.max_peers} peers"
        rows.append(("limits", _line(f"{up}   {down}   {peers}")))
    recent = [*_exchanges(exchanges)][:EXCHANGES]
    recent += [Text("")] * (EXCHANGES - len(recent))
    rows += zip(("last", "", "", ""), recent, strict=True)
    if status.refusals:
        # The first sign of an attack, or of a clock that is wrong.
        counts = "   ".join(f"{name} {count}" for name, count in status.refusals.items())
        rows.append(("refused", _warning(counts)))
    rows += [("warning", _warning(text)) for text in status.warnings[-MOST_WARNINGS:]]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1, overflow="ellipsis")
    for label, content in rows:
        grid.add_row(label, content)
    title = Text("lowcomm", "bold")
    if run is not None:
        title = Text.assemble((clean(run.name), "bold"), (f"@{clean(run.fingerprint)}", "dim"))
    subtitle = Text(f"{short_peer(status.peer_id)} · {seconds(status.uptime)}", "dim")
    return _panel(grid, title=title, subtitle=subtitle)


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _warning(text: str) -> Text:
    return Text(clean(text), "yellow")


def _phase(status: Status) -> Text:
    phase = clean(status.phase)
    style = PHASE_STYLES.get(phase, "yellow")
    # The reason may wrap: it is the one thing that a reader must get whole.
    waiting = f" · {clean(status.waiting)}" if status.waiting else ""
    return Text.assemble((phase, f"bold {style}"), (waiting, "yellow"))


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
    return _line(
        speed_in_words(trainer),
        (f"   {kinds_in_words(trainer.device)}", "dim"),
        (f"   {quantity(trainer.parameters)} parameters", "dim"),
        (f"   lr {rate:.2e}" if rate is not None else "", "dim"),
    )


def _device(one: Accelerator) -> Text:
    """First what differs from device to device: the rest of a long line is cut."""
    of_memory = one.memory_taken is not None and one.memory_total is not None
    return _line(
        f"{clean(one.device)}",
        f"   {MISSING if one.load is None else f'{one.load:.0%}'}",
        f"   {size(one.memory_taken)} of {size(one.memory_total)}" if of_memory else "",
        f"   {one.temperature} °C" if one.temperature is not None else "",
        (f"   {clean(one.name)}", "dim"),
    )


def _exchange(status: Status) -> RenderableType:
    running = status.exchanges_running
    if not running:
        since = status.exchanges.since_applied
        last = "" if since is None else f"; the last was applied {seconds(since)} ago"
        return Text(f"none in progress{last}", "dim")
    done = sum(one.bytes_sent + one.bytes_received for one in running)
    expected = sum(one.bytes_expected for one in running)
    first, count = running[0], len(running)
    partners = ", ".join(short_peer(partner) for partner in first.partners) or MISSING
    text = f"fragment {first.fragment} with {partners}: {clean(first.stage)}"
    if count > 1 or len(text) > 50:
        text = f"{count} in progress"
    return _bar(done, expected, f"{text}, {size(done)}", "cyan")


def _counts(status: Status) -> Text:
    counts = status.exchanges
    # Refusals of single peers belong to `peers`: an exchange that all refused is one without a
    # partner.
    parts = [
        (counts.completed, "applied", "green"),
        (counts.no_partner, "without a partner", "dim"),
        (counts.failed, "failed", "yellow"),
        (counts.in_doubt, "unconfirmed", "yellow"),
        (counts.realigned, "resynced", "yellow"),
    ]
    return Text.assemble(*((f"{count} {word}   ", style) for count, word, style in parts if count))


def _peers(status: Status) -> Text:
    silent = 0 if status.shards else status.silent_peers
    return _line(
        peers_in_words(status),
        (f"   {silent} more {'does' if silent == 1 else 'do'} not answer" if silent else "", "dim"),
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


def _exchanges(exchanges: Sequence[ExchangeEnded]) -> Iterator[Text]:
    """Yield a line for each of the last exchanges, the newest first; those without a partner count
    together."""
    for why, entries in groupby(reversed(exchanges), key=_why_alone):
        if why:
            newest, *others = entries
            many = f"{1 + len(others)} x " if others else ""
            yield Text(f"{_clock(newest)} {many}{clean(why)}", "dim")
        else:
            yield from map(_line_of, entries)


def _why_alone(entry: ExchangeEnded) -> str:
    if entry.outcome is not Outcome.NO_PARTNER:
        return ""
    return "no partner: others were busy" if entry.code in _BUSY else entry.reason


def _clock(entry: ExchangeEnded) -> str:
    return f"{datetime.fromtimestamp(entry.time).astimezone():%H:%M:%S}"


def _line_of(entry: ExchangeEnded) -> Text:
    partners = ", ".join(short_peer(partner) for partner in entry.partners)
    applied = entry.outcome is Outcome.APPLIED
    detail = f"with {partners}, {seconds(entry.seconds)}" if applied else entry.reason
    return _line(
        (f"{_clock(entry)} ", "dim"),
        f"step {entry.swarm_step:>5} ",
        (f"fragment {entry.fragment} ", "dim"),
        (entry.outcome.value, _OUTCOME_STYLES[entry.outcome]),
        (f" {clean(detail)}", "dim"),
    )


# --- The nodes of a demo --------------------------------------------------------------------------


def swarm_panel(title: str, statuses: Sequence[Status | None], elapsed: float) -> RenderableType:
    """A demo: a row a node (None: not up yet), totals, and every reason to wait."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("node", no_wrap=True)
    for heading in ("step", "loss", "held-out", "tokens/s", "met", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    waits: list[Text] = []
    for number, status in enumerate(statuses, start=1):
        if status is None:
            table.add_row(f"{number} starting", *[MISSING] * 6, style="dim")
            continue
        phase, trainer = clean(status.phase), status.trainer
        table.add_row(
            Text.assemble(f"{number} ", (phase, PHASE_STYLES.get(phase, "yellow"))),
            str(trainer.swarm_step or 0),
            loss(trainer.loss),
            loss(trainer.val_loss_last),
            quantity(trainer.tokens_per_second),
            str(status.exchanges.completed),
            size(status.bytes_sent),
        )
        if status.waiting and phase != "finished":
            waits.append(_line((f"node {number}: {clean(status.waiting)}", "yellow")))
    # One line is always kept for a reason to wait, because one comes and goes at every sync.
    content = Group(table, Text(""), *(waits or [Text("")]))
    return _panel(content, title=Text(clean(title), "bold"), subtitle=seconds(elapsed))
