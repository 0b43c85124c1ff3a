"""Whose fault it is when contents do not come. Pure.

One peer that stalls is slow, or its line is. Several in a row, with nothing that came whole in
between, have one thing in
common: our own line, such as one that drops large packets.
"""

MOST = 64
"""Peers that are remembered."""


class OwnLine:
    """What has come and what has stalled, as far as it tells of our own line."""

    def __init__(self) -> None:
        self._stalled = set[str]()
        """Peers whose contents have stalled since one came whole."""

    def came(self) -> None:
        """A content has come whole."""
        self._stalled.clear()

    def stalled(self, peer: str) -> bool:
        """A peer's content has not come; whether that is its fault, as far as we know."""
        is_its_fault = not self._stalled - {peer}
        if len(self._stalled) < MOST:
            self._stalled.add(peer)
        return is_its_fault

    @property
    def trouble(self) -> str | None:
        """What is wrong with our line; None if nothing tells that anything is."""
        count = len(self._stalled)
        if count < 2:
            return None
        return (
            f"contents of {count} peers in a row did not come, so it is this machine's line: see "
            "`lowcomm-node doctor`"
        )
