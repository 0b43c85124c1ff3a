"""``web``: the page of the running node."""

import webbrowser
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.owner.sources import find_home


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("web")(web)


def web(
    open_: Annotated[
        bool, typer.Option("--open/--print", help="Open it in a browser, or only print the link.")
    ] = True,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Show the node in a browser: loss, exchanges, peers, limits. The link works once, on this
    machine.
    """
    with ControlClient(find_home(home)) as client:
        link = client.link()
    show({"link": link}, json_, link)
    if open_ and not json_:
        webbrowser.open(link)
