"""The line that a run is planned for, as options give it, and as the section ``[plan]`` of a
run.toml keeps it for `create`. It is never signed. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowcomm_node.errors import ConfigError
from lowcomm_node.planner.question import Line, Question
from lowcomm_node.system.units import read_rate, write_rate
from lowcomm_protocol.spec.run import RunSpec

SECTION = "plan"
LATENCY = 50.0
"""Milliseconds there and back, unless told."""
MOST_PEERS = 1024
LEAST_STEP, MOST_STEP, MOST_LATENCY = 1e-4, 86_400.0, 10_000.0
_KEYS = ("up", "down", "step_seconds", "peers", "latency")
NEEDED = ("up", "step_seconds", "peers")
"""What has no default."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A line in an owner's units."""

    up: str
    down: str | None = None
    step_seconds: float
    peers: int
    latency: float = LATENCY

    def question(self, spec: RunSpec, named: Callable[[str], str]) -> Question:
        """A run on this line. Raises ConfigError, which calls a value as ``named`` does."""
        up = _rate(named("up"), self.up)
        down = up if self.down is None else _rate(named("down"), self.down)
        _check(named("step_seconds"), self.step_seconds, LEAST_STEP, MOST_STEP, "seconds")
        _check(named("latency"), self.latency, 0.0, MOST_LATENCY, "milliseconds")
        _check(named("peers"), self.peers, 2, MOST_PEERS, "peers")
        line = Line(up=up, down=down, latency=self.latency / 1000)
        return Question(spec=spec, line=line, step_seconds=self.step_seconds, peers=self.peers)


def option(key: str) -> str:
    """A value as options have it."""
    return f"--{key.replace('_', '-')}"


def section_of(question: Question) -> dict[str, Any]:
    """What a run.toml keeps."""
    line = question.line
    return {
        "up": write_rate(line.up),
        "down": write_rate(line.down),
        "step_seconds": question.step_seconds,
        "peers": question.peers,
        "latency": round(1000 * line.latency, 3),
    }


def question_in(section: object, spec: RunSpec, source: str) -> Question:
    """The line of a run.toml. Raises ConfigError."""
    told = values_in(section, source)
    if missing := [key for key in NEEDED if key not in told]:
        raise ConfigError(f"{source}: [plan] lacks {', '.join(missing)}: add it, or remove [plan].")
    return Declared(**told).question(spec, lambda key: key_in(source, key))


def values_in(section: object, source: str) -> dict[str, Any]:
    """What a run.toml tells of its line, all of it or a part. Raises ConfigError."""
    kinds = {"up": str, "down": str, "step_seconds": float, "peers": int, "latency": float}
    told: dict[str, Any] = dict(section) if isinstance(section, dict) else {}
    for key, value in told.items():
        if key not in kinds or not _is(value, kinds[key]):
            raise ConfigError(
                f"{source}: [plan] {key} = {value!r}: it has {', '.join(_KEYS)}, as `init --plan` "
                "writes them; correct or remove it."
            )
    return told


def key_in(source: str, key: str) -> str:
    """A value as a run.toml has it."""
    return f"{source}: [plan] {key} ="


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _check(name: str, value: float, least: float, most: float, unit: str) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} {value:g}: give {least:g} to {most:g} {unit}.")


def _rate(name: str, text: str) -> float:
    try:
        rate = read_rate(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text}: {error}.") from None
    if rate is None:
        raise ConfigError(f"{name} none: a plan is for a line; name its rate, such as 20Mbit.")
    return rate
