"""The base of all events: what a node tells its log and its listeners, as it happens.

Each room declares the events that it tells; ``status/events.py`` lists them all.
"""

from dataclasses import dataclass, field
from time import time
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. The fields of a subclass are what it tells on the wire."""

    names: ClassVar[tuple[str, ...]]
    """What it is called on the wire; several names where one of them tells how it ended."""
    time: float = field(default_factory=time, compare=False)
    """When it happened (Unix seconds)."""

    @property
    def name(self) -> str:
        """What this one is called."""
        return self.names[0]
