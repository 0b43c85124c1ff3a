"""The command line ``lowcomm-node``: one file a group of commands.

common      options that commands share, errors, exit codes
create      init, create, plan: a new run
members     invite, remove, amend: a run created here
join        the node itself
running     status, peers, rounds, wait, web, healthy, exchanges, logs, pause, resume, limits,
            finish, stop
results     checkpoint, generate, report, track
machine     doctor, ping, id, paths, config, demo
"""

from typing import Annotated

import typer

from lowcomm_node.cli import common, create, join, machine, members, results, running  # noqa: F401 - their order is that of the help
from lowcomm_node.cli.common import app
from lowcomm_node.system.command import end


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Show release, commit and protocol.", is_eager=True)
    ] = False,
) -> None:
    """Show the version, or go on to the command."""
    if show:
        from lowcomm_node.system.release import describe
        from lowcomm_protocol import PROTOCOL_VERSION

        print(f"lowcomm-node {describe(PROTOCOL_VERSION)}")
        raise typer.Exit


def main() -> None:
    """Entry point: an error on purpose becomes one line and its exit code."""
    end(common.run(app))
