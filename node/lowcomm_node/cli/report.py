"""``report``: what a home did in a run, as one HTML file."""

import time
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.checkpoints import Run
from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.owner.sources import find_home
from lowcomm_node.storage.paths import absolute


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A home, or a folder of homes as a demo leaves it; default: that of --home.",
            metavar="HOME",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")
    ] = Path("report.html"),
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Write one HTML file with plots of a run, from the journal: the node need not run.

    Example: lowcomm-node report --output tea.html
    """
    from lowcomm_node.report.write import write_report

    homes = write_report(absolute(folder or find_home(home)), output, run)
    told = {"file": str(output.absolute()), "homes": homes, "written": time.time()}
    show(told, json_, f"{output} written: open it in a browser")
