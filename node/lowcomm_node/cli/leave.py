"""``finish`` and ``stop``: end the running node."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.lines import contribution, tell_farewell
from lowcomm_node.status.model import Contribution, RunStatus
from lowcomm_node.storage.paths import Paths

DEADLINE = 60.0
"""Seconds to wait at least; a node with long steps or checkpoints says how long it needs."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(finish)
    app.command()(stop)


def finish(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Save, let running exchanges end, evaluate, say goodbye, leave."""
    _end(home, lambda client: client.finish(), json_, "finished, saved, said goodbye")


def stop(
    now: Annotated[bool, typer.Option("--now", help="Without saving.")] = False,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Save, give running exchanges 2 s, say goodbye, leave; --now does not save."""
    _end(
        home,
        lambda client: client.stop(now),
        json_,
        "stopped without saving" if now else "saved and stopped",
    )


def _end(home: Path | None, ask: Callable[[ControlClient], None], as_json: bool, text: str) -> None:
    """Ask the node to end, wait until it has, and show what it leaves behind."""
    folder = find_home(home)
    with ControlClient(folder) as client:
        last = client.status()

        def look() -> None:
            nonlocal last
            with suppress(NodeError):  # it ends just now
                last = client.status()

        ask(client)
        look()
        deadline = max(DEADLINE, last.leaving or 0.0)
        if not client.wait_ended(deadline, look):
            pid = client.endpoint.pid
            raise Unhealthy(
                f"The node (process {pid}) did not end within {deadline:.0f} s: end it with `kill "
                f"{pid}`."
            )
    given = _as_saved(contribution(last), folder, last.run)
    told = f"\n{tell_farewell(given, folder)}" if last.run is not None else ""
    show({"ended": True, **asdict(given)}, as_json, text + told)


def _as_saved(given: Contribution, home: Path, run: RunStatus | None) -> Contribution:
    """The same with the steps of the newest checkpoint: the last status may have missed some."""
    from lowcomm_node.storage.checkpoint import CheckpointStore

    folder = Paths(home).checkpoints(run.fingerprint) if run is not None else None
    newest = CheckpointStore(folder).latest() if folder is not None and folder.is_dir() else None
    if newest is None:
        return given
    steps, tokens = (newest.meta.get(name, getattr(given, name)) for name in ("steps", "tokens"))
    return replace(given, steps=steps, tokens=tokens, checkpoint=str(newest.path))
