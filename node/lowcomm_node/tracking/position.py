"""How far a sink is in a journal: a small file beside it, written whole after each delivery."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.storage.files import lock, read_small, write_atomic

MAX_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Position:
    """What the next point depends on."""

    notice: int = 0
    """Number of the last notice."""
    time: float = 0.0
    """Of the last sample (Unix seconds)."""
    newest: float = 0.0
    """When the last notice was told (Unix seconds): a journal that began anew counts from 1."""
    points: int = 0
    """How many there were."""
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each count the last value, and its sum over all starts."""
    seen: tuple[float | None, ...] = ()
    """What the last sample told, to leave out those that tell the same."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The sink's own."""


class PositionFile:
    """Where the position of one sink and target is kept."""

    def __init__(self, folder: Path, sink: str, target: str) -> None:
        name = f"{sink}-{sha256(target.encode()).hexdigest()[:12]}"
        self._path = folder / f"{name}.json"
        self._lock = folder / f"{name}.lock"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which no other tracker writes to the same target. Raises RetryLater."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not lock(descriptor, fcntl.LOCK_EX, wait=False):
                raise RetryLater(
                    f"Another `lowcomm-node track` writes from this home to the same place "
                    f"({self._lock} is held): end that one first, or name another place with --to."
                )
            yield
        finally:
            os.close(descriptor)

    def load(self) -> Position:
        """The position; the beginning if there is none. Raises ConfigError if it can't be read."""
        if not self._path.exists():
            return Position()
        try:
            told = json.loads(read_small(self._path, MAX_BYTES))
            counts = {
                name: (float(last), float(total))
                for name, (last, total) in told.pop("counts").items()
            }
            return Position(counts=counts, seen=tuple(told.pop("seen")), **told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} can't be read ({error}): remove it, and name a new place with --to, "
                "or what is there is written a second time."
            ) from None

    def save(self, position: Position) -> None:
        """Keep it. Raises DiskFull."""
        write_atomic(self._path, json.dumps(asdict(position)).encode(), 0o600)
