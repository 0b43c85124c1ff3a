"""``plan``: what a run costs on a line, before it begins."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.errors import ConfigError

if TYPE_CHECKING:
    from lowcomm_protocol.spec.run import RunSpec

UP = typer.Option(help="What a peer's line sends, a second.", metavar="20Mbit")
STEP_SECONDS = typer.Option(
    help="Seconds that a peer takes for an inner step.", metavar="SECONDS", show_default=False
)
PEERS = typer.Option("--peers", help="How many peers are expected.", metavar="N")
Down = Annotated[
    str | None,
    typer.Option(help="What it receives; default: as much as it sends.", metavar="100Mbit"),
]
Latency = Annotated[
    float, typer.Option(help="Milliseconds there and back between two peers.", metavar="MS")
]
Parameters = Annotated[
    str | None, typer.Option(help="A model of about so many parameters.", metavar="1B")
]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The line that options of ``init --plan`` tell; None where one was not given."""

    up: str | None
    down: str | None
    step_seconds: float | None
    peers: int | None
    latency: float

    @property
    def any(self) -> bool:
        """Whether any was given."""
        return (self.up, self.down, self.step_seconds, self.peers) != (None,) * 4


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    up: Annotated[str, UP],
    step_seconds: Annotated[float, STEP_SECONDS],
    peers: Annotated[int, PEERS],
    file: Annotated[Path | None, typer.Argument(help="A run.toml.", metavar="[RUN.TOML]")] = None,
    parameters: Parameters = None,
    down: Down = None,
    latency: Latency = 50.0,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Reckon what each method costs on a line, and what of all-reduce's gain it keeps there.

    Example: lowcomm-node plan run.toml --up 20Mbit --step-seconds 2 --peers 8
    """
    from lowcomm_node.planner.declared import Declared, option
    from lowcomm_node.planner.plan import plan as reckon
    from lowcomm_node.planner.words import plan_in_words

    if (file is None) == (parameters is None):
        raise ConfigError(
            "plan needs a run.toml (write one with `lowcomm-node init`) or --parameters, and not "
            "both."
        )
    spec = run_of_parameters(parameters, peers) if parameters is not None else run_in(file)
    line = Declared(up=up, down=down, step_seconds=step_seconds, peers=peers, latency=latency)
    told = reckon(line.question(spec, option), from_file=file is not None)
    show(told, json_, plan_in_words(told))


def run_of_parameters(text: str, peers: int | None) -> "RunSpec":
    """A run of a model of so many parameters. Raises ConfigError."""
    from lowcomm_node.planner.question import read_parameters, run_of

    try:
        return run_of(read_parameters(text), max(1, peers or 1))
    except ValueError as error:
        raise ConfigError(f"--parameters: {error}.") from None


def run_in(file: Path | None) -> "RunSpec":
    """The run of a file. Raises ConfigError and SpecError."""
    from lowcomm_node.cli.new_run import parameters_of
    from lowcomm_protocol.spec.run import parse_toml

    assert file is not None
    try:
        return parse_toml(file.read_text(), str(file), parameters_of)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}: write one with `lowcomm-node init`.") from None
