"""``demo``: a whole swarm on this machine, of real nodes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.common import Json, Quiet, Verbose


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    nodes: Annotated[int, typer.Option(help="How many nodes.", min=1, max=16)] = 3,
    steps: Annotated[int, typer.Option(help="Swarm steps.", min=1)] = 400,
    method: Annotated[
        str, typer.Option(help="lowcomm, noloco, gossip, diloco, streaming-diloco or local.")
    ] = "lowcomm",
    text: Annotated[
        str, typer.Option(help="stories: tiny ones from a grammar; python: its standard library.")
    ] = "stories",
    optimizer: Annotated[
        str | None, typer.Option(help="Inner optimizer, adamw or muon, if not the method's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.", min=0)] = 0,
    interval: Annotated[
        int | None, typer.Option(help="Swarm steps between two syncs of a fragment.", min=1)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--home", help="Where everything lies; default: a new folder.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds, at most.")] = 900.0,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Start a bootstrap server and a few nodes on loopback, train, and show what they learned.

    Example: lowcomm-node demo --nodes 4 --method streaming-diloco
    """
    from lowcomm_node.net.p2pd import find_p2pd
    from lowcomm_node.system.command import check_system

    check_system(find_p2pd)
    from lowcomm_node.demo.demo import Demo
    from lowcomm_node.demo.result import render
    from lowcomm_node.errors import ConfigError
    from lowcomm_node.swarm.run_template import TEXTS

    if text not in TEXTS:
        raise ConfigError(f"--text {text} is not known: choose {' or '.join(TEXTS)}.")
    swarm = Demo(
        nodes=nodes,
        steps=steps,
        method=method,
        text=text,
        optimizer=optimizer,
        seed=seed,
        interval=interval,
        folder=folder,
        timeout=timeout,
        show=not json_ and not quiet,
    )
    result = swarm.run()
    print(json.dumps(result.to_json()) if json_ else render(result))
