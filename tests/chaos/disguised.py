"""Programs that wrap parts of the real code, and then run the real command line or the real
trainer.

python PROGRAM ARGUMENTS join --peers ...          a daemon
python PROGRAM ARGUMENTS --trainer 5 6             its trainer, started in the place of the real one
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers.processes import Node, Swarm

TRAINER = "--trainer"
TESTS = Path(__file__).parents[1]
"""Where programs find what tests share."""


class _OtherTrainer:
    """The module ``subprocess``, but that the trainer is started by a program of ours."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], **options: Any) -> Any:  # noqa: N802 - as there
        """Start a process."""
        descriptors = command[command.index("lowcomm_node.node.host") + 1 :]
        return subprocess.Popen([*self._command, TRAINER, *descriptors], **options)


def run(arguments: int, wrap_daemon: Callable[[], None], wrap_trainer: Callable[[], None]) -> Any:
    """Run what the command line of this process asks for, after so many arguments of the program's
    own."""
    own, rest = sys.argv[: arguments + 1], sys.argv[arguments + 1 :]
    if rest[0] == TRAINER:
        from lowcomm_node.node.host import main as trainer

        wrap_trainer()
        sys.argv = [own[0], *rest[1:]]
        return trainer()
    from lowcomm_node.cli import main as command_line
    from lowcomm_node.node import process

    process.subprocess = _OtherTrainer([sys.executable, *own])
    wrap_daemon()
    sys.argv = [own[0], *rest]
    return command_line()


class DisguisedNode(Node):
    """A ``lowcomm-node join`` that runs through a program of ours."""

    program: tuple[str, ...] = ()
    """Its file and its own arguments."""

    def launch(self, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start the program in the place of ``python -m lowcomm_node``."""
        options["env"] |= {"PYTHONPATH": str(TESTS)}
        return subprocess.Popen([command[0], *self.program, *command[3:]], **options)


def start(
    kind: type[DisguisedNode],
    swarm: Swarm,
    name: str,
    program: Sequence[str | Path],
    *arguments: str,
) -> Any:
    """Start a node through a program; it is ended with its swarm."""
    disguised = type(kind.__name__, (kind,), {"program": tuple(map(str, program))})
    node = disguised(swarm.folder / name, swarm.address, *arguments)
    swarm.processes.append(node)
    return node
