"""With whom each fragment was merged of late, and for how long with one other alone. Pure.

Pairs that meet again mix nobody else in: the swarm falls into parts whose slow weights part, and
each part sees small differences within itself alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class _Last:
    partner: str
    first: int
    """Own inner steps when the first contribution of this row of merges was captured."""
    last: int
    """The same of the last one."""


class Company:
    """The last partner in pairs."""

    def __init__(self) -> None:
        self._by_fragment: dict[int, _Last] = {}

    def merged(self, fragment: int, partner: str, steps: int) -> None:
        """Count a merge with a partner, of what was captured after ``steps`` own inner steps."""
        was = self._by_fragment.get(fragment)
        first = steps if was is None or was.partner != partner else was.first
        self._by_fragment[fragment] = _Last(partner, first, steps)

    def apart(self, fragment: int, peer: str) -> int:
        """For how many own inner steps we have merged a fragment with one other alone, who is not
        ``peer``."""
        was = self._by_fragment.get(fragment)
        return 0 if was is None or was.partner == peer else was.last - was.first

    def forget(self) -> None:
        """Know nothing any more: our slow weights are others."""
        self._by_fragment.clear()
