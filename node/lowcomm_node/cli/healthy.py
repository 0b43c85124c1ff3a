"""``healthy``: for a supervisor of the node, such as a container engine."""

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NotRunning, Unhealthy
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.health import Health, judge_health


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(healthy)


def healthy(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Say in one line whether the node is well, and why. Exit code: 0, or 4 if it is not.

    A node is not well if it does not answer, makes no progress for too long,
    or has heard from no peer for five minutes. A paused node is well.
    """
    found = _look(home)
    show({"healthy": found.healthy, "reason": found.reason}, json_, found.reason)
    if not found.healthy:
        raise typer.Exit(Unhealthy.exit_code)


def _look(home: Home) -> Health:
    try:
        with ControlClient(find_home(home)) as client:
            return judge_health(client.status())
    except (NotRunning, Unhealthy) as error:
        return Health(False, str(error))
