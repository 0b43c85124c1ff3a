"""``status``, ``peers``, ``rounds``, ``wait``, ``web``, ``healthy``: look at the running node.
``exchanges`` and ``logs``: what a node of this home has done, also when it runs no more.
"""

import json
import shutil
import sys
import textwrap
import time
import webbrowser
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lowcomm_node.cli.common import Here, command
from lowcomm_node.errors import ConfigError, NodeError, NotRunning, RetryLater, Unhealthy
from lowcomm_node.status.journal import Journal, JournalEntry
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_node.status.words import Health, event_in_words, judge_health, progress_in_words
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.units import (
    MISSING,
    clean,
    milliseconds,
    quantity,
    rate,
    read_duration,
    seconds,
    short_peer,
    size,
)
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.exchange.events import Outcome

Run = Annotated[
    str | None, typer.Option(help="Fingerprint of the run; default: the one used last.")
]
Since = Annotated[
    str | None, typer.Option(help="Only of this last time, such as 30m or 2h.", metavar="TIME")
]

WATCH_EVERY = 1.0
"""Seconds between two looks that are shown, until Ctrl-C: no event tells every figure."""

ROUNDS_SHOWN = 4
"""Exchanges that the panel lists."""

POLL = 0.5
"""Seconds between two looks at the status: no event announces a single step."""

FOLLOW_EVERY = 0.5
"""Seconds between two looks at the journal."""

_LEADS_THERE = """<!doctype html>
<meta charset="utf-8" />
<title>lowcomm node</title>
<meta http-equiv="refresh" content="0; url={link}" />
<a href="{link}">The page of the node</a>
"""


@command()
def status(
    again: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")
    ] = False,
    *,
    here: Here,
) -> None:
    """Show what the node does, and why it waits if it does."""
    with here.node() as client:
        if again:
            _show_again(client, here)
        now, recent = client.status(), client.rounds(ROUNDS_SHOWN)
    if here.as_json:
        here.show(now, "")
        return
    from rich.console import Console

    from lowcomm_node.status.panel import node_panel

    Console().print(node_panel(now, recent))


def _show_again(client: ControlClient, here: Here) -> NoReturn:
    """Until interrupted, or the node has gone: then NotRunning tells so."""
    from rich.live import Live

    from lowcomm_node.status.panel import node_panel

    if here.as_json or not sys.stdout.isatty():
        while True:
            now = client.status()
            here.show(now, progress_in_words(now))
            sys.stdout.flush()
            time.sleep(WATCH_EVERY)  # until Ctrl-C, or the node has gone
    with Live(auto_refresh=False) as live:
        while True:
            live.update(node_panel(client.status(), client.rounds(ROUNDS_SHOWN)), refresh=True)
            time.sleep(WATCH_EVERY)  # likewise


@command()
def healthy(here: Here) -> None:
    """Say in one line whether the node is well, and why. Exit code: 0, or 4 if it is not.

    A node is not well if it does not answer, makes no progress for too long,
    or has heard from no peer for five minutes. A paused node is well.
    """
    found = _look(here)
    here.show({"healthy": found.healthy, "reason": found.reason}, found.reason)
    if not found.healthy:
        raise typer.Exit(Unhealthy.exit_code)


def _look(here: Here) -> Health:
    try:
        with here.node() as client:
            return judge_health(client.status())
    except (NotRunning, Unhealthy) as error:
        return Health(False, str(error))


@command()
def web(
    open_: Annotated[
        bool, typer.Option("--open/--print", help="Open it in a browser, or only print the link.")
    ] = True,
    *,
    here: Here,
) -> None:
    """Show the node in a browser: loss, exchanges, peers, limits. The link works once, on this
    machine.
    """
    folder = here.folder
    with ControlClient(folder) as client:
        link = client.link()
    here.show({"link": link}, link)
    if open_ and not here.as_json:
        from lowcomm_node.storage.files import write_atomic  # Windows has no fcntl

        # Every user of the machine can read the command line of the browser, and nobody else this
        # file with the key.
        page = Paths(folder).page_link
        write_atomic(page, _LEADS_THERE.format(link=link).encode(), 0o600)
        webbrowser.open(page.as_uri())


@command()
def wait(
    step: Annotated[int | None, typer.Option(help="Until this swarm step.")] = None,
    finished: Annotated[bool, typer.Option("--finished", help="Until the run is over.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds, at most.")] = 3600.0,
    *,
    here: Here,
) -> None:
    """Wait until the node trains, reaches a step, or has finished."""
    deadline = time.monotonic() + timeout
    with here.node() as client:
        while True:
            now = client.status()
            if _reached(now, step, finished):
                here.show(now, f"{now.phase} at swarm step {now.trainer.swarm_step}")
                return
            if now.phase in ("finished", "left"):
                # Its clock stands still from now on: waiting on would only run into the timeout.
                reached = now.trainer.swarm_step
                raise NodeError(
                    f"The node has {now.phase} at swarm step {reached}: it goes no further."
                )
            if time.monotonic() > deadline:
                why = now.waiting or f"it is {now.phase} at swarm step {now.trainer.swarm_step}"
                raise RetryLater(f"Not reached within {timeout:.0f} s: {why}.")
            time.sleep(POLL)


def _reached(now: Status, step: int | None, finished: bool) -> bool:
    if step is not None:
        return (now.trainer.swarm_step or 0) >= step
    return now.phase == "finished" or (not finished and now.phase == "training")


class Order(StrEnum):
    """Orders of a list of peers; the first is the best, or the largest."""

    PEER = "peer"
    STEP = "step"
    TOKENS = "tokens"
    ROUND_TRIP = "round-trip"
    RATE = "rate"
    DONE = "done"
    FAILED = "failed"
    SCORE = "score"
    AGE = "seen"


_ORDERS: dict[Order, Callable[[PeerStatus], Any]] = {
    Order.PEER: lambda peer: short_peer(peer.peer_id),
    Order.STEP: lambda peer: -peer.swarm_step,
    Order.TOKENS: lambda peer: -peer.tokens_per_second,
    Order.ROUND_TRIP: lambda peer: inf if peer.round_trip is None else peer.round_trip,
    Order.RATE: lambda peer: -((peer.rate_up or 0.0) + (peer.rate_down or 0.0)),
    Order.DONE: lambda peer: -peer.completed,
    Order.FAILED: lambda peer: -peer.failed,
    Order.SCORE: lambda peer: -peer.score,
    Order.AGE: lambda peer: peer.age,
}


@command()
def peers(
    order: Annotated[Order | None, typer.Option("--sort", help="What they are listed by.")] = None,
    *,
    here: Here,
) -> None:
    """List the peers that are alive, and how exchanges with them went."""
    with here.node() as client:
        found = client.peers()
    if order is not None:
        found = sorted(found, key=_ORDERS[order])
    here.show(found, peers_table(found, terminal_width()) if found else "no other peer is alive")


@command()
def rounds(
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=200)] = 20,
    story: Annotated[
        int | None,
        typer.Option(
            help="Instead, tell in JSON how the N-th last exchange went, for a report.",
            metavar="N",
            min=1,
        ),
    ] = None,
    *,
    here: Here,
) -> None:
    """List the last exchanges, the newest last."""
    with here.node() as client:
        if story is not None:
            print(json.dumps(client.story(story)))
            return
        found = client.rounds(limit)
    here.show(found, rounds_table(found, terminal_width()) if found else "no exchange yet")


@command()
def exchanges(
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=5000)] = 20,
    outcome: Annotated[Outcome | None, typer.Option(help="Only those that ended so.")] = None,
    peer: Annotated[str, typer.Option(help="Only with this peer, or a part of its id.")] = "",
    since: Since = None,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """List exchanges of this home, the newest last; the node need not run."""
    journal = Journal(journal_path(here, run))
    found = journal.exchanges(limit, _since(since), outcome and outcome.value, peer)
    here.show(found, rounds_table(found, terminal_width()) if found else "no such exchange")


@command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it happens.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the past.", min=0, max=5000)
    ] = 50,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Show what happened in this home, the newest last; the node need not run."""
    journal = Journal(journal_path(here, run))
    entries = journal.last_notices(max(lines, 1))
    seen = entries[-1].number if entries else 0
    for entry in entries if lines else ():
        _print(entry, here.as_json)
    while follow:
        for entry in journal.notices(seen):
            _print(entry, here.as_json)
            seen = entry.number
        time.sleep(FOLLOW_EVERY)  # until Ctrl-C: no event tells that a file has grown


def journal_path(here: Here, fingerprint: str | None) -> Path:
    """Journal of the named run, or of the one written last. Raises ConfigError."""
    paths = Paths(here.folder)
    runs = [folder.name for folder in paths.runs.glob(f"{fingerprint or ''}*") if folder.is_dir()]
    found = [path for path in map(paths.journal, runs) if path.exists()]
    if not found:
        whose = f" of run {fingerprint}" if fingerprint else ""
        raise ConfigError(f"{paths.home} holds no journal{whose}: see --home.")
    return max(found, key=lambda path: path.stat().st_mtime)


def _since(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        return time.time() - read_duration(text)
    except ValueError as error:
        raise ConfigError(f"--since: {error}.") from None


def _print(entry: JournalEntry, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry.notice.to_json()), flush=True)
        return
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.notice.time))
    event = entry.notice.event
    words = event_in_words(event)
    if words is None and isinstance(event, ExchangeEnded):
        words = _exchange_in_words(event)
    print(f"{when}  {words or event.name}", flush=True)


def _exchange_in_words(event: ExchangeEnded) -> str:
    """An exchange as a line: a running node only counts it."""
    why = f": {event.reason}" if event.reason else ""
    return clean(f"exchange of fragment {event.fragment} {event.outcome}{why}")


# tables


def peers_table(found: Sequence[PeerStatus], width: int) -> str:
    """Peers as a table of at most ``width`` columns, with reasons on lines of their own.

    What matters least is left out first.
    """
    columns = (
        # heading, what it shows, how soon it is left out (0: never)
        ("peer", lambda peer: short_peer(peer.peer_id), 0),
        ("phase", lambda peer: clean(peer.phase), 0),
        ("step", lambda peer: str(peer.swarm_step), 0),
        ("tokens/s", lambda peer: quantity(peer.tokens_per_second), 3),
        ("route", lambda peer: _route(peer.route), 1),
        ("round trip", lambda peer: milliseconds(peer.round_trip), 4),
        ("up", lambda peer: rate(peer.rate_up), 5),
        ("down", lambda peer: rate(peer.rate_down), 5),
        ("seen", lambda peer: seconds(peer.age), 2),
        ("done", lambda peer: str(peer.completed), 0),
        ("refused", lambda peer: str(peer.refused), 1),
        ("failed", lambda peer: str(peer.failed), 0),
        ("score", lambda peer: f"{peer.score:.2f}", 0),
        ("release", lambda peer: clean(peer.release or MISSING), 6),
    )
    notes = [_notes(peer) for peer in found]
    rows = [[cell(peer) for _, cell, _ in columns] for peer in found]
    return table(
        [name for name, _, _ in columns], rows, [sooner for _, _, sooner in columns], notes, width
    )


def _route(route: str | None) -> str:
    """The kind of a route; its address, which can be long, is in ``--json``."""
    name = clean(route or MISSING)
    return "direct" if name.startswith("direct ") else name


def _notes(peer: PeerStatus) -> list[str]:
    """Notes on a peer besides its figures."""
    told = [f"left out: {peer.held_against}"] if peer.left_out else []
    told += [f"not reached: {peer.route_reason}"] if peer.route_reason and not peer.route else []
    told += [f"last: {peer.last_reason}"] if peer.last_reason and not peer.left_out else []
    return [clean(one) for one in told]


def rounds_table(found: Sequence[ExchangeEnded], width: int) -> str:
    """Exchanges as a table; the reason why one was not applied has its own line."""
    columns = ("time", "step", "fragment", "outcome", "with", "sent", "received", "took")
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(entry.time)),
            str(entry.swarm_step),
            str(entry.fragment),
            clean(entry.outcome),
            " ".join(short_peer(peer) for peer in entry.partners) or MISSING,
            size(entry.bytes_sent),
            size(entry.bytes_received),
            seconds(entry.seconds),
        ]
        for entry in found
    ]
    notes = [[clean(entry.reason)] if entry.reason else [] for entry in found]
    return table(columns, rows, (0, 0, 0, 0, 1, 3, 3, 2), notes, width)


def terminal_width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    sooner: Sequence[int],
    notes: Sequence[Sequence[str]],
    width: int,
) -> str:
    """A table of at most ``width`` characters a line, if the columns that always stay fit.

    ``sooner``: the larger, the sooner that column is left out; 0 for never. ``notes``: lines below
    each row.
    """
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    kept = list(range(len(columns)))
    while sum(widths[i] + 2 for i in kept) - 2 > width and any(sooner[i] for i in kept):
        kept.remove(max((i for i in kept if sooner[i]), key=lambda i: (sooner[i], i)))
    lines: list[str] = []
    for row, told in zip([columns, *rows], [(), *notes], strict=True):
        lines.append("  ".join(row[i].ljust(widths[i]) for i in kept).rstrip())
        for note in told:
            lines += textwrap.wrap(
                note, max(20, width), initial_indent="  ", subsequent_indent="    "
            )
    return "\n".join(lines)
