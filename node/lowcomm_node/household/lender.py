"""The lender: lets paired heads in, and connects one of them to a worker.

TLS ends connections of strangers in its handshake. While a code is shown, a machine without a
certificate may try to pair. Few connections wait for their proof at once, and the oldest makes way
for a new one, so silent connections keep no head out.
"""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from time import monotonic
from typing import Any

from lowcomm_node.errors import LinkLost, NodeError, PortInUse
from lowcomm_node.household.link import (
    DEADLINE,
    MAX_LINE,
    Ask,
    Description,
    Gpu,
    Refusal,
    SecureStream,
    Started,
    make_context,
)
from lowcomm_node.household.machines import Household, Machine
from lowcomm_node.household.pairing import MAX_MESSAGE, Codes, make_hello, read
from lowcomm_node.system.accelerator import Card, nvml
from lowcomm_node.system.logs import log
from lowcomm_node.system.machine import cores_allowed, memory_of, memory_of_machine
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import Tasks, start
from lowcomm_node.system.units import clean, size

COMMAND = (sys.executable, "-m", "lowcomm_node.trainer.worker")
"""The worker. It gets settings as JSON at its standard input, and as its last argument the
descriptor of a socket."""
MAX_UNPROVED, MAX_OF_ADDRESS = 64, 8
"""Connections that have not proved themselves: of all, and of one address."""
REAP_DEADLINE = 5.0
"""Seconds for a worker to end that has closed its socket."""
DRIVER_DEADLINE = 5.0
"""Seconds for the driver of a GPU to answer."""
TAIL = 2000
"""Last bytes of a worker's output that are kept."""
PIPE_BYTES = 64 * 1024
"""What a pipe of Linux holds."""
LOOK = 1.0
"""Seconds between two looks at the code, the worker's memory and the paired machines."""

Tell = Callable[[str, str], object]
"""Shows the owner what happens: the name of an event, and a sentence."""


def listen(port: int, host: str = "") -> socket.socket:
    """A socket that listens, by default at all addresses. Raises PortInUse."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise PortInUse(
            f"Port {port} can't be listened at ({why}): stop the other `lowcomm-node lend`, or "
            "choose another port with --port."
        ) from None
    made.setblocking(False)
    return made


class _Worker:
    """A process that computes for a head."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        """Start the process. Raises OSError."""
        self.socket, theirs = socket.socketpair()
        with theirs, TemporaryFile() as file:
            file.write(settings)
            file.seek(0)
            try:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a Ctrl-C at the terminal is the lender's to answer
                )
            except OSError:
                self.socket.close()
                raise
        self.ended = start(asyncio.to_thread(self.process.wait))
        self.reason = ""
        """Why this machine has ended it, if it has."""
        self._output = bytearray()
        assert self.process.stdout is not None
        self._pipe = self.process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._read)

    async def end(self, patience: float) -> str:
        """End it unless it ends within ``patience`` seconds; how it ended, in words."""
        self.socket.close()
        try:
            await asyncio.wait({self.ended}, timeout=patience)
        finally:
            self.process.kill()  # does nothing where it has ended
            self._read()
            self._loop.remove_reader(self._pipe)
            self._pipe.close()
        code = await asyncio.shield(self.ended)
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended: exit code {code}"
        lines = [clean(line) for line in self._output.decode(errors="replace").splitlines()]
        return "\n".join([self.reason or f"The worker {how}.", *lines])

    def _read(self) -> None:
        """Take in what it has written: a child of it may hold the pipe open."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._pipe.fileno(), PIPE_BYTES)
            if not data:
                self._loop.remove_reader(self._pipe)
        self._output += data
        del self._output[:-TAIL]


@dataclass
class _Lending:
    """A head that this machine computes for."""

    head: Machine
    task: asyncio.Task[None]
    worker: _Worker | None = None


class Lender:
    """This machine, as it computes for others."""

    def __init__(
        self,
        household: Household,
        tell: Tell,
        *,
        pairs: bool = False,
        command: Sequence[str] = COMMAND,
        device: str = "auto",
        max_bytes: int | None = None,
    ) -> None:
        """``pairs``: show codes though machines are paired. ``max_bytes``: for a worker."""
        self._household, self._tell, self._pairs = household, tell, pairs
        self._command, self._device, self._max_bytes = command, device, max_bytes
        self.codes = Codes(lambda code: tell("code", code))
        self._heads: dict[bytes, Machine] = {}
        self._tls: ssl.SSLContext | None = None
        self._unproved: dict[asyncio.Task[None], str] = {}
        """Addresses, in the order in which they came."""
        self._tasks = Tasks()
        self._lending: _Lending | None = None
        self._starting = asyncio.Lock()
        self._last_end = ("", "")
        """The key of the last head, and how its worker has ended."""

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled; then end the worker."""
        loop = asyncio.get_running_loop()
        self._look()
        self._tasks.start(self._look_on())
        try:
            while True:
                try:
                    sock, address = await loop.sock_accept(listener)
                except OSError as error:  # no descriptor is left
                    log.warning("lend.not_accepted", error=repr(error))
                    await asyncio.sleep(LOOK)
                    continue
                self._take(sock, address[0].removeprefix("::ffff:"))
                await asyncio.sleep(0)  # others go on, however many come
        finally:
            await self._tasks.cancel()

    def count_unproved(self) -> int:
        """Connections that have not proved themselves."""
        return len(self._unproved)

    # connections

    def _take(self, sock: socket.socket, address: str) -> None:
        held = Counter(self._unproved.values())
        is_crowd = held[address] >= MAX_OF_ADDRESS
        if is_crowd or len(self._unproved) >= MAX_UNPROVED:
            crowd = address if is_crowd else held.most_common(1)[0][0]
            oldest = next(one for one, from_ in self._unproved.items() if from_ == crowd)
            del self._unproved[oldest]
            oldest.cancel()
        assert self._tls is not None
        try:
            stream = SecureStream(sock, self._tls, is_lender=True)
        except LinkLost:
            return
        task = self._tasks.start(self._serve(stream))
        self._unproved[task] = address

        def forget(task: asyncio.Task[None]) -> None:
            self._unproved.pop(task, None)
            stream.close()

        task.add_done_callback(forget)

    async def _serve(self, stream: SecureStream) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                await stream.handshake()
                certificate = stream.certificate
                head = self._heads.get(certificate) if certificate else None
                if head is None:
                    if certificate is None and self.codes.is_shown(monotonic()):
                        await self._pair(stream)
                    return
                current = asyncio.current_task()
                assert current is not None
                del self._unproved[current]
                ask = read(Ask, await stream.read_line(MAX_LINE))
            if ask.ask == "describe":
                await stream.send(await self._describe(head))
            else:
                await self._start(head, stream, ask.settings)
        except (NodeError, TimeoutError) as error:
            log.debug("lend.refused", reason=str(error))
        await stream.finish()

    async def _pair(self, stream: SecureStream) -> None:
        hello = make_hello(self._household)
        await stream.send(hello)
        head, consent = self.codes.check(hello, await stream.read_line(MAX_MESSAGE), monotonic())
        head = self._household.add(head)
        self._tell("paired", f"{head.name} is paired with this machine.")
        self._look()
        await stream.send(consent)

    # heads

    async def _describe(self, head: Machine) -> Description:
        _, free = memory_of_machine()
        gpus: tuple[Gpu, ...] = ()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRIVER_DEADLINE):
                gpus = await asyncio.to_thread(_gpus, self._device)
        return Description(
            name=self._household.name,
            release=release(),
            cores=min(float(len(os.sched_getaffinity(0))), cores_allowed()),
            free_bytes=free if self._max_bytes is None else min(free, self._max_bytes),
            gpus=gpus,
            computes_for=self._lending.head.name if self._lending else "",
            last_end=self._last_end[1] if self._last_end[0] == head.key else "",
        )

    async def _start(self, head: Machine, stream: SecureStream, asked: dict[str, Any]) -> None:
        current = asyncio.current_task()
        assert current is not None
        async with self._starting:
            before = self._lending
            if before is not None and before.head.key != head.key:
                text = f"{self._household.name} computes for {before.head.name}: end that first."
                await stream.send(Refusal(refusal=text))
                return
            if before is not None:
                before.task.cancel()
                await asyncio.wait({before.task})
            lending = self._lending = _Lending(head, current)
        try:
            await self._lend(lending, stream, asked)
        finally:
            if self._lending is lending:
                self._lending = None

    async def _lend(self, lending: _Lending, stream: SecureStream, asked: dict[str, Any]) -> None:
        own = {"device": self._device, "max_memory_bytes": self._max_bytes}
        try:
            settings = json.dumps(asked | own, allow_nan=False).encode()
        except ValueError:
            raise LinkLost("sent settings that are no JSON") from None
        name, is_local = lending.head.name, False
        try:
            worker = lending.worker = _Worker(self._command, settings)
        except OSError as error:
            text = f"{self._household.name} can't start a worker: {error.strerror}."
            await stream.send(Refusal(refusal=text))
            return
        self._tell("started", f"{name} computes here, in process {worker.process.pid}.")
        carrying = None
        try:
            await stream.send(Started())
            carrying = start(stream.carry(worker.socket))
            await asyncio.wait({carrying, worker.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not carrying.done():
                worker.socket.shutdown(socket.SHUT_RD)  # what it has written still goes out
            is_local = await carrying
        finally:
            if carrying is not None:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)
            reason = await worker.end(REAP_DEADLINE if is_local else 0.0)
            self._last_end = lending.head.key, reason
            why = f" {reason}" if is_local else ""
            self._tell("ended", f"{name} computes here no longer.{why}")

    # what changes by itself

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            try:
                self._look()
            except NodeError as error:
                log.warning("lend.machines_unreadable", error=str(error))
            lending, bound = self._lending, self._max_bytes
            if lending is None:
                continue
            if lending.head not in self._heads.values():
                lending.task.cancel()
            worker = lending.worker
            if worker is not None and not worker.ended.done() and bound is not None:
                taken = memory_of(worker.process.pid)
                if taken > bound:
                    worker.reason = (
                        f"The worker was ended: it took {size(taken)}, and --max-memory allows "
                        f"{size(bound)}."
                    )
                    worker.process.kill()

    def _look(self) -> None:
        """Take over the machines that are paired now, and show a code if one is due."""
        heads = self._household.heads()
        if self._tls is None or heads != self._heads:
            self._heads = heads
            pinned = "".join(map(ssl.DER_cert_to_PEM_cert, heads)).encode()
            self._tls = make_context(self._household, is_lender=True, pinned=pinned)
        now = monotonic()
        if (self._pairs or not heads) and not self.codes.is_shown(now):
            self.codes.renew(now)


def _gpus(device: str) -> tuple[Gpu, ...]:
    """The graphics cards of NVIDIA that a worker may use."""
    import pynvml

    if device.partition(":")[0] not in ("auto", "cuda"):
        return ()
    with suppress(pynvml.NVMLError):  # no driver, or no card
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = nvml().nvmlDeviceGetCount() if visible is None else len(visible.split(","))
        names = [device] if ":" in device else [f"cuda:{place}" for place in range(count)]
        loads = [Card(device=name).load() for name in names]
        return tuple(
            Gpu(name=load.name, memory_bytes=total, free_bytes=total - (load.memory_taken or 0))
            for load in loads
            if (total := load.memory_total) is not None
        )
    return ()
