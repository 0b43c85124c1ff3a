"""The kinds of exchange, as a table: the first that fits the settings of a run carries out its
exchanges.

A new kind is a machine (a `base.Gathering`), an entry here, a driver in ``sync`` of the node, and
what it carries in ``simulation/contents.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.base import Gathering
from lowcomm_protocol.exchange.events import PeerEvent
from lowcomm_protocol.exchange.group import GroupExchange
from lowcomm_protocol.exchange.pair import PairExchange
from lowcomm_protocol.spec.sections import SyncSettings

HELLO_DEADLINE = 10.0
"""Seconds for the answer to a call, and for last words when contributions have come."""
PATIENCE = 3.0
"""Seconds between two looks at who holds up the list of members of a group."""
GATHERING_PART, REDUCING_PART = 0.25, 0.6
"""Parts of the deadline in which a group must have gathered, and contributions must have come."""

Timetable = list[tuple[float, PeerEvent]]
"""Events of an exchange, each with the seconds from its beginning on."""


@dataclass(frozen=True, kw_only=True)
class ExchangeKind:
    """One kind of exchange."""

    name: str
    fits: Callable[[SyncSettings], bool]
    """Whether a run with these settings exchanges in this way."""
    machine: Callable[[str, Sequence[str], int], Gathering]
    """An exchange: our peer id, candidates, most members."""
    timetable: Callable[[float, float], Timetable]
    """What happens when: seconds for a hello, seconds of the deadline."""
    contents: int
    """How many times the bytes of the fragment go out, at most."""
    slots: int
    """Buffers that an exchange holds at a peer, however many take part, each as large as the coded
    fragment."""
    all_call: bool
    """Whether a peer that is called calls its own candidates, too."""


def timetable(hello: float, deadline: float) -> Timetable:
    """The deadlines of every kind.

    What members still tell each other when contributions have come gets a grace of its own; after
    it the exchange is over in any case.
    """
    return [(deadline, events.DeadlinePassed()), (deadline + hello, events.DeadlinePassed())]


def _pair_timetable(hello: float, deadline: float) -> Timetable:
    return [(min(hello, deadline / 2), events.GatheringClosed()), *timetable(hello, deadline)]


def _group_timetable(hello: float, deadline: float) -> Timetable:
    gathering, reducing = min(hello, GATHERING_PART * deadline), REDUCING_PART * deadline
    patience = min(PATIENCE, (reducing - gathering) / 4)
    looks = int((deadline - gathering) / patience)
    return [
        (gathering, events.GatheringClosed()),
        *((gathering + look * patience, events.AgreeingClosed()) for look in range(1, looks)),
        (reducing, events.ReduceClosed()),
        (deadline + hello / 2, events.ConfirmingClosed()),
        *timetable(hello, deadline),
    ]


PAIR = ExchangeKind(
    name="pair",
    fits=lambda sync: sync.group == 2,
    machine=lambda me, candidates, group: PairExchange(me, candidates),
    timetable=_pair_timetable,
    contents=1,
    slots=2,  # our contribution, theirs
    all_call=False,
)
GROUP = ExchangeKind(
    name="group",
    fits=lambda sync: sync.group > 2,
    machine=GroupExchange,
    timetable=_group_timetable,
    contents=2,
    # What we contribute to the shards of the others, what they contribute to ours, and the means of
    # all shards.
    slots=3,
    all_call=True,
)
KINDS = [PAIR, GROUP]


def kind_of(sync: SyncSettings) -> ExchangeKind | None:
    """The kind of exchange of a run; None where its peers do not exchange."""
    return next((kind for kind in KINDS if kind.fits(sync)), None)
