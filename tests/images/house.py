"""A compose file that runs: ask its containers, kill, stop and start them; all are removed at the
end."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine import Engine

from helpers.waiting import until

START = 420.0
"""Seconds for a node in a container to train, on a machine with two cores and others on it."""


class House:
    """The containers of one compose project."""

    def __init__(self, engine: Engine, project: str, files: Sequence[str]) -> None:
        self.engine, self.project = engine, project
        self._command = engine.compose(project, files)

    def compose(self, *arguments: str, **environment: str) -> str:
        """Run podman-compose; what it printed. Raises AssertionError with that, where it fails."""
        done = subprocess.run(
            [*self._command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
            env=os.environ | environment,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def containers(self, service: str = "") -> list[str]:
        """Names of those that run."""
        told = self.engine.podman(
            "ps",
            "--format",
            "{{.Names}}",
            "--filter",
            f"label=io.podman.compose.project={self.project}",
        )
        return sorted(name for name in told.split() if name.startswith(f"{self.project}_{service}"))

    def ask(self, name: str, *command: str, user: str = "lowcomm") -> Any:
        """What a command in a container tells as JSON; None while it does not answer."""
        try:
            return json.loads(self.engine.podman("exec", "--user", user, name, *command, "--json"))
        except (RuntimeError, ValueError):
            return None

    def until(
        self,
        name: str,
        condition: Callable[[dict[str, Any]], Any],
        what: str,
        deadline: float = START,
    ) -> dict[str, Any]:
        """The first status of a node for which ``condition`` holds."""

        def holds() -> dict[str, Any] | None:
            status = self.ask(name, "lowcomm-node", "status")
            return status if status is not None and condition(status) else None

        try:
            return until(holds, deadline, f"{name}: {what}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs(name)[-3000:]}") from None

    def logs(self, name: str) -> str:
        """What a container has printed."""
        done = subprocess.run(
            self.engine.inside("podman", *self.engine.flags, "logs", name),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout


@contextmanager
def house(engine: Engine, project: str, *files: str, **environment: str) -> Iterator[House]:
    """A project that is up; removed with its volumes in any case."""
    made = House(engine, project, files)
    try:
        made.compose("up", "-d", "--no-build", **environment)
        yield made
    finally:
        told = engine.podman("ps", "--all", "--format", "{{.Names}}", check=False)
        names = [name for name in told.split() if name.startswith(f"{project}_")]
        if names:
            engine.podman("rm", "--force", "--time", "2", *names, check=False, timeout=300)
        volumes = engine.podman("volume", "ls", "--format", "{{.Name}}", check=False).split()
        engine.podman(
            "volume",
            "rm",
            *[name for name in volumes if name.startswith(f"{project}_")],
            check=False,
        )
