"""``init`` and ``create``: write a run specification, sign it, publish it."""

import asyncio
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, run_async, show
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_node.logs import configure_logs

if TYPE_CHECKING:
    from lowcomm_node.data.tokenizer import Tokenizer
    from lowcomm_protocol.run import RunSpec

PUBLISH_DEADLINE = 30.0
RUN_LIFE = 1800.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("init")(init)
    app.command("create")(create)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    method: Annotated[
        str, typer.Option(help="lowcomm, noloco, gossip, diloco, streaming-diloco or local.")
    ] = "lowcomm",
    optimizer: Annotated[str | None, typer.Option(help="Inner optimizer, adamw or muon, if not the method's.")] = None,
    name: Annotated[str, typer.Option(help="Name of the run: a-z, 0-9, dots and dashes.")] = "my-run",
    steps: Annotated[int, typer.Option(help="Length of the run in swarm steps.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of all randomness of the run.", min=0)] = 0,
    admission: Annotated[str, typer.Option(help="Who may join: open, invite or list.")] = "open",
    member: Annotated[list[str] | None, typer.Option(help="Peer id on the list; may be repeated.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json that all peers use; default: bytes, without a file.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite the file.")] = False,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Write a commented run specification to edit.

    Example: lowcomm-node init --method streaming-diloco run.toml
    """
    from lowcomm_node.specfile import write_template
    from lowcomm_protocol.run import METHODS, parse_toml

    if file.exists() and not force:
        raise ConfigError(f"{file} exists: name another file, or overwrite it with --force.")
    chosen = _open(str(tokenizer)) if tokenizer is not None else None
    text = write_template(
        name, method, steps, seed, optimizer=optimizer, admission=admission, members=member or (), tokenizer=chosen
    )
    spec = parse_toml(text, str(file))
    file.write_text(text)
    show(
        {"file": str(file), "name": spec.run.name, "method": spec.sync.method},
        json_,
        f"{method}: {METHODS[method]}\n{file} written: edit it, then publish it with\n  lowcomm-node create {file} --peers ADDR",
    )


def create(
    file: Annotated[Path, typer.Argument(help="The run.toml to publish.")],
    peers: Annotated[list[str], typer.Option(help="Address of a bootstrap server or peer; may be repeated.")],
    tokenizer: Annotated[
        str | None, typer.Option(help='The tokenizer.json that all peers use, where data.tokenizer = "local".')
    ] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Sign a run specification with this node's key and publish it.

    Example: lowcomm-node create run.toml --peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from lowcomm_node.files import load_or_create_identity, write_atomic
    from lowcomm_protocol.run import parse_toml, sign_run

    configure_logs(verbose - quiet - 1)
    settings = read_settings({"home": home, "peers": peers, "tokenizer": tokenizer}).settings
    try:
        spec = parse_toml(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}: write one with `lowcomm-node init`.") from None
    spec = name_tokenizer(spec, settings.tokenizer)
    identity = load_or_create_identity(settings.paths.identity)
    run = sign_run(spec, identity)
    run_async(_publish(settings, identity, run))
    write_atomic(settings.paths.signed_run(run.fingerprint), run.to_bytes(), 0o600)
    address = settings.peers[0]
    show(
        {"name": spec.run.name, "run_id": run.run_id, "fingerprint": run.fingerprint, "creator": run.creator},
        json_,
        f"published {spec.run.name}@{run.fingerprint} ({spec.sync.method}, {spec.run.steps} steps)\n"
        f"join it with\n  lowcomm-node join --peers {address}{_whom(spec.run.admission)}",
    )


def name_tokenizer(spec: "RunSpec", path: str | None) -> "RunSpec":
    """A specification with the SHA-256 of its creator's tokenizer, so that all peers use the same. Raises ConfigError."""
    if spec.data.tokenizer != "local":
        return spec
    if path is None:
        if not spec.data.tokenizer_sha256:
            raise ConfigError(
                'data.tokenizer = "local", but nobody knows which file: name yours with --tokenizer PATH, so that the run '
                "carries its SHA-256 and refuses others."
            )
        return spec
    from lowcomm_node.data.tokenizer import check_tokenizer

    found = _open(path)
    check_tokenizer(found, spec.data.tokenizer_sha256, spec.model.vocab)
    data = spec.data.model_copy(update={"tokenizer_sha256": found.sha256})
    return spec.model_copy(update={"data": data})


def _open(path: str) -> "Tokenizer":
    from lowcomm_node.data.tokenizer import open_tokenizer

    found = open_tokenizer(path)
    if not found.sha256:
        raise ConfigError("--tokenizer bytes needs no file: leave it away, runs use bytes unless they say otherwise.")
    return found


def _whom(admission: str) -> str:
    """What else somebody needs who wants to join."""
    match admission:
        case "invite":
            return " --invite ...\nwhich you make with\n  lowcomm-node invite"
        case "list":
            return "\nas one of its members"
        case _:
            return ""


async def _publish(settings, identity, run) -> None:
    from lowcomm_node.discovery.keys import RUNS_KEY
    from lowcomm_node.finding import open_discovery

    discovery = open_discovery(settings, identity)
    try:
        await discovery.start()
        deadline = monotonic() + PUBLISH_DEADLINE
        while monotonic() < deadline:
            await discovery.publish(RUNS_KEY, run.run_id, run.to_bytes(), RUN_LIFE)
            # A store that says yes may not have arrived: read it back.
            if run.run_id in await discovery.lookup(RUNS_KEY):
                return
            await asyncio.sleep(1.0)
    finally:
        await discovery.close()
    raise NoPeers(
        f"The run could not be published within {PUBLISH_DEADLINE:.0f} s: is the bootstrap server closed to new runs?"
    )
