"""Messages to the service manager that started this process: systemd's ``sd_notify``, without its
library.

    READY=1                 once: the process works, or waits for others with a reason
    EXTEND_TIMEOUT_USEC=... at each tick until then, and while it leaves: it is not stuck, since
                            what it waits for has a deadline of its own
    STATUS=...              one line when it has changed
    WATCHDOG=1              twice per period of the manager, while nothing is overdue
    STOPPING=1              once

Each is a datagram to the socket in ``$NOTIFY_SOCKET`` (sd_notify(3)). Without one, nothing is sent.
"""

import asyncio
import os
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from time import monotonic
from typing import Self

from lowcomm_node.system.logs import log
from lowcomm_node.system.units import clean

TICK = 1.0
"""Seconds between two checks for news."""
MAX_STATUS = 400
"""Characters. systemd drops datagrams of more than 4096 bytes."""
EXTENSION = 60.0
"""Seconds by which a start or a stop is extended, sent at each tick while nothing is overdue."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The state of the process."""

    ready: bool
    """Whether its start is over."""
    line: str
    """Its activity, or why it waits."""
    leaving: bool = False
    """Whether it is ending, which has a deadline of its own."""
    overdue: str | None = None
    """Task that has exceeded its own deadline; None while all is in time."""


class ServiceManager:
    """The service manager of this process, if it has one."""

    def __init__(self, address: str | None = None, watchdog: float | None = None) -> None:
        """``address``: a path, or ``@`` and an abstract name; ``watchdog``: seconds of silence
        before it kills us."""
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self._watchdog = watchdog
        self._ready = self._stopping = False
        self._line, self._fed_at = "", -float("inf")
        self._overdue: str | None = None
        self._period = TICK if watchdog is None else min(TICK, watchdog / 8)
        """Seconds between two ticks."""

    @classmethod
    def of(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """From the environment. The variables are removed from it, because they don't concern
        children."""
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        address, period, pid = (environment.pop(name, "") for name in names)
        is_ours = pid in ("", str(os.getpid())) and period.isdecimal() and int(period) > 0
        if address[:1] not in ("", "/", "@"):
            # Such as vsock, which a virtual machine's manager uses.
            log.warning("service.unknown_socket", address=address)
            address = ""
        return cls(address or None, int(period) / 1e6 if is_ours else None)

    def stopping(self) -> None:
        """Report that the end has begun."""
        self._stopping = self._stopping or self._send("STOPPING=1")

    async def attend(self, look: Callable[[], Condition]) -> None:
        """Report what is due, until cancelled. Returns at once without a manager."""
        while self._address is not None:
            try:
                now = look()
            except Exception as error:  # a defect in the report must not end the process
                log.error("service.defect", error=repr(error), exc_info=error)
                now = Condition(ready=self._ready, line="its status is unknown: see its logs")
            self.tick(now, monotonic())
            await asyncio.sleep(self._period)

    def tick(self, now: Condition, time: float) -> None:
        """Report what is due at ``time`` (monotonic seconds)."""
        if now.ready and not self._ready:
            self._ready = self._send("READY=1")
        if (now.leaving or not (self._ready or self._stopping)) and now.overdue is None:
            self._send(f"EXTEND_TIMEOUT_USEC={EXTENSION * 1e6:.0f}")
        line = clean(now.overdue or now.line)[:MAX_STATUS]
        if line != self._line and self._send(f"STATUS={line}"):
            self._line = line
        if now.overdue is not None and now.overdue != self._overdue:
            log.error("service.overdue", reason=now.overdue)
        self._overdue = now.overdue
        # One tick before half of the period is over: the manager kills us after a late message.
        is_due = self._watchdog and time - self._fed_at >= self._watchdog / 2 - self._period
        if is_due and now.overdue is None and self._send("WATCHDOG=1"):
            self._fed_at = time

    def _send(self, text: str) -> bool:
        """Send one datagram; returns whether it was accepted.

        Never waits: a manager that does not read must not block us.
        """
        if self._address is None:
            return True
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_UNIX, kind) as sender:
            try:
                sender.sendto(text.encode(), self._address)
            except OSError as error:
                log.debug("service.not_sent", text=text, reason=error.strerror)
                return False
        return True
