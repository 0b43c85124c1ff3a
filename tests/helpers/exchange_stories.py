"""Exchanges in a virtual swarm, and stories of one, event by event, as ``m`` sees it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.virtual import OFFER, Swarm, VirtualPeer
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.base import Gathering
from lowcomm_protocol.exchange.group import GroupExchange

ME = "m"
D = {name: bytes([number]) * 32 for number, name in enumerate(("a", "b", "m", "z"), 1)}


def joined() -> list[events.PeerEvent]:
    """The events until three peers have agreed on a group."""
    three = ("a", "b", ME)
    return [
        accepted("a"), accepted("b"), *(events.Roll(peer=peer, roll=three) for peer in "ab"),
        *(events.Members(peer=peer, members=three) for peer in "ab"),
    ]  # fmt: skip


def well() -> list[events.PeerEvent]:
    """The events of a story that goes well."""
    means = {name: D[name] for name in ("a", "b", ME)}
    return [
        *joined(), events.Captured(), *(events.Shard(peer=peer) for peer in "ab"),
        events.Reduced(digest=D[ME]),
        *(events.ShardMean(peer=peer, digest=D[peer]) for peer in "ab"),
        *(events.Holdings(peer=peer, held=tuple(means.values())) for peer in "ab"),
        *(events.Commit(peer=peer, shards=(True,) * 3, heard=(True,) * 3) for peer in "ab"),
    ]  # fmt: skip


def accepted(peer: str, called_us: bool = False, step: int = 40) -> events.Accepted:
    return events.Accepted(peer=peer, offer=replace(OFFER, swarm_step=step), called_us=called_us)


def group(*order: str, size: int = 4) -> GroupExchange:
    exchange = GroupExchange(me=ME, candidates=order, group=size)
    exchange.start()
    return exchange


def told(exchange: Gathering, *happenings: events.PeerEvent) -> list[events.Effect]:
    """The effects of the last event."""
    effects: list[events.Effect] = []
    for event in happenings:
        effects = exchange.handle(event)
    return effects


def run_to_end(exchange: Gathering, happenings: list[events.PeerEvent]) -> list[events.Effect]:
    """All effects of a story that ends in time, each violation told as a loss."""
    effects: list[events.Effect] = []
    for event in [
        *happenings, events.GatheringClosed(), events.DeadlinePassed(), events.DeadlinePassed()
    ]:  # fmt: skip
        was_over = exchange.over
        try:
            new = exchange.handle(event)
        except ProtocolViolation:
            assert not was_over
            new = exchange.handle(
                events.Lost(peer=getattr(event, "peer", ""), reason="violated the protocol")
            )
        assert not (was_over and new), "effects after the end"
        assert len(exchange.partners) < exchange.group
        effects += new
    assert exchange.over
    assert exchange.stage is events.Stage.APPLIED or exchange.reason
    return effects


def after(count: int) -> GroupExchange:
    """An exchange of three after so many events of a story that goes well."""
    exchange = group("a", "b")
    told(exchange, *well()[:count])
    return exchange


AGREED, SENT, GIVEN, REDUCED, HELD, COMMITTED = 6, 7, 9, 10, 12, 14
"""How many events of a story that goes well: until all have agreed, ours is captured, theirs has
come, and so on."""
THREE = ("a", "b", ME)
MEANS = (D["a"], D["b"], D[ME])


def refused(exchange: GroupExchange, event: events.PeerEvent) -> None:
    before = repr(exchange)
    with pytest.raises(ProtocolViolation):
        exchange.handle(event)
    assert repr(exchange) == before, "a violation has changed something"


def held(peer: str, *digests: bytes) -> events.Holdings:
    return events.Holdings(peer=peer, held=digests)


def commit(peer: str, shards: str, heard: str = "111") -> events.Commit:
    return events.Commit(
        peer=peer, shards=tuple(c == "1" for c in shards), heard=tuple(c == "1" for c in heard)
    )


def group_peers(swarm: Swarm) -> list[VirtualPeer]:
    return list(swarm.peers.values())


def at(
    kind: type[events.Effect], number: int, action: Callable[[], None]
) -> Callable[[events.Effect], None]:
    """Do something just before the effect of this kind and number, counted from 0."""
    seen = Counter[type[events.Effect]]()

    def before(effect: events.Effect) -> None:
        if type(effect) is kind and seen[kind] == number:
            action()
        seen[type(effect)] += 1

    return before
