"""``status``, ``peers``, ``rounds``, ``wait``: look at the running node."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf
from typing import Annotated, Any, NoReturn

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NodeError, RetryLater
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.lines import progress_in_words
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_node.sync.records import ExchangeEnded
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

WATCH_EVERY = 1.0
"""Seconds between two looks that are shown, until Ctrl-C: no event tells every figure."""
ROUNDS_SHOWN = 4
"""Exchanges that the panel lists."""
POLL = 0.5
"""Seconds between two looks at the status: no event announces a single step."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, peers, rounds, wait):
        app.command()(command)


def status(
    again: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")
    ] = False,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Show what the node does, and why it waits if it does."""
    with ControlClient(find_home(home)) as client:
        if again:
            _show_again(client, json_)
        now, recent = client.status(), client.rounds(ROUNDS_SHOWN)
    if json_:
        show(now, True, "")
        return
    from rich.console import Console

    from lowcomm_node.status.panel import node_panel

    Console().print(node_panel(now, recent))


def _show_again(client: ControlClient, as_json: bool) -> NoReturn:
    """Until interrupted, or the node has gone: then NotRunning tells so."""
    from rich.live import Live

    from lowcomm_node.status.panel import node_panel

    if as_json or not sys.stdout.isatty():
        while True:
            now = client.status()
            show(now, as_json, progress_in_words(now))
            sys.stdout.flush()
            time.sleep(WATCH_EVERY)  # until Ctrl-C, or the node has gone
    with Live(auto_refresh=False) as live:
        while True:
            live.update(node_panel(client.status(), client.rounds(ROUNDS_SHOWN)), refresh=True)
            time.sleep(WATCH_EVERY)  # likewise


class Order(StrEnum):
    """What peers are listed by; the first is the best, or the largest."""

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


def peers(
    order: Annotated[Order | None, typer.Option("--sort", help="What they are listed by.")] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """List the peers that are alive, and how exchanges with them went."""
    with ControlClient(find_home(home)) as client:
        found = client.peers()
    if order is not None:
        found = sorted(found, key=_ORDERS[order])
    show(found, json_, peers_table(found, terminal_width()) if found else "no other peer is alive")


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
    """What a reader should know of a peer besides its figures."""
    told = [f"left out: {peer.held_against}"] if peer.left_out else []
    told += [f"not reached: {peer.route_reason}"] if peer.route_reason and not peer.route else []
    told += [f"last: {peer.last_reason}"] if peer.last_reason and not peer.left_out else []
    return [clean(one) for one in told]


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
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """List the last exchanges, the newest last."""
    with ControlClient(find_home(home)) as client:
        if story is not None:
            show(client.story(story), True, "")
            return
        found = client.rounds(limit)
    show(found, json_, rounds_table(found, terminal_width()) if found else "no exchange yet")


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


def wait(
    step: Annotated[int | None, typer.Option(help="Until this swarm step.")] = None,
    finished: Annotated[bool, typer.Option("--finished", help="Until the run is over.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds, at most.")] = 3600.0,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Wait until the node trains, reaches a step, or has finished."""
    deadline = time.monotonic() + timeout
    with ControlClient(find_home(home)) as client:
        while True:
            now = client.status()
            if _reached(now, step, finished):
                show(now, json_, f"{now.phase} at swarm step {now.trainer.swarm_step}")
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
