"""Memory that one thread reads while another may not change it: a large state is written from where
it is, instead of a copy.

    training thread     begin ── trains on ── wait before it changes anything ── changes it
    writing thread           reads ... reads ── end
"""

import threading
from time import monotonic


class Reading:
    """Use of the memory by one thread. It holds as long as ``is_void`` is false."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._ended = threading.Event()
        self.is_void = False
        """Whether the memory was changed before it was read: its reader took too long."""

    def end(self) -> None:
        """All is read; may be called again."""
        self._ended.set()

    def wait(self) -> None:
        """Wait until it has ended, or void it once its time is up."""
        if not self._ended.wait(max(0.0, self._deadline - monotonic())):
            self.is_void = True


class Readings:
    """All that read the memory of one owner; only the owner's thread begins them, and waits."""

    def __init__(self) -> None:
        self._under_way: list[Reading] = []

    def begin(self, seconds: float) -> Reading:
        """Start a read that may delay writers for at most ``seconds``."""
        reading = Reading(monotonic() + seconds)
        self._under_way.append(reading)
        return reading

    def wait(self) -> None:
        """To be called before the memory is changed."""
        while self._under_way:
            self._under_way.pop().wait()
