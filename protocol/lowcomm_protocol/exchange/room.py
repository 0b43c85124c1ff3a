"""What fits at this peer: memory, places and line of the exchanges under way, and the seconds that
one more needs. Pure."""

from collections.abc import Mapping

from lowcomm_protocol.exchange.budget import Budget
from lowcomm_protocol.exchange.events import Surroundings
from lowcomm_protocol.exchange.kinds import Kind
from lowcomm_protocol.exchange.needs import Needs
from lowcomm_protocol.exchange.position import Position
from lowcomm_protocol.exchange.underway import Underway


class Room:
    """Room for exchanges beside those that run."""

    def __init__(
        self,
        kind: Kind | None,
        budget: Budget,
        position: Position,
        around: Surroundings,
        running: Mapping[int, Underway],
    ) -> None:
        """``running``: exchanges under way, by fragment."""
        self.closing: set[int] = set()
        """Exchanges that are over, and whose memory is not free yet."""
        self._kind = kind
        self._budget = budget
        self._position = position
        self._around = around
        self._running = running

    @property
    def free(self) -> int:
        """How many exchanges may begin beside those that run."""
        ready = self._position.ready
        return (ready.exchanges if ready else 0) - len(self._running)

    @property
    def has_memory(self) -> bool:
        """Whether one more finds memory."""
        return self.free > len(self.closing)

    def fills_line(self, now: float) -> bool:
        """Whether those under way take all that the line carries until one is decided."""
        running = self._running.values()
        undecided = sum(one.decided is None and not self.gives_way(one, now) for one in running)
        return undecided >= self._budget.at_once(now)

    def gives_way(self, one: Underway, now: float) -> bool:
        """Whether an exchange ends where one of our own is due: one of a pair that a caller began,
        and that takes longer than usual. A group would do without us."""
        if one.call is None or one.kind.all_call or one.decided is not None or one.machine.over:
            return False
        return now - one.began > self._budget.usual(one.call.peer, one.needs)

    def has_place_for(self, place: str) -> bool:
        """Whether a call from an address may begin an exchange: no address takes all."""
        callers = [one.call.place for one in self._running.values() if one.call]
        return self._around.has_room_for(place, callers, self.free)

    def needs_now(self, fragment: int, now: float) -> Needs:
        """What an exchange of a fragment needs beside those that run."""
        streams = len({*self._running, fragment}) + self._around.sharing()
        return self.needs(fragment, streams, now)

    def needs(self, fragment: int, streams: int, now: float) -> Needs:
        """What an exchange of a fragment needs while so many share the line."""
        size = self.bytes_of(fragment, now)
        seconds = self._around.transfer_seconds(size, streams)
        return self._budget.needs(size, seconds, streams, now)

    def bytes_of(self, fragment: int, now: float) -> int:
        """What an exchange of a fragment carries one way."""
        assert self._position.ready is not None
        assert self._kind is not None
        most = self._kind.contents * self._position.ready.sizes[fragment][1]
        return self._budget.bytes_of(most, now)
