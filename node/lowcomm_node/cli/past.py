"""``exchanges`` and ``logs``: what a node of this home has done, also when it runs no more."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.checkpoints import Run
from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.cli.watch import rounds_table, terminal_width
from lowcomm_node.errors import ConfigError
from lowcomm_node.journal.reader import Entry, Journal, Wanted
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.lines import event_in_words
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.units import clean, read_duration
from lowcomm_protocol.exchange.events import Outcome

FOLLOW_EVERY = 0.5
"""Seconds between two looks at the journal."""
Since = Annotated[
    str | None, typer.Option(help="Only of this last time, such as 30m or 2h.", metavar="TIME")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (exchanges, logs):
        app.command()(command)


def exchanges(
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=5000)] = 20,
    outcome: Annotated[Outcome | None, typer.Option(help="Only those that ended so.")] = None,
    peer: Annotated[str, typer.Option(help="Only with this peer, or a part of its id.")] = "",
    since: Since = None,
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """List exchanges of this home, the newest last; the node need not run."""
    wanted = Wanted(
        outcome=outcome.value if outcome is not None else None, peer=peer, since=_since(since)
    )
    found = _journal(home, run).exchanges(limit, wanted)
    show(found, json_, rounds_table(found, terminal_width()) if found else "no such exchange")


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it happens.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the past.", min=0, max=5000)
    ] = 50,
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Show what happened in this home, the newest last; the node need not run."""
    journal = _journal(home, run)
    entries = journal.last_notices(max(lines, 1))
    seen = entries[-1].number if entries else 0
    for entry in entries if lines else ():
        _print(entry, json_)
    while follow:
        for entry in journal.notices(seen):
            _print(entry, json_)
            seen = entry.number
        time.sleep(FOLLOW_EVERY)  # until Ctrl-C: no event tells that a file has grown


def _journal(home: Path | None, fingerprint: str | None) -> Journal:
    return Journal(journal_path(home, fingerprint))


def journal_path(home: Path | None, fingerprint: str | None) -> Path:
    """Of the named run, or of the one that was written down last. Raises ConfigError."""
    paths = Paths(find_home(home))
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


def _print(entry: Entry, as_json: bool) -> None:
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
    """Of one that a running node counts only."""
    why = f": {event.reason}" if event.reason else ""
    return clean(f"exchange of fragment {event.fragment} {event.outcome}{why}")
