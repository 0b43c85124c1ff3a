"""Seconds that exchanges need and may take, and what fits beside those that run. Pure: the time
comes in.

    limits   contents at the rates that the owner allows
    step     a capture waits for the end of an inner step
    work     what the trainer takes beyond that: coding, decoding, averaging
    line     what contents took at the rates that were measured, beyond ``limits``

Both ends send their sum in their offers, and both add the larger to their deadlines.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

from cachetools import FIFOCache

from lowcomm_protocol.exchange.events import Measured, PeerView
from lowcomm_protocol.exchange.kinds import HELLO_DEADLINE, ExchangeKind
from lowcomm_protocol.exchange.position import Position
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.peers.trust import MAX_PEERS

MEASUREMENTS = 16
"""Measurements of one quantity that count."""
LIFE = 600.0
"""Seconds after which one is forgotten: a bad moment must not keep exchanges from ever being tried
again."""
STEPS = 8
"""A capture may wait for as long as the longest of the last steps took."""
SLACK = 1.5
"""Times as long as contents take at the allowed rates: other exchanges begin meanwhile."""
FIRST_DEADLINE = 30.0
"""Seconds for an exchange beyond what both ends need, until one has gone well."""
FIRST_USUAL = 5.0
"""Seconds that an exchange is taken to last beyond what we need, until one has gone well; a peer
gets as much where nothing is known of it."""
FIRST_RATE = 250_000
"""Bytes a second that a line is taken to carry until one is measured: 2 Mbit/s."""


class Recent:
    """The last measurements of one quantity."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MEASUREMENTS)

    def add(self, value: float, now: float) -> None:
        """Take in one more."""
        self._values.append((now, value))

    def usual(self, now: float) -> float | None:
        """Their median; None if there is none."""
        values = [value for since, value in self._values if now - since <= LIFE]
        return median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds that one exchange needs."""

    limits: int = 0
    step: float = 0.0
    work: float = 0.0
    line: float = 0.0
    streams: int = 1
    """How many share the line."""

    @property
    def least(self) -> int:
        """What it takes in any case: an exchange that may not take so long is not begun."""
        return self.limits + int(self.step)

    def offered(self, longest: float) -> int:
        """Whole seconds for an offer. What was only measured makes no exchange too long to
        begin."""
        most = self.limits + int(self.step + self.work + self.line)
        return max(self.least, min(int(longest), most))


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines, in seconds."""

    longest: float = 300.0
    """An exchange may take so long, as the owner says."""
    first: float = FIRST_DEADLINE
    hello: float = HELLO_DEADLINE
    alone_first: bool = True
    """Whether only one exchange is under way until the first ones have shown how fast the line
    is."""


class Budget:
    """Time and memory of the exchanges of one peer."""

    def __init__(
        self,
        deadlines: Deadlines,
        kind: ExchangeKind | None,
        position: Position,
        around: PeerView,
        running: Mapping[int, Underway],
    ) -> None:
        """``running``: exchanges under way, by fragment."""
        self.deadlines = deadlines
        self.closing: set[int] = set()
        """Exchanges that are over, and whose memory is not free yet."""
        self.pace: deque[float] = deque(maxlen=STEPS)
        """Seconds of the last inner steps."""
        self.work = Recent()
        self.rates = Recent()
        self.lines = Recent()
        self.shares = Recent()
        """Of the last exchanges, as in `Measured`."""
        self.durations: deque[float] = deque(maxlen=16)
        """Seconds after which the last exchanges that were applied had all they needed."""
        self._kind, self._position, self._around = kind, position, around
        self._running = running
        self._took: FIFOCache[str, float] = FIFOCache(MAX_PEERS)
        """Seconds after which the last applied contribution of each peer had come."""
        self._too_long: Needs | None = None
        """Of the last exchange that was not begun because it would take too long."""

    # what was measured

    def measured(self, measured: Measured, now: float) -> None:
        """Learn from an exchange, a failed one too: the next ones then get as long as it takes."""
        if measured.work:
            self.work.add(measured.work, now)
        rate, line = (measured.rate, self.rates), (measured.line, self.lines)
        for value, recent in (rate, line, (measured.share, self.shares)):
            if value is not None:
                recent.add(value, now)

    def came(self, line: float | None, now: float) -> None:
        """Estimate the rate of the line from the first content, before its exchange has ended."""
        if line is not None and self.lines.usual(now) is None:
            self.lines.add(line, now)

    def took(self, peer: str, seconds: float) -> None:
        """Learn after which time the contribution of a peer had come; it was applied."""
        self._took[peer] = seconds

    @property
    def step_seconds(self) -> float:
        """How long a capture may wait for the end of a step; 0 while there was none."""
        # Not the median: a capture that waits for the slow step of several must not miss the
        # deadline.
        return max(self.pace, default=0.0)

    @property
    def mean_step_seconds(self) -> float:
        """Mean seconds of the last inner steps; 0 while there was none."""
        return sum(self.pace) / len(self.pace) if self.pace else 0.0

    # how long an exchange takes, and may take

    def bytes_of(self, fragment: int, now: float) -> int:
        """Bytes that an exchange of a fragment carries one way."""
        assert self._position.ready is not None
        assert self._kind is not None
        return self.bytes_in(self._kind.contents * self._position.ready.sizes[fragment][1], now)

    def bytes_in(self, most: int, now: float) -> int:
        """The same, of ``most`` that it might carry."""
        share = self.shares.usual(now)
        return most if share is None else max(1, ceil(share * most))

    def needs(self, fragment: int, now: float, streams: int = 1) -> Needs:
        """What an exchange of a fragment needs while ``streams`` share the line."""
        size = self.bytes_of(fragment, now)
        allowed = ceil(SLACK * self._around.transfer_seconds(size, streams))
        rate = self.rates.usual(now)
        return Needs(
            limits=allowed,
            step=self.step_seconds,
            # Measured work includes the wait for a step, which ``step`` covers.
            work=max(0.0, (self.work.usual(now) or 0.0) - self.step_seconds),
            # The measured rate is that of line and limits together, for one content at a time.
            line=max(0.0, streams * size / rate - allowed) if rate else 0.0,
            streams=streams,
        )

    def needs_now(self, fragment: int, now: float) -> Needs:
        """What it needs beside those that run."""
        return self.needs(fragment, now, len({*self._running, fragment}) + self._around.sharing())

    def hindrance(self, now: float) -> Needs | None:
        """What keeps an exchange of some fragment, or the last that was not begun, from being begun
        within the owner's limits; None if all can."""
        if self._position.ready is None or self._kind is None:
            return None
        needs = [self.needs(fragment, now) for fragment in range(len(self._position.schedule))]
        most = max([*needs, self._too_long or Needs()], key=lambda one: one.least)
        return most if most.least > self.deadlines.longest else None

    def allows(self, needs: Needs) -> bool:
        """Whether to begin an exchange: one that takes too long could only fail."""
        is_too_long = needs.least > self.deadlines.longest
        self._too_long = needs if is_too_long else None
        return not is_too_long

    @property
    def deadline(self) -> float:
        """Seconds that an exchange may take: learned from the good ones, at most ``longest``."""
        usual = self.deadlines.first
        if self.durations:
            # Far above the usual, as an exchange that is cut short has sent its bytes in vain. The
            # constant counts where exchanges take less than a few seconds.
            usual = 10.0 + 4 * median(self.durations)
        return min(self.deadlines.longest, usual)

    def deadline_for(self, fragment: int, seconds: float, now: float) -> float:
        """The same where a member offers to need ``seconds``."""
        needed = self.needed(fragment, seconds, now)
        return min(self.deadlines.longest, self.deadline + needed)

    def needed(self, fragment: int, seconds: float, now: float) -> float:
        """The seconds that a member needs, as far as it can know that."""
        # No offer has this: a peer whose deadlines are short would refuse a guess.
        at_first = self.bytes_of(fragment, now) // FIRST_RATE
        return max(seconds, at_first) if self.rates.usual(now) is None else seconds

    def usual(self, peer: str, needs: float) -> float:
        """Seconds after which an exchange with a peer takes longer than it should; ``needs``:
        those that we need ourselves, which count before any exchange has been applied."""
        seconds = median(self.durations) if self.durations else FIRST_USUAL + needs
        return 0.5 + 2 * max(seconds, self._took.get(peer, 0.0))

    def granted(self, peer: str, asked: float) -> float:
        """Seconds that a peer gets, of those that it asks for: as a claim costs nothing, no more
        than it was seen to need."""
        return min(asked, max(FIRST_USUAL, 2 * self._took.get(peer, 0.0)))

    # what fits beside those that run

    @property
    def has_memory(self) -> bool:
        """Whether one more finds memory."""
        return self._free > len(self.closing)

    @property
    def _free(self) -> int:
        ready = self._position.ready
        return (ready.exchanges if ready else 0) - len(self._running)

    def fills_line(self, now: float) -> bool:
        """Whether those under way take all that the line carries until one is decided.

        While one is on the line, as many others are coded, decoded or wait for a step, and one
        waits for the line of its partner. More of them would only share it, and all end late.
        """
        running = self._running.values()
        undecided = sum(one.decided is None and not self.gives_way(one, now) for one in running)
        line = self.lines.usual(now)
        if line is None:
            return undecided >= 1 and not self.durations and self.deadlines.alone_first
        rest = 2 * ((self.work.usual(now) or 0.0) + self.step_seconds)
        return undecided >= (inf if line <= 0.0 else 1 + ceil((line + rest) / line))

    def gives_way(self, one: Underway, now: float) -> bool:
        """Whether an exchange ends where one of our own is due: one of a pair that a caller began,
        and that takes longer than usual. A group would do without us."""
        if one.call is None or one.kind.all_call or one.decided is not None or one.machine.over:
            return False
        return now - one.began > self.usual(one.call.peer, one.needs)

    def has_place_for(self, place: str) -> bool:
        """Whether a call from an address may begin an exchange: no address takes all."""
        callers = [one.call.place for one in self._running.values() if one.call]
        return self._around.has_room_for(place, callers, self._free)
