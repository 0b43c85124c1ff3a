"""``limits``: show and change what the running node may take of the network."""

from typing import Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.cli.options import takes_settings
from lowcomm_node.control.client import ControlClient
from lowcomm_node.owner.settings import CHANGEABLE
from lowcomm_node.owner.sources import find_home
from lowcomm_node.system.units import write_rate


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(limits)


@takes_settings(*CHANGEABLE)
def limits(
    flags: dict[str, Any],
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Show the network limits of the running node and their use, or change them.

    A change holds at once. It is kept in config.toml of the home, so it survives
    a restart, unless an option of `join` or a variable overrides it.

    Example: lowcomm-node limits --max-up 5Mbit
    """
    with ControlClient(find_home(home)) as client:
        now = client.limits({name: value for name, value in flags.items() if value is not None})
    rows = [
        ("up", write_rate(now.up), write_rate(now.max_up)),
        ("down", write_rate(now.down), write_rate(now.max_down)),
        ("peers", str(now.peers), str(now.max_peers)),
    ]
    show(now, json_, "\n".join(f"{name:<7}{used:>10} of {most}" for name, used, most in rows))
