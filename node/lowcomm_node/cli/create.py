"""``init`` and ``create``: write a run specification, sign it, publish it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, run_async, show
from lowcomm_node.cli.options import setting
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_node.system.logs import configure_logs

if TYPE_CHECKING:
    from lowcomm_node.data.tokenizer import Tokenizer
    from lowcomm_protocol.peers.probes import Keeping
    from lowcomm_protocol.spec.run import RunSpec

PUBLISH_DEADLINE = 30.0
ASKED = 3
"""How often a server is asked whether it keeps a run, a second apart: it may just be receiving it."""
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
    from lowcomm_node.swarm.run_template import write_template
    from lowcomm_protocol.spec.run import METHODS, parse_toml

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
    peers: Annotated[list[str], setting("peers")],
    tokenizer: Annotated[
        str | None, setting("tokenizer", 'The tokenizer.json that all peers use, where data.tokenizer = "local".')
    ] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Sign a run specification with this node's key and publish it.

    Example: lowcomm-node create run.toml --peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from lowcomm_node.storage.files import load_or_create_identity, write_atomic
    from lowcomm_protocol.spec.run import parse_toml, sign_run

    configure_logs(verbose - quiet - 1)
    settings = read_settings({"home": home, "peers": peers, "tokenizer": tokenizer}).settings
    try:
        spec = parse_toml(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}: write one with `lowcomm-node init`.") from None
    if tokenizer is not None and spec.data.tokenizer != "local":
        raise ConfigError(
            f'--tokenizer {tokenizer}: {file} says data.tokenizer = "bytes": set "local", or leave the flag.'
        )
    spec = name_tokenizer(spec, settings.tokenizer)
    warning = check_size(spec)
    identity = load_or_create_identity(settings.paths.identity)
    run = sign_run(spec, identity)
    kept = run_async(_publish(settings, identity, run))
    write_atomic(settings.paths.signed_run(run.fingerprint), run.to_bytes(), 0o600)
    address = settings.peers[0]
    show(
        {"name": spec.run.name, "run_id": run.run_id, "fingerprint": run.fingerprint, "creator": run.creator}
        | {"kept": [{"peer_id": peer, **asdict(keeping)} for peer, keeping in kept.items()]},
        json_,
        f"published {spec.run.name}@{run.fingerprint} ({spec.sync.method}, {spec.run.steps} steps)\n"
        f"{keeping_in_words(kept)}\n"
        f"join it with\n  lowcomm-node join --peers {address}{_files(spec)}{_whom(spec.run.admission)}"
        + (f"\nwarning: {warning}" if warning else ""),
    )


def check_size(spec: "RunSpec") -> str | None:
    """What the creator should know of how many peers a run is for. Raises ConfigError if it begins with too many."""
    group, begins_with = spec.sync.group, spec.run.start_peers
    if spec.sync.realigns_among(begins_with):
        raise ConfigError(
            f"start_peers = {begins_with}, but group = {group} and consensus = 0: most exchanges of more than {group} peers "
            f'would be realignments in fp32. Set start_peers = {group} or less, codec = "bf16" and consensus = 1.0, or '
            'method = "lowcomm".'
        )
    if not spec.sync.realigns_among(group + 1):
        return None
    return (
        f"this run is for at most {group} peers: with more, most exchanges are realignments in fp32, for consensus = 0. "
        'For a larger swarm set codec = "bf16" and consensus = 1.0, or method = "lowcomm".'
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


def _files(spec: "RunSpec") -> str:
    """What a run leaves to each owner."""
    data = " --data PATH" if spec.data.source == "local" else ""
    return f"{data} --tokenizer PATH" if spec.data.tokenizer == "local" else data


def _whom(admission: str) -> str:
    """What else somebody needs who wants to join."""
    match admission:
        case "invite":
            return " --invite ...\nwhich you make with\n  lowcomm-node invite"
        case "list":
            return "\nas one of its members"
        case _:
            return ""


def keeping_in_words(kept: "Mapping[str, Keeping]") -> str:
    """Who keeps a run, for how long, and what to do where nobody does."""
    keepers = [keeping for keeping in kept.values() if keeping.kept]
    lines = [f"{peer[-6:]} does not keep it: {keeping.reason}" for peer, keeping in kept.items() if not keeping.kept]
    seconds = [keeping.seconds for keeping in keepers if keeping.seconds is not None]
    if keepers:
        lasts = (
            f"for {_duration(min(seconds))} without a peer that answers, and for as long as one does"
            if seconds
            else "for good"
        )
        lines.insert(0, f"kept by {len(keepers)} of {len(kept)} {'server' if len(kept) == 1 else 'servers'}, {lasts}")
    else:
        lines += [
            "no server keeps it: it stays in the DHT for up to half an hour, and for as long as a node trains it. Start one "
            "soon, name another server with --peers, or ask the operator of this one to serve it with --run"
        ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds / 3600))} h"


async def _publish(settings, identity, run) -> "dict[str, Keeping]":
    """Publish a run; whether those that ``--peers`` names keep it."""
    from lowcomm_node.dht.keys import RUNS_KEY
    from lowcomm_node.dht.knocks import by_peer
    from lowcomm_node.swarm.find_run import open_discovery

    discovery = open_discovery(settings, identity)
    try:
        await discovery.start()
        deadline = monotonic() + PUBLISH_DEADLINE
        while monotonic() < deadline:
            await discovery.publish(RUNS_KEY, run.run_id, run.to_bytes(), RUN_LIFE)
            # A store that says yes may not have arrived: read it back, from others than ourselves.
            if await discovery.held_by_others(RUNS_KEY, run.run_id) is not None:
                doors = by_peer(settings.peers)
                kept = await asyncio.gather(*(_ask(discovery, peer, doors[peer], run.run_id) for peer in doors))
                return dict(zip(doors, kept, strict=True))
            await asyncio.sleep(1.0)
    finally:
        await discovery.close()
    raise NoPeers(
        f"The run could not be published within {PUBLISH_DEADLINE:.0f} s: is the bootstrap server closed to new runs?"
    )


async def _ask(discovery, peer: str, addresses: Sequence[str], run_id: str) -> "Keeping":
    """Whether a server keeps a run, asked until it has received it."""
    from lowcomm_node.probing.asker import CONNECT_DEADLINE, Asker
    from lowcomm_protocol.errors import LowcommError
    from lowcomm_protocol.peers.probes import PROTOCOL, Keeping

    keeping = Keeping(reason="it did not answer")
    for _ in range(ASKED):
        try:
            await discovery.connect(peer, addresses, CONNECT_DEADLINE)
            with Asker(await discovery.open_stream(peer, PROTOCOL, CONNECT_DEADLINE)) as asker:
                keeping = await asker.keeps(run_id)
        except LowcommError as error:
            keeping = Keeping(reason=str(error))
        if keeping.kept:
            break
        await asyncio.sleep(1.0)
    return keeping
