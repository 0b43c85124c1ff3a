"""The command line of the bootstrap server."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.errors import ConfigError, Unhealthy
from lowcomm_node.net.p2pd import RelayLimits, find_p2pd, listeners, numeric
from lowcomm_node.system.app import add_version, run_app, run_async
from lowcomm_node.system.command import check_system, raise_descriptors
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.units import read_size, write_size

app = typer.Typer(
    help="The entry point of a swarm: peers enter the DHT here, and runs stay published.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


PREFIX = "LOWCOMM_BOOTSTRAP_"
"""Prefix of the environment variables of options; spaces separate several values."""


def _option(name: str, text: str, least: int | None = None, most: int | None = None) -> Any:
    return typer.Option(help=text, envvar=f"{PREFIX}{name}", min=least, max=most)


Home = Annotated[Path | None, _option("HOME", "Folder of identity and runs.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Everything, and tracebacks.")]
Texts = list[str] | None
Host = Annotated[str, _option("HOST", "Address to listen on.")]
Port = Annotated[int, _option("PORT", "TCP and UDP port; 0 takes any free ones.", 0, 65535)]
Announce = Annotated[Texts, _option("ANNOUNCE", "Multiaddress to tell, as /dns4/HOST/tcp/PORT.")]
Peers = Annotated[Texts, _option("PEERS", "Address of another peer of the swarm; repeatable.")]
Runs = Annotated[list[Path] | None, _option("RUN", "run.toml or signed run to keep published.")]
Closed = Annotated[
    bool,
    typer.Option("--closed", help="Publish only runs given or kept.", envvar=f"{PREFIX}CLOSED"),
]
MaxRuns = Annotated[int, _option("MAX_RUNS", "Runs to keep, at most.", 1)]
RelayPeers = Annotated[int, _option("RELAY_PEERS", "Peers behind routers to relay to; 0: none.", 0)]
RelayCircuits = Annotated[int, _option("RELAY_CIRCUITS", "Relayed connections of each at once.", 1)]
RelayBytes = Annotated[str, _option("RELAY_BYTES", "Bytes of one, each way, as 4GiB or 500MB.")]
RelaySeconds = Annotated[int, _option("RELAY_SECONDS", "Seconds of one relayed connection.", 1)]
Web = Annotated[
    int | None, _option("WEB", "Port of a public page of the runs; default: none.", 0, 65535)
]
_RELAY = RelayLimits()


add_version(app, "lowcomm-bootstrap")


@app.command()
def serve(
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = 31337,
    announce: Announce = None,
    peers: Peers = None,
    run: Runs = None,
    closed: Closed = False,
    max_runs: MaxRuns = 64,
    relay_peers: RelayPeers = _RELAY.peers,
    relay_circuits: RelayCircuits = _RELAY.circuits,
    relay_bytes: RelayBytes = write_size(_RELAY.bytes),
    relay_seconds: RelaySeconds = _RELAY.seconds,
    web: Web = None,
    json_: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve until stopped. Prints what volunteers have to type."""
    folder = _prepare(home, quiet, verbose, json_, serves=True)
    from lowcomm_bootstrap.serving import serve as serving
    from lowcomm_bootstrap.serving import teller
    from lowcomm_node.dht.hivemind import DhtSettings

    address, size = numeric(host), _size(relay_bytes)
    relay = RelayLimits(
        peers=relay_peers, circuits=relay_circuits, bytes=size, seconds=relay_seconds
    )
    dht = DhtSettings(
        listen=listeners(address, port), initial_peers=tuple(peers or ()), require_peers=False,
        announce=tuple(announce or ()), relay=relay,
    )  # fmt: skip
    page = (address, web) if web is not None else None
    tell = teller(json_, quiet)
    run_async(serving(folder, dht, run or (), closed, max_runs, tell, page))


@app.command()
def runs(
    home: Home = None, json_: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """List the runs that this server keeps."""
    from lowcomm_bootstrap.registry import Registry
    from lowcomm_bootstrap.serving import in_words

    registry = Registry(_prepare(home, quiet, verbose, json_) / "runs", max_runs=sys.maxsize)
    for path, event in registry.unread.items():
        print(in_words({"event": event, "path": path}), file=sys.stderr)
    for run in registry.runs():
        entry = {
            "name": run.spec.run.name,
            "fingerprint": run.fingerprint,
            "run_id": run.run_id,
            "creator": run.creator,
            "ended": registry.kept[run.run_id].ended or None,
        }
        over = f"  over at swarm step {entry['ended']}" if entry["ended"] else ""
        line = f"{entry['name']}@{run.fingerprint}  {run.spec.sync.method}  by {run.creator}{over}"
        print(json.dumps(entry) if json_ else line)


@app.command("id")
def show_id(
    home: Home = None, json_: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """Show this server's peer id; the identity is made if there is none."""
    from lowcomm_node.storage.files import load_or_create_identity

    key_file = _prepare(home, quiet, verbose, json_) / "identity.key"
    identity = load_or_create_identity(key_file)
    print(json.dumps({"peer_id": identity.peer_id}) if json_ else identity.peer_id)


@app.command()
def healthy(
    home: Home = None, json_: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """Say in one line whether the server is well, and why: exit code 0, or 4 if it is not."""
    from lowcomm_bootstrap.health import check_health

    folder = _prepare(home, quiet, verbose, json_)
    try:
        is_well, reason = True, check_health(folder)
    except Unhealthy as error:
        is_well, reason = False, str(error)
    print(json.dumps({"healthy": is_well, "reason": reason}) if json_ else reason)
    if not is_well:
        raise typer.Exit(Unhealthy.exit_code)


def main() -> None:
    """Run a command, and end with its exit code."""
    raise SystemExit(run_app(app, find_p2pd))


def _size(text: str) -> int:
    try:
        size = read_size(text)
    except ValueError as error:
        raise ConfigError(f"flag --relay-bytes: {error}.") from None
    if size < 1:
        raise ConfigError("flag --relay-bytes: at least 1B; --relay-peers 0 relays for nobody.")
    return size


def _prepare(
    given: Path | None, quiet: bool, verbose: bool, as_json: bool, serves: bool = False
) -> Path:
    """Set up the log; returns the home, which exists. Raises ConfigError, or Incompatible where no
    server can work."""
    configure_logs(-2 if quiet else int(verbose), as_json)
    if serves:
        check_system(find_p2pd)
        raise_descriptors()
    from lowcomm_node.storage.files import disk_full_error  # not on Windows
    from lowcomm_node.storage.paths import absolute, data_folder

    if given is None and os.environ.get("STATE_DIRECTORY"):
        # systemd joins several state directories by colons; the first is the unit's main one.
        given = Path(os.environ["STATE_DIRECTORY"].split(":")[0])
    home = absolute(given) if given is not None else data_folder("lowcomm-bootstrap")
    try:
        with disk_full_error(home.parent):
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{home}: {error.strerror}: choose another --home.") from None
    return home
