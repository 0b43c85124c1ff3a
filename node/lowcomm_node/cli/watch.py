"""``status``, ``peers``, ``rounds``, ``wait``: look at the running node."""

import time
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NodeError, RetryLater
from lowcomm_node.formatting import MISSING, clean, milliseconds, quantity, rate, seconds, short_peer, size
from lowcomm_node.settings import find_home

POLL = 0.5
"""Seconds between two looks at the status: events do not tell of single steps."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, peers, rounds, wait):
        app.command()(command)


def status(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Show what the node does, and why it waits if it does."""
    with ControlClient(find_home(home)) as client:
        now, recent = client.status(), client.rounds(4)
    if json_:
        show(now, True, "")
        return
    from rich.console import Console

    from lowcomm_node.panel import node_panel

    Console().print(node_panel(now, recent))


def peers(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """List the peers that are alive, and how exchanges with them went."""
    with ControlClient(find_home(home)) as client:
        found = client.peers()
    columns = (
        *("peer", "phase", "step", "tokens/s", "route", "round trip", "up", "down"),
        *("seen", "done", "refused", "failed", "score", "last reason"),
    )
    rows = [
        (
            short_peer(peer["peer_id"]),
            peer["phase"],
            str(peer["swarm_step"]),
            quantity(peer["tokens_per_second"]),
            clean(peer["route"] or peer["route_reason"] or MISSING),
            milliseconds(peer["round_trip"]),
            rate(peer["rate_up"]),
            rate(peer["rate_down"]),
            f"{seconds(peer['age'])} ago",
            str(peer["completed"]),
            str(peer["refused"]),
            str(peer["failed"]),
            f"{peer['score']:.2f}",
            clean(f"left out: {peer['held_against']}" if peer["left_out"] else peer["last_reason"]),
        )
        for peer in found
    ]
    show(found, json_, _table(columns, rows) if rows else "no other peer is alive")


def rounds(
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=200)] = 20,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """List the last exchanges, the newest last."""
    with ControlClient(find_home(home)) as client:
        found = client.rounds(limit)
    columns = ("time", "step", "fragment", "outcome", "with", "sent", "received", "took", "reason")
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(entry["time"])),
            str(entry["swarm_step"]),
            str(entry["fragment"]),
            entry["outcome"],
            " ".join(short_peer(peer) for peer in entry["partners"]),
            size(entry["bytes_sent"]),
            size(entry["bytes_received"]),
            seconds(entry["seconds"]),
            clean(entry["reason"]),
        )
        for entry in found
    ]
    show(found, json_, _table(columns, rows) if rows else "no exchange yet")


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
                show(now, json_, f"{now['phase']} at swarm step {now['trainer']['swarm_step']}")
                return
            if now["phase"] in ("finished", "left"):
                # Its clock stands still from now on: waiting on would only run into the timeout.
                reached = now["trainer"]["swarm_step"]
                raise NodeError(f"The node has {now['phase']} at swarm step {reached}: it goes no further.")
            if time.monotonic() > deadline:
                why = now["waiting"] or f"it is {now['phase']} at swarm step {now['trainer']['swarm_step']}"
                raise RetryLater(f"Not reached within {timeout:.0f} s: {why}.")
            time.sleep(POLL)


def _reached(now: dict[str, Any], step: int | None, finished: bool) -> bool:
    if step is not None:
        return (now["trainer"]["swarm_step"] or 0) >= step
    return now["phase"] == "finished" or (not finished and now["phase"] == "training")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    )
