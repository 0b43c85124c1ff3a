"""Wait for a condition with a deadline, never for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")
POLL = 0.1
"""Seconds between two looks: conditions are about anything, so nothing tells when one comes
true."""


def until(condition: Callable[[], T], deadline: float, what: str) -> T:
    """The first true value of ``condition``. Raises AssertionError that says ``what`` did not
    happen in time."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline:.0f} s: {what}; last: {value!r}"
        time.sleep(POLL)


async def until_async(
    condition: Callable[[], Awaitable[T]] | Callable[[], T], deadline: float, what: str
) -> T:
    """``until`` for tests in an event loop, which goes on meanwhile."""
    end = time.monotonic() + deadline
    while True:
        found: Any = condition()
        value: T = await found if isawaitable(found) else found
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline:.0f} s: {what}; last: {value!r}"
        await asyncio.sleep(POLL)
