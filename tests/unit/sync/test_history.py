"""What must hold for the memory of exchanges: it counts what happened, and stays bounded however
many there are."""

from types import SimpleNamespace

import pytest

from helpers.clock import Clock
from helpers.virtual import OFFER
from lowcomm_node.node.messages import Shared
from lowcomm_node.sync import history as history_module
from lowcomm_node.sync.driver import ExchangeDriver
from lowcomm_node.sync.group_driver import GroupDriver
from lowcomm_node.sync.history import (
    MAX_EXCHANGES,
    MAX_PEERS,
    ExchangeEnded,
    ExchangeStatus,
    History,
    PeerHistory,
)
from lowcomm_node.sync.link import ContentLink
from lowcomm_node.sync.pair_driver import PairDriver
from lowcomm_protocol.exchange import kinds
from lowcomm_protocol.exchange.events import Accepted, Cause, Outcome, Refused
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(history_module, "monotonic", clock)
    return clock


def make_driver(
    *partners: str, refuse: tuple[str, ...] = (), began: float = 1000.0, **links: tuple[int, int]
) -> ExchangeDriver:
    """An exchange in which these take part, those refuse, and links have sent and received so many
    bytes."""
    kind, driver = (kinds.PAIR, PairDriver) if len(partners) < 2 else (kinds.GROUP, GroupDriver)
    machine = kind.machine("me", [*refuse, *partners], len(partners) + 1)
    one = Underway(1, kind, machine, OFFER, began)
    arena = SimpleNamespace(take=lambda count: ())
    exchanger = SimpleNamespace(
        peer=SimpleNamespace(me="me"), trainer_now=lambda: (None, None, arena)
    )
    made = driver(exchanger, one)  # pyright: ignore[reportArgumentType]
    machine.start()
    for peer in refuse:
        machine.handle(Refused(peer=peer, reason=Refusal.BUSY))
    for peer in partners:
        machine.handle(Accepted(peer=peer, offer=OFFER))
    for peer, (sent, received) in links.items():
        link = made.links[peer] = ContentLink(peer, stream=None)
        link.bytes_sent = sent
        link.bytes_received = received
    return made


# History


def test_an_exchange_that_was_applied_is_counted_for_everybody_who_took_part(clock):
    history = History()
    clock.now += 7.5
    driver = make_driver("a", "b", a=(10, 20), b=(11, 22))
    entry = history.record(driver, Outcome.APPLIED, "", 42)
    assert history.outcomes == {Outcome.APPLIED: 1}
    assert (history.bytes_sent, history.bytes_received) == (21, 42)
    assert [history.of(peer).completed for peer in "abc"] == [1, 1, 0]
    assert history.applied_at == 1007.5
    assert list(history.exchanges) == [entry]
    assert entry.time > 1_700_000_000
    assert entry == ExchangeEnded(
        time=entry.time, fragment=OFFER.fragment, round=OFFER.round, outcome=Outcome.APPLIED,
        reason="",
        partners=("a", "b"), left_out={}, swarm_step=42, bytes_sent=21, bytes_received=42,
        seconds=7.5,
    )  # fmt: skip


def test_an_exchange_that_failed_tells_why_and_counts_for_nobody(clock):
    history = History()
    entry = history.record(make_driver("a", a=(5, 0)), Outcome.FAILED, "was too slow", 42)
    assert (entry.outcome, entry.reason) == ("failed", "was too slow")
    assert (history.bytes_sent, history.of("a").completed) == (5, 0)
    history.record(make_driver("a"), Outcome.APPLIED, "realigned", 43)
    assert history.exchanges[-1].reason == "realigned"
    assert history.outcomes == {Outcome.FAILED: 1, Outcome.APPLIED: 1}


def test_what_a_peer_did_is_counted_apart(clock):
    history = History()
    history.refused("a", Refusal.BUSY)
    assert history.of("a") == PeerHistory(
        refused=1, last_reason=REFUSAL_TEXT[Refusal.BUSY], last_code="busy"
    )
    history.lost("a", "ended the stream", Cause.LOST)
    assert history.of("a") == PeerHistory(
        refused=1, failed=1, last_reason="ended the stream", last_code="lost"
    )
    history.refused("a", Refusal.OTHER_RUN, by_us=True)
    assert history.of("a") == PeerHistory(
        refused=1,
        failed=1,
        last_reason="we refused it: it takes part in another run",
        last_code="other-run",
    )
    assert history.of("b") == PeerHistory()


def test_refusals_are_counted_on_both_sides_but_not_those_of_calls_that_crossed(clock):
    history = History()
    history.refused("a", Refusal.BUSY)
    history.refused("b", Refusal.TOO_SOON, by_us=True)
    for by_us in (False, True):
        history.refused("c", Refusal.CROSSED, by_us)
    assert history.refusals == 2
    assert history.of("c") == PeerHistory()


def test_only_the_last_rounds_are_kept_but_all_are_counted(clock):
    history = History()
    for step in range(MAX_EXCHANGES + 10):
        history.record(make_driver("a", a=(1, 2)), Outcome.APPLIED, "", step)
    assert [entry.swarm_step for entry in history.exchanges] == list(range(10, MAX_EXCHANGES + 10))
    assert (
        history.outcomes[Outcome.APPLIED]
        == history.bytes_sent
        == history.of("a").completed
        == MAX_EXCHANGES + 10
    )


def test_of_many_peers_those_not_met_for_longest_are_forgotten():
    history = History()
    for number in range(MAX_PEERS):
        history.lost(str(number), "gone", Cause.LOST)
    history.of("0")  # met again
    for number in range(MAX_PEERS, MAX_PEERS + 10):
        history.refused(str(number), Refusal.NOT_ALLOWED, by_us=True)
    assert len(history._peers) == MAX_PEERS
    assert history.of("0").failed == 1
    assert [number for number in range(20) if str(number) not in history._peers] == list(
        range(1, 11)
    )


# Round


async def test_a_round_tells_what_is_under_way():
    driver = make_driver("a", a=(10, 20))
    driver.least, driver.most = 50, 100
    told = driver.describe(now=1003.0)
    assert told == ExchangeStatus(
        fragment=OFFER.fragment, round=OFFER.round, stage="capturing", partners=("a",),
        bytes_sent=10, bytes_received=20, bytes_expected=200, seconds=3.0,
    )  # fmt: skip
    driver.shared = Shared(sizes=(60,), digests=(b"digest",), steps=1)
    assert driver.describe(now=1003.0).bytes_expected == 120, (
        "what ours has taken says best what theirs will take"
    )
