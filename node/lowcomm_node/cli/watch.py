"""``status``, ``peers``, ``rounds``, ``wait``, ``web``, ``healthy``: look at the running node.
``exchanges`` and ``logs``: what a node of this home has done, also when it runs no more.
"""

import json
import re
import shutil
import sys
import textwrap
import time
import webbrowser
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from lowcomm_node.cli.common import Here, command, newest, seconds_of
from lowcomm_node.errors import NodeError, NotRunning, RetryLater, Unhealthy
from lowcomm_node.status.journal import Journal, JournalEntry
from lowcomm_node.status.model import PeerStatus
from lowcomm_node.status.words import Health, event_in_words, judge_health, progress_in_words
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.units import (
    MISSING,
    clean,
    milliseconds,
    quantity,
    rate,
    seconds,
    short_peer,
    size,
)
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.exchange.events import Outcome

Run = Annotated[
    str | None, typer.Option(help="Fingerprint of the run; default: the one used last.")
]
WATCH_EVERY = 1.0
"""Seconds between two looks that are shown: no event carries every figure."""
ROUNDS_SHOWN = 4
"""Exchanges in the panel."""
POLL = 0.5
"""Seconds between two looks at status or journal: no event announces a step, or a line of it."""
_PAGE_LINK = """<!doctype html>
<meta charset="utf-8" />
<title>lowcomm node</title>
<meta http-equiv="refresh" content="0; url={link}" />
<a href="{link}">The page of the node</a>
"""


@command()
def status(here: Here, again: Annotated[bool, typer.Option("--watch", "-w")] = False) -> None:
    """Show what the node does, and why it waits if it does.

    Args:
        again: Show it again and again, until Ctrl-C.
    """
    from lowcomm_node.status.panel import node_panel

    def panel() -> RenderableType:
        return node_panel(client.status(), client.rounds(ROUNDS_SHOWN))

    with here.node() as client:
        if not again:
            if here.as_json:
                here.show(client.status(), "")
            else:
                Console().print(panel())
            return
        # Until Ctrl-C, or NotRunning where the node has gone.
        if here.as_json or not sys.stdout.isatty():
            while True:
                now = client.status()
                here.show(now, progress_in_words(now))
                sys.stdout.flush()
                time.sleep(WATCH_EVERY)
        with Live(auto_refresh=False) as live:
            while True:
                live.update(panel(), refresh=True)
                time.sleep(WATCH_EVERY)


@command()
def healthy(here: Here) -> None:
    """Say in one line whether the node is well, and why. Exit code: 0, or 4 if it is not.

    A node is not well if it does not answer, makes no progress for too long,
    or has heard from no peer for five minutes. A paused node is well.
    """
    try:
        with here.node() as client:
            health = judge_health(client.status())
    except (NotRunning, Unhealthy) as error:
        health = Health(False, str(error))
    here.show({"healthy": health.healthy, "reason": health.reason}, health.reason)
    if not health.healthy:
        raise typer.Exit(Unhealthy.exit_code)


@command()
def web(here: Here, open_: Annotated[bool, typer.Option("--open/--print")] = True) -> None:
    """Show the node in a browser: loss, exchanges, peers, limits. The link works once, on this
    machine.

    Args:
        open_: Open it in a browser, or only print the link.
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
        write_atomic(page, _PAGE_LINK.format(link=link).encode(), 0o600)
        webbrowser.open(page.as_uri())


@command()
def wait(
    here: Here,
    step: int | None = None,
    finished: Annotated[bool, typer.Option("--finished")] = False,
    timeout: float = 3600.0,
) -> None:
    """Wait until the node trains, reaches a step, or has finished.

    Args:
        step: Until this swarm step.
        finished: Until the run is over.
        timeout: Seconds, at most.
    """
    deadline = time.monotonic() + timeout
    with here.node() as client:
        while True:
            now = client.status()
            place = f"{now.phase} at swarm step {now.trainer.swarm_step}"
            is_reached = now.phase == "finished" or (not finished and now.phase == "training")
            if step is not None:
                is_reached = (now.trainer.swarm_step or 0) >= step
            if is_reached:
                here.show(now, place)
                return
            if now.phase in ("finished", "left"):
                # Its clock stands still from now on: waiting on would only run into the timeout.
                raise NodeError(f"The node has {place}: it goes no further.")
            if time.monotonic() > deadline:
                why = now.waiting or f"it is {place}"
                raise RetryLater(f"Not reached within {timeout:.0f} s: {why}.")
            time.sleep(POLL)


_ORDERS: dict[str, Callable[[PeerStatus], Any]] = {
    "peer": lambda peer: short_peer(peer.peer_id),
    "step": lambda peer: -peer.swarm_step,
    "tokens": lambda peer: -peer.tokens_per_second,
    "round-trip": lambda peer: inf if peer.round_trip is None else peer.round_trip,
    "rate": lambda peer: -((peer.rate_up or 0.0) + (peer.rate_down or 0.0)),
    "done": lambda peer: -peer.completed,
    "failed": lambda peer: -peer.failed,
    "score": lambda peer: -peer.score,
    "seen": lambda peer: peer.age,
}
"""Keys by which peers are sorted; the best, or the largest, comes first."""
Order = Literal["peer", "step", "tokens", "round-trip", "rate", "done", "failed", "score", "seen"]


@command()
def peers(here: Here, order: Annotated[Order | None, typer.Option("--sort")] = None) -> None:
    """List the peers that are alive, and how exchanges with them went.

    Args:
        order: What they are listed by.
    """
    with here.node() as client:
        alive = client.peers()
    if order is not None:
        alive = sorted(alive, key=_ORDERS[order])
    here.show(alive, peers_table(alive, _width()) if alive else "no other peer is alive")


@command()
def rounds(
    here: Here,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    story: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
) -> None:
    """List the last exchanges, the newest last.

    Args:
        limit: How many, at most.
        story: Instead, tell in JSON how the N-th last exchange went, for a report.
    """
    with here.node() as client:
        if story is not None:
            print(json.dumps(client.story(story)))
            return
        ended = client.rounds(limit)
    here.show(ended, rounds_table(ended, _width()) if ended else "no exchange yet")


@command()
def exchanges(
    here: Here,
    limit: Annotated[int, typer.Option(min=1, max=5000)] = 20,
    outcome: Outcome | None = None,
    peer: str = "",
    since: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    run: Run = None,
) -> None:
    """List exchanges of this home, the newest last; the node need not run.

    Args:
        limit: How many, at most.
        outcome: Only those that ended so.
        peer: Only with this peer, or a part of its id.
        since: Only of this last time, such as 30m or 2h.
    """
    earliest = time.time() - seconds_of(since, "--since: ") if since is not None else 0.0
    journal = Journal(journal_path(here, run))
    ended = journal.exchanges(limit, earliest, outcome and outcome.value, peer)
    here.show(ended, rounds_table(ended, _width()) if ended else "no such exchange")


@command()
def logs(
    here: Here,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=5000)] = 50,
    run: Run = None,
) -> None:
    """Show what happened in this home, the newest last; the node need not run.

    Args:
        follow: Go on as it happens.
        lines: How many of the past.
    """
    journal = Journal(journal_path(here, run))
    entries = journal.last_notices(max(lines, 1))
    seen = entries[-1].number if entries else 0
    for entry in entries if lines else ():
        _print(entry, here.as_json)
    while follow:  # until Ctrl-C
        for entry in journal.notices(seen):
            _print(entry, here.as_json)
            seen = entry.number
        time.sleep(POLL)


def journal_path(here: Here, fingerprint: str | None) -> Path:
    """Journal of the named run, or of the run written last. Raises ConfigError."""
    return newest(here.folder, fingerprint, "journal.db", "journal")


def _print(entry: JournalEntry, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry.notice.to_json()), flush=True)
        return
    event = entry.notice.event
    words = event_in_words(event)
    if words is None and isinstance(event, ExchangeEnded):  # a running node only counts it
        why = f": {event.reason}" if event.reason else ""
        words = clean(f"exchange of fragment {event.fragment} {event.outcome}{why}")
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.notice.time))
    print(f"{when}  {words or event.name}", flush=True)


# tables

Columns = Sequence[tuple[str, Callable[[Any], str], int]]
"""Heading, cell, and how soon a column is left out: the larger, the sooner; 0: never."""
_PEER_COLUMNS: Columns = (
    ("peer", lambda peer: short_peer(peer.peer_id), 0),
    ("phase", lambda peer: peer.phase, 0),
    ("step", lambda peer: str(peer.swarm_step), 0),
    ("tokens/s", lambda peer: quantity(peer.tokens_per_second), 3),
    # The address of a direct route can be long; it is in ``--json``.
    ("route", lambda peer: re.sub("^direct .*", "direct", clean(peer.route or MISSING)), 1),
    ("round trip", lambda peer: milliseconds(peer.round_trip), 4),
    ("up", lambda peer: rate(peer.rate_up), 5),
    ("down", lambda peer: rate(peer.rate_down), 5),
    ("seen", lambda peer: seconds(peer.age), 2),
    ("done", lambda peer: str(peer.completed), 0),
    ("refused", lambda peer: str(peer.refused), 1),
    ("failed", lambda peer: str(peer.failed), 0),
    ("score", lambda peer: f"{peer.score:.2f}", 0),
    ("release", lambda peer: peer.release or MISSING, 6),
)
_EXCHANGE_COLUMNS: Columns = (
    ("time", lambda ended: time.strftime("%H:%M:%S", time.localtime(ended.time)), 0),
    ("step", lambda ended: str(ended.swarm_step), 0),
    ("fragment", lambda ended: str(ended.fragment), 0),
    ("outcome", lambda ended: ended.outcome, 0),
    ("with", lambda ended: " ".join(map(short_peer, ended.partners)) or MISSING, 1),
    ("sent", lambda ended: size(ended.bytes_sent), 3),
    ("received", lambda ended: size(ended.bytes_received), 3),
    ("took", lambda ended: seconds(ended.seconds), 2),
)


def peers_table(alive: Sequence[PeerStatus], width: int) -> str:
    """Peers as a table, with reasons on lines of their own."""

    def notes(peer: PeerStatus) -> Sequence[str]:
        left_out = f"left out: {peer.held_against}" if peer.left_out else ""
        is_lost = peer.route_reason and not peer.route
        last = f"last: {peer.last_reason}" if peer.last_reason and not peer.left_out else ""
        return left_out, f"not reached: {peer.route_reason}" if is_lost else "", last

    return _table(_PEER_COLUMNS, alive, notes, width)


def rounds_table(ended: Sequence[ExchangeEnded], width: int) -> str:
    """Exchanges as a table; why one was not applied has its own line."""
    return _table(_EXCHANGE_COLUMNS, ended, lambda one: [one.reason], width)


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _table(
    columns: Columns, entries: Sequence[Any], notes: Callable[[Any], Sequence[str]], width: int
) -> str:
    """A table of at most ``width`` columns of text, if what is never left out fits.

    ``notes``: lines below the row of an entry.
    """
    rows = [[name for name, _, _ in columns]]
    rows += [[clean(cell(entry)) for _, cell, _ in columns] for entry in entries]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sooner = [order for _, _, order in columns]
    kept = list(range(len(columns)))
    while sum(widths[i] + 2 for i in kept) - 2 > width and any(sooner[i] for i in kept):
        kept.remove(max((i for i in kept if sooner[i]), key=lambda i: (sooner[i], i)))
    lines: list[str] = []
    for row, below in zip(rows, [(), *map(notes, entries)], strict=True):
        lines.append("  ".join(row[i].ljust(widths[i]) for i in kept).rstrip())
        for note in filter(None, below):
            lines += textwrap.wrap(
                clean(note), max(20, width), initial_indent="  ", subsequent_indent="    "
            )
    return "\n".join(lines)
