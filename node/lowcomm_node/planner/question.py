"""Input of a plan: a run, a line, seconds of a step, a number of peers. Pure.

Options of `plan` and `init --plan` give the line; the section ``[plan]`` of a run.toml keeps it for
`create`. It is never signed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import family_of
from lowcomm_node.system.units import read_count, read_rate, write_rate
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

KINDS = {"up": str, "down": str, "step_seconds": float, "peers": int, "latency": float}
NEEDED = ("up", "step_seconds", "peers")
"""Values without a default."""
BOUNDS = {
    "step_seconds": (1e-4, 86_400.0, "seconds"),
    "latency": (0.0, 10_000.0, "milliseconds"),
    "peers": (2, 1024, "peers"),
}
LEAST_PARAMETERS, MOST_PARAMETERS = 100_000, 200_000_000_000
BYTES_BELOW = 30_000_000
"""Parameters below which a model reads bytes: a larger vocabulary would be most of it."""
BYTES, TOKENS = 256, 32_768
HEAD = 64
WIDEST = 32 * 1024
USUAL = 64
"""Width of a model over its layers, about."""
TOKENS_A_PARAMETER = 20
"""Tokens to train on where only parameters are given (Hoffmann et al., 2203.15556)."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The connection of each peer to the others."""

    up: float
    """Bytes a second sent."""
    down: float
    """Bytes a second received."""
    latency: float
    """Seconds there and back between two peers."""

    @property
    def slower(self) -> float:
        """Bytes a second of the slower direction."""
        return min(self.up, self.down)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run on a line."""

    spec: RunSpec
    line: Line
    step_seconds: float
    """Seconds of one inner step of a peer."""
    peers: int

    def section(self) -> dict[str, Any]:
        """``[plan]`` of a run.toml."""
        return {
            "up": write_rate(self.line.up),
            "down": write_rate(self.line.down),
            "step_seconds": self.step_seconds,
            "peers": self.peers,
            "latency": round(1000 * self.line.latency, 3),
        }


def question_of(
    spec: RunSpec,
    options: Mapping[str, Any],
    section: object = None,
    source: str = "",
    asked: str = "plan",
) -> Question:
    """A run on the line that options give, and for the rest the section ``[plan]`` of ``source``.

    ``asked``: how errors call what lacks a value. Raises ConfigError.
    """
    given = {key: value for key, value in options.items() if value is not None}
    values: dict[str, Any] = dict(section) if isinstance(section, dict) else {}
    for key, value in values.items():
        kind = KINDS.get(key, type(None))
        kinds = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(
                f"{source}: [plan] {key} = {value!r}: it has {', '.join(KINDS)}, as `init --plan` "
                "writes them; correct or remove it."
            )
    values |= given
    flags = {key: f"--{key.replace('_', '-')}" for key in KINDS}
    if missing := [key for key in NEEDED if key not in values]:
        if not asked:
            lacking = ", ".join(missing)
            raise ConfigError(f"{source}: [plan] lacks {lacking}: add it, or remove [plan].")
        raise ConfigError(
            f"{asked} lacks {', '.join(flags[key] for key in missing)}: --up is what a peer's line "
            "sends, --step-seconds how long it takes for an inner step, --peers how many are "
            "expected. A run.toml of `init --plan` has them."
        )
    names = {key: flags[key] if key in given else f"{source}: [plan] {key} =" for key in KINDS}
    for key, (least, most, unit) in BOUNDS.items():
        if key in values and not least <= values[key] <= most:
            raise ConfigError(f"{names[key]} {values[key]:g}: give {least:g} to {most:g} {unit}.")
    rates: dict[str, float] = {}
    for key in ("up", "down"):
        text = values.get(key, values["up"])
        try:
            rate = read_rate(text)
        except ValueError as error:
            raise ConfigError(f"{names[key]} {text}: {error}.") from None
        if rate is None:
            raise ConfigError(
                f"{names[key]} none: a plan is for a line; name its rate, such as 20Mbit."
            )
        rates[key] = rate
    line = Line(**rates, latency=values.get("latency", 50.0) / 1000)
    step_seconds, peers = values["step_seconds"], values["peers"]
    return Question(spec=spec, line=line, step_seconds=step_seconds, peers=peers)


def run_of_parameters(text: str, peers: int | None, vocab: int | None = None) -> RunSpec:
    """A run of a model with as many parameters as ``--parameters`` says, such as ``234k``, ``10M``
    or ``1.3B``. Raises ConfigError."""
    count = read_count(text)
    if not LEAST_PARAMETERS <= count <= MOST_PARAMETERS:
        raise ConfigError(
            f"--parameters: {text.strip()!r} is not a number of parameters from 100k to 200B: "
            "write such as 10M or 1.3B."
        )
    return run_of(count, max(1, peers or 1), vocab)


def run_of(parameters: int, peers: int, vocab: int | None = None) -> RunSpec:
    """A run of a transformer of usual shape that trains on 20 tokens a parameter, all peers
    together; ``vocab``: of its tokenizer, if known."""
    vocab = vocab or (BYTES if parameters < BYTES_BELOW else TOKENS)

    def shape(width: int, layers: int) -> tuple[TransformerSettings, int]:
        """A model, and its number of parameters."""
        feed_forward = 32 * round(width / 12)  # about 8/3 of the width
        model = TransformerSettings(
            vocab=vocab, context=1024, layers=layers, width=width, heads=width // HEAD,
            feed_forward=feed_forward,
        )  # fmt: skip
        return model, family_of(model).footprint(model).parameters

    widths = range(HEAD, WIDEST + 1, HEAD)
    width = min(widths, key=lambda width: abs(log(shape(width, width // USUAL)[1] / parameters)))
    one, two = shape(width, 1)[1], shape(width, 2)[1]
    model, _ = shape(width, max(1, round((parameters - one) / (two - one)) + 1))
    spec = RunSpec.model_validate(
        {"run": {"name": "plan"}, "model": model, "sync": {"method": "lowcomm"}}
    )
    steps = round(TOKENS_A_PARAMETER * parameters / (peers * spec.tokens_per_step))
    run = spec.run.model_copy(update={"steps": max(1, steps)})
    return spec.model_copy(update={"run": run})
