"""``plan``: what a run costs on a line, before it begins."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, show
from lowcomm_node.errors import ConfigError

if TYPE_CHECKING:
    from lowcomm_node.planner.question import Question
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
LATENCY = typer.Option(
    help="Milliseconds there and back between two peers; default: 50.", metavar="MS"
)
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
    file: Annotated[Path | None, typer.Argument(help="A run.toml.", metavar="[RUN.TOML]")] = None,
    parameters: Parameters = None,
    up: Annotated[str | None, UP] = None,
    down: Down = None,
    step_seconds: Annotated[float | None, STEP_SECONDS] = None,
    peers: Annotated[int | None, PEERS] = None,
    latency: Annotated[float | None, LATENCY] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Reckon what each method costs on a line, and what of all-reduce's gain it keeps there. A
    run.toml that was written for a line needs no options.

    Example: lowcomm-node plan run.toml --up 20Mbit --step-seconds 2 --peers 8
    """
    from lowcomm_node.planner.plan import plan as reckon
    from lowcomm_node.planner.words import plan_in_words

    if (file is None) == (parameters is None):
        raise ConfigError(
            "plan needs a run.toml (write one with `lowcomm-node init`) or --parameters, and not "
            "both."
        )
    spec = run_of_parameters(parameters, peers) if parameters is not None else run_in(file)
    options = {
        "up": up, "down": down, "step_seconds": step_seconds, "peers": peers, "latency": latency
    }  # fmt: skip
    told = reckon(question_of(spec, file, options), from_file=file is not None)
    show(told, json_, plan_in_words(told))


def question_of(spec: "RunSpec", file: Path | None, options: Mapping[str, Any]) -> "Question":
    """A run on the line that options tell, and for the rest the section ``[plan]`` of its file.

    Raises ConfigError.
    """
    from lowcomm_node.planner.declared import NEEDED, SECTION, Declared, key_in, option, values_in

    given = {key: value for key, value in options.items() if value is not None}
    section = tomllib.loads(text_of(file)).get(SECTION) if file is not None else None
    told = values_in(section, str(file)) | given
    if missing := [option(key) for key in NEEDED if key not in told]:
        raise ConfigError(
            f"plan lacks {', '.join(missing)}: --up is what a peer's line sends, --step-seconds "
            "how long it takes for an inner step, --peers how many are expected. A run.toml of "
            "`init --plan` has them."
        )
    return Declared(**told).question(
        spec, lambda key: option(key) if key in given else key_in(str(file), key)
    )


def run_of_parameters(text: str, peers: int | None, vocab: int | None = None) -> "RunSpec":
    """A run of a model with a number of parameters. Raises ConfigError."""
    from lowcomm_node.planner.question import read_parameters, run_of

    try:
        return run_of(read_parameters(text), max(1, peers or 1), vocab)
    except ValueError as error:
        raise ConfigError(f"--parameters: {error}.") from None


def run_in(file: Path | None) -> "RunSpec":
    """The run of a file. Raises ConfigError and SpecError."""
    from lowcomm_node.cli.new_run import parameters_of
    from lowcomm_protocol.spec.run import parse_toml

    assert file is not None
    return parse_toml(text_of(file), str(file), parameters_of)


def text_of(file: Path) -> str:
    """Read a run.toml, with or without a byte order mark. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "not text in UTF-8: save it so"
    raise ConfigError(f"{file}: {reason}. `lowcomm-node init` writes one.")
