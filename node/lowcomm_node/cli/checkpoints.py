"""``checkpoint ls``, ``verify``, ``export``, ``publish``."""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import CheckpointError, ConfigError, NodeError, NotRunning
from lowcomm_node.export.choices import Choices, Dtype, Format, Weights
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.owner.sources import find_home
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.units import size

app = typer.Typer(
    help="Checkpoints of this node: list, verify, export, publish.", no_args_is_help=True
)
Run = Annotated[
    str | None, typer.Option(help="Fingerprint of the run; default: the one used last.")
]


@app.command("ls")
def list_(
    run: Run = None, home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0
) -> None:
    """List checkpoints, the oldest first."""
    store = _store(home, run)
    found = [
        {"step": info.step, "time": info.created_at, "bytes": info.size, "path": str(info.path)}
        for info in store.entries()
    ]
    lines = [
        f"{entry['step']:>10}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry['time']))} "
        f" {size(entry['bytes']):>9}  {entry['path']}"
        for entry in found
    ]
    show(found, json_, "\n".join(lines) or "no checkpoint yet")


@app.command()
def verify(
    run: Run = None, home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0
) -> None:
    """Read every byte of every checkpoint, and report damage."""
    store = _store(home, run)
    found = {step: store.verify(step) for step in store.steps()}
    lines = [
        f"{step:>10}  {'ok' if not problems else '; '.join(problems)}"
        for step, problems in found.items()
    ]
    show(found, json_, "\n".join(lines) or "no checkpoint yet")
    if any(found.values()):
        damaged = ", ".join(str(step) for step, problems in found.items() if problems)
        raise CheckpointError(
            f"Damaged: {damaged}. A restart resumes from the newest sound one; delete the others."
        )


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    format_: Annotated[
        Format, typer.Option("--format", help="For which programs: see docs/models.md.")
    ] = Format.HF,
    dtype: Annotated[
        Dtype, typer.Option(help="Precision of the weights; q8_0 with --format gguf.")
    ] = Dtype.FLOAT32,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="average: the slow weights, which the peers agree on, of this node and three "
            "peers; slow: of this node; fast: what it trains. Default: average where it runs, else "
            "slow where there are any."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which; default: the newest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Its tokenizer.json, where the home keeps no copy.")
    ] = None,
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Write the model of a checkpoint for transformers, llama.cpp, ollama and others.

    A node that runs saves a checkpoint for it, and asks peers for their weights.
    """
    from lowcomm_node.export.write import export_checkpoint

    choices = Choices(format_, dtype, weights, step, tokenizer)
    of_run = newest_run(find_home(home), run)
    gathered = _gather(find_home(home), of_run, choices)
    files = {peer: Path(gathered.folder) / peer for peer in gathered.peers}
    try:
        written = export_checkpoint(of_run, folder, choices, files)
    finally:
        shutil.rmtree(of_run / "gathered", ignore_errors=True)
    left_out = set(files) - set(written.peers) if written.weights is not Weights.FAST else set()
    missing = "; ".join(
        [gathered.missing, *(f"{peer[-6:]}: its weights are far from ours" for peer in left_out)]
    ).strip("; ")
    told = {
        Weights.AVERAGE: f"the mean of the slow weights of this node and {len(written.peers)} of "
        "its peers",
        Weights.SLOW: "the slow weights of this node",
        Weights.FAST: "the fast weights of this node",
    }[written.weights]
    note = f" ({missing})" if missing and written.weights is not Weights.FAST else ""
    show(
        {"path": str(folder), "missing": missing} | asdict(written),
        json_,
        f"exported {told} at its step {written.step:,} to {folder}{note}",
    )


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="Folder that `checkpoint export` wrote.")],
    repository: Annotated[str, typer.Argument(help="On the Hub: NAME/MODEL.")],
    public: Annotated[
        bool, typer.Option(help="Let everybody see a new repository; else only its owner.")
    ] = False,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Upload an export to the Hugging Face Hub, with your own login there.

    Example: lowcomm-node checkpoint publish tea alice/tea
    """
    from lowcomm_node.export.publish import publish as upload

    address = upload(folder, repository, public)
    show({"repository": repository, "url": address}, json_, f"published {folder} as {address}")


def _gather(home: Path, of_run: Path, choices: Choices) -> Gathered:
    """What peers of the running node give for an average; why nothing, if nothing."""
    nothing = Gathered(folder="")
    may = choices.step is None and choices.format is not Format.SAFETENSORS
    if not may or choices.weights not in (None, Weights.AVERAGE):
        return nothing
    try:
        with ControlClient(home) as client:
            status = client.status()
            if status.run is None or status.run.fingerprint != of_run.name:
                return replace(nothing, missing="the node of this home trains another run")
            return client.gather()
    except NotRunning:
        return replace(nothing, missing="no peers' weights: the node of this home does not run")
    except NodeError as error:
        return replace(nothing, missing=str(error).rstrip("."))


def newest_run(home: Path, fingerprint: str | None) -> Path:
    """The folder of the named run, or of the one used last. Raises ConfigError."""
    found = [folder.parent for folder in Paths(home).runs.glob("*/checkpoints") if folder.is_dir()]
    if fingerprint is not None:
        found = [folder for folder in found if folder.name.startswith(fingerprint)]
    if not found:
        whose = f" of run {fingerprint}" if fingerprint else ""
        raise ConfigError(f"{home} holds no checkpoints{whose}: see --home.")
    return max(found, key=lambda folder: (folder / "checkpoints").stat().st_mtime)


def _store(home: Path | None, run: str | None) -> Any:
    from lowcomm_node.storage.checkpoint import CheckpointStore

    return CheckpointStore(newest_run(find_home(home), run) / "checkpoints")
