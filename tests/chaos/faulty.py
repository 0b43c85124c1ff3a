"""A node to which faults happen by plan: the boundaries of the real code are wrapped, then the real
command line runs.

    python faulty.py PLAN FIRED join --peers ...

PLAN is a file of ``Plan.to_json``. What has happened is added to the file FIRED, and does not
happen again after a restart."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from disguised import run
from faults import Boundary, Fault, Injector, Kind, Plan

from lowcomm_node.node.messages import RequestFailed

FOREVER = 1e6
"""Seconds. What sleeps here is the fault itself: a delay, or a stall that somebody else must
end."""


class Injection:
    """Lets the faults of a plan happen to this process."""

    def __init__(self, plan: Path, fired: Path) -> None:
        self._fired = fired
        before = fired.read_text().splitlines() if fired.exists() else []
        whole = Plan.from_json(plan.read_text()).faults
        self._injector = Injector(
            Plan(tuple(fault for fault in whole if repr(fault) not in before))
        )
        self._ahead = 0.0

    def due(self, boundary: Boundary, what: str) -> Fault | None:
        """What goes wrong at this passage and is left to the caller; what happens to the process
        has happened."""
        fault = self._injector.due(boundary, what)
        if fault is None:
            return None
        with self._fired.open("a") as file:
            file.write(f"{fault!r}\n")
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.EXIT:
                os._exit(7)
            case Kind.STOP:
                wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake])
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.CLOCK_STEP:
                self._ahead += fault.seconds
            case _:
                return fault
        return None

    def shift_clock(self) -> None:
        """From now on this process sees the time of day as the plan sets it; to be called before
        others import it."""
        now = time.time
        time.time = lambda: now() + self._ahead

    # where things go wrong

    def wrap_daemon(self) -> None:
        """The daemon's boundaries."""
        from lowcomm_node.dht.hivemind import Discovery
        from lowcomm_node.errors import LinkLost
        from lowcomm_node.net.channels import Channels
        from lowcomm_node.net.stream import CalleeStream, CallerStream

        Discovery.publish = self._wrap_publish(Discovery.publish)
        Discovery.lookup = self._wrap_lookup(Discovery.lookup)
        Channels.stub = self._wrap_stub(Channels.stub, LinkLost)
        for stream in (CallerStream, CalleeStream):
            stream.send = self._wrap_send(stream.send)
        self._wrap_disk()

    def wrap_trainer(self) -> None:
        """The trainer's boundaries."""
        from lowcomm_node.trainer.loop import TrainerLoop
        from lowcomm_node.trainer.replica import Replica

        TrainerLoop._carry_out = self._wrap_request(TrainerLoop._carry_out)
        Replica.take_step = self._wrap_step(Replica.take_step)
        self._wrap_disk()

    def _wrap_publish(self, publish: Any) -> Any:
        async def faulty(node: Any, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
            fault = self.due(Boundary.DHT, "publish")
            if fault is not None and fault.kind is Kind.DROP:
                return False
            return await publish(node, key, subkey, await self._bytes(fault, value), lifetime)

        return faulty

    def _wrap_lookup(self, lookup: Any) -> Any:
        async def faulty(node: Any, key: str) -> dict[str, bytes]:
            fault = self.due(Boundary.DHT, "lookup")
            if fault is not None and fault.kind is Kind.DROP:
                return {}
            return {
                name: await self._bytes(fault, value)
                for name, value in (await lookup(node, key)).items()
            }

        return faulty

    def _wrap_stub(self, stub: Any, error: type[Exception]) -> Any:
        async def faulty(channels: Any, peer: Any) -> Any:
            fault = self.due(Boundary.DIAL, "")
            if fault is not None and fault.kind is Kind.DROP:
                raise error("can't be reached")
            await self._wait(fault)
            return await stub(channels, peer)

        return faulty

    def _wrap_send(self, send: Any) -> Any:
        from lowcomm_node.net.stream import ChunkFrame

        held: dict[Any, Any] = {}

        async def faulty(stream: Any, frame: Any) -> None:
            frame = frame.whole() if isinstance(frame, ChunkFrame) else frame
            boundary = Boundary.FRAME if frame.DESCRIPTOR.name == "Frame" else Boundary.FETCH
            fault = self.due(boundary, frame.WhichOneof("kind") or "")
            kind = fault.kind if fault is not None else None
            if kind is Kind.DROP:
                return
            if kind is Kind.REORDER:
                held[stream] = frame
                return
            await send(stream, await self._message(fault, frame))
            if kind is Kind.DUPLICATE:
                await send(stream, frame)
            if stream in held:
                await send(stream, held.pop(stream))

        return faulty

    def _wrap_request(self, carry_out: Any) -> Any:
        def faulty(loop: Any, request: Any, number: int) -> None:
            fault = self.due(Boundary.PIPE, request.wire_name)
            self._sleep(fault)
            if fault is None or fault.kind is not Kind.OUT_OF_MEMORY:
                return carry_out(loop, request, number)
            return loop._pipe.answer(number, RequestFailed(text="CUDA out of memory"))

        return faulty

    def _wrap_step(self, step: Any) -> Any:
        def faulty(replica: Any) -> float:
            import torch

            fault = self.due(Boundary.PIPE, "step")
            self._sleep(fault)
            if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return step(replica)

        return faulty

    def _wrap_disk(self) -> None:
        sync = os.fsync

        def faulty(descriptor: int) -> None:
            fault = self.due(Boundary.DISK, "")
            self._sleep(fault)
            if fault is not None and fault.kind is Kind.NO_SPACE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(descriptor)

        os.fsync = faulty

    # what they do

    async def _wait(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind in (Kind.DELAY, Kind.STALL):
            await asyncio.sleep(FOREVER if fault.kind is Kind.STALL else fault.seconds)

    def _sleep(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind in (Kind.DELAY, Kind.STALL):
            # The fault that was asked for: the test ends the process.
            time.sleep(FOREVER if fault.kind is Kind.STALL else fault.seconds)

    async def _bytes(self, fault: Fault | None, data: bytes) -> bytes:
        await self._wait(fault)
        return damaged(fault, data)

    async def _message(self, fault: Fault | None, message: Any) -> Any:
        """A message whose longest field of bytes is damaged; if it has none, an empty one."""
        await self._wait(fault)
        if fault is None or fault.kind not in (Kind.TRUNCATE, Kind.CORRUPT):
            return message
        fields = [
            (field, value)
            for field, value in leaf_of(message).ListFields()
            if isinstance(value, bytes) and value
        ]
        if not fields:
            return type(message)()
        damaged_one = type(message)()
        damaged_one.CopyFrom(message)
        field, value = max(fields, key=lambda one: len(one[1]))
        setattr(leaf_of(damaged_one), field.name, damaged(fault, value))
        return damaged_one


def leaf_of(message: Any) -> Any:
    """The message that a frame carries; another message itself."""
    kind = message.WhichOneof("kind") if "kind" in message.DESCRIPTOR.oneofs_by_name else None
    return getattr(message, kind) if kind else message


def damaged(fault: Fault | None, data: bytes) -> bytes:
    """Bytes that were cut in half, or in which one bit is turned over."""
    if fault is not None and fault.kind is Kind.TRUNCATE:
        return data[: len(data) // 2]
    if fault is not None and fault.kind is Kind.CORRUPT and data:
        place = len(data) // 2
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
    return data


if __name__ == "__main__":
    injection = Injection(Path(sys.argv[1]), Path(sys.argv[2]))
    injection.shift_clock()
    sys.exit(run(2, injection.wrap_daemon, injection.wrap_trainer))
