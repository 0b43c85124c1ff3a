"""One incoming call. A caller must take what it is sent, or it loses its connection.

A gRPC server can't end a call whose caller has filled its window and stopped reading: the status
queues behind the unread bytes, and the call keeps its places in our limits and in gRPC. Cancelling
the handler changes nothing. So a deadline ends the connection itself.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import grpc
from grpc import aio

from lowcomm_node.net.connections import INTERNET, Endings
from lowcomm_node.net.tunnels import Tunnels
from lowcomm_node.system.logs import log

TAKE_DEADLINE = 180.0
"""Seconds for a caller to take a chunk or the end of its call. At the least --max-down, a chunk of
a snapshot takes 66."""


class Call:
    """Context manager around one incoming call."""

    def __init__(self, context: Any, tunnels: Tunnels | None, endings: Endings) -> None:
        """``context``: the one that gRPC gives the handler."""
        self.context = context
        self._tunnels = tunnels
        self._endings = endings
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._held = ExitStack()
        context.add_done_callback(self._over)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hurry()  # the caller has still to take the status

    def hold(self, place: AbstractContextManager[None]) -> None:
        """Hold a place until the caller has taken the end of the call, possibly long after the
        handler."""
        if not self._is_over:
            self._held.enter_context(place)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Context in which something is sent; the deadline of the caller runs meanwhile."""
        self._hurry()
        try:
            yield
        finally:
            self._stop()

    async def abort(self, code: grpc.StatusCode, words: str) -> None:
        """End the call with a status.

        Raises AbortError, or CancelledError if gRPC has ended the call itself meanwhile.
        """
        with self.taking():
            try:
                await self.context.abort(code, words)
            # Such as a compressed message, which gRPC answers
            except (aio.InternalError, aio.UsageError):
                raise asyncio.CancelledError from None

    def break_off(self, reason: str) -> None:
        """End the connection of this call, with everything else on it."""
        caller = self.context.peer()
        kind, _, name = caller.partition(":")
        if kind in INTERNET:
            if not self._endings.end(caller):
                return
        elif self._tunnels is not None:
            self._tunnels.callee.break_off(unquote(name))
        log.info("call.broken_off", caller=caller, reason=reason)

    def _hurry(self) -> None:
        self._stop()
        if not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(TAKE_DEADLINE, self._break_off)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _over(self, context: Any) -> None:
        self._is_over = True
        self._stop()
        self._held.close()

    def _break_off(self) -> None:
        self.break_off(f"took nothing for {TAKE_DEADLINE:.0f} s")
