"""How long each stage of an exchange takes: capture, encode, hash, send, receive, decode, outer,
merge."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Stages:
    """Seconds by stage. Stages may run at the same time, and one may come in several parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        """When the last part of each stage that ran here ended (monotonic seconds)."""

    def add(self, stage: str, seconds: float) -> None:
        """Count a part of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.ended[stage] = monotonic()

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Context in which a part of a stage is carried out."""
        began = monotonic()
        try:
            yield
        finally:
            self.add(stage, monotonic() - began)
