"""``pause`` and ``resume``: the machine is needed for something else for a while."""

import time
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import ConfigError, NodeError, Unhealthy
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.model import Status
from lowcomm_node.system.units import read_duration

DEADLINE = 90.0
POLL = 0.2
"""Seconds between two looks at the status: no event says that the trainer's process ended."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(pause)
    app.command()(resume)


def pause(
    duration: Annotated[
        str | None, typer.Argument(help="Such as 30m, 2h or 1h30m; without: until `resume`.")
    ] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Save, then free the memory of training, on the GPU too. The node stays in its swarm, paused.

    A pause survives a restart of the node.

    Example: lowcomm-node pause 30m
    """
    try:
        seconds = None if duration is None else read_duration(duration)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    with ControlClient(find_home(home)) as client:
        client.pause(seconds)
        now = _wait_paused(client)
    kept = f"saved at swarm step {now.checkpoint.step}" if now.checkpoint else "nothing to save yet"
    told = now.pause.reason if now.pause else "paused"
    show(
        {"paused": True, "pause": now.pause, "checkpoint": now.checkpoint}, json_, f"{told}; {kept}"
    )


def resume(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Train again, even against a schedule or another rule, until that rule next changes."""
    with ControlClient(find_home(home)) as client:
        client.resume()
    show({"resumed": True}, json_, "trains again, once the trainer has started")


def _wait_paused(client: ControlClient) -> Status:
    deadline = time.monotonic() + DEADLINE
    while True:
        now = client.status()
        if now.trainer.pid is None and (now.phase == "paused" or now.run is None):
            return now
        if now.pause is None:
            raise NodeError("The node does not pause: it was resumed meanwhile.")
        if time.monotonic() > deadline:
            raise Unhealthy(
                f"The node has not paused within {DEADLINE:.0f} s: it is {now.phase}; see its logs."
            )
        time.sleep(POLL)
