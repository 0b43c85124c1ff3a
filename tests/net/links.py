"""Emulated links as the tests hold them: each is a process (``emulator.py``) with a device in
either namespace."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from namespaces import DEADLINE, LaboratoryError, Namespace
from shaping import Counters, Link

_EMULATOR = Path(__file__).with_name("emulator.py")


@dataclass(frozen=True)
class Traffic:
    """What has become of the packets of a link."""

    up: Counters
    down: Counters


class EmulatedLink:
    """A running link: ``up`` is the direction from the near end to the far one. Raises
    LaboratoryError when it ended."""

    def __init__(
        self, near: tuple[Namespace, str], far: tuple[Namespace, str], up: Link, down: Link
    ) -> None:
        ours, theirs = socket.socketpair()
        settings = {
            "devices": [[str(namespace.path), device] for namespace, device in (near, far)],
            "links": [asdict(up), asdict(down)],
        }
        with theirs:
            # A session of its own: an interrupt from the terminal is for the tests, which then end
            # it.
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-E",
                    "-s",
                    "-S",
                    str(_EMULATOR),
                    str(theirs.fileno()),
                    json.dumps(settings),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        ours.settimeout(DEADLINE)
        self._control, self._answers = ours, ours.makefile("rb")
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def outage(self, on: bool) -> None:
        """Cut the link, with what is under way on it, or mend it."""
        self._ask({"outage": on})

    def change(self, up: Link, down: Link | None = None) -> None:
        """Other settings, for packets that come from now on; ``down`` as ``up`` if it is not
        given."""
        self._ask({"links": [asdict(up), asdict(up if down is None else down)]})

    def traffic(self) -> Traffic:
        """What has become of the packets so far."""
        up, down = self._ask({})["counters"]
        return Traffic(Counters(**up), Counters(**down))

    def close(self) -> None:
        """End it; its devices vanish."""
        self._answers.close()
        self._control.close()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            self._control.sendall(json.dumps(command).encode() + b"\n")
        except OSError:
            self._ended()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise LaboratoryError(
                f"the emulator {self.process.pid} does not answer within {DEADLINE:.0f} s"
            ) from None
        except OSError:
            line = b""
        return json.loads(line) if line else self._ended()

    def _ended(self) -> Any:
        code = self.process.wait(DEADLINE)
        raise LaboratoryError(
            f"the emulator ended with {code}: {self.process.stderr.read()[-2000:]}"
        )
