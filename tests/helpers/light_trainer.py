"""A trainer's process without tensors: it starts in milliseconds, and fails as it is told."""

import sys

from helpers import light_process
from lowcomm_node.node.process import Trainer


class LightTrainer(Trainer):
    """A real process that takes steps of nothing; ``behaviour``: see ``light_process``."""

    def __init__(self, behaviour: str = "") -> None:
        super().__init__()
        self._behaviour = behaviour

    def _command(self) -> list[str]:
        return [sys.executable, light_process.__file__, self._behaviour]
