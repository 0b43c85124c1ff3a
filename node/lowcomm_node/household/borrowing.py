"""The head: lets its trainer reach the workers of lenders.

    trainer ──connects──► socket of the daemon ──► link to the lender (``link.py``)
            ◄──a descriptor of the link, or why there is none

The trainer connects again whenever a link has ended, so a lender may come and go.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lowcomm_node.errors import NodeError
from lowcomm_node.household.link import borrowed
from lowcomm_node.household.machines import Household
from lowcomm_node.net import local
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Tasks

MAX_TEXT = 1000
"""Bytes of a reason."""


class Borrowing:
    """A socket for each lender of this machine."""

    def __init__(self, home: Path, addresses: Sequence[str], trainer: Callable[[], int | None]):
        """``trainer``: the process that may use them. Raises ConfigError for a machine that is not
        paired."""
        self._home, self._trainer = home, trainer
        household = Household(home) if addresses else None
        self._machines = {household.lender(one).name: one for one in addresses if household}
        self._sockets: dict[str, tuple[str, socket.socket]] = {}
        self._tasks = Tasks()

    def open(self) -> tuple[tuple[str, str], ...]:
        """Listen; the name of each lender, and that of its socket."""
        for name, address in self._machines.items():
            path = local.new_name()
            listener = local.bound(path)
            listener.listen()
            self._sockets[name] = path, listener
            self._tasks.start(self._serve(listener, address))
        return tuple((name, path) for name, (path, _) in self._sockets.items())

    async def close(self) -> None:
        """End all links."""
        await self._tasks.cancel()
        for path, listener in self._sockets.values():
            listener.close()
            local.remove(path)

    async def _serve(self, listener: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            self._tasks.start(self._hand_over(connection, address))

    async def _hand_over(self, connection: socket.socket, address: str) -> None:
        with connection, suppress(OSError):
            if local.caller(connection) != self._trainer():
                return
            try:
                async with borrowed(address, self._home) as stream:
                    ours, theirs = socket.socketpair()
                    with ours:
                        with theirs:
                            socket.send_fds(connection, [b"+"], [theirs.fileno()])
                        is_here = await stream.carry(ours)
            except NodeError as error:
                connection.send(str(error).encode()[:MAX_TEXT])
                return
            reason = "it was closed here" if is_here else "`lowcomm-node lend` there says why"
            log.info("lender.ended", address=address, reason=reason)
