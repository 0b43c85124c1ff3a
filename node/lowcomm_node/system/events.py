"""The base of all events: what a node reports to its log and to listeners, as it happens.

Each room declares its own events; ``status/events.py`` lists them all.
"""

from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar


class Event:
    """Something that happened.

    A subclass is a frozen dataclass: its fields are what is reported.
    """

    wire_name: ClassVar[str]

    @property
    def name(self) -> str:
        """Its name in the log and on the wire."""
        return self.wire_name

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All names that events of this kind can have."""
        return (cls.wire_name,)

    def to_json(self) -> dict[str, Any]:
        """The event with its name, as ``join --json`` prints it."""
        assert is_dataclass(self)
        return {"event": self.name, **asdict(self)}
