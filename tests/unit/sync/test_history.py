"""What must hold for the memory of exchanges: it counts what happened, and stays bounded however many there are."""

from types import SimpleNamespace

import pytest

from lowcomm_node.sync import history as history_module
from lowcomm_node.sync.driver import Round
from lowcomm_node.sync.group_driver import GroupRound
from lowcomm_node.sync.history import MAX_PEERS, MAX_ROUNDS, History, Outcome, PeerHistory
from lowcomm_node.sync.link import Link
from lowcomm_node.sync.pair_driver import PairRound
from lowcomm_node.trainer.messages import Captured
from lowcomm_protocol.exchange.base import Accepted, Refused
from lowcomm_protocol.plan.matching import REFUSAL_TEXT, Refusal
from virtual import OFFER


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(history_module, "monotonic", clock)
    return clock


def make_round(*partners: str, refuse: tuple[str, ...] = (), began: float = 1000.0, **links: tuple[int, int]) -> Round:
    """An exchange in which these take part, those refuse, and links have sent and received so many bytes."""
    spec = SimpleNamespace(sync=SimpleNamespace(group=len(partners) + 1))
    node = SimpleNamespace(peer_id="me", spec=spec, trainer=None, arena=None)
    kind = PairRound if len(partners) < 2 else GroupRound
    round_ = kind(node, OFFER, [*refuse, *partners], slots=(), called=False)
    round_.began, exchange = began, round_.exchange
    exchange.start()
    for peer in refuse:
        exchange.handle(Refused(peer=peer, reason=Refusal.BUSY, detail=REFUSAL_TEXT[Refusal.BUSY]))
    for peer in partners:
        exchange.handle(Accepted(peer=peer, offer=OFFER))
    for peer, (sent, received) in links.items():
        link = round_.links[peer] = Link(peer, stream=None)
        link.bytes_sent, link.bytes_received = sent, received
    return round_


# History


def test_an_exchange_that_was_applied_is_counted_for_everybody_who_took_part(clock):
    history = History()
    clock.now += 7.5
    round_ = make_round("a", "b", a=(10, 20), b=(11, 22))
    entry = history.record(round_, Outcome.APPLIED, "", 42)
    assert history.outcomes == {Outcome.APPLIED: 1}
    assert (history.bytes_sent, history.bytes_received) == (21, 42)
    assert [history.of(peer).completed for peer in "abc"] == [1, 1, 0]
    assert list(history.rounds) == [entry]
    assert entry.pop("time") > 1_700_000_000
    assert entry == {
            "fragment": OFFER.fragment, "round": OFFER.round, "outcome": "applied", "reason": "", "partners": ["a", "b"],
            "in_doubt": False, "left_out": {}, "swarm_step": 42, "bytes_sent": 21, "bytes_received": 42, "seconds": 7.5,
            "worst_block": None,
        }  # fmt: skip


def test_an_exchange_that_failed_tells_why_and_counts_for_nobody(clock):
    history = History()
    entry = history.record(make_round("a", a=(5, 0)), Outcome.FAILED, "was too slow", 42)
    assert (entry["outcome"], entry["reason"], history.last_reason) == ("failed", "was too slow", "was too slow")
    assert (history.bytes_sent, history.of("a").completed) == (5, 0)
    history.record(make_round("a"), Outcome.APPLIED, "realigned", 43)
    assert history.last_reason == "", "all is well again"
    assert history.rounds[-1]["reason"] == "realigned"
    assert history.outcomes == {Outcome.FAILED: 1, Outcome.APPLIED: 1}


def test_who_refused_is_listed_with_the_reason(clock):
    entry = History().record(make_round("c", refuse=("a", "b")), Outcome.APPLIED, "", 42)
    assert entry["left_out"] == dict.fromkeys("ab", REFUSAL_TEXT[Refusal.BUSY])
    assert entry["partners"] == ["c"]


def test_exchanges_in_doubt_are_counted(clock):
    history = History()
    for doubt in (True, False, True):
        round_ = make_round("a")
        round_.exchange.in_doubt = doubt
        history.record(round_, Outcome.FAILED, "lost", 42)
    assert history.in_doubt == 2


def test_the_usual_duration_is_the_median_of_the_last_that_were_applied(clock):
    history = History()
    assert history.usual_seconds() is None
    for seconds in [1000.0] * 20 + [float(number) for number in range(16)]:
        history.record(make_round("a", began=clock.now - seconds), Outcome.APPLIED, "", 42)
    for outcome in (Outcome.FAILED, Outcome.NO_PARTNER):
        for _ in range(20):
            history.record(make_round("a", began=clock.now - 9999.0), outcome, "too slow", 42)
    assert history.usual_seconds() == 7.5


def test_what_a_peer_did_is_counted_apart(clock):
    history = History()
    history.they_refused("a", Refusal.BUSY)
    assert history.of("a") == PeerHistory(refused=1, last_reason=REFUSAL_TEXT[Refusal.BUSY])
    history.lost("a", "ended the stream")
    assert history.of("a") == PeerHistory(refused=1, failed=1, last_reason="ended the stream")
    history.we_refused("a", Refusal.OTHER_RUN)
    assert history.of("a") == PeerHistory(
        refused=1, failed=1, last_reason="we refused it: it takes part in another run"
    )
    assert history.of("b") == PeerHistory()


def test_refusals_are_counted_on_both_sides_but_not_those_of_calls_that_crossed(clock):
    history = History()
    history.they_refused("a", Refusal.BUSY)
    history.we_refused("b", Refusal.TOO_SOON)
    for count in (history.they_refused, history.we_refused):
        count("c", Refusal.CROSSED)
    assert history.refusals == 2
    assert history.of("c") == PeerHistory()


def test_only_the_last_rounds_are_kept_but_all_are_counted(clock):
    history = History()
    for step in range(MAX_ROUNDS + 10):
        history.record(make_round("a", a=(1, 2)), Outcome.APPLIED, "", step)
    assert [entry["swarm_step"] for entry in history.rounds] == list(range(10, MAX_ROUNDS + 10))
    assert history.outcomes[Outcome.APPLIED] == history.bytes_sent == history.of("a").completed == MAX_ROUNDS + 10


def test_of_many_peers_those_not_met_for_longest_are_forgotten():
    history = History()
    for number in range(MAX_PEERS):
        history.lost(str(number), "gone")
    history.of("0")  # met again
    for number in range(MAX_PEERS, MAX_PEERS + 10):
        history.we_refused(str(number), Refusal.NOT_ALLOWED)
    assert len(history._peers) == MAX_PEERS
    assert history.of("0").failed == 1
    assert [number for number in range(20) if str(number) not in history._peers] == list(range(1, 11))


# Round


async def test_a_round_tells_what_is_under_way():
    round_ = make_round("a", a=(10, 20))
    round_.least, round_.most = 50, 100
    told = round_.describe(now=1003.0)
    assert told == {
        "fragment": OFFER.fragment, "round": OFFER.round, "stage": "capturing", "partners": ["a"],
        "bytes_sent": 10, "bytes_received": 20, "bytes_expected": 200, "seconds": 3.0,
    }  # fmt: skip
    round_.content = Captured(size=60, digest=b"digest", steps=1)
    assert round_.describe(now=1003.0)["bytes_expected"] == 120, "what ours has taken says best what theirs will take"


async def test_a_round_of_a_group_expects_a_share_and_a_mean_for_each_other_member():
    round_ = make_round("a", "z", a=(1, 2), z=(10, 20))
    told = round_.describe(now=1003.0)
    assert (told["stage"], told["partners"], told["bytes_expected"]) == ("agreeing", ["a", "z"], 0)
    round_.members, round_.sizes = ("a", "me", "z"), (30, 20, 10)
    told = round_.describe(now=1003.0)
    assert (told["bytes_sent"], told["bytes_received"]) == (11, 22)
    assert told["bytes_expected"] == 2 * (30 + 10 + 20 + 20)


def test_a_round_without_a_partner_expects_nothing():
    round_ = make_round()
    told = round_.describe(now=1000.0)
    assert (told["partners"], told["bytes_sent"], told["bytes_received"], told["bytes_expected"]) == ([], 0, 0, 0)


def test_realignments_that_were_applied_are_counted(clock):
    history = History()
    for realign, outcome in ((True, Outcome.APPLIED), (True, Outcome.FAILED), (False, Outcome.APPLIED)):
        round_ = make_round("a")
        round_.realign = realign
        history.record(round_, outcome, "", swarm_step=42)
    assert history.realigned == 1
