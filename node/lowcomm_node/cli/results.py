"""``checkpoint``, ``generate``, ``report``, ``track``: what training has brought."""

import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, app, command, read_settings, setting
from lowcomm_node.cli.watch import Run, journal_path
from lowcomm_node.errors import CheckpointError, ConfigError, NodeError, NotRunning
from lowcomm_node.export import Dtype, ExportChoices, Format, Weights
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.system.command import unwinding_signals
from lowcomm_node.system.units import clean, size

checkpoints = typer.Typer(
    help="Checkpoints of this node: list, verify, export, publish.", no_args_is_help=True
)
app.add_typer(checkpoints, name="checkpoint")


@command("ls", of=checkpoints)
def list_(run: Run = None, *, here: Here) -> None:
    """List checkpoints, the oldest first."""
    store = _store(here, run)
    found = [
        {"step": info.step, "time": info.created_at, "bytes": info.size, "path": str(info.path)}
        for info in store.entries()
    ]
    lines = [
        f"{entry['step']:>10}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry['time']))} "
        f" {size(entry['bytes']):>9}  {entry['path']}"
        for entry in found
    ]
    here.show(found, "\n".join(lines) or "no checkpoint yet")


@command(of=checkpoints)
def verify(run: Run = None, *, here: Here) -> None:
    """Read every byte of every checkpoint, and report damage."""
    store = _store(here, run)
    found = {step: store.verify(step) for step in store.steps()}
    lines = [
        f"{step:>10}  {'ok' if not problems else '; '.join(problems)}"
        for step, problems in found.items()
    ]
    here.show(found, "\n".join(lines) or "no checkpoint yet")
    if any(found.values()):
        damaged = ", ".join(str(step) for step, problems in found.items() if problems)
        raise CheckpointError(
            f"Damaged: {damaged}. A restart resumes from the newest sound one; delete the others."
        )


@command(of=checkpoints)
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
    *,
    here: Here,
) -> None:
    """Write the model of a checkpoint for transformers, llama.cpp, ollama and others.

    A node that runs saves a checkpoint for it, and asks peers for their weights.
    """
    from lowcomm_node.export.write import export_checkpoint

    choices = ExportChoices(format_, dtype, weights, step, tokenizer)
    of_run = newest_run(here.folder, run)
    gathered = _gather(here, of_run, choices)
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
    here.show(
        {"path": str(folder), "missing": missing} | asdict(written),
        f"exported {told} at its step {written.step:,} to {folder}{note}",
    )


@command(of=checkpoints, home=False)
def publish(
    folder: Annotated[Path, typer.Argument(help="Folder that `checkpoint export` wrote.")],
    repository: Annotated[str, typer.Argument(help="On the Hub: NAME/MODEL.")],
    public: Annotated[
        bool, typer.Option(help="Let everybody see a new repository; else only its owner.")
    ] = False,
    *,
    here: Here,
) -> None:
    """Upload an export to the Hugging Face Hub, with your own login there.

    Example: lowcomm-node checkpoint publish tea alice/tea
    """
    from lowcomm_node.export.publish import publish as upload

    address = upload(folder, repository, public)
    here.show({"repository": repository, "url": address}, f"published {folder} as {address}")


def _gather(here: Here, of_run: Path, choices: ExportChoices) -> Gathered:
    """Weights from peers of the running node for an average, or the reason for none."""
    nothing = Gathered(folder="")
    may = choices.step is None and choices.format is not Format.SAFETENSORS
    if not may or choices.weights not in (None, Weights.AVERAGE):
        return nothing
    try:
        with here.node() as client:
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


def _store(here: Here, run: str | None) -> Any:
    from lowcomm_node.storage.checkpoint import CheckpointStore

    return CheckpointStore(newest_run(here.folder, run) / "checkpoints")


@command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="How many to draw.", min=1, max=4096)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint; default: the running node.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Its tokenizer.json, if the home of the checkpoint has no copy; or bytes."
        ),
    ] = None,
    *,
    here: Here,
) -> None:
    """Let the model of the running node, or of the newest checkpoint, write.

    Example: lowcomm-node generate "import " --tokens 400
    """
    folder = here.folder
    text, whose = None, "the running node"
    if checkpoint is None:
        with suppress(NotRunning), here.node() as client:
            text = client.generate(prompt, tokens, temperature, seed)
    if text is None:
        from lowcomm_node.models.inference import generate_from

        text = generate_from(
            checkpoint or newest_run(folder, None) / "checkpoints",
            prompt,
            tokens,
            temperature,
            seed,
            tokenizer,
        )
        whose = "a checkpoint"
    # Beside the text, which a program may read.
    print(f"by the fast weights of {whose}", file=sys.stderr)
    told = {"prompt": prompt, "text": text, "weights": "fast"}
    here.show(told, prompt + clean(text, keep="\n\t"))


@command()
def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A home, or a folder of homes as a demo leaves it; default: that of --home.",
            metavar="HOME",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")
    ] = Path("report.html"),
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Write one HTML file with plots of a run, from the journal: the node need not run.

    Example: lowcomm-node report --output tea.html
    """
    from lowcomm_node.status.report import write_report

    homes = write_report(absolute(folder or here.folder), output, run)
    told = {"file": str(output.absolute()), "homes": homes, "written": time.time()}
    here.show(told, f"{output} written: open it in a browser")


@command()
def track(
    sink: Annotated[str, typer.Argument(help="tensorboard or wandb.", metavar="SINK")],
    to: Annotated[
        str | None,
        typer.Option(
            help="A folder (tensorboard) or a project (wandb). Default: tensorboard or lowcomm.",
            metavar="TARGET",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it happens.")] = False,
    name: Annotated[str | None, setting("name")] = None,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Write what this home did into a tracker: losses, rates and bytes.

    The node need not run, and is not touched. A second start goes on where
    the first ended.

    Example: lowcomm-node track tensorboard --to logs --follow
    """
    from lowcomm_node.status.journal import Journal
    from lowcomm_node.status.track import SINKS, PositionFile, Tracker, tracked_of

    SINKS.check(sink)
    path = journal_path(here, run)
    fingerprint, folder = path.parent.name, path.parents[2]
    settings = read_settings({"home": folder, "name": name}).settings
    tracked = tracked_of(folder, fingerprint, settings.name or "")
    written = SINKS[sink](to, tracked)
    file = PositionFile(Paths(folder).tracked(fingerprint), sink, written.target)
    tracker = Tracker(Journal(path), written, tracked.step_tokens, file)
    if follow:
        _warn(f"{tracked.run}@{fingerprint} goes to {written.target}; Ctrl-C ends it")
    try:
        with unwinding_signals():
            tracker.run(_warn if follow else None)
    except KeyboardInterrupt:
        if not follow:
            raise
    told = {
        "sink": sink,
        "target": written.target,
        "run": fingerprint,
        "node": tracked.node,
        "points": tracker.points,
    }
    here.show(
        told, f"{tracker.points} points of {tracked.run}@{fingerprint} written to {written.target}"
    )


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
