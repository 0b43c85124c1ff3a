"""Seconds that exchanges need and may take, and what fits beside those that run. Pure: the time
comes in.

    limits   contents at the rates that the owner allows
    step     a capture waits for the end of an inner step
    work     what the trainer takes beyond that: coding, decoding, averaging
    line     what contents took at the rates that were measured, beyond ``limits``

Both ends send their sum in their offers, and both add the larger to their deadlines.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

from lowcomm_protocol.exchange.events import Measured, PeerView
from lowcomm_protocol.exchange.kinds import HELLO_DEADLINE, ExchangeKind
from lowcomm_protocol.exchange.position import Position
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.peers.trust import MAX_PEERS

MEASUREMENTS = 16
"""Measurements that count."""
LIFE = 600.0
"""Seconds after which one is forgotten: a bad moment must not keep exchanges from ever being tried
again."""
STEPS = 8
"""The longest of so many last steps is what a capture may wait for."""


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
    """What one exchange needs; whole seconds are told."""

    limits: int = 0
    step: float = 0.0
    work: float = 0.0
    line: float = 0.0
    streams: int = 1
    """How many share the link."""

    @property
    def least(self) -> int:
        """What it takes in any case: an exchange that may not take so long is not begun."""
        return self.limits + int(self.step)

    def told(self, longest: float) -> int:
        """What an offer tells. What was only measured makes no exchange too long to be begun."""
        return max(
            self.least, min(int(longest), self.limits + int(self.step + self.work + self.line))
        )


SLACK = 1.5
"""Times as long as contents take at the allowed rates: other exchanges begin meanwhile."""
FIRST_DEADLINE = 30.0
"""Seconds for an exchange beyond what both ends need, until one has gone well that could tell."""
FIRST_USUAL = 5.0
"""Seconds that an exchange is taken to last beyond what we need, until one has gone well; a peer
gets as much where nothing is known of it."""
FIRST_RATE = 250_000
"""Bytes a second that a line is taken to carry until one is measured: 2 Mbit/s."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines, in seconds."""

    longest: float = 300.0
    """An exchange may take so long, as the owner says."""
    first: float = FIRST_DEADLINE
    hello: float = HELLO_DEADLINE
    learns: bool = True
    """Whether exchanges that went well shorten the deadline."""
    alone_first: bool = True
    """Whether only one exchange is under way until the first ones have told how fast the line
    is."""


class Budget:
    """What exchanges need and may take."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self.pace: deque[float] = deque(maxlen=STEPS)
        """Seconds of the last inner steps."""
        self.work = Recent()
        """Seconds that the trainer took for an exchange."""
        self.rates = Recent()
        """Bytes a second at which contents came, the slowest of each exchange."""
        self.lines = Recent()
        """Seconds that contents took one way, of each exchange."""
        self.shares = Recent()
        """Bytes that exchanges carried one way, in those that they might have carried."""
        self.durations: deque[float] = deque(maxlen=16)
        """Seconds after which the last exchanges that were applied had all they needed."""
        self._took: OrderedDict[str, float] = OrderedDict()
        """Seconds after which the contribution of each peer had come, the last time that one was
        applied."""
        self._too_long: Needs | None = None
        """Of the exchange that was not begun of late, as it would take too long."""

    def measured(self, measured: Measured, now: float) -> None:
        """Learn from an exchange, a failed one too: the next ones then get as long as it takes."""
        if measured.work:
            self.work.add(measured.work, now)
        if measured.rate is not None:
            self.rates.add(measured.rate, now)
        if measured.line is not None:
            self.lines.add(measured.line, now)
        if measured.share is not None:
            self.shares.add(measured.share, now)

    def came(self, line: float | None, now: float) -> None:
        """Learn how fast the line is from the first content that has come, so that other exchanges
        need not wait for the end of its own."""
        if line is not None and self.lines.usual(now) is None:
            self.lines.add(line, now)

    def bytes_of(self, most: int, now: float) -> int:
        """Bytes that an exchange carries one way, of ``most`` that it might carry."""
        share = self.shares.usual(now)
        return most if share is None else max(1, ceil(share * most))

    def at_once(self, now: float) -> float:
        """How many exchanges fill the line: while one is on it, as many others are coded, decoded
        or wait for a step, and one waits for the line of its partner. More of them would only share
        it, and all end late."""
        line = self.lines.usual(now)
        if line is None:
            is_known = self.durations or not self.deadlines.alone_first
            return inf if is_known else 1
        rest = 2 * ((self.work.usual(now) or 0.0) + self.step_seconds)
        return inf if line <= 0.0 else 1 + ceil((line + rest) / line)

    @property
    def step_seconds(self) -> float:
        """How long a capture may wait for the end of a step; 0 while there was none."""
        # Not the median: a capture that waits for the slow step of several must not miss the
        # deadline.
        return max(self.pace, default=0.0)

    def took(self, peer: str, seconds: float) -> None:
        """Learn after which time the contribution of a peer had come; it was applied."""
        self._took[peer] = seconds
        self._took.move_to_end(peer)
        if len(self._took) > MAX_PEERS:
            self._took.popitem(last=False)

    def usual(self, peer: str, needs: float) -> float:
        """Seconds after which an exchange with a peer takes longer than it should; ``needs``:
        those that we need ourselves, which tell it before any exchange has."""
        seconds = median(self.durations) if self.durations else FIRST_USUAL + needs
        return 0.5 + 2 * max(seconds, self._took.get(peer, 0.0))

    def granted(self, peer: str, asked: float) -> float:
        """Seconds that a peer gets, of those that it asks for: as a claim costs nothing, no more
        than it was seen to need."""
        return min(asked, max(FIRST_USUAL, 2 * self._took.get(peer, 0.0)))

    @property
    def mean_step_seconds(self) -> float:
        """Mean seconds of the last inner steps; 0 while there was none."""
        return sum(self.pace) / len(self.pace) if self.pace else 0.0

    @property
    def deadline(self) -> float:
        """Seconds that an exchange may take: learned from the good ones, at most ``longest``."""
        usual = self.deadlines.first
        if self.durations and self.deadlines.learns:
            # Far above the usual, as an exchange that is cut short has sent its bytes in vain. The
            # constant counts where exchanges take less than a few seconds.
            usual = 10.0 + 4 * median(self.durations)
        return min(self.deadlines.longest, usual)

    def deadline_for(self, seconds: float, size: int, now: float) -> float:
        """The same where a member needs so many seconds, as its offer tells, for an exchange that
        carries ``size`` bytes one way."""
        return min(self.deadlines.longest, self.deadline + self.needed(seconds, size, now))

    def needed(self, seconds: float, size: int, now: float) -> float:
        """The seconds that a member needs, as far as it can know that."""
        # No offer tells of it: a peer whose deadlines are short would refuse a guess.
        return max(seconds, size // FIRST_RATE) if self.rates.usual(now) is None else seconds

    def excess(self, seconds: float) -> str | None:
        """Why a peer that needs so many seconds can't take part; None if it can."""
        if seconds <= self.deadlines.longest:
            return None
        return (
            f"needs {seconds} s for its steps and contents, where an exchange may take "
            f"{self.deadlines.longest:.0f} s"
        )

    def needs(self, size: int, at_limits: float, streams: int, now: float) -> Needs:
        """What an exchange of so many bytes needs; ``at_limits``: seconds at the owner's limits."""
        allowed, rate = ceil(SLACK * at_limits), self.rates.usual(now)
        return Needs(
            limits=allowed,
            step=self.step_seconds,
            # Measured work includes the wait for a step, which ``step`` covers.
            work=max(0.0, (self.work.usual(now) or 0.0) - self.step_seconds),
            # The measured rate is that of line and limits together, for one content at a time.
            line=max(0.0, streams * size / rate - allowed) if rate else 0.0,
            streams=streams,
        )

    def allows(self, needs: Needs) -> bool:
        """Whether to begin an exchange: one that takes too long could only fail."""
        is_too_long = needs.least > self.deadlines.longest
        self._too_long = needs if is_too_long else None
        return not is_too_long

    def hindrance(self, each: Iterable[Needs]) -> Needs | None:
        """What keeps one of these exchanges, or the last that was not begun, from being begun
        within ``longest``; None if all can."""
        needs = [*each, *([self._too_long] if self._too_long is not None else [])]
        most = max(needs, key=lambda one: one.least)
        return most if most.least > self.deadlines.longest else None


class Room:
    """Room for exchanges beside those that run."""

    def __init__(
        self,
        kind: ExchangeKind | None,
        budget: Budget,
        position: Position,
        around: PeerView,
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
