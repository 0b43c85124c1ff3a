"""What ``join``, ``status`` and ``demo`` show: from statuses, as the control API gives them, to a rich renderable.

Pure: no clock, no terminal. Rows stay where they are from one frame to the next, so that nothing jumps or flickers.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowcomm_node.system.formatting import MISSING, clean, loss, quantity, seconds, short_peer, size
from lowcomm_node.system.units import write_rate

Status = Mapping[str, Any]
ROUNDS = 4
"""Rows kept for the last rounds."""
PHASE_STYLES = {
    "training": "green",
    "paused": "blue",
    "finished": "cyan",
    "finishing": "cyan",
    "left": "dim",
}
_OUTCOME_STYLES = {"applied": "green", "no-partner": "yellow", "failed": "red"}
_LABEL_WIDTH = 9


def node_panel(status: Status, rounds: Sequence[Status] = ()) -> RenderableType:
    """One node: phase, progress, losses, the exchange under way, the last rounds, traffic, and why it waits."""
    rows = _grid()
    rows.add_row("phase", _phase(status))
    rows.add_row("step", _progress(status))
    rows.add_row("loss", _losses(status))
    rows.add_row("speed", _speed(status))
    rows.add_row("exchange", _exchange(status))
    rows.add_row("counts", _counts(status))
    rows.add_row("peers", _peers(status))
    for trouble in _troubles(status.get("swarm") or {}):
        rows.add_row("swarm", Text(clean(trouble), "yellow"))
    if status["phase"] in ("finished", "left") and status.get("checkpoint"):
        rows.add_row("model", Text(clean(status["checkpoint"]["path"])))
    if about := (status.get("run") or {}).get("description"):
        rows.add_row("about", Text(clean(about)))
    for amendment in (status.get("run") or {}).get("amendments") or ():
        state = "in force" if amendment["in_force"] else "to come"
        rows.add_row("amended", Text(clean(f"{amendment['text']} ({state})")))
    limits = status.get("limits") or {}
    if limits.get("max_up") or limits.get("max_down"):
        rows.add_row("limits", _line(limits_text(limits)))
    for index in range(ROUNDS):
        recent = list(rounds)[-ROUNDS:][::-1]
        rows.add_row("rounds" if index == 0 else "", _round(recent[index]) if index < len(recent) else Text(""))
    if status.get("refusals"):
        rows.add_row("refused", _refusals(status["refusals"]))
    for warning in status.get("warnings") or ():
        rows.add_row("warning", Text(clean(warning), "yellow"))
    return Panel(
        rows, title=_title(status), title_align="left", subtitle=_subtitle(status), subtitle_align="right",
        box=box.ROUNDED, border_style="dim", padding=(0, 1),
    )  # fmt: skip


def swarm_panel(title: str, statuses: Sequence[Status | None], elapsed: float, width: int = 80) -> RenderableType:
    """A demo: one row a node (None: not up yet), totals, exchanges under way and every reason to wait.

    ``width`` in columns decides how many figures a row shows.
    """
    known = [status for status in statuses if status is not None]
    notes = [
        Text(f"node {index + 1}: {clean(status['waiting'])}", "yellow", no_wrap=True, overflow="ellipsis")
        for index, status in enumerate(statuses)
        if status is not None and status.get("waiting") and status["phase"] != "finished"
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
    return Panel(
        Group(*parts), title=Text(clean(title), "bold"), title_align="left", subtitle=Text(seconds(elapsed)),
        subtitle_align="right", box=box.ROUNDED, border_style="dim", padding=(0, 1),
    )  # fmt: skip


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1, overflow="ellipsis")
    return grid


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _title(status: Status) -> Text:
    run = status.get("run")
    if run is None:
        return Text("lowcomm", "bold")
    return Text.assemble((clean(run["name"]), "bold"), (f"@{clean(run['fingerprint'])}", "dim"))


def _subtitle(status: Status) -> Text:
    return Text(f"{short_peer(status['peer_id'])} · {seconds(status.get('uptime'))}", "dim")


def _phase(status: Status) -> Text:
    phase = clean(status["phase"])
    style = PHASE_STYLES.get(phase, "yellow")
    waiting = status.get("waiting")
    # The reason may wrap: it is the one thing that a reader must get whole.
    return Text.assemble((phase, f"bold {style}"), (f" · {clean(waiting)}" if waiting else "", "yellow"))


def _progress(status: Status) -> RenderableType:
    trainer = _trainer(status)
    total = trainer.get("total_steps") or (status.get("run") or {}).get("steps")
    return _bar(trainer.get("swarm_step") or 0, total, f"{trainer.get('swarm_step') or 0} / {total or MISSING}")


def _bar(done: float, total: float | None, text: str, style: str = "green") -> RenderableType:
    # Without a total the bar stands empty; rich's own form for that moves, and this panel does not.
    bar = ProgressBar(total=total or 1, completed=min(done, total) if total else 0, complete_style=style,
                      finished_style=style)  # fmt: skip
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(bar, Text(text, no_wrap=True))
    return grid


def _losses(status: Status) -> Text:
    trainer = _trainer(status)
    first = trainer.get("val_loss_first")
    return _line(
        (loss(trainer.get("loss")), "bold"),
        ("   held-out ", "dim"),
        (loss(trainer.get("val_loss_last")), "bold"),
        (f" from {loss(first)}" if first is not None else "", "dim"),
        (f"   {skipped} steps skipped" if (skipped := trainer.get("skipped_steps")) else "", "yellow"),
    )


def _speed(status: Status) -> Text:
    trainer = _trainer(status)
    rate = trainer.get("learning_rate")
    return _line(
        f"{quantity(trainer.get('tokens_per_second'))} tokens/s",
        (f"   {clean(trainer.get('device') or MISSING)}", "dim"),
        (f"   {quantity(trainer.get('parameters'))} parameters", "dim"),
        (f"   lr {rate:.2e}" if rate is not None else "", "dim"),
    )


def _exchange(status: Status) -> RenderableType:
    running = status.get("exchanges_running") or ()
    if not running:
        return Text("none under way", "dim")
    first, *others = running
    partners = ", ".join(short_peer(partner) for partner in first.get("partners") or ()) or MISSING
    done = (first.get("bytes_sent") or 0) + (first.get("bytes_received") or 0)
    expected = first.get("bytes_expected") or 0
    more = f" and {len(others)} more" if others else ""
    stage = f"{clean(first['stage'])}, {size(done)}"
    text = f"fragment {first['fragment']} with {partners}{more}: {stage}"
    return _bar(done, expected, text if len(text) <= 50 else f"{stage}{more}", "cyan")


def _counts(status: Status) -> Text:
    counts = status.get("exchanges") or {}
    parts = [(f"{counts.get('completed', 0)} completed", "green" if counts.get("completed") else "dim")]
    # Refusals of single peers belong to `peers`: an exchange that all refused is one without a partner.
    for key, word in (
        ("no_partner", "no partner"),
        ("failed", "failed"),
        ("in_doubt", "in doubt"),
        ("realigned", "realigned"),
    ):
        parts.append((f"{counts.get(key, 0)} {word}", "yellow" if counts.get(key) else "dim"))
    return Text.assemble(*(piece for part in parts for piece in (part, "   ")))


def _peers(status: Status) -> Text:
    return _line(
        f"{status.get('peers', 0)}",
        (f" ({status.get('dht_peers', 0)} in the DHT)", "dim"),
        (f"   {silent} do not answer" if (silent := status.get("silent_peers")) else "", "dim"),
        f"   ↑ {size(status.get('bytes_sent'))}   ↓ {size(status.get('bytes_received'))}",
    )


def _troubles(swarm: Mapping[str, Any]) -> list[str]:
    """Why we are not in the swarm, and which of the owner's addresses do not answer; empty if all is well."""
    if swarm.get("reason"):
        return [swarm["reason"]]
    shut = [door for door in swarm.get("doors") or () if door["named"] and door["reason"]]
    return [f"{door['address']} does not answer: {door['reason']}" for door in shut[:3]]


def limits_text(limits: Status) -> str:
    """What is used of the owner's limits on traffic, in a line."""
    ways = [
        f"{arrow} {write_rate(limits[way])} of {write_rate(limits[f'max_{way}'])}"
        for arrow, way in (("↑", "up"), ("↓", "down"))
    ]
    return "   ".join((*ways, f"{limits['peers']} of {limits['max_peers']} peers"))


def _refusals(counts: Mapping[str, int]) -> Text:
    """What strangers sent that was not taken; at other peers' homes that is the first sign of an attack, or of a clock."""
    return Text("   ".join(f"{clean(name)} {count}" for name, count in counts.items()), "yellow")


def _round(entry: Status) -> Text:
    outcome = clean(entry["outcome"])
    partners = ", ".join(short_peer(partner) for partner in entry.get("partners") or ())
    detail = f"with {partners}, {seconds(entry.get('seconds'))}" if outcome == "applied" else entry.get("reason") or ""
    return _line(
        (f"{datetime.fromtimestamp(entry['time']).astimezone():%H:%M:%S} ", "dim"),
        f"step {entry.get('swarm_step', MISSING):>5} ",
        (f"fragment {entry['fragment']} ", "dim"),
        (outcome, _OUTCOME_STYLES.get(outcome, "")),
        (f" {clean(detail)}", "dim"),
    )


def _swarm_progress(known: Sequence[Status], nodes: int) -> RenderableType:
    trainers = [_trainer(status) for status in known]
    total = max((trainer.get("total_steps") or 0 for trainer in trainers), default=0)
    # The slowest node decides when the demo ends; one that is not up yet is at zero.
    step = min((trainer.get("swarm_step") or 0 for trainer in trainers), default=0) if len(known) == nodes else 0
    return _bar(step, total, f"{step} / {total or MISSING}")


def _swarm_table(statuses: Sequence[Status | None], width: int) -> Table:
    columns = [column for column in _COLUMNS if width >= column[1]]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", show_footer=True, footer_style="dim")
    known = [status for status in statuses if status is not None]
    for index, (name, _, _, total) in enumerate(columns):
        table.add_column(name, footer=total(known), justify="left" if index < 2 else "right", no_wrap=True)
    for index, status in enumerate(statuses):
        cells = [_node_phase(index, status)]
        cells += [Text(MISSING, "dim") if status is None else cell(status) for _, _, cell, _ in columns[1:]]
        table.add_row(*cells)
    return table


def _node_phase(index: int, status: Status | None) -> Text:
    phase = "starting" if status is None else clean(status["phase"])
    return Text.assemble(f"{index + 1} ", (phase, PHASE_STYLES.get(phase, "yellow")))


def _under_way(statuses: Sequence[Status | None]) -> Text:
    numbers = {status["peer_id"]: str(index + 1) for index, status in enumerate(statuses) if status is not None}
    meetings: dict[tuple[Any, ...], str] = {}
    for status in statuses:
        for exchange in (status or {}).get("exchanges_running") or ():
            peers = [status["peer_id"], *(exchange.get("partners") or ())] if status else []
            members = sorted(numbers.get(peer) or short_peer(peer) for peer in peers)
            # Every member tells of the same meeting: it is shown once.
            meetings[(exchange["fragment"], *members)] = f"{' ⇄ '.join(members)} fragment {exchange['fragment']}"
    text = "   ".join(meetings.values())
    return Text(f"exchanges {text}" if text else "no exchange under way", "cyan" if text else "dim", no_wrap=True,
                overflow="ellipsis")  # fmt: skip


def _trainer(status: Status) -> Status:
    return status.get("trainer") or {}


def _held_out_mean(known: Sequence[Status]) -> str:
    losses = [value for status in known if (value := _trainer(status).get("val_loss_last")) is not None]
    return f"mean {loss(sum(losses) / len(losses))}" if losses else ""


def _figure(key: str, show: Any) -> Any:
    return lambda status: Text(show(_trainer(status).get(key)))


def _nothing(known: Sequence[Status]) -> str:
    return ""


_COLUMNS: list[tuple[str, int, Any, Any]] = [
    # heading, least width of the panel, cell of one status, footer of all
    ("node", 0, None, _nothing),
    ("peer", 90, lambda status: Text(short_peer(status["peer_id"]), "dim"), _nothing),
    ("step", 0, _figure("swarm_step", lambda step: str(step or 0)), _nothing),
    ("loss", 76, _figure("loss", loss), _nothing),
    ("held-out", 0, _figure("val_loss_last", loss), _held_out_mean),
    ("tokens/s", 68, _figure("tokens_per_second", quantity),
     lambda known: quantity(sum(_trainer(status).get("tokens_per_second") or 0 for status in known))),
    ("met", 56, lambda status: Text(str((status.get("exchanges") or {}).get("completed", 0))), _nothing),
    ("missed", 100, lambda status: Text(str(_missed(status))), _nothing),
    ("sent", 56, lambda status: Text(size(status.get("bytes_sent"))),
     lambda known: size(sum(status.get("bytes_sent") or 0 for status in known))),
]  # fmt: skip


def _missed(status: Status) -> int:
    counts = status.get("exchanges") or {}
    return sum(counts.get(key, 0) for key in ("no_partner", "failed"))
