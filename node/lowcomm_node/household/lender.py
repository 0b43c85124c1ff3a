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
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from time import monotonic

from lowcomm_node.errors import NodeError, PortInUse
from lowcomm_node.household.link import DEADLINE, Reply, SecureStream, make_context
from lowcomm_node.household.machines import Household, Machine
from lowcomm_node.household.pairing import Codes, make_hello
from lowcomm_node.system.logs import log
from lowcomm_node.system.machine import memory_of
from lowcomm_node.system.tasks import Tasks, start
from lowcomm_node.system.units import size

COMMAND = (sys.executable, "-m", "lowcomm_node.trainer.worker")
"""The worker. Its last arguments are settings as JSON, and the descriptor of a socket."""
MAX_UNPROVED, MAX_OF_ADDRESS = 64, 8
"""Connections that have not proved themselves: of all, and of one address."""
REAP_DEADLINE = 5.0
"""Seconds for a worker to end that has closed its socket."""
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


@dataclass
class _Lending:
    """A head that this machine computes for."""

    head: Machine
    task: asyncio.Task[None]
    worker: Process | None = None


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
        self._max_bytes = max_bytes
        own = {"device": device, "max_memory_bytes": max_bytes}
        self._command = (*command, json.dumps(own))
        self.codes = Codes(lambda code: tell("code", code))
        self._heads: dict[bytes, Machine] = {}
        self._tls = make_context(household, b"", is_lender=True)
        self._unproved: dict[asyncio.Task[None], str] = {}
        """Addresses, in the order in which they came."""
        self._tasks = Tasks()
        self._lending: _Lending | None = None

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

    # connections

    def _take(self, sock: socket.socket, address: str) -> None:
        held = Counter(self._unproved.values())
        is_crowd = held[address] >= MAX_OF_ADDRESS
        if is_crowd or len(self._unproved) >= MAX_UNPROVED:
            crowd = address if is_crowd else held.most_common(1)[0][0]
            oldest = next(one for one, from_ in self._unproved.items() if from_ == crowd)
            del self._unproved[oldest]
            oldest.cancel()
        task = self._tasks.start(self._serve(sock))
        self._unproved[task] = address
        task.add_done_callback(lambda task: self._unproved.pop(task, None))

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with closing(SecureStream(sock, self._tls, is_lender=True)) as stream:
                async with asyncio.timeout(DEADLINE):
                    await stream.handshake()
                    certificate = stream.certificate
                    if certificate is None and self.codes.is_shown(monotonic()):
                        await self._pair(stream)
                head = self._heads.get(certificate or b"")
                if head is not None:
                    current = asyncio.current_task()
                    assert current is not None
                    del self._unproved[current]
                    await self._start(_Lending(head, current), stream)
                    await stream.finish()
        except (NodeError, TimeoutError) as error:
            log.debug("lend.refused", reason=str(error))

    async def _pair(self, stream: SecureStream) -> None:
        hello = make_hello(self._household)
        await stream.send(hello)
        head, consent = self.codes.check(hello, await stream.receive(), monotonic())
        head = self._household.add(head)
        self._tell("paired", f"{head.name} is paired with this machine.")
        self._look()
        await stream.send(consent)

    # heads

    async def _start(self, lending: _Lending, stream: SecureStream) -> None:
        while (before := self._lending) is not None:
            if before.head.key != lending.head.key:
                text = f"{self._household.name} computes for {before.head.name}: end that first."
                await stream.send(Reply(refusal=text))
                return
            before.task.cancel()
            await asyncio.wait({before.task})
        self._lending = lending
        try:
            await self._lend(lending, stream)
        finally:
            self._lending = None

    async def _lend(self, lending: _Lending, stream: SecureStream) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    lending.worker = worker = await asyncio.create_subprocess_exec(
                        *self._command,
                        str(theirs.fileno()),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=sys.__stderr__,
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,  # Ctrl-C is the lender's to answer
                    )
                except OSError as error:
                    text = f"{self._household.name} can't start a worker: {error.strerror}."
                    await stream.send(Reply(refusal=text))
                    return
            name, is_here = lending.head.name, False
            self._tell("started", f"{name} computes here, in process {worker.pid}.")
            ended = start(_end_children(worker))
            try:
                await stream.send(Reply())
                if is_here := await stream.carry(ours):
                    await asyncio.wait({ended}, timeout=REAP_DEADLINE)
            finally:
                _kill(worker)
                await asyncio.wait({ended})
                code = worker.returncode or 0
                how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                why = f" The worker {how}." if is_here else ""
                self._tell("ended", f"{name} computes here no longer.{why}")

    # what changes by itself

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            try:
                self._look()
            except NodeError as error:
                log.warning("lend.machines_unreadable", error=str(error))
            if self._lending is None:
                continue
            if self._lending.head not in self._heads.values():
                self._lending.task.cancel()
            worker, bound = self._lending.worker, self._max_bytes
            if worker is not None and worker.returncode is None and bound is not None:
                taken = memory_of(worker.pid)
                if taken > bound:
                    text = f"It took {size(taken)}, and --max-memory allows {size(bound)}."
                    self._tell("too_large", f"The worker is ended: {text}")
                    _kill(worker)

    def _look(self) -> None:
        """Take over the machines that are paired now, and show a code if one is due."""
        heads = self._household.heads()
        if heads != self._heads:
            self._heads = heads
            self._tls = make_context(self._household, b"".join(heads), is_lender=True)
        now = monotonic()
        if (self._pairs or not heads) and not self.codes.is_shown(now):
            self.codes.renew(now)


async def _end_children(worker: Process) -> None:
    """Wait for the end of a worker, and kill what it leaves behind, which may hold its socket."""
    await worker.wait()
    _kill(worker)


def _kill(worker: Process) -> None:
    with suppress(OSError):  # it has ended, and so has all that it started
        os.killpg(worker.pid, signal.SIGKILL)
