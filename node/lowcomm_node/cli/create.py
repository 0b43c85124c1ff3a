"""``init``, ``create``, ``plan``: write a run, publish it, and what it costs on a line."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, run_async, setting
from lowcomm_node.errors import ConfigError

UP = typer.Option(help="What a peer's line sends, a second.", metavar="20Mbit")
DOWN = typer.Option(help="What it receives; default: as much as it sends.", metavar="100Mbit")
STEP_SECONDS = typer.Option(
    help="Seconds that a peer takes for an inner step.", metavar="SECONDS", show_default=False
)
PEERS = typer.Option("--peers", help="How many peers are expected.", metavar="N")
LATENCY = typer.Option(
    help="Milliseconds there and back between two peers; default: 50.", metavar="MS"
)
PARAMETERS = typer.Option(help="A model of about as many parameters.", metavar="1B")


@command()
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
    parameters: Annotated[str | None, PARAMETERS] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Take the best method and interval for a line.")
    ] = False,
    up: Annotated[str | None, UP] = None,
    down: Annotated[str | None, DOWN] = None,
    step_seconds: Annotated[float | None, STEP_SECONDS] = None,
    peers: Annotated[int | None, PEERS] = None,
    latency: Annotated[float | None, LATENCY] = None,
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
    *,
    here: Here,
) -> None:
    """Write a commented run specification to edit.

    Example: lowcomm-node init --method streaming-diloco run.toml
    """
    from lowcomm_node.cli import new_run
    from lowcomm_node.planner.run_template import write_template
    from lowcomm_protocol.spec.presets import PRESETS
    from lowcomm_protocol.spec.run import parse_toml
    from lowcomm_protocol.spec.sections import BYTES

    if file.exists() and not force:
        raise ConfigError(f"{file} exists: name another file, or overwrite it with --force.")
    if parameters is not None and from_ is not None:
        raise ConfigError("--parameters and --from: open weights have a size of their own.")
    weights = new_run.open_weights(from_) if from_ is not None else None
    if from_ is not None:
        tokenizer = tokenizer or new_run.tokenizer_beside(from_)
    chosen = new_run.tokenizer_file(str(tokenizer), weights, from_) if tokenizer else None
    more: dict[str, Mapping[str, Any]] = {
        "run": {"admission": admission} | ({"members": member} if member else {})
    }
    if parameters is not None:
        from lowcomm_node.planner.question import run_of_parameters  # loads torch

        whole = run_of_parameters(parameters, peers, chosen.vocab if chosen else BYTES)
        more["model"], steps = whole.model.model_dump(), steps or whole.run.steps
    line = {"up": up, "down": down, "step_seconds": step_seconds, "peers": peers}

    def written() -> str:
        return write_template(
            name, method or "lowcomm", steps or 2000, seed,
            optimizer=optimizer, more=more, tokenizer=chosen, weights=weights,
        )  # fmt: skip

    text, told = written(), ""
    if plan:
        spec = parse_toml(text, str(file))
        best = new_run.planned(spec, line | {"latency": latency}, method, optimizer)
        method, optimizer = best.method, best.optimizer
        more |= {"sync": best.settings, "plan": best.section}
        text, told = written(), f"{best.reason}\n"
    elif any(value is not None for value in line.values()):
        raise ConfigError("--up, --step-seconds and --peers are for --plan: give that, too.")
    spec = parse_toml(text, str(file))
    warnings = [text for one in (weights, chosen) if one for text in one.warnings]
    file.write_text(text, encoding="utf-8")
    epochs = new_run.epochs_in_words(spec)
    told += f"{epochs}\n" if epochs else ""
    method = spec.sync.method
    here.show(
        {"file": str(file), "name": spec.run.name, "method": method, "warnings": warnings},
        f"{told}{method}: {PRESETS[method].purpose}\n{file} written: edit it, "
        f"then publish it with\n  lowcomm-node create {file} --peers ADDR"
        + "".join(f"\nwarning: {warning}" for warning in warnings),
    )


@command()
def create(
    file: Annotated[Path, typer.Argument(help="The run.toml to publish.")],
    peers: Annotated[list[str], setting("peers")],
    tokenizer: Annotated[
        str | None,
        setting(
            "tokenizer", 'The tokenizer.json that all peers use, where data.tokenizer = "local".'
        ),
    ] = None,
    *,
    here: Here,
) -> None:
    """Sign a run specification with this node's key and publish it.

    Example: lowcomm-node create run.toml --peers ADDRESS
    """
    from lowcomm_node.cli import new_run
    from lowcomm_node.cli.publishing import publish_run
    from lowcomm_node.data.tokenizer import keep_tokenizer, open_tokenizer
    from lowcomm_node.storage.files import load_or_create_identity, write_atomic
    from lowcomm_protocol.spec.run import parse_toml, sign_run

    here.log()
    settings = here.settings(peers=peers, tokenizer=tokenizer)
    text = text_of(file)
    spec = parse_toml(text, str(file), new_run.parameters_of)
    if tokenizer is not None and spec.data.tokenizer != "local":
        raise ConfigError(
            f'--tokenizer {tokenizer}: {file} says data.tokenizer = "bytes": set "local", or leave '
            "the flag."
        )
    spec = new_run.name_layout(new_run.name_tokenizer(spec, settings.tokenizer))
    warnings = [
        new_run.check_size(spec),
        new_run.check_line(spec, text, str(file)),
        new_run.check_used(spec, new_run.tokens_of(spec, settings.tokenizer)),
    ]
    identity = load_or_create_identity(settings.paths.identity)
    run = sign_run(spec, identity)
    kept = run_async(publish_run(settings, identity, run))
    write_atomic(settings.paths.signed_run(run.fingerprint), run.to_bytes(), 0o600)
    if spec.data.tokenizer_sha256 and settings.tokenizer is not None:
        # The node of this home hands it on.
        keep_tokenizer(open_tokenizer(settings.tokenizer), settings.paths.run(run.fingerprint))
    epochs = new_run.epochs_in_words(spec)
    here.show(
        {
            "name": spec.run.name,
            "run_id": run.run_id,
            "fingerprint": run.fingerprint,
            "creator": run.creator,
            "kept": [{"peer_id": peer, **asdict(keeping)} for peer, keeping in kept.items()],
        },
        f"published {spec.run.name}@{run.fingerprint} ({spec.sync.method}, {spec.run.steps} "
        "steps)\n"
        f"{new_run.keeping_in_words(kept)}\n"
        f"join it with\n  {new_run.how_to_join(spec, settings.peers[0])}"
        + (f"\n{epochs}" if epochs else "")
        + "".join(f"\nwarning: {warning}" for warning in warnings if warning),
    )


@command()
def plan(
    file: Annotated[Path | None, typer.Argument(help="A run.toml.", metavar="[RUN.TOML]")] = None,
    parameters: Annotated[str | None, PARAMETERS] = None,
    up: Annotated[str | None, UP] = None,
    down: Annotated[str | None, DOWN] = None,
    step_seconds: Annotated[float | None, STEP_SECONDS] = None,
    peers: Annotated[int | None, PEERS] = None,
    latency: Annotated[float | None, LATENCY] = None,
    *,
    here: Here,
) -> None:
    """Estimate what each method costs on a line, and what of all-reduce's gain it keeps there.

    A run.toml that was written for a line needs no options.

    Example: lowcomm-node plan run.toml --up 20Mbit --step-seconds 2 --peers 8
    """
    from lowcomm_node.cli.new_run import parameters_of
    from lowcomm_node.planner.plan import plan as plan_methods
    from lowcomm_node.planner.question import SECTION, question_of, run_of_parameters
    from lowcomm_node.planner.words import plan_in_words
    from lowcomm_protocol.spec.run import parse_toml

    section = None
    if file is not None and parameters is None:
        text = text_of(file)
        spec, section = parse_toml(text, str(file), parameters_of), tomllib.loads(text).get(SECTION)
    elif parameters is not None and file is None:
        spec = run_of_parameters(parameters, peers)
    else:
        raise ConfigError(
            "plan needs a run.toml (write one with `lowcomm-node init`) or --parameters, and not "
            "both."
        )
    options = {
        "up": up, "down": down, "step_seconds": step_seconds, "peers": peers, "latency": latency
    }  # fmt: skip
    told = plan_methods(question_of(spec, options, section, str(file)), from_file=file is not None)
    here.show(told, plan_in_words(told))


def text_of(file: Path) -> str:
    """Read a run.toml, with or without a byte order mark. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "not text in UTF-8: save it so"
    raise ConfigError(f"{file}: {reason}. `lowcomm-node init` writes one.")
