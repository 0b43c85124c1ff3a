"""``status``, ``peers``, ``web``: look at the running node.
``exchanges``, ``logs``: what a node of this home has done, also when it runs no more.
``pause``, ``resume``, ``limits``, ``finish``: steer the running node.
"""

import json
import re
import shutil
import textwrap
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from lowcomm_node.cli.common import Here, command, newest, seconds_of, setting_options
from lowcomm_node.errors import NodeError, NotRunning, RetryLater, Unhealthy
from lowcomm_node.owner.settings import CHANGEABLE
from lowcomm_node.status import words
from lowcomm_node.status.events import Notice
from lowcomm_node.status.journal import Journal
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system import units
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.exchange.events import Outcome

Run = Annotated[
    str | None, typer.Option(help="Fingerprint of the run; default: the one used last.")
]
POLL = 0.2
"""Seconds between two looks at status or journal: no event announces a step, or a line of it."""
JOURNAL = "journal.db", "journal"
"""Its name in a folder of a run, and in messages."""
PAUSE_DEADLINE = 90.0
END_DEADLINE = 60.0
"""Minimum seconds to wait for the end; a node with long steps or checkpoints asks for more."""
_PAGE_LINK = """<!doctype html>
<meta charset="utf-8" />
<title>lowcomm node</title>
<meta http-equiv="refresh" content="0; url={link}" />
<a href="{link}">The page of the node</a>
"""


@command()
def status(
    here: Here,
    wait: Annotated[bool, typer.Option("--wait")] = False,
    step: int | None = None,
    finished: Annotated[bool, typer.Option("--finished")] = False,
    timeout: float = 3600.0,
    check: Annotated[bool, typer.Option("--check")] = False,
) -> None:
    """Show what the node does, how long it takes, and why it waits if it does.

    With --check: whether it answers, makes progress, and has heard from a peer within
    five minutes. A paused node is well.

    Args:
        wait: Wait until it trains.
        step: Wait until this swarm step.
        finished: Wait until the run is over.
        timeout: Seconds to wait, at most.
        check: Say in one line whether it is well, and why; exit code 4 if it is not.
    """
    if check:
        try:
            with here.node() as client:
                health = words.judge_health(client.status())
        except (NotRunning, Unhealthy) as error:
            health = words.Health(False, str(error))
        here.show(health, health.reason)
        raise typer.Exit(0 if health.healthy else Unhealthy.exit_code)
    from lowcomm_node.status.panel import EXCHANGES, node_panel

    with here.node() as client:
        if wait or finished or step is not None:
            now, place = _wait(client, step, finished, timeout)
            here.show(now, place)
        elif here.as_json:
            here.show(client.status(), "")
        else:
            Console().print(node_panel(client.status(), client.exchanges(EXCHANGES)))


def _wait(
    client: ControlClient, step: int | None, finished: bool, timeout: float
) -> tuple[Status, str]:
    """Wait until the node trains, reaches a step, or has finished; its status, and a line."""
    deadline = time.monotonic() + timeout
    while True:
        now = client.status()
        is_reached = now.phase == "finished" or (not finished and now.phase == "training")
        if step is not None:
            is_reached = (now.trainer.swarm_step or 0) >= step
        place = f"{now.phase} at swarm step {now.trainer.swarm_step}"
        if is_reached:
            return now, place
        if now.phase in ("finished", "left"):
            # Its clock stands still from now on: waiting on would only run into the timeout.
            raise NodeError(f"The node has {place}: it goes no further.")
        if time.monotonic() > deadline:
            why = now.waiting or f"it is {place}"
            raise RetryLater(f"Not reached within {timeout:.0f} s: {why}.")
        time.sleep(POLL)


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
def peers(here: Here) -> None:
    """List the peers that are alive, and how exchanges with them went."""
    with here.node() as client:
        alive = client.peers()
    here.show(alive, peers_table(alive, width()) if alive else "no other peer is alive")


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
    journal = Journal(newest(here.folder, run, *JOURNAL))
    ended = journal.exchanges(limit, earliest, outcome and outcome.value, peer)
    text = table(_EXCHANGE_COLUMNS, ended, lambda one: [one.reason], width())
    here.show(ended, text if ended else "no such exchange")


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
    journal = Journal(newest(here.folder, run, *JOURNAL))
    entries = journal.last_notices(max(lines, 1))
    seen = entries[-1].number if entries else 0
    for entry in entries if lines else ():
        _print(entry, here.as_json)
    while follow:  # until Ctrl-C
        for entry in journal.notices(seen):
            _print(entry, here.as_json)
            seen = entry.number
        time.sleep(POLL)


def _print(entry: Notice, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry.to_json()), flush=True)
        return
    event = entry.event
    line = words.event_in_words(event)
    if line is None and isinstance(event, ExchangeEnded):  # a running node only counts it
        why = f": {event.reason}" if event.reason else ""
        line = units.clean(f"exchange of fragment {event.fragment} {event.outcome}{why}")
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.time))
    print(f"{when}  {line or event.name}", flush=True)


# steering


@command()
def pause(here: Here, duration: Annotated[str | None, typer.Argument()] = None) -> None:
    """Save, then free the memory of training, on the GPU too. The node stays in its swarm, paused.

    A pause survives a restart of the node.

    Example: lowcomm-node pause 30m

    Args:
        duration: Such as 30m, 2h or 1h30m; without: until `resume`.
    """
    seconds = None if duration is None else seconds_of(duration)
    with here.node() as client:
        client.pause(seconds)
        deadline = time.monotonic() + PAUSE_DEADLINE
        while True:
            now = client.status()
            if now.trainer.pid is None and (now.phase == "paused" or now.run is None):
                break
            if now.pause is None:
                raise NodeError("The node does not pause: it was resumed meanwhile.")
            if time.monotonic() > deadline:
                raise Unhealthy(
                    f"The node has not paused within {PAUSE_DEADLINE:.0f} s: it is {now.phase}; "
                    "see its logs."
                )
            time.sleep(POLL)
    kept = f"saved at swarm step {now.checkpoint.step}" if now.checkpoint else "nothing to save yet"
    reason = now.pause.reason if now.pause else "paused"
    content = {"paused": True, "pause": now.pause, "checkpoint": now.checkpoint}
    here.show(content, f"{reason}; {kept}")


@command()
def resume(here: Here) -> None:
    """Train again, even against a schedule or another rule, until that rule next changes."""
    with here.node() as client:
        client.resume()
    here.show({"resumed": True}, "trains again, once the trainer has started")


@command(groups={"flags": setting_options(CHANGEABLE)})
def limits(here: Here, flags: dict[str, Any]) -> None:
    """Show the network limits of the running node and their use, or change them.

    A change holds at once. It is kept in config.toml of the home, so it survives
    a restart, unless an option of `join` or a variable overrides it.

    Example: lowcomm-node limits --max-up 5Mbit
    """
    with here.node() as client:
        now = client.limits({name: value for name, value in flags.items() if value is not None})
    rows = [
        ("up", units.write_rate(now.up), units.write_rate(now.max_up)),
        ("down", units.write_rate(now.down), units.write_rate(now.max_down)),
        ("peers", str(now.peers), str(now.max_peers)),
    ]
    here.show(now, "\n".join(f"{name:<7}{used:>10} of {most}" for name, used, most in rows))


@command()
def finish(
    here: Here,
    now: Annotated[int, typer.Option("--now", count=True, metavar="", show_default=False)] = 0,
) -> None:
    """Let running exchanges end, save, evaluate, say goodbye, leave.

    Args:
        now: Do not wait for exchanges; twice: do not save.
    """
    with here.node() as client:
        last = client.status()
        if now:
            client.stop(now > 1)
        else:
            client.finish()

        def look() -> None:
            nonlocal last
            with suppress(NodeError):  # it ends just now
                last = client.status()

        look()
        deadline = max(END_DEADLINE, last.leaving or 0.0)
        if not client.wait_ended(deadline, look):
            pid = client.endpoint.pid
            raise Unhealthy(
                f"The node (process {pid}) did not end within {deadline:.0f} s: end it with `kill "
                f"{pid}`."
            )
    given, home = words.contribution(last), here.folder
    text = ("finished, saved, said goodbye", "saved and stopped", "stopped without saving")[
        min(now, 2)
    ]
    if last.run is not None:
        from lowcomm_node.storage.checkpoint import CheckpointStore

        # The last status may have missed some steps: the newest checkpoint has all.
        saved = Paths(home).checkpoints(last.run.fingerprint)
        if saved.is_dir() and (newest := CheckpointStore(saved).latest()) is not None:
            steps, tokens = newest.meta.get("steps"), newest.meta.get("tokens")
            known = {"steps": steps, "tokens": tokens, "checkpoint": str(newest.path)}
            given = replace(given, **{key: one for key, one in known.items() if one is not None})
        text += f"\n{words.tell_farewell(given, home)}"
    here.show({"ended": True, **asdict(given)}, text)


# tables

Columns = Sequence[tuple[str, Callable[[Any], str], int]]
"""Heading, cell, and how soon a column is left out: the larger, the sooner; 0: never."""
_PEER_COLUMNS: Columns = (
    ("peer", lambda peer: units.short_peer(peer.peer_id), 0),
    ("phase", lambda peer: peer.phase, 0),
    ("step", lambda peer: str(peer.swarm_step), 0),
    ("tokens/s", lambda peer: units.quantity(peer.tokens_per_second), 3),
    # The address of a direct route can be long; it is in ``--json``.
    ("route", lambda peer: re.sub("(?s)^direct .*", "direct", peer.route or units.MISSING), 1),
    ("round trip", lambda peer: units.milliseconds(peer.round_trip), 4),
    ("up", lambda peer: units.rate(peer.rate_up), 5),
    ("down", lambda peer: units.rate(peer.rate_down), 5),
    ("seen", lambda peer: units.seconds(peer.age), 2),
    ("done", lambda peer: str(peer.completed), 0),
    ("refused", lambda peer: str(peer.refused), 1),
    ("failed", lambda peer: str(peer.failed), 0),
    ("score", lambda peer: f"{peer.score:.2f}", 0),
    ("release", lambda peer: peer.release or units.MISSING, 6),
)
_EXCHANGE_COLUMNS: Columns = (
    ("time", lambda ended: time.strftime("%H:%M:%S", time.localtime(ended.time)), 0),
    ("step", lambda ended: str(ended.swarm_step), 0),
    ("fragment", lambda ended: str(ended.fragment), 0),
    ("outcome", lambda ended: ended.outcome, 0),
    ("with", lambda ended: " ".join(map(units.short_peer, ended.partners)) or units.MISSING, 1),
    ("sent", lambda ended: units.size(ended.bytes_sent), 3),
    ("received", lambda ended: units.size(ended.bytes_received), 3),
    ("took", lambda ended: units.seconds(ended.seconds), 2),
)


def peers_table(alive: Sequence[PeerStatus], width: int) -> str:
    """Peers as a table, with reasons on lines of their own."""

    def notes(peer: PeerStatus) -> Sequence[str]:
        left_out = f"left out: {peer.held_against}" if peer.left_out else ""
        is_lost = peer.route_reason and not peer.route
        last = f"last: {peer.last_reason}" if peer.last_reason and not peer.left_out else ""
        return left_out, f"not reached: {peer.route_reason}" if is_lost else "", last

    return table(_PEER_COLUMNS, alive, notes, width)


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def table(
    columns: Columns, entries: Sequence[Any], notes: Callable[[Any], Sequence[str]], width: int
) -> str:
    """A table of at most ``width`` columns of text, if what is never left out fits.

    ``notes``: lines below the row of an entry.
    """
    rows = [[name for name, _, _ in columns]]
    rows += [[units.clean(cell(entry)) for _, cell, _ in columns] for entry in entries]
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
                units.clean(note), max(20, width), initial_indent="  ", subsequent_indent="    "
            )
    return "\n".join(lines)
