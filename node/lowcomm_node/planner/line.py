"""The line that a run is planned for, and a run of a model with a number of parameters. Pure.

Options of `plan` and `init --plan` give the line; the section ``[plan]`` of a run.toml keeps it for
`create`. It is never signed.
"""

from collections.abc import Mapping
from dataclasses import asdict
from math import log
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_node.system.units import read_count, read_rate, write_rate
from lowcomm_node.trainer.memory import count_parameters
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

LEAST_PARAMETERS, MOST_PARAMETERS = 100_000, 60_000_000_000
BYTES_BELOW = 30_000_000
"""Parameters below which a model reads bytes: a larger vocabulary would be most of it."""
BYTES, TOKENS = 256, 32_768
HEAD = 64
WIDEST = 32 * 1024
USUAL = 64
"""Width of a model over its layers, about."""
TOKENS_A_PARAMETER = 20
"""Tokens to train on where only parameters are given (Hoffmann et al., 2203.15556)."""


def _read_rate(text: object) -> float:
    rate = read_rate(text) if isinstance(text, str) else None
    if rate is None:
        raise ValueError("a plan is for a line; name its rate, such as 20Mbit")
    return rate


Rate = Annotated[float, BeforeValidator(_read_rate)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Line:
    """The connection of each peer to the others, its speed, and how many peers there are."""

    up: Rate
    """Bytes a second sent."""
    down: Rate
    """Bytes a second received."""
    step_seconds: Annotated[float, Field(ge=1e-4, le=86_400)]
    """Seconds of one inner step of a peer."""
    peers: Annotated[int, Field(ge=2, le=1024)]
    """Number of peers that are expected."""
    latency: Annotated[float, Field(ge=0, le=10_000)] = 50.0
    """Milliseconds there and back between two peers."""

    @property
    def slower(self) -> float:
        """Bytes a second of the slower direction."""
        return min(self.up, self.down)

    def section(self) -> dict[str, Any]:
        """``[plan]`` of a run.toml."""
        return asdict(self) | {"up": write_rate(self.up), "down": write_rate(self.down)}


def read_line(source: str, options: Mapping[str, Any], section: object = None) -> Line:
    """The line that options give, and for the rest the section ``[plan]``, which errors call
    ``source``. Raises ConfigError.
    """
    given = {key: value for key, value in options.items() if value is not None}
    values: dict[str, Any] = (section if isinstance(section, dict) else {}) | given
    values.setdefault("down", values.get("up"))
    try:
        return Line(**values)
    except ValidationError as error:
        problems = {str(problem["loc"][0]): problem for problem in error.errors()}
    missing = [key for key, problem in problems.items() if problem["type"] == "missing"]
    if missing:
        raise ConfigError(
            f"{source} lacks {', '.join(missing)}: up is what a peer's line sends, step_seconds "
            "how long it takes for an inner step, peers how many are expected. Give --up, "
            "--step-seconds and --peers, or a section [plan] as `init --plan` writes it."
        )
    key, problem = next(iter(problems.items()))
    name = f"--{key.replace('_', '-')}" if key in given else f"{source} {key} ="
    known = key in Line.__dataclass_fields__
    expected = expected_in_words(problem) if known else f"it has {', '.join(Line.__annotations__)}"
    raise ConfigError(f"{name} {values[key]}: {expected}.")


def run_of_parameters(text: str, peers: int, vocab: int | None = None) -> RunSpec:
    """A run of a transformer of usual shape with as many parameters as ``--parameters`` says, such
    as ``234k``, ``10M`` or ``1.3B``.

    All peers together train on 20 tokens a parameter. ``vocab``: of its tokenizer, if known. Raises
    ConfigError.
    """
    parameters = read_count(text)
    if not LEAST_PARAMETERS <= parameters <= MOST_PARAMETERS:
        raise ConfigError(
            f"--parameters: {text.strip()!r} is not a number of parameters from 100k to 60B: "
            "write such as 10M or 1.3B."
        )
    vocab = vocab or (BYTES if parameters < BYTES_BELOW else TOKENS)

    def shape(width: int, layers: int) -> TransformerSettings:
        feed_forward = 32 * round(width / 12)  # about 8/3 of the width
        return TransformerSettings(
            vocab=vocab, context=1024, layers=layers, width=width, heads=width // HEAD,
            feed_forward=feed_forward,
        )  # fmt: skip

    width = min(
        range(HEAD, WIDEST + 1, HEAD),
        key=lambda one: abs(log(count_parameters(shape(one, one // USUAL)) / parameters)),
    )
    least, more = (count_parameters(shape(width, layers)) for layers in (1, 2))
    layers = max(1, round((parameters - least) / (more - least)) + 1)
    spec = RunSpec.model_validate(
        {"run": {"name": "plan"}, "model": shape(width, layers), "sync": {"method": "lowcomm"}}
    )
    steps = round(TOKENS_A_PARAMETER * parameters / (peers * spec.tokens_per_step))
    run = spec.run.model_copy(update={"steps": max(1, steps)})
    return spec.model_copy(update={"run": run})
