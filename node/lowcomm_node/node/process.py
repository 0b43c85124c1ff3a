"""The daemon's end of a trainer: starts its process, and talks to it from the event loop.

Requests have deadlines, news is a queue, and coded fragments pass through a shared arena.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from time import monotonic

from lowcomm_node.errors import TrainerError, TrainerLost
from lowcomm_node.node.ipc import (
    MAX_LINE,
    A,
    Answer,
    Arena,
    Request,
    TrainerEvent,
    TrainerMessage,
    create_file,
    decode,
    encode,
)
from lowcomm_node.node.messages import (
    Build,
    Ended,
    LenderAwaited,
    Ready,
    RequestFailed,
    Stop,
    Tokenizing,
    TrainerSettings,
)
from lowcomm_node.system.machine import LAST
from lowcomm_node.system.tasks import start

BUILD_DEADLINE = 3600.0
"""Seconds of silence while it builds; while text is tokenized it reports its progress."""
STEP_DEADLINE = 600.0
"""Seconds that a request may wait for a step boundary; where a step takes longer, that long."""
STOP_DEADLINE = 30.0
"""Seconds for a trainer to end after a request to stop."""
REAP_DEADLINE = 5.0
"""Seconds for a process to end that has closed its socket."""
STDERR = 2


class Trainer:
    """The daemon's view of one trainer, from its launch to its end.

    Every request raises TrainerLost if the trainer has died or does not answer, TrainerError if it
    answers that it can't.
    """

    pid: int | None = None
    """Process id; None while there is no process."""

    def __init__(self, niceness: int = LAST) -> None:
        """``niceness``: how far it steps back for other programs, 0 to 19."""
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self.news: asyncio.Queue[TrainerEvent] = asyncio.Queue()
        self.arena: Arena | None = None
        self.patience = STEP_DEADLINE
        """Seconds that it may take to answer, where nothing else is said."""
        self.occupied = 0
        """Requests under way that hold up its steps."""
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self._building: asyncio.Timeout | None = None
        self._is_gone = False  # whether it has closed its end of the socket
        self._memory = -1
        self._ours: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def launch(self) -> None:
        """Start its loop, which loads torch meanwhile. ``start`` does it where nobody did."""
        self._ours, theirs = socket.socketpair()
        self._memory = create_file()
        with theirs:
            self._launch(theirs, self._memory)

    async def start(self, settings: TrainerSettings) -> Ready:
        """Build or resume the replica, and map the arena."""
        if self._ours is None:
            self.launch()
            assert self._ours is not None
        self._ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=MAX_LINE)
        self._reading = start(self._read(reader))
        ready = await self.ask(Build(settings=settings), BUILD_DEADLINE)
        self.arena = Arena(self._memory, ready.slots, ready.slot_bytes)
        return ready

    async def stop(self) -> None:
        """End it. What was being written is finished first; past the deadline it is killed."""
        deadline = monotonic() + STOP_DEADLINE
        try:
            await self.ask(Stop(), STOP_DEADLINE)
        except TrainerError:
            self.kill()
        if self._writer is None and self._ours is not None:
            self._ours.close()  # it was launched and never started: it has nothing to lose
            self.kill()
        await self._join(max(REAP_DEADLINE, deadline - monotonic()))
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.arena is not None:
            self.arena.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def kill(self) -> None:
        """End it at once; ``stop`` must follow. Requests raise TrainerLost."""
        if self._process is not None:
            self._process.kill()  # also if it is stopped

    async def _fate(self) -> str:
        """Cause of its end, in a sentence, once its end of the socket is closed."""
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, REAP_DEADLINE)
        except subprocess.TimeoutExpired:
            return "The trainer closed its connection."
        if code == -signal.SIGKILL:
            return (
                "The trainer was killed (SIGKILL): if nobody did that, the machine ran out of "
                "memory, and `journalctl -k` tells so."
            )
        if code < 0:
            return f"The trainer died of {signal.Signals(-code).name}."
        return f"The trainer ended with exit code {code}." if code else "The trainer ended."

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "lowcomm_node.node.host", str(self._niceness)]

    def _launch(self, theirs: socket.socket, memory: int) -> None:
        """Start the loop at its end of the socket."""
        descriptors = (theirs.fileno(), memory)
        self._process = subprocess.Popen(
            [*self._command(), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=descriptors,
            start_new_session=True,  # a Ctrl-C at the terminal is the daemon's to answer
        )
        self.pid = self._process.pid

    async def _join(self, seconds: float) -> None:
        """Wait for the loop to end, for ``seconds`` at most."""
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def ask(self, request: Request[A], deadline: float | None = None) -> A:
        """Send a request, and wait for its answer: for ``deadline`` seconds, or our patience."""
        if self._writer is None or self._is_gone:
            raise TrainerLost("The trainer is not running.")
        self._number += 1
        number = self._number
        name, is_build = request.wire_name, isinstance(request, Build)
        self.occupied += request.holds_steps
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        seconds = self.patience if deadline is None else deadline
        try:
            self._writer.write(encode(request, number))
            async with asyncio.timeout(seconds) as limit:
                self._building = limit if is_build else self._building
                answer = await future
        except TimeoutError:
            raise TrainerLost(
                f"The trainer did not answer {name!r} within {seconds:.0f} s."
            ) from None
        finally:
            self.occupied -= request.holds_steps
            self._building = None if is_build else self._building
            self._answers.pop(number, None)
        if not isinstance(answer, request.answer):
            raise TrainerError(f"The trainer answered {name!r} with {answer.wire_name!r}.")
        return answer  # type: ignore[return-value]  # it is what the request names

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            with suppress(OSError):  # it was killed: how it ended explains more
                while line := await reader.readline():
                    self._take_in(*decode(line))
        except Exception as error:  # ValueError: a line longer than MAX_LINE
            reason = f"The trainer can't be understood: {error}"
        finally:
            self._is_gone = True
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(TrainerLost(reason or "The trainer ended."))
        self.news.put_nowait(Ended(reason=reason or await self._fate()))

    def _take_in(self, message: TrainerMessage, number: int | None) -> None:
        if isinstance(message, TrainerEvent):
            if isinstance(message, Tokenizing | LenderAwaited) and self._building is not None:
                self._building.reschedule(asyncio.get_running_loop().time() + BUILD_DEADLINE)
            self.news.put_nowait(message)
            return
        future = self._answers.get(number or 0)
        if future is not None and not future.done():
            if isinstance(message, RequestFailed):
                future.set_exception(message.to_error())
            elif isinstance(message, Answer):
                future.set_result(message)
