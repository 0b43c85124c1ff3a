"""``finish`` and ``stop``: end the running node."""

from contextlib import suppress
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.settings import find_home

DEADLINE = 60.0
"""Seconds to wait at least; a node of which steps or checkpoints take long tells how long it needs."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(finish)
    app.command()(stop)


def finish(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Let the running exchanges end, save, evaluate, say goodbye, leave."""
    with ControlClient(find_home(home)) as client:
        client.finish()
        _wait(client, json_, "finished, saved, said goodbye")


def stop(
    now: Annotated[bool, typer.Option("--now", help="Without saving.")] = False,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Give up the running exchanges, save, say goodbye, leave; --now does not save."""
    with ControlClient(find_home(home)) as client:
        client.stop(now)
        _wait(client, json_, "stopped without saving" if now else "saved and stopped")


def _wait(client: ControlClient, as_json: bool, text: str) -> None:
    deadline = DEADLINE
    with suppress(NodeError):  # it may be gone already
        deadline = max(DEADLINE, client.status().get("leaving") or 0.0)
    if not client.wait_ended(deadline):
        pid = client.endpoint.pid
        raise Unhealthy(f"The node (process {pid}) did not end within {deadline:.0f} s: end it with `kill {pid}`.")
    show({"ended": True}, as_json, text)
