"""``init`` and ``create``: write a run specification, sign it, publish it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, run_async, show
from lowcomm_node.cli.options import setting
from lowcomm_node.cli.plan import (
    PEERS,
    STEP_SECONDS,
    UP,
    Down,
    Latency,
    Parameters,
    Wishes,
    run_of_parameters,
    text_of,
)
from lowcomm_node.errors import ConfigError
from lowcomm_node.system.logs import configure_logs


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("init")(init)
    app.command("create")(create)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    method: Annotated[
        str | None,
        typer.Option(
            help="lowcomm (the default), noloco, gossip, diloco, streaming-diloco or local."
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Inner optimizer, adamw or muon, if not the method's.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name of the run: a-z, 0-9, dots and dashes.")
    ] = "my-run",
    steps: Annotated[
        int | None,
        typer.Option(
            help="Length of the run in swarm steps; default: 2000, with --parameters as many as "
            "give 20 tokens a parameter.",
            min=1,
        ),
    ] = None,
    parameters: Parameters = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Take the best method and interval for a line.")
    ] = False,
    up: Annotated[str | None, UP] = None,
    down: Down = None,
    step_seconds: Annotated[float | None, STEP_SECONDS] = None,
    peers: Annotated[int | None, PEERS] = None,
    latency: Latency = 50.0,
    seed: Annotated[int, typer.Option(help="Seed of all randomness of the run.", min=0)] = 0,
    admission: Annotated[str, typer.Option(help="Who may join: open, invite or list.")] = "open",
    member: Annotated[
        list[str] | None, typer.Option(help="Peer id on the list; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The tokenizer.json that all peers use; default: bytes, without a file."),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A folder of Hugging Face's with open weights, which the run begins with.",
            metavar="DIR",
        ),
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
    from lowcomm_node.cli.new_run import epochs_in_words
    from lowcomm_node.swarm.run_template import write_template
    from lowcomm_protocol.spec.presets import PRESETS
    from lowcomm_protocol.spec.run import parse_toml
    from lowcomm_protocol.spec.sections import BYTES

    if file.exists() and not force:
        raise ConfigError(f"{file} exists: name another file, or overwrite it with --force.")
    if parameters is not None and from_ is not None:
        raise ConfigError("--parameters and --from: open weights have a size of their own.")
    chosen = weights = model = None
    if from_ is not None:
        from lowcomm_node.cli.new_run import open_weights, tokenizer_beside  # loads torch

        weights = open_weights(from_)
        tokenizer = tokenizer or Path(tokenizer_beside(from_))
    if tokenizer is not None:
        from lowcomm_node.cli.new_run import tokenizer_file  # loads numpy

        chosen = tokenizer_file(str(tokenizer), weights, from_)
    if parameters is not None:
        whole = run_of_parameters(parameters, peers, chosen.vocab if chosen else BYTES)
        model, steps = whole.model, steps or whole.run.steps
    wishes = Wishes(up=up, down=down, step_seconds=step_seconds, peers=peers, latency=latency)

    def written(
        method: str,
        optimizer: str | None,
        changes: Mapping[str, object],
        line: Mapping[str, object] | None,
    ) -> str:
        return write_template(
            name,
            method,
            steps or 2000,
            seed,
            optimizer=optimizer,
            admission=admission,
            members=member or (),
            tokenizer=chosen,
            weights=weights,
            model=model,
            changes=changes,
            plan=line,
        )

    text = written(method or "lowcomm", optimizer, {}, None)
    told = ""
    if plan:
        from lowcomm_node.cli.new_run import planned  # loads torch

        best = planned(parse_toml(text, str(file)), wishes, method, optimizer)
        text = written(best.method, best.optimizer, best.settings, best.section)
        told = f"{best.reason}\n"
    elif wishes.any:
        raise ConfigError("--up, --step-seconds and --peers are for --plan: give that, too.")
    spec = parse_toml(text, str(file))
    warnings = [text for one in (weights, chosen) if one for text in one.warnings]
    file.write_text(text, encoding="utf-8")
    epochs = epochs_in_words(spec)
    told += f"{epochs}\n" if epochs else ""
    show(
        {
            "file": str(file),
            "name": spec.run.name,
            "method": spec.sync.method,
            "warnings": [*warnings],
        },
        json_,
        f"{told}{spec.sync.method}: {PRESETS[spec.sync.method].purpose}\n{file} written: edit it, "
        f"then publish it with\n  lowcomm-node create {file} --peers ADDR"
        + "".join(f"\nwarning: {warning}" for warning in warnings),
    )


def create(
    file: Annotated[Path, typer.Argument(help="The run.toml to publish.")],
    peers: Annotated[list[str], setting("peers")],
    tokenizer: Annotated[
        str | None,
        setting(
            "tokenizer", 'The tokenizer.json that all peers use, where data.tokenizer = "local".'
        ),
    ] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Sign a run specification with this node's key and publish it.

    Example: lowcomm-node create run.toml --peers ADDRESS
    """
    from lowcomm_node.cli.new_run import (
        check_line,
        check_size,
        check_used,
        epochs_in_words,
        how_to_join,
        keep_for_the_first_node,
        keeping_in_words,
        name_layout,
        name_tokenizer,
        parameters_of,
        tokens_of,
    )
    from lowcomm_node.cli.publishing import publish_run
    from lowcomm_node.storage.files import load_or_create_identity, write_atomic
    from lowcomm_protocol.spec.run import parse_toml, sign_run

    configure_logs(verbose - quiet - 1, json_)
    settings = read_settings({"home": home, "peers": peers, "tokenizer": tokenizer}).settings
    text = text_of(file)
    spec = parse_toml(text, str(file), parameters_of)
    if tokenizer is not None and spec.data.tokenizer != "local":
        raise ConfigError(
            f'--tokenizer {tokenizer}: {file} says data.tokenizer = "bytes": set "local", or leave '
            "the flag."
        )
    spec = name_layout(name_tokenizer(spec, settings.tokenizer))
    tokens = tokens_of(spec, settings.tokenizer)
    warnings = [check_size(spec), check_line(spec, text, str(file)), check_used(spec, tokens)]
    identity = load_or_create_identity(settings.paths.identity)
    run = sign_run(spec, identity)
    kept = run_async(publish_run(settings, identity, run))
    write_atomic(settings.paths.signed_run(run.fingerprint), run.to_bytes(), 0o600)
    keep_for_the_first_node(settings, run)
    show(
        {
            "name": spec.run.name,
            "run_id": run.run_id,
            "fingerprint": run.fingerprint,
            "creator": run.creator,
        }
        | {"kept": [{"peer_id": peer, **asdict(keeping)} for peer, keeping in kept.items()]},
        json_,
        f"published {spec.run.name}@{run.fingerprint} ({spec.sync.method}, {spec.run.steps} "
        "steps)\n"
        f"{keeping_in_words(kept)}\n"
        f"join it with\n  {how_to_join(spec, settings.peers[0])}"
        + "".join(f"\n{note}" for note in (epochs_in_words(spec),) if note)
        + "".join(f"\nwarning: {warning}" for warning in warnings if warning),
    )
