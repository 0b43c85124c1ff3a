"""A lender that holds a stage, as the head sees it (``pipeline.py``).

The head asks on one thread, and the answers come in the same order. A second thread reads them, so
neither end waits for the other to read. A third one sees whether the lender still shows life.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import SHUT_RDWR, socket
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.errors import LinkLost, TrainerError
from lowcomm_node.models.base import Stage
from lowcomm_node.node.ipc import FailureKind
from lowcomm_node.node.messages import LenderAwaited
from lowcomm_node.trainer.memory import StepChoices
from lowcomm_node.trainer.wire import PATIENCE, Wire, connect
from lowcomm_protocol.spec.run import RunSpec

SILENT, GONE = 0.8, 10.0
"""Seconds without a byte after which a lender is reported as silent, and after which it is gone."""
LOOK = 0.1
"""Seconds between two looks at that."""


@dataclass(frozen=True)
class PipelineSettings:
    """What a pipeline is formed from."""

    spec: RunSpec
    device: torch.device
    lenders: Sequence[tuple[str, str]]
    """Name of each, and the path of the daemon's socket for it."""
    separator: int | None
    limits: tuple[float | None, float | None]
    """GiB of this machine's memory, and of its GPU's."""
    exchanges: int
    choices: StepChoices
    folder: Path | None
    """For copies of weights and moments of a large model; None to keep them in memory."""
    tell: Callable[[LenderAwaited], None]
    on_lost: Callable[[FailureKind, str], None]
    """Called, on another thread, if a lender has failed or is gone."""


@dataclass(frozen=True)
class Offer:
    """What a machine can do."""

    blocks: int
    """Blocks that it has memory for."""
    seconds: float
    """What a product of matrices takes there."""


class Holder:
    """A lender that holds a stage."""

    def __init__(self, name: str, path: str, settings: PipelineSettings) -> None:
        """Connect. Raises LinkLost, OSError, TrainerError."""
        self.name = name
        self.on_lost: Callable[[FailureKind, str], None] = lambda kind, reason: None
        self._tell = settings.tell
        self._sock: socket = connect(path)
        self._sock.settimeout(PATIENCE)
        self._wire = Wire(self._sock)
        self.stage = Stage(0, 0)
        self.computed = self.waited = 0.0
        """Seconds of the last step in which it computed, and in which we waited for it."""
        self.moved = 0
        """Bytes of tensors sent and received."""
        self.lost = ""
        self._is_stopped = False
        self._pending = deque[tuple[list[Tensor], Future[Any]]]()
        self._lock = threading.Lock()
        for work in (self._read, self._watch):
            threading.Thread(target=work, name=f"stage-{name}", daemon=True).start()
        choices = settings.choices
        order = {
            "spec": settings.spec.canonical().decode(),
            "stages": True,
            "separator": settings.separator,
            "moments": choices.moments,
            "micro_batch": choices.micro_batch,
        }
        said = self.ask(order).result()
        try:
            self.offer = Offer(int(said["blocks"]), float(said["seconds"]))
        except (KeyError, TypeError, ValueError):
            self.stop()
            raise LinkLost("it has another release of lowcomm: install the same on both") from None

    def ask(
        self,
        order: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        into: Sequence[Tensor] = (),
        then: Callable[[Future[Any]], None] | None = None,
    ) -> Future[Any]:
        """Its answer, once the tensors that come with it are in ``into``. To be called on one
        thread alone. The wait ends with TrainerError where it shows no life; the daemon bounds
        that for one that is alive."""
        asked = Future[Any]()
        if then is not None:
            asked.add_done_callback(then)
        self.moved += sum(one.nbytes for one in (*tensors, *into))
        with self._lock:
            self._pending.append((list(into), asked))
            lost = self.lost
        if lost:
            self._fail(lost)
        else:
            with suppress(OSError):  # the thread that reads learns why
                self._wire.send(order, tensors)
        return asked

    def stop(self) -> None:
        """End the connection, and with it the worker."""
        self._is_stopped = True
        with suppress(OSError):
            self._sock.shutdown(SHUT_RDWR)

    def _read(self) -> None:
        reason, kind = "the connection ended", FailureKind.LENDER
        try:
            while (line := self._wire.read()) is not None:
                if "failed" in line:
                    # The next worker would fail, too: unlike a machine that is gone, it counts.
                    reason, kind = str(line["failed"])[:500], FailureKind.ERROR
                    break
                if "alive" in line:
                    continue
                with self._lock:
                    into, asked = self._pending.popleft()
                self._wire.read_exactly(into)
                self.computed += float(line.get("seconds") or 0.0)
                asked.set_result(line.get("answer", line))
        except (OSError, LinkLost) as error:
            reason = str(error) or reason
        except (ValueError, TypeError, AttributeError, IndexError):
            reason = "it says what can't be understood"
        self._sock.close()
        if not self._is_stopped:
            self.on_lost(kind, f"{self.name} is gone: {reason.rstrip('.')}.")
        self._fail(reason)

    def _watch(self) -> None:
        """Report it while it is silent; in the end it counts as gone."""
        was_silent = False
        while not self.lost:
            sleep(LOOK)
            silence = monotonic() - self._wire.heard
            if (silence > SILENT) != was_silent and not self.lost:
                was_silent = not was_silent
                why = f"{self.name} gives no sign of life" if was_silent else ""
                self._tell(LenderAwaited(why=why))
            if silence > GONE:
                with suppress(OSError):
                    self._sock.shutdown(SHUT_RDWR)
                return

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.lost = reason
            failed, self._pending = list(self._pending), deque()
        for _, asked in failed:
            asked.set_exception(TrainerError(f"{self.name} is gone: {reason.rstrip('.')}."))
