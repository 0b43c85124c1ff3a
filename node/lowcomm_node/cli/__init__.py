"""The command line ``lowcomm-node``: one file a group of commands."""

from typing import Annotated

import typer

from lowcomm_node.cli import (
    amend,
    checkpoints,
    common,
    create,
    demo,
    doctor,
    healthy,
    join,
    leave,
    limits,
    local,
    members,
    past,
    pausing,
    plan,
    report,
    text,
    track,
    watch,
    web,
)
from lowcomm_node.system.command import end

app = typer.Typer(
    help="Train one model together with peers that you do not know, over ordinary internet links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (
    create,
    members,
    amend,
    join,
    demo,
    watch,
    past,
    report,
    track,
    web,
    healthy,
    doctor,
    limits,
    pausing,
    plan,
    leave,
    text,
    local,
):
    group.register(app)
app.add_typer(checkpoints.app, name="checkpoint")


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
