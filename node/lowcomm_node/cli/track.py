"""``track``: a home's journal, followed into the tracker that its owner uses."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from lowcomm_node.cli.checkpoints import Run
from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, show
from lowcomm_node.cli.options import setting
from lowcomm_node.cli.past import journal_path


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(track)


def track(
    sink: Annotated[
        str, typer.Argument(help="tensorboard, wandb, trackio, or otlp.", metavar="SINK")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="A folder (tensorboard), a project (wandb, trackio), or the address of a "
            "collector (otlp). Default: tensorboard, lowcomm, or http://localhost:4318.",
            metavar="TARGET",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it happens.")] = False,
    name: Annotated[str | None, setting("name")] = None,
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Write what this home did into a tracker: losses, rates, bytes, or traces of exchanges.

    The node need not run, and is not touched. A second start goes on where
    the first ended.

    Example: lowcomm-node track tensorboard --to logs --follow
    """
    from lowcomm_node.journal.reader import Journal
    from lowcomm_node.storage.paths import Paths
    from lowcomm_node.tracking.follow import Tracker, Waits
    from lowcomm_node.tracking.home import tracked_of
    from lowcomm_node.tracking.position import PositionFile
    from lowcomm_node.tracking.sinks import SINKS

    SINKS.check(sink)
    path = journal_path(home, run)
    fingerprint, folder = path.parent.name, path.parents[2]
    settings = read_settings({"home": folder, "name": name}).settings
    written = SINKS[sink](to)
    tracked = tracked_of(folder, fingerprint, settings.name or "")
    file = PositionFile(Paths(folder).tracked(fingerprint), sink, written.target)
    tracker = Tracker(Journal(path), written, tracked, file)
    waits = Waits(sleep=time.sleep, warn=_warn) if follow else None
    if follow:
        _warn(f"{tracked.run}@{fingerprint} goes to {written.target}; Ctrl-C ends it")
    with _ended_by_signals(follow):
        tracker.run(waits)
    done = tracker.delivered
    told = {
        "sink": sink,
        "target": written.target,
        "run": fingerprint,
        "node": tracked.node,
        "points": done.points,
        "exchanges": done.exchanges,
    }
    what = f"{done.points} points" if written.takes == "points" else f"{done.exchanges} exchanges"
    show(told, json_, f"{what} of {tracked.run}@{fingerprint} written to {written.target}")


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _ended_by_signals(follow: bool) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM end a tracker that follows as its owner wants it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if not follow:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
