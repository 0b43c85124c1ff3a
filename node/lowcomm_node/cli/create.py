"""``init``, ``create``, ``plan``: write a run, publish it, and what it costs on a line."""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, option, setting
from lowcomm_node.errors import ConfigError
from lowcomm_node.system.app import run_async
from lowcomm_node.system.units import clean, read_count, read_size
from lowcomm_protocol.spec.sections import MAX_RANK

LINE = [
    option("up", str, "What a peer's line sends, such as 20Mbit.", metavar="RATE"),
    option("down", str, "What it receives; default: as much as it sends.", metavar="RATE"),
    option(
        "step_seconds", float, "Seconds that a peer takes for an inner step.", metavar="SECONDS"
    ),
    option("peers", int, "How many peers are expected.", metavar="N"),
    option(
        "latency",
        float,
        "Milliseconds there and back between two peers; default: 50.",
        metavar="MS",
    ),
]
Parameters = Annotated[
    str | None, typer.Option(help="A model of about as many parameters.", metavar="1B")
]


@command(groups={"line": LINE})
def init(
    here: Here,
    file: Annotated[Path, typer.Argument()] = Path("run.toml"),
    method: str | None = None,
    optimizer: str | None = None,
    name: str = "my-run",
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    tokens: Annotated[str | None, typer.Option(metavar="10B")] = None,
    parameters: Parameters = None,
    plan: Annotated[bool, typer.Option("--plan")] = False,
    line: Any = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    admission: str = "open",
    member: list[str] | None = None,
    data: Annotated[list[Path] | None, typer.Option(metavar="PACK")] = None,
    tokenizer: Path | None = None,
    from_: Annotated[Path | None, typer.Option("--from", metavar="DIR")] = None,
    adapter: Annotated[int | None, typer.Option(metavar="RANK")] = None,
    base: str | None = None,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Write a commented run specification to edit.

    Example: lowcomm-node init --method streaming-diloco run.toml

    Args:
        file: Where to write it.
        method: lowcomm (the default), noloco, gossip, diloco, streaming-diloco or local.
        optimizer: Inner optimizer, adamw or muon, if not the method's.
        name: Name of the run: a-z, 0-9, dots and dashes.
        steps: Length of the run in swarm steps; default: 2000, with --parameters as many as give
            20 tokens a parameter.
        tokens: Length in tokens of all peers, in place of steps.
        plan: Take the best method and interval for a line.
        seed: Seed of all randomness of the run.
        admission: Admission of peers: open, invite or list.
        member: Peer id on the list; may be repeated.
        data: Packed text to train on, of `data pack`; may be repeated.
        tokenizer: The tokenizer.json that all peers use; default: bytes, without a file.
        from_: A folder of Hugging Face's with open weights, which the run begins with.
        adapter: With --from: train low-rank factors (LoRA) of this rank; the weights stay.
        base: With --adapter: bf16, int8 or nf4, in which peers hold the weights.
        force: Overwrite the file.
    """
    from lowcomm_node.cli import creator
    from lowcomm_node.cli.data import licences_of_packs, pin_packs
    from lowcomm_node.data.tokenizer import KEPT
    from lowcomm_node.planner.run_template import write_template
    from lowcomm_protocol.spec.presets import PRESETS
    from lowcomm_protocol.spec.run import parse_toml
    from lowcomm_protocol.spec.sections import BYTES

    if file.exists() and not force:
        raise ConfigError(f"{file} exists: name another file, or overwrite it with --force.")
    if parameters is not None and from_ is not None:
        raise ConfigError("--parameters and --from: open weights have a size of their own.")
    weights = creator.open_weights(from_) if from_ is not None else None
    if from_ is not None:
        tokenizer = tokenizer or from_ / KEPT
    words = creator.tokenizer_file(str(tokenizer), weights, from_) if tokenizer else None
    vocab = words.vocab if words else BYTES
    given: dict[str, dict[str, Any]] = {
        "run": {"name": name, "seed": seed, "admission": admission, "members": member or None},
        "model": {"vocab": vocab},
        "data": dict(words.data) if words else {},
        "train": {"optimizer": optimizer},
        "sync": {"method": method or "lowcomm"},
        "export": words.export.model_dump(exclude_defaults=True) if words else {},
    }
    licences = creator.licences_of_weights(from_) if from_ is not None else []
    if data:
        given["data"], vocab = pin_packs(data, words.data if words else None)
        licences += licences_of_packs(data)
        given["model"] = {"vocab": vocab}
    if weights:
        given |= {"model": weights.model.model_dump(), "start": weights.start.model_dump()}
        given["export"]["base"] = clean(from_.absolute().name[:100]) if from_ else None
        tuning = creator.FINE_TUNING if adapter is None else creator.ADAPTING
        if optimizer in (None, tuning["optimizer"]):
            given["train"] = dict(tuning)
    if adapter is not None:
        if weights is None:
            raise ConfigError("--adapter adapts open weights: name their folder with --from DIR.")
        if method in (None, "lowcomm"):
            given["sync"] |= creator.ADAPTER_SYNC
        given["adapter"] = {"rank": adapter, "alpha": 2.0 * adapter, "base": base or "bf16"}
    elif base is not None:
        raise ConfigError("--base is for --adapter: weights that are trained stay in fp32.")
    if licences:
        given["export"]["licences"] = licences
    if tokens is not None:
        given["run"]["tokens"] = read_count(tokens)
        if steps or not given["run"]["tokens"]:
            raise ConfigError(f"--tokens {tokens}: write such as 10B, and without --steps.")
    if parameters is not None:
        from lowcomm_node.planner.line import run_of_parameters  # loads torch

        sized = run_of_parameters(parameters, max(1, line["peers"] or 1), vocab)
        given["model"] = sized.model.model_dump()
        steps = steps or sized.run.steps
    if tokens is None:
        given["run"]["steps"] = steps or 2000
    longest = weights.longest if weights else 0
    text, message = write_template(given, longest), ""
    if plan:
        spec = parse_toml(text, str(file))
        sections, reason = creator.apply_plan(spec, line, method, optimizer)
        text, message = write_template(given | sections, longest), f"{reason}\n"
    elif any(line[name] is not None for name in ("up", "down", "step_seconds", "peers")):
        raise ConfigError("--up, --step-seconds and --peers are for --plan: give that, too.")
    spec = parse_toml(text, str(file))
    warnings = [warning for part in (weights, words) if part for warning in part.warnings]
    file.write_text(text, encoding="utf-8")
    if epochs := creator.epochs_in_words(spec):
        message += f"{epochs}\n"
    method = spec.sync.method
    here.show(
        {"file": str(file), "name": spec.run.name, "method": method, "warnings": warnings},
        f"{message}{method}: {PRESETS[method].purpose}\n{file} written: edit it, "
        f"then publish it with\n  lowcomm-node create {file} --peers ADDR"
        + "".join(f"\nwarning: {warning}" for warning in warnings),
    )


@command()
def create(
    here: Here,
    file: Annotated[Path, typer.Argument(help="The run.toml to publish.")],
    peers: Annotated[list[str], setting("peers")],
    tokenizer: Annotated[
        str | None,
        setting(
            "tokenizer", 'The tokenizer.json that all peers use, where data.tokenizer = "local".'
        ),
    ] = None,
) -> None:
    """Sign a run specification with this node's key and publish it.

    Example: lowcomm-node create run.toml --peers ADDRESS
    """
    from lowcomm_node.cli import creator
    from lowcomm_node.data.tokenizer import keep_tokenizer
    from lowcomm_node.storage.files import load_or_create_identity, write_atomic
    from lowcomm_protocol.spec.run import parse_toml, sign_run
    from lowcomm_protocol.spec.sections import BUILTIN_TOKENS

    here.log()
    settings = here.settings(peers=peers, tokenizer=tokenizer)
    text = text_of(file)
    spec = parse_toml(text, str(file), creator.parameters_of)
    if tokenizer is not None and spec.data.tokenizer != "local":
        raise ConfigError(
            f'--tokenizer {tokenizer}: {file} says data.tokenizer = "bytes": set "local", or leave '
            "the flag."
        )
    spec = creator.name_layout(creator.name_tokenizer(spec, settings.tokenizer))
    creator.check_adapter(spec)
    path = settings.tokenizer if spec.data.tokenizer == "local" else None
    words = creator.open_tokenizer_file(path) if path else None
    tokens = BUILTIN_TOKENS.get(spec.data.tokenizer) or (words.vocab if words else None)
    warnings = [
        creator.check_size(spec),
        creator.check_line(spec, text, str(file)),
        creator.check_used(spec, tokens),
    ]
    identity = load_or_create_identity(settings.paths.identity)
    run = sign_run(spec, identity)
    kept = run_async(creator.publish_run(settings, identity, run))
    write_atomic(settings.paths.signed_run(run.fingerprint), run.to_bytes(), 0o600)
    if spec.data.tokenizer_sha256 and words is not None:
        # The node of this home hands it on.
        keep_tokenizer(words, settings.paths.run(run.fingerprint))
    epochs = creator.epochs_in_words(spec)
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
        f"{creator.keeping_in_words(kept)}\n"
        f"join it with\n  {creator.how_to_join(spec, settings.peers[0])}"
        + (f"\n{epochs}" if epochs else "")
        + "".join(f"\nwarning: {warning}" for warning in warnings if warning),
    )


@command(groups={"line": LINE})
def plan(
    here: Here,
    file: Annotated[Path | None, typer.Argument(help="A run.toml.", metavar="[RUN.TOML]")] = None,
    parameters: Parameters = None,
    adapter: Annotated[int | None, typer.Option(metavar="RANK", min=1, max=MAX_RANK)] = None,
    base: str | None = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    gpus: Annotated[int, typer.Option(min=1, max=16)] = 1,
    moments: str = "fp32",
    line: Any = None,
) -> None:
    """Estimate what each method costs on your connection, and what of all-reduce's gain it keeps.

    A run.toml that was written for a line needs no options. With --vram: the memory of a GPU.

    Example: lowcomm-node plan run.toml --up 20Mbit --step-seconds 2 --peers 8

    Args:
        adapter: Train low-rank factors of this rank beside frozen weights.
        base: bf16, int8 or nf4: how peers hold the frozen weights.
        vram: Memory of a GPU, such as 12GiB: say what it holds, and what to change.
        gpus: With --vram: GPUs of that size that train together, as with --device all.
        moments: With --vram: fp32, bf16 or int8, as for join.
    """
    from lowcomm_node.cli.creator import parameters_of
    from lowcomm_node.models.frozen import FORMS
    from lowcomm_node.planner.fit import fit, with_adapter
    from lowcomm_node.planner.line import read_line, run_of_parameters
    from lowcomm_node.planner.plan import plan as plan_methods
    from lowcomm_node.planner.words import fit_in_words, plan_in_words
    from lowcomm_node.trainer.moments import BITS
    from lowcomm_protocol.spec.run import parse_toml

    if base not in (None, *FORMS) or moments not in BITS:
        raise ConfigError("--base is bf16, int8 or nf4, and --moments fp32, bf16 or int8.")
    on = None
    if file is not None and parameters is None:
        text = text_of(file)
        spec = parse_toml(text, str(file), parameters_of)
        if vram is None:
            on = read_line(f"{file}: [plan]", line, tomllib.loads(text).get("plan"))
    elif parameters is not None and file is None:
        on = read_line("plan", line) if vram is None else None
        spec = run_of_parameters(parameters, on.peers if on else 1)
    else:
        raise ConfigError(
            "plan needs a run.toml (write one with `lowcomm-node init`) or --parameters, and not "
            "both."
        )
    if adapter is not None or base is not None:
        spec = with_adapter(spec, adapter, base)
    if on is None:
        fitting = fit(spec, _size(vram or ""), moments, gpus)
        here.show(fitting, fit_in_words(fitting))
        return
    planned = plan_methods(spec, on, from_file=file is not None)
    here.show(planned, plan_in_words(planned))


def _size(text: str) -> int:
    try:
        if text.isdecimal():  # in GiB, or in bytes?
            raise ValueError(f"{text} of what? Write {text}GiB")
        return read_size(text)
    except ValueError as error:
        raise ConfigError(f"--vram: {error}.") from None


def text_of(file: Path) -> str:
    """Read a run.toml, with or without a byte order mark. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "not text in UTF-8: save it so"
    raise ConfigError(f"{file}: {reason}. `lowcomm-node init` writes one.")
