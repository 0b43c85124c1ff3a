"""A command line that a test runs in its own process (the fixture ``cli``)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ended]
