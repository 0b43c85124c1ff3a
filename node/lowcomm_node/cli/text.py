"""``generate``: sample text from a checkpoint or from the running node."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from lowcomm_node.cli.checkpoints import newest_run
from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NotRunning
from lowcomm_node.owner.sources import find_home
from lowcomm_node.system.units import clean_text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


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
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Let the model of the running node, or of the newest checkpoint, write.

    Example: lowcomm-node generate "import " --tokens 400
    """
    folder = find_home(home)
    text, whose = None, "the running node"
    if checkpoint is None:
        with suppress(NotRunning), ControlClient(folder) as client:
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
    show(told, json_, prompt + clean_text(text))
