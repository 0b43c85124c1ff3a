"""``checkpoint``, ``generate``, ``eval``, ``report``, ``track``: what training has brought."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowcomm_node.cli.common import Here, app, command, newest, read_settings, setting
from lowcomm_node.cli.running import JOURNAL, Run
from lowcomm_node.errors import CheckpointError, ConfigError, NodeError, NotRunning
from lowcomm_node.export import Dtype, ExportChoices, Format, Weights
from lowcomm_node.fetch import Gathered
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.system.command import unwinding_signals
from lowcomm_node.system.units import clean, size
from lowcomm_protocol.errors import LowcommError

if TYPE_CHECKING:
    from lowcomm_node.storage.checkpoint import CheckpointStore

checkpoints = typer.Typer(
    help="Checkpoints of this node: list, verify, export, publish.", no_args_is_help=True
)
app.add_typer(checkpoints, name="checkpoint")
BEGINNING = "Once upon a time"
"""Beginning of the sample in a report."""
CHECKPOINTS = "checkpoints", "checkpoints"
"""Their name in a folder of a run, and in messages."""
_BEGUN = "the weights that the run began with"
MOST_SENT = 50_000
"""Bytes of a conversation, without its oldest turns, that a running node is asked about."""
Stream = Callable[..., Iterable[str]]
"""Writes a text or an answer, by how to draw: tokens, temperature and seed."""
_IN_WORDS = {
    Weights.AVERAGE: "the mean of the slow weights of this node and {} of its peers",
    Weights.SLOW: "the slow weights of this node",
    Weights.FAST: "the fast weights of this node",
}


@command("ls", of=checkpoints)
def list_(here: Here, run: Run = None) -> None:
    """List checkpoints, the oldest first."""
    kept = [
        {"step": info.step, "time": info.created_at, "bytes": info.size, "path": str(info.path)}
        for info in _store(here, run).entries()
    ]
    lines = [
        f"{entry['step']:>10}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry['time']))} "
        f" {size(entry['bytes']):>9}  {entry['path']}"
        for entry in kept
    ]
    here.show(kept, "\n".join(lines) or "no checkpoint yet")


@command(of=checkpoints)
def verify(here: Here, run: Run = None) -> None:
    """Read every byte of every checkpoint, and report damage."""
    store = _store(here, run)
    problems = {step: store.verify(step) for step in store.steps()}
    lines = [f"{step:>10}  {'; '.join(found) or 'ok'}" for step, found in problems.items()]
    here.show(problems, "\n".join(lines) or "no checkpoint yet")
    if damaged := ", ".join(str(step) for step, found in problems.items() if found):
        raise CheckpointError(
            f"Damaged: {damaged}. A restart resumes from the newest sound one; delete the others."
        )


@command(of=checkpoints)
def export(
    here: Here,
    folder: Path,
    format_: Annotated[Format, typer.Option("--format")] = Format.HF,
    dtype: Dtype = Dtype.FLOAT32,
    weights: Weights | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
    run: Run = None,
) -> None:
    """Write the model of a checkpoint for transformers, llama.cpp, ollama and others.

    A node that runs saves a checkpoint for it, and asks peers for their weights.

    Args:
        folder: New folder.
        format_: For which programs: see docs/models.md.
        dtype: Precision of the weights; q8_0 with --format gguf.
        weights: average: the slow weights, which the peers agree on, of this node and three peers;
            slow: of this node; fast: what it trains. Default: average where it runs, else slow
            where there are any.
        step: Which; default: the newest.
        tokenizer: Its tokenizer.json, where the home keeps no copy.
    """
    from lowcomm_node.export.write import export_checkpoint

    choices = ExportChoices(format_, dtype, weights, step, tokenizer)
    of_run = newest(here.folder, run, *CHECKPOINTS).parent
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
    note = f" ({missing})" if missing and written.weights is not Weights.FAST else ""
    exported = _IN_WORDS[written.weights].format(len(written.peers))
    here.show(
        {"path": str(folder), "missing": missing} | asdict(written),
        f"exported {exported} at its step {written.step:,} to {folder}{note}",
    )


@command(of=checkpoints, home=False)
def publish(
    here: Here,
    folder: Path,
    repository: str,
    public: Annotated[bool, typer.Option("--public")] = False,
) -> None:
    """Upload an export to the Hugging Face Hub, with your own login there.

    Example: lowcomm-node checkpoint publish tea alice/tea

    Args:
        folder: Folder that `checkpoint export` wrote.
        repository: On the Hub: NAME/MODEL.
        public: Let everybody see a new repository; else only its owner.
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


def _store(here: Here, run: str | None) -> "CheckpointStore":
    from lowcomm_node.storage.checkpoint import CheckpointStore

    return CheckpointStore(newest(here.folder, run, *CHECKPOINTS))


@command()
def generate(
    here: Here,
    prompt: Annotated[str | None, typer.Argument()] = None,
    chat: Annotated[bool, typer.Option("--chat")] = False,
    compare: Annotated[bool, typer.Option("--compare")] = False,
    tokens: Annotated[int, typer.Option(min=1, max=4096)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="NUMBER")] = 0.8,
    seed: int = 0,
    checkpoint: Path | None = None,
    tokenizer: str | None = None,
) -> None:
    """Let the model of the running node, or of the newest checkpoint, write, or talk with it.

    Example: lowcomm-node generate "import " --tokens 400

    Args:
        prompt: The text to continue; default: "def ". With --chat the message to answer; default:
            the lines that you type, until an empty one or Ctrl-D.
        chat: Answer messages by the chat template of the run, or by the one beside its tokenizer.
        compare: Write twice with the same seed: by the weights that the run began with, and by the
            checkpoint, or by a running node that trains an adapter.
        tokens: How many to draw; of an answer at most.
        temperature: 0 takes the likeliest token.
        seed: The same seed gives the same text.
        checkpoint: Folder of a checkpoint; default: the running node.
        tokenizer: Its tokenizer.json, if the home of the checkpoint has no copy; or bytes.
    """
    writers, draw = _writers(here, compare, checkpoint, tokenizer), (tokens, temperature, seed)
    if not compare:  # beside the text, which a program may read
        print(f"by the fast weights of {next(iter(writers))}", file=sys.stderr)
    if not chat:
        prompt = "def " if prompt is None else prompt
        _write(here, prompt, writers, [prompt] * len(writers), draw)
        return
    talks: list[list[str]] = [[] for _ in writers]
    for message in _messages() if prompt is None else [prompt]:
        for talk in talks:
            talk.append(message)
        for talk, text in zip(talks, _write(here, message, writers, talks, draw), strict=True):
            talk.append(text)


def _writers(
    here: Here, compare: bool, checkpoint: Path | None, tokenizer: str | None
) -> Mapping[str, Stream]:
    if checkpoint is None:
        with suppress(NotRunning), here.node() as client:
            node = {"the running node": partial(_ask_node, here)}
            run = client.status().run if compare else None
            if run and run.adapts:  # which it can leave aside
                return {_BEGUN: partial(_ask_node, here, before=True)} | node
            if not compare:
                return node
    from lowcomm_node.models.writing import open_writer

    saved = checkpoint or newest(here.folder, None, *CHECKPOINTS)
    if not compare:
        return {"a checkpoint": open_writer(saved, tokenizer).stream}
    return {
        _BEGUN: open_writer(saved, tokenizer, at_start=True).stream,
        "the checkpoint": open_writer(saved, tokenizer).stream,
    }


def _ask_node(
    here: Here,
    asked: str | list[str],
    tokens: int,
    temperature: float,
    seed: int,
    before: bool = False,
) -> list[str]:
    prompt, chat = (asked, []) if isinstance(asked, str) else ("", asked)
    while len(chat) > 2 and len(json.dumps(chat)) > MOST_SENT:
        chat = chat[2:]
    with here.node() as client:
        return [client.generate(prompt, tokens, temperature, seed, chat, before)]


def _messages() -> Iterator[str]:
    """Lines of a person or a program, until an empty one."""
    is_person = sys.stdin.isatty()
    if is_person:
        with suppress(ImportError):
            import_module("readline")  # lets them edit a line
    with suppress(EOFError):
        while (line := input("> " if is_person else "")).strip():
            yield line


def _write(
    here: Here,
    prompt: str,
    writers: Mapping[str, Stream],
    asked: Sequence[str | list[str]],
    draw: tuple[int, float, int],
) -> list[str]:
    """Show what each writer writes, and return it."""
    texts: list[str] = []
    for (of, stream), one in zip(writers.items(), asked, strict=True):
        pieces, begun = stream(one, *draw), prompt if isinstance(one, str) else ""
        if here.as_json:
            texts.append("".join(pieces))
            continue
        if len(writers) > 1:
            print(f"\nby {of}:" if texts else f"by {of}:")
        texts.append("")
        for piece in pieces:
            print(begun + clean(piece, keep="\n\t"), end="", flush=True)
            texts[-1] += piece
            begun = ""
        print(flush=True)
    if here.as_json:
        content = {"prompt": prompt, "text": texts[-1], "weights": "fast"}
        if len(texts) > 1:
            content["before"] = texts[0]
        print(json.dumps(content), flush=True)
    return texts


@command("eval", home=False)
def evaluate(
    here: Here,
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER")] = None,
    tasks: Annotated[str, typer.Option(metavar="NAMES")] = "",
    include: Path | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Score an export on tasks of lm-eval, the harness of EleutherAI.

    Example: lowcomm-node eval tea --tasks arc_easy,hellaswag --limit 200

    Args:
        folder: Folder that `checkpoint export` wrote.
        tasks: Their names, separated by commas; `lm-eval ls tasks` lists all.
        include: Folder with tasks of your own, in YAML.
        limit: Documents of each task; default: all.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if folder is None:
        raise ConfigError("Name an export: `lowcomm-node checkpoint export FOLDER` writes one.")
    if not names:
        raise ConfigError("Name tasks, such as --tasks arc_easy,hellaswag.")
    from lowcomm_node.export.scoring import score

    scores = score(folder, names, include, limit)
    lines = [f"{'task':40} {'metric':18} {'value':>9} {'stderr':>9}"]
    for found in scores:
        error = "" if found.stderr is None else f"{found.stderr:.4f}"
        row = f"{found.task:40.40} {found.metric:18.18} {found.value:9.4f} {error:>9}"
        lines.append(row.rstrip())
    here.show(scores, "\n".join(lines))


@command()
def report(
    here: Here,
    folder: Annotated[Path | None, typer.Argument(metavar="HOME")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("report.html"),
    run: Run = None,
) -> None:
    """Write one HTML file with plots of a run, from the journal: the node need not run.

    Example: lowcomm-node report --output tea.html

    Args:
        folder: A home, or a folder of homes as a demo leaves it; default: that of --home.
        output: The file to write.
    """
    from lowcomm_node.models.writing import open_writer
    from lowcomm_node.status.report import write_report

    home = absolute(folder or here.folder)
    sample = ""
    with suppress(LowcommError, OSError):  # a report without one is good as well
        saved = newest(home, run, *CHECKPOINTS)
        sample = BEGINNING + open_writer(saved).text(BEGINNING, 60, 0.8)
    homes = write_report(home, output, run, sample)
    content = {"file": str(output.absolute()), "homes": homes, "written": time.time()}
    here.show(content, f"{output} written: open it in a browser")


@command()
def track(
    here: Here,
    sink: Annotated[str, typer.Argument(metavar="SINK")],
    to: Annotated[str | None, typer.Option(metavar="TARGET")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    name: Annotated[str | None, setting("name")] = None,
    run: Run = None,
) -> None:
    """Write what this home did into a tracker: losses, rates and bytes.

    The node need not run, and is not touched. A second start goes on where
    the first ended.

    Example: lowcomm-node track tensorboard --to logs --follow

    Args:
        sink: tensorboard or wandb.
        to: A folder (tensorboard) or a project (wandb). Default: tensorboard or lowcomm.
        follow: Go on as it happens.
    """
    from lowcomm_node.status.journal import Journal
    from lowcomm_node.status.track import SINKS, Tracker, tracked_of

    SINKS.check(sink)
    path = newest(here.folder, run, *JOURNAL)
    fingerprint, folder = path.parent.name, path.parents[2]
    settings = read_settings({"home": folder, "name": name}).settings
    tracked = tracked_of(folder, fingerprint, settings.name or "")
    written = SINKS[sink](to, tracked)
    positions = Paths(folder).tracked(fingerprint)
    tracker = Tracker(Journal(path), written, positions, sink)
    named = f"{tracked.run}@{fingerprint}"
    warn = partial(print, file=sys.stderr, flush=True)
    if follow:
        warn(f"{named} goes to {written.target}; Ctrl-C ends it")
    try:
        with unwinding_signals():
            tracker.run(warn if follow else None)
    except KeyboardInterrupt:
        if not follow:
            raise
    content: dict[str, Any] = {
        "sink": sink, "target": written.target, "run": fingerprint, "node": tracked.node,
        "points": tracker.points,
    }  # fmt: skip
    here.show(content, f"{tracker.points} points of {named} written to {written.target}")
