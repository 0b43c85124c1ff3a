"""What was written down last, for those who follow it: each notice with its number."""

from collections import deque
from collections.abc import Callable, Sequence

from lowcomm_node.journal.reader import Entry
from lowcomm_node.journal.sample import Sample

KEPT = 1000
"""Entries in memory; older ones are read from the journal."""


class Feed:
    """The end of a journal that is being written. In the event loop of the daemon only."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """Number of the newest entry, 0 if there is none; None until the journal is open."""
        self.sample: Sample | None = None
        """The newest."""
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._listeners: set[Callable[[], None]] = set()

    def publish(self, newest: int, entries: Sequence[Entry], sample: Sample | None) -> None:
        """These were written; ``newest``: the number of the newest entry now."""
        self.newest = newest
        self._entries.extend(entries)
        self.sample = sample or self.sample
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever something was written; returns what ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def after(self, number: int) -> list[Entry] | None:
        """The entries behind a number; None if some of them are no longer in memory."""
        if self.newest is None or number >= self.newest:
            return []
        if not self._entries or self._entries[0].number > number + 1:
            return None
        return [entry for entry in self._entries if entry.number > number]
