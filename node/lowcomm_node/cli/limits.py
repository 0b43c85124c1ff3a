"""``limits``: what this node may take of the network, shown and changed while it runs."""

from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.owner.settings import find_home
from lowcomm_node.system.units import write_rate


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(limits)


def limits(
    max_up: Annotated[
        str | None, typer.Option(help="Contents sent a second, such as 20Mbit or 2.5MB; none: no limit.")
    ] = None,
    max_down: Annotated[str | None, typer.Option(help="Contents received a second; as --max-up.")] = None,
    max_peers: Annotated[str | None, typer.Option(help="Peers to talk with at once; none: 64.")] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Show the limits on traffic of the running node and what is used of them, or change them.

    A change holds at once, and is kept in config.toml of the home, so after a restart too, unless the node is started
    with a flag or variable that says otherwise. Example: lowcomm-node limits --max-up 5Mbit
    """
    given = {"max_up": max_up, "max_down": max_down, "max_peers": max_peers}
    with ControlClient(find_home(home)) as client:
        now = client.limits({name: value for name, value in given.items() if value is not None})
    rows = [
        ("up", write_rate(now["up"]), write_rate(now["max_up"])),
        ("down", write_rate(now["down"]), write_rate(now["max_down"])),
        ("peers", str(now["peers"]), str(now["max_peers"])),
    ]
    show(now, json_, "\n".join(f"{name:<7}{used:>10} of {most}" for name, used, most in rows))
