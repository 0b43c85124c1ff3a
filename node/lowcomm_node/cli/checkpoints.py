"""``checkpoint ls``, ``verify``, ``export``."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.errors import CheckpointError, ConfigError
from lowcomm_node.owner.sources import find_home
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.formatting import size

app = typer.Typer(help="Checkpoints of this node: list, verify, export.", no_args_is_help=True)
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
    folder: Annotated[
        Path, typer.Argument(help="New folder for weights.safetensors and config.json.")
    ],
    step: Annotated[int | None, typer.Option(help="Which; default: the newest.")] = None,
    run: Run = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Write the weights of a checkpoint for use elsewhere."""
    store = _store(home, run)
    newest = store.latest()
    if newest is None:
        raise CheckpointError(f"There is no checkpoint in {store.folder} yet.")
    path = store.export(newest.step if step is None else step, folder)
    show({"path": str(path)}, json_, f"exported to {path}")


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
