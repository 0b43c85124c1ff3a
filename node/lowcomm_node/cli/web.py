"""``web``: the page of the running node."""

import webbrowser
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.owner.sources import find_home
from lowcomm_node.storage.paths import Paths

_LEADS_THERE = """<!doctype html>
<meta charset="utf-8" />
<title>lowcomm node</title>
<meta http-equiv="refresh" content="0; url={link}" />
<a href="{link}">The page of the node</a>
"""


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
    folder = find_home(home)
    with ControlClient(folder) as client:
        link = client.link()
    show({"link": link}, json_, link)
    if open_ and not json_:
        from lowcomm_node.storage.files import write_atomic  # Windows has no fcntl

        # Every user of the machine can read the command line of the browser, and nobody else this
        # file with the key.
        page = Paths(folder).page_link
        write_atomic(page, _LEADS_THERE.format(link=link).encode(), 0o600)
        webbrowser.open(page.as_uri())
