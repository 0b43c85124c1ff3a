"""The command line of the bootstrap server."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from lowcomm_node.errors import NodeError
from lowcomm_node.files import HomeLock, load_or_create_identity
from lowcomm_protocol.errors import LowcommError, SignatureError, SpecError, VersionError

app = typer.Typer(
    help="The door to a swarm: peers enter the DHT here, and runs stay published.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Home = Annotated[Path | None, typer.Option(help="Folder of identity and runs.", envvar="LOWCOMM_BOOTSTRAP_HOME")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Everything, and tracebacks.")]
_VERBOSE = "LOWCOMM_BOOTSTRAP_TRACEBACK"


@app.command()
def serve(
    home: Home = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="TCP port; 0 takes any free one.", min=0, max=65535)] = 31337,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddress to tell, such as /dns4/HOST/tcp/PORT.")
    ] = None,
    run: Annotated[list[Path] | None, typer.Option(help="run.toml or signed run to keep published.")] = None,
    closed: Annotated[bool, typer.Option(help="Publish only the runs given here.")] = False,
    max_runs: Annotated[int, typer.Option(help="Runs to keep, at most.", min=1)] = 64,
    json_: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve until stopped. Prints what volunteers have to type."""
    os.environ[_VERBOSE] = "1" if verbose else ""
    folder = _home(home)
    raise SystemExit(_run(_serve(folder, host, port, announce or [], run or [], closed, max_runs, json_, quiet)))


@app.command()
def runs(home: Home = None, json_: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the runs that this server keeps."""
    from lowcomm_bootstrap.registry import Registry

    for run in Registry(_home(home) / "runs").runs():
        entry = {
            "name": run.spec.run.name,
            "fingerprint": run.fingerprint,
            "run_id": run.run_id,
            "creator": run.creator,
        }
        print(
            json.dumps(entry)
            if json_
            else f"{run.spec.run.name}@{run.fingerprint}  {run.spec.sync.method}  by {run.creator}"
        )


@app.command("id")
def show_id(home: Home = None, json_: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show this server's peer id."""
    identity = load_or_create_identity(_home(home) / "identity.key")
    print(json.dumps({"peer_id": identity.peer_id}) if json_ else identity.peer_id)


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app(standalone_mode=True)
    except LowcommError as error:
        if os.environ.get(_VERBOSE):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None


def exit_code(error: LowcommError) -> int:
    """The exit code that an error ends a command with (docs/design.md)."""
    if isinstance(error, NodeError):
        return error.exit_code
    if isinstance(error, VersionError):
        return 5
    return 78 if isinstance(error, SpecError | SignatureError) else 1


def _home(given: Path | None) -> Path:
    if given is None and os.environ.get("STATE_DIRECTORY"):
        given = Path(os.environ["STATE_DIRECTORY"].split(":")[0])
    return (given or Path(platformdirs.user_data_dir("lowcomm-bootstrap"))).expanduser().absolute()


def _run(work: Any) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _serve(
    home: Path,
    host: str,
    port: int,
    announce: list[str],
    files: list[Path],
    closed: bool,
    max_runs: int,
    as_json: bool,
    quiet: bool,
) -> int:
    from lowcomm_bootstrap.registry import Registry
    from lowcomm_bootstrap.server import BootstrapServer
    from lowcomm_node.discovery.hivemind import HivemindDiscovery

    def tell(event: dict[str, Any]) -> None:
        if not quiet:
            print(json.dumps(event) if as_json else _plain(event), flush=True)

    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with HomeLock(home / "lock"):
        identity = load_or_create_identity(home / "identity.key")
        registry = Registry(home / "runs", max_runs)
        for file in files:
            registry.add(_read_run(file, identity))
        family = "ip6" if ":" in host else "ip4"
        discovery = HivemindDiscovery(
            identity=identity,
            key_file=home / "identity.key",
            listen=(f"/{family}/{host}/tcp/{port}",),
            announce=announce,
        )
        server = BootstrapServer(discovery, registry, closed, tell)
        serving = asyncio.current_task()
        assert serving is not None
        _stop_on_signal(serving)
        try:
            await server.start()
            tell({"event": "ready", "peer_id": identity.peer_id, "addresses": list(discovery.addresses())})
            await server.run()
        except asyncio.CancelledError:
            tell({"event": "stopping"})
        finally:
            await server.close()
    return 0


def _stop_on_signal(serving: asyncio.Task[Any]) -> None:
    """The first SIGINT or SIGTERM stops cleanly, the second at once."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)


def _read_run(path: Path, identity: Any) -> Any:
    from lowcomm_node.errors import ConfigError
    from lowcomm_protocol.run import parse_toml, read_signed_run, sign_run

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a run.toml or a signed run.") from None
    if data.lstrip().startswith(b"{"):
        return read_signed_run(data, str(path))
    return sign_run(parse_toml(data.decode(errors="replace"), str(path)), identity)


def _plain(event: dict[str, Any]) -> str:
    match event["event"]:
        case "ready":
            lines = [f"{address}" for address in event["addresses"]]
            command = f"lowcomm-node join --peers {lines[0]}" if lines else ""
            return "\n".join(["ready; peers join with", *(f"  {line}" for line in lines), "", f"  {command}"])
        case "run.adopted":
            return f"keeping run {event['name']}@{event['fingerprint']} published"
        case "run.damaged":
            return f"warning: {event['path']} is damaged and not published; remove it or restore it"
        case other:
            return str(other)
