"""An entry of the catalogue."""

import re
from dataclasses import dataclass

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Message:
    """What a code means."""

    meaning: str
    remedy: str


def code_of(kind: type) -> str:
    """The code of a class of errors: ``NotRunning`` is ``not-running``."""
    return _CAPITAL.sub("-", kind.__name__.removeprefix("_")).lower()
