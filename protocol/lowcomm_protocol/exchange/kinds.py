"""The kinds of exchange, as a table: the first that fits the settings of a run carries out its
exchanges.

A new kind is a machine (a `base.Gathering`), an entry here, a driver in ``sync`` of the node, and
what it carries in ``simulation/contents.py``.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange import pair as pairs
from lowcomm_protocol.exchange.base import (
    Crossed,
    DeadlinePassed,
    Equal,
    Gathering,
    GatheringClosed,
    Knocked,
    Missed,
    NeedsMost,
    WentAway,
)
from lowcomm_protocol.spec.sections import SyncSettings

HELLO_DEADLINE = 10.0
"""Seconds for the answer to a call, and for what is still to be told when contributions have
come."""
PATIENCE = 3.0
"""Seconds between two looks at who holds up the list of members of a group."""
GATHERING_PART, REDUCING_PART = 0.25, 0.6
"""Parts of the deadline in which a group must have gathered, and contributions must have come."""

Timetable = list[tuple[float, Any]]
"""Events that an exchange is told, each after so many seconds."""


@dataclass(frozen=True, kw_only=True)
class ExchangeKind:
    """One kind of exchange."""

    name: str
    fits: Callable[[SyncSettings], bool]
    """Whether a run with these settings uses it."""
    machine: Callable[[str, Sequence[str], int], Gathering]
    """An exchange: our peer id, candidates, most members."""
    timetable: Callable[[float, float], Timetable]
    """What is told when: seconds for a hello, seconds of the deadline."""
    contents: int
    """How many times the bytes of the fragment go out, at most."""
    slots: int
    """Buffers that an exchange holds at a peer, however many take part, each as large as the coded
    fragment."""
    all_call: bool
    """Whether a peer that is called calls its own candidates, too."""
    events: tuple[type, ...] = ()
    """Its events beside those of every kind (``base.py``): stories name them."""


def timetable(hello: float, deadline: float) -> Timetable:
    """What every kind is told.

    What members still tell each other when contributions have come gets a grace of its own; after
    it the exchange is over in any case.
    """
    return [(deadline, DeadlinePassed()), (deadline + hello, DeadlinePassed())]


def _pair_timetable(hello: float, deadline: float) -> Timetable:
    return [(min(hello, deadline / 2), GatheringClosed()), *timetable(hello, deadline)]


def _group_timetable(hello: float, deadline: float) -> Timetable:
    gathering, reducing = min(hello, GATHERING_PART * deadline), REDUCING_PART * deadline
    patience = min(PATIENCE, (reducing - gathering) / 4)
    looks = int((deadline - gathering) / patience)
    return [
        (gathering, GatheringClosed()),
        *((gathering + look * patience, groups.AgreeingClosed()) for look in range(1, looks)),
        (reducing, groups.ReduceClosed()),
        (deadline + hello / 2, groups.ConfirmingClosed()),
        *timetable(hello, deadline),
    ]


PAIR = ExchangeKind(
    name="pair",
    fits=lambda sync: sync.group == 2,
    machine=lambda me, candidates, group: pairs.Exchange(me=me, candidates=candidates),
    timetable=_pair_timetable,
    contents=1,
    slots=2,  # our contribution, theirs
    all_call=False,
    events=(Crossed, Knocked, WentAway, pairs.Verified, pairs.Confirmed),
)
GROUP = ExchangeKind(
    name="group",
    fits=lambda sync: sync.group > 2,
    machine=lambda me, candidates, group: groups.GroupExchange(
        me=me, candidates=candidates, group=group
    ),
    timetable=_group_timetable,
    contents=2,
    # What we contribute to the shards of the others, what they contribute to ours, and the means of
    # all shards.
    slots=3,
    all_call=True,
    events=(
        Crossed,
        Equal,
        Missed,
        NeedsMost,
        groups.RollCame,
        groups.MembersCame,
        groups.AgreeingClosed,
        groups.MissedVerified,
        groups.ShardVerified,
        groups.ReduceClosed,
        groups.Reduced,
        groups.MeanVerified,
        groups.HeldCame,
        groups.ConfirmingClosed,
        groups.CommitCame,
    ),
)
_KINDS = [PAIR, GROUP]


def kind_of(sync: SyncSettings) -> ExchangeKind | None:
    """The kind of exchange of a run; None where its peers do not exchange."""
    return next((kind for kind in _KINDS if kind.fits(sync)), None)


def kind_named(name: str) -> ExchangeKind:
    """A kind by its name. Raises KeyError where there is none."""
    return {kind.name: kind for kind in _KINDS}[name]


@contextmanager
def registered(kind: ExchangeKind) -> Generator[None]:
    """Put a kind before all others while the context lasts."""
    _KINDS.insert(0, kind)
    try:
        yield
    finally:
        _KINDS.remove(kind)
