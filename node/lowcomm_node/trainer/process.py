"""Start a trainer, and talk to it from the daemon's event loop.

``TrainerProcess`` runs it as a child process; ``TrainerThread`` runs the same loop on a thread, for tests. Both give the daemon one
``Trainer``: requests with deadlines, news as a queue, and the shared arena.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from lowcomm_node.errors import Diverged, TrainerError, TrainerLost, Unusable
from lowcomm_node.trainer.arena import Arena, create_file
from lowcomm_node.trainer.interface import (
    MAX_LINE,
    Again,
    Captured,
    Merged,
    Ready,
    Reduced,
    Shared,
    TrainerSettings,
    is_foreseen,
    said,
)
from lowcomm_protocol.deeds import Deed

BUILD_DEADLINE = 3600.0
"""Seconds that building may be silent: while text is tokenized it tells how far it is."""
STEP_DEADLINE = 600.0
"""Seconds that a request may wait for a step boundary, at least: where steps are slow, as long as one may take."""
STOP_DEADLINE = 30.0
"""Seconds for a trainer to end that was told to."""
REAP_DEADLINE = 5.0
"""Seconds for a process to end that has closed its socket."""
NICENESS = 5
STDERR = 2
_LONG = frozenset({"build", "evaluate", "generate", "adopt"})
"""Requests that hold up the steps for as long as they take; each has a deadline of its own."""


class Trainer(ABC):
    """The daemon's view of one trainer, from its launch to its end.

    Every request raises TrainerLost if the trainer has died or does not answer, TrainerError if it answers that it can't.
    """

    pid: int | None = None
    """Its process, where it has one of its own."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.arena: Arena | None = None
        self.patience = STEP_DEADLINE
        """Seconds that it may take to answer, where nothing else is said."""
        self.occupied = 0
        """Requests under way that hold up its steps."""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._building: asyncio.Timeout | None = None
        self._is_gone = False
        """Whether it has closed its end of the socket."""
        self._memory = -1
        self._ours: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def launch(self) -> None:
        """Start its loop, which loads torch while the daemon still looks for a run. ``start`` does it where nobody did."""
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
        self._reading = asyncio.create_task(self._read(reader))
        answer = await self._ask("build", BUILD_DEADLINE, settings=settings.to_dict())
        ready = Ready.from_dict(answer)
        self.arena = Arena(self._memory, ready.slots, ready.slot_bytes)
        return ready

    async def train(self, on: bool) -> None:
        """Let it step, or hold it."""
        await self._ask("train", on=on)

    async def amend(self, amendments: str) -> int:
        """Follow these amendments from the next step boundary on; the swarm step of that."""
        return int((await self._ask("amend", amendments=amendments))["swarm_step"])

    async def evaluate(self) -> float:
        """Loss on held-out text, nats a token."""
        return float((await self._ask("evaluate"))["loss"])

    async def generate(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        """Sample text from the fast weights."""
        answer = await self._ask("generate", prompt=prompt, tokens=tokens, temperature=temperature, seed=seed)
        return str(answer["text"])

    async def capture(self, fragment: int, slot: int, realign: bool, ahead: int) -> Captured:
        """Capture our contribution at the next step boundary and code it into a slot.

        ``ahead``: how many inner steps longer than we the partner claims to have trained.
        """
        answer = await self._ask("capture", fragment=fragment, slot=slot, realign=realign, ahead=ahead)
        return Captured(size=answer["size"], digest=bytes.fromhex(answer["digest"]), steps=answer["steps"])

    async def receive(self, fragment: int, peer: str, slot: int, size: int) -> Again | None:
        """Decode a member's contribution; what of it must come again. The slot is free afterwards."""
        answer = await self._ask("receive", fragment=fragment, peer=peer, slot=slot, size=size)
        return Again(blocks=b64decode(answer["again"]), size=answer["size"]) if answer["again"] else None

    async def resend(self, fragment: int, blocks: bytes, slot: int) -> tuple[int, bytes]:
        """Code blocks of our contribution again, into a slot; their size and digest."""
        answer = await self._ask("resend", fragment=fragment, blocks=b64encode(blocks).decode(), slot=slot)
        return answer["size"], bytes.fromhex(answer["digest"])

    async def patch(self, fragment: int, peer: str, slot: int, size: int) -> None:
        """Take in the blocks that came again."""
        await self._ask("patch", fragment=fragment, peer=peer, slot=slot, size=size)

    async def share(self, fragment: int, slot: int, realign: bool, members: Sequence[str], ahead: int) -> Shared:
        """Capture our contribution to a group at the next step boundary, and code what each other owner gets."""
        told = {"slot": slot, "realign": realign, "members": list(members), "ahead": ahead}
        answer = await self._ask("share", fragment=fragment, **told)
        sizes = tuple(share["size"] for share in answer["shares"])
        digests = tuple(bytes.fromhex(share["digest"]) for share in answer["shares"])
        return Shared(sizes=sizes, digests=digests, steps=answer["steps"])

    async def receive_share(self, fragment: int, peer: str, slot: int, offset: int, size: int) -> None:
        """Decode a member's contribution to our shard."""
        await self._ask("receive_share", fragment=fragment, peer=peer, slot=slot, offset=offset, size=size)

    async def reduce(self, fragment: int, tokens: Mapping[str, int], slot: int, offset: int) -> Reduced:
        """Average our shard over the peers in ``tokens``, weighted by them, and code the mean."""
        answer = await self._ask("reduce", fragment=fragment, tokens=dict(tokens), slot=slot, offset=offset)
        left_out = {peer: _unusable(told) for peer, told in answer["left_out"].items()}
        return Reduced(answer["size"], bytes.fromhex(answer["digest"]), left_out)

    async def receive_mean(self, fragment: int, owner: str, slot: int, offset: int, size: int) -> None:
        """Decode an owner's mean of its shard."""
        await self._ask("receive_mean", fragment=fragment, owner=owner, slot=slot, offset=offset, size=size)

    async def merge(
        self, fragment: int, over: Mapping[str, int] | Sequence[str], swarm_step: int, keep_momentum: bool = False
    ) -> Merged:
        """Take the outer step and merge.

        ``over``: in a pair the tokens that weigh each member's contribution, in a group the owners of the shards that
        are applied. ``keep_momentum``: a realignment leaves the outer momentum as it is.
        """
        told: dict[str, Any] = {"tokens": dict(over)} if isinstance(over, Mapping) else {"owners": list(over)}
        answer = await self._ask("merge", fragment=fragment, swarm_step=swarm_step, keep_momentum=keep_momentum, **told)
        return Merged(**{key: answer[key] for key in Merged.__dataclass_fields__})

    async def drop(self, fragment: int) -> None:
        """Forget a capture that will not be merged. Afterwards nothing is written to its slots any more."""
        await self._ask("drop", fragment=fragment)

    async def save(self) -> dict[str, Any]:
        """Write a checkpoint now; its swarm step and path, and the steps and tokens of its own in it."""
        return await self._ask("save")

    async def snapshot(self, folder: str) -> tuple[str, int]:
        """Write a snapshot for joiners into a folder, beside training; its name and swarm step."""
        answer = await self._ask("snapshot", folder=folder)
        return answer["name"], answer["swarm_step"]

    async def adopt(self, folder: str, back: bool = False) -> Ready:
        """Take over the state that was downloaded into a folder; ``back``: its swarm step too where ours is ahead of it."""
        return Ready.from_dict(await self._ask("adopt", folder=folder, back=back))

    async def stop(self) -> None:
        """End it. What was being written is finished first; past the deadline it is killed."""
        deadline = monotonic() + STOP_DEADLINE
        try:
            await self._ask("stop", STOP_DEADLINE)
        except TrainerError:
            self.kill()
        if self._writer is None and self._ours is not None:
            self._abandon(self._ours)
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

    @abstractmethod
    def kill(self) -> None:
        """End it at once; ``stop`` must follow. Whatever it was asked raises TrainerLost."""

    @abstractmethod
    async def _fate(self) -> str:
        """How it ended, in a sentence, once its end of the socket is closed."""

    @abstractmethod
    def _launch(self, theirs: socket.socket, memory: int) -> None:
        """Start the loop at its end of the socket."""

    def _abandon(self, ours: socket.socket) -> None:
        """End a loop that was launched and never started: it has nothing to lose."""
        ours.close()

    @abstractmethod
    async def _join(self, seconds: float) -> None:
        """Wait for the loop to end, so long at most."""

    async def _ask(self, do: str, deadline: float | None = None, **arguments: Any) -> dict[str, Any]:
        if self._writer is None or self._is_gone:
            raise TrainerLost("The trainer is not running.")
        self._number += 1
        number = self._number
        self.occupied += do in _LONG
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        seconds = self.patience if deadline is None else deadline
        line = json.dumps({"do": do, "id": number, **arguments}, separators=(",", ":")).encode() + b"\n"
        try:
            self._writer.write(line)
            async with asyncio.timeout(seconds) as limit:
                self._building = limit if do == "build" else self._building
                return await future
        except TimeoutError:
            raise TrainerLost(f"The trainer did not answer {do!r} within {seconds:.0f} s.") from None
        finally:
            self.occupied -= do in _LONG
            self._building = None if do == "build" else self._building
            self._answers.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            while line := await reader.readline():
                self._take_in(json.loads(line))
        except OSError:
            pass  # it was killed: how it ended tells more
        except (ValueError, KeyError, TypeError) as error:
            reason = f"The trainer can't be understood: {error!r}."
        finally:
            self._is_gone = True
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(TrainerLost(reason or "The trainer ended."))
        self.news.put_nowait({"event": "ended", "reason": reason or await self._fate()})

    def _take_in(self, message: dict[str, Any]) -> None:
        if "event" in message:
            if message["event"] == "tokenizing" and self._building is not None:
                self._building.reschedule(asyncio.get_running_loop().time() + BUILD_DEADLINE)
            self.news.put_nowait(message)
            return
        future = self._answers.get(message["re"])
        if future is None or future.done():
            return
        if "error" in message:
            error = _unusable(message) if message.get("unusable") else TrainerError(message["error"])
            error.exit_code = int(message.get("exit_code", 1))
            future.set_exception(error)
        else:
            future.set_result(message)


def _unusable(told: Mapping[str, Any]) -> Unusable:
    return Unusable(str(told["error"]), Deed(told["deed"]) if told.get("deed") else None)


class TrainerProcess(Trainer):
    """The trainer in a process of its own: a crash there leaves the daemon up."""

    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, niceness: int = NICENESS) -> None:
        """``niceness``: above that of the daemon."""
        super().__init__()
        self._niceness = niceness

    def kill(self) -> None:
        """See Trainer."""
        if self._process is not None:
            self._process.kill()  # also if it is stopped

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "lowcomm_node.trainer.process", str(self._niceness)]

    def _launch(self, theirs: socket.socket, memory: int) -> None:
        descriptors = (theirs.fileno(), memory)
        self._process = subprocess.Popen(
            [*self._command(), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=descriptors,
        )
        self.pid = self._process.pid

    async def _fate(self) -> str:
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, REAP_DEADLINE)
        except subprocess.TimeoutExpired:
            return "The trainer closed its connection."
        return fate(code)

    def _abandon(self, ours: socket.socket) -> None:
        super()._abandon(ours)
        if self._process is not None:
            self._process.kill()

    async def _join(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class TrainerThread(Trainer):
    """The same loop on a thread of this process, for tests."""

    _thread: threading.Thread | None = None

    def kill(self) -> None:
        """See Trainer. A thread can't be killed: it ends with the step that it takes."""
        if self._writer is not None:
            self._writer.close()
        elif self._ours is not None:
            self._ours.close()

    async def _fate(self) -> str:
        return "The trainer ended."

    def _launch(self, theirs: socket.socket, memory: int) -> None:
        copy = theirs.dup()
        self._thread = threading.Thread(target=serve, args=(copy, os.dup(memory)), name="trainer", daemon=True)
        self._thread.start()

    async def _join(self, seconds: float) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)


def fate(code: int) -> str:
    """What the exit code of a trainer tells that said nothing of its end."""
    if code == -signal.SIGKILL:
        return (
            "The trainer was killed (SIGKILL): if nobody did that, the machine ran out of memory, and `journalctl -k` "
            "tells so."
        )
    if code < 0:
        return f"The trainer died of {signal.Signals(-code).name}."
    return f"The trainer ended with exit code {code}." if code else "The trainer ended."


def serve(sock: socket.socket, memory: int) -> int:
    """Run the training loop over a socket; the exit code."""
    from lowcomm_node.trainer.loop import TrainerLoop  # torch is imported only where it is used
    from lowcomm_node.trainer.pipe import Pipe

    pipe = Pipe(sock)
    try:
        TrainerLoop(pipe, memory).run()
    except Exception as error:
        if not is_foreseen(error):
            traceback.print_exc()  # into the log of the daemon
        pipe.send({"event": "failed", **describe_end(error)})
        return 1
    finally:
        pipe.close()
        os.close(memory)
    return 0


def describe_end(error: Exception) -> dict[str, Any]:
    """Why training ends, as the daemon is told."""
    reason = said(error)
    # torch.cuda.OutOfMemoryError is a RuntimeError that says so; the host's own is a MemoryError.
    memory = isinstance(error, MemoryError) or "out of memory" in reason.lower()
    kind = "diverged" if isinstance(error, Diverged) else "memory" if memory else "error"
    return {"reason": reason, "kind": kind, "exit_code": getattr(error, "exit_code", 1)}


def main() -> int:
    """Entry of the child process: ``python -m lowcomm_node.trainer.process NICENESS SOCKET MEMORY``."""
    die_with_parent()
    # Training takes every core that it gets: the daemon, and whatever else its owner does, come first.
    os.nice(int(sys.argv[1]))
    die_first()
    # Coding threads wait for the interpreter's lock; the usual 5 ms a turn would make exchanges last for several steps.
    sys.setswitchinterval(0.0005)
    # The daemon decides when to stop; a Ctrl-C at the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written: to unload torch takes ten seconds on a busy machine, and the daemon waits for it


def die_first() -> None:
    """Ask the kernel (Linux) to take this process before others where memory runs out: the daemon starts another."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent dies, also by SIGKILL."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
