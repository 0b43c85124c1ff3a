"""``doctor``, ``ping``, ``id``, ``config``, ``demo``: this machine and its home."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowcomm_node.cli.common import Here, command, read_settings, setting
from lowcomm_node.cli.running import Columns, table, width
from lowcomm_node.doctor.findings import Finding, exit_code
from lowcomm_node.errors import ConfigError, NodeError, NotRunning, Unhealthy
from lowcomm_node.status.model import read
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.app import run_async
from lowcomm_node.system.units import clean, milliseconds, rate

_ROUTE_COLUMNS: Columns = (
    ("route", lambda route: route.route, 0),
    ("round trip", lambda route: milliseconds(route.round_trip), 0),
    ("up", lambda route: rate(route.up), 0),
    ("down", lambda route: rate(route.down), 0),
)
_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red", "unknown": "dim"}


@command()
def doctor(here: Here, peers: Annotated[list[str] | None, setting("peers")] = None) -> None:
    """Find what is wrong with this machine or its network, and say what to do about it.

    The node of this home does it if it runs. Peers are asked to call this machine
    back. Takes up to a minute.

    Exit code: 0 if nothing is broken, 4 if something is, 6 if no peer answers.

    Example: lowcomm-node doctor --peers ADDRESS

    Args:
        peers: Address of the swarm, where no node runs; default: what this home is set to.
    """
    here.log()
    settings = here.settings(peers=peers)
    try:
        with here.node() as client:
            findings = read(list[Finding], client.doctor(peers or []))
    except (NotRunning, Unhealthy) as error:
        from lowcomm_node.doctor.run import examine_alone  # takes seconds to import

        hangs = isinstance(error, Unhealthy)
        findings = run_async(examine_alone(settings, str(error), hangs))
    code = exit_code(findings)
    if here.as_json:
        here.show({"exit_code": code, "findings": findings}, "")
    else:
        _print_findings(findings)
    raise SystemExit(code)


def _print_findings(findings: Sequence[Finding]) -> None:
    # One remedy may mend several findings.
    remedies = list(dict.fromkeys(finding.remedy for finding in findings if finding.remedy))
    grid = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        state = Text(finding.state.value, _STYLES[finding.state.value])
        see = f"see {remedies.index(finding.remedy) + 1}" if finding.remedy else ""
        # Wrapped and never cut, so that it can be copied; peers may have written it.
        value = Text(clean(finding.value), overflow="fold")
        grid.add_row(finding.name, state, value, Text(see, "dim", no_wrap=True))
    console = Console(highlight=False)
    console.print(grid)
    if remedies:
        console.print(Text("\nwhat to do", "bold"))
    for number, remedy in enumerate(remedies, 1):
        # Not wrapped, so that commands can be copied.
        console.print(Text(f"{number}. {clean(remedy)}"), soft_wrap=True)


@command()
def ping(here: Here, peer: str) -> None:
    """Measure latency and rate on each route to a peer of the run; the node of this home must run.

    Sends and receives up to 8 MB on each route, within the node's limits.
    Exit code 4 if no route works.

    Example: lowcomm-node ping 8fX2aA

    Args:
        peer: Peer id, its beginning, or its last characters as `peers` shows them.
    """
    with here.node() as client:
        answer = client.ping(peer)
    routes = table(_ROUTE_COLUMNS, answer.routes, lambda route: [route.reason], width())
    here.show(answer, f"{answer.peer_id}\n{routes}")
    if all(route.up is None for route in answer.routes):
        raise Unhealthy("No route to that peer works: `lowcomm-node doctor` looks at this end.")


@command("id")
def show_id(here: Here) -> None:
    """Show the peer id of this node, which is its public key, and where its files lie.

    The first call makes the key. While the node runs, also show its addresses: others can give
    them to --peers.
    """
    from lowcomm_node.storage.files import load_or_create_identity

    folder = Paths(here.folder)
    peer_id = load_or_create_identity(folder.identity).peer_id
    addresses: list[str] = []
    with suppress(NodeError), here.node() as client:
        addresses = list(client.status().entry_points)
    names = ("home", "identity", "config", "control", "lock", "runs", "data")
    files = {name: str(getattr(folder, name)) for name in names}
    lines = [peer_id, *(f"  {address}" for address in addresses)]
    lines += [f"{name:<9}{path}" for name, path in files.items()]
    content = {"peer_id": peer_id, "key": files["identity"], "addresses": addresses}
    here.show(content | {"paths": files}, "\n".join(lines))


@command()
def config(here: Here) -> None:
    """Show every setting, its value, and where it was set."""
    loaded = read_settings({"home": here.home})
    content = {
        key: {"value": value, "source": loaded.sources[key]}
        for key, value in loaded.settings.model_dump(mode="json").items()
    }
    lines = [f"{key:<18}{entry['value']!s:<24} {entry['source']}" for key, entry in content.items()]
    here.show(content, "\n".join(lines))


@command(home=False)
def demo(
    here: Here,
    nodes: Annotated[int, typer.Option(min=1, max=16)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 400,
    method: str = "lowcomm",
    text: str = "stories",
    optimizer: str | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    interval: Annotated[int | None, typer.Option(min=1)] = None,
    folder: Annotated[Path | None, typer.Option("--home")] = None,
    timeout: float = 900.0,
) -> None:
    """Start a bootstrap server and a few nodes on loopback, train, and show what they learned.

    Example: lowcomm-node demo --nodes 4 --method streaming-diloco

    Args:
        nodes: How many nodes.
        steps: Swarm steps.
        method: lowcomm, noloco, gossip, diloco, streaming-diloco or local.
        text: stories: tiny ones from a grammar; python: its standard library.
        optimizer: Inner optimizer, adamw or muon, if not the method's.
        seed: Seed of the run.
        interval: Swarm steps between two syncs of a fragment.
        folder: Where everything lies; default: a new folder.
        timeout: Seconds, at most.
    """
    from lowcomm_node.net.p2pd import find_p2pd
    from lowcomm_node.system.command import check_system

    check_system(find_p2pd)
    from lowcomm_node.demo.demo import TEXTS, Demo
    from lowcomm_node.demo.result import render

    if text not in TEXTS:
        raise ConfigError(f"--text {text} is not known: choose {' or '.join(TEXTS)}.")
    result = Demo(
        nodes=nodes, steps=steps, method=method, text=text, optimizer=optimizer, seed=seed,
        interval=interval, folder=folder, timeout=timeout,
        show=not here.as_json and here.level >= 0,
    ).run()  # fmt: skip
    print(json.dumps(asdict(result)) if here.as_json else render(result))
