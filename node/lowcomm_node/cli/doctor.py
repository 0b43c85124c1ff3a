"""``doctor`` and ``ping``: what is wrong here, and how good the connection to a peer is."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, run_async, show
from lowcomm_node.cli.options import setting
from lowcomm_node.control.client import ControlClient
from lowcomm_node.doctor.report import Finding, exit_code
from lowcomm_node.errors import NotRunning, Unhealthy
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.model import Ping
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.units import clean, milliseconds, rate

_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red", "unknown": "dim"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(ping)


def doctor(
    peers: Annotated[
        list[str] | None,
        setting(
            "peers", "Address of the swarm, where no node runs; default: what this home is set to."
        ),
    ] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Find what is wrong with this machine or its network, and say what to do about it.

    The node of this home does it if it runs. Peers are asked to call this machine
    back. Takes up to a minute.

    Exit code: 0 if nothing is broken, 4 if something is, 6 if no peer answers.

    Example: lowcomm-node doctor --peers ADDRESS
    """
    configure_logs(verbose - quiet - 1, json_)
    settings = read_settings({"home": home, "peers": peers}).settings
    findings = _examine(settings, peers or [])
    code = exit_code(findings)
    if json_:
        show({"exit_code": code, "findings": [finding.to_json() for finding in findings]}, True, "")
    else:
        _print_findings(findings)
    raise SystemExit(code)


def ping(
    peer: Annotated[
        str,
        typer.Argument(
            help="Peer id, its beginning, or its last characters as `peers` shows them."
        ),
    ],
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Measure latency and rate on each route to a peer of the run; the node of this home must run.

    Sends and receives up to 8 MB on each route, within the node's limits.
    Exit code 4 if no route works.

    Example: lowcomm-node ping 8fX2aA
    """
    with ControlClient(find_home(home)) as client:
        found = client.ping(peer)
    if json_:
        show(found, True, "")
    else:
        _print_routes(found)
    if all(route.up is None for route in found.routes):
        raise Unhealthy("No route to that peer works: `lowcomm-node doctor` looks at this end.")


def _examine(settings: NodeSettings, peers: Sequence[str]) -> Sequence[Finding]:
    """Ask the node of this home if it runs, else examine from here."""
    try:
        with ControlClient(settings.home) as client:
            return [Finding.from_json(found) for found in client.doctor(peers)]
    except (NotRunning, Unhealthy) as error:
        absent, hangs = str(error), isinstance(error, Unhealthy)
    from lowcomm_node.doctor.run import examine_alone  # takes seconds to import

    return run_async(examine_alone(settings, absent, hangs))


def _print_findings(findings: Sequence[Finding]) -> None:
    # One remedy may mend several findings.
    numbers = {
        remedy: number
        for number, remedy in enumerate(dict.fromkeys(f.remedy for f in findings if f.remedy), 1)
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        state = Text(finding.state.value, _STYLES[finding.state.value])
        see = f"see {numbers[finding.remedy]}" if finding.remedy else ""
        table.add_row(finding.name, state, _folded(finding.value), Text(see, "dim", no_wrap=True))
    console = Console(highlight=False)
    console.print(table)
    if numbers:
        console.print(Text("\nwhat to do", "bold"))
    for remedy, number in numbers.items():
        console.print(
            Text(f"{number}. {clean(remedy)}"), soft_wrap=True
        )  # so that commands can be copied


def _print_routes(found: Ping) -> None:
    table = Table(
        "route", "round trip", "up", "down", "", box=None, pad_edge=False, header_style="dim"
    )
    for route in found.routes:
        figures = (milliseconds(route.round_trip), rate(route.up), rate(route.down))
        table.add_row(_folded(route.route), *figures, _folded(route.reason))
    console = Console(highlight=False)
    console.print(found.peer_id, soft_wrap=True)
    console.print(table)


def _folded(text: str) -> Text:
    """Text that peers may have written, wrapped and never cut, so that it can be copied."""
    return Text(clean(text), overflow="fold")
