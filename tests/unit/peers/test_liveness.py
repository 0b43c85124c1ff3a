"""What must hold for who is alive, and for whom to probe next."""

from itertools import pairwise

import pytest

from lowcomm_protocol.peers.roster import (
    ALIVE,
    BURST,
    FIRST_BURST,
    FIRST_PAUSE,
    FIRST_REST,
    FREE_MISSES,
    LONGEST_PAUSE,
    LONGEST_PLACE_PAUSE,
    LONGEST_REFRESH,
    PROBE_EVERY,
    REFRESH,
    RETRY,
    Liveness,
)

pytestmark = pytest.mark.slow

NOW = 1000.0


def strangers(count: int, place: str | None = None) -> list[tuple[str, tuple[str, ...], int]]:
    """Peers of which nothing but a record is known."""
    return [(f"peer-{number}", (place or f"net-{number}",), 0) for number in range(count)]


def test_a_peer_that_leaves_two_offers_unanswered_rests_and_then_is_called_again():
    liveness = Liveness()
    liveness.heard("ada", NOW)
    liveness.missed("ada", NOW)
    assert liveness.is_alive("ada", NOW), "one alone tells nothing"
    liveness.missed("ada", NOW)
    liveness.heard("ada", NOW + 1)
    assert liveness.is_proved("ada", NOW + 1) and not liveness.is_alive("ada", NOW + 1)
    assert not liveness.is_alive("ada", NOW + FIRST_REST - 1)
    assert liveness.is_alive("ada", NOW + FIRST_REST)
    liveness.missed("ada", NOW + FIRST_REST)
    assert not liveness.is_alive("ada", NOW + 3 * FIRST_REST - 1), "twice as long"
    liveness.met("ada", NOW + 2 * FIRST_REST)
    assert liveness.is_alive("ada", NOW + 2 * FIRST_REST), "its answer ends the rest"


def test_unknown_peers_are_probed_at_a_rate_and_each_of_them_ever_more_rarely():
    liveness, known, probed = Liveness(), strangers(1), list[float]()
    for second in range(4000):
        if liveness.due([], known, NOW + second):
            probed.append(NOW + second)
    pauses = [after - before for before, after in pairwise(probed)]
    assert (
        pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
        and max(pauses) == LONGEST_PAUSE
    )
    crowd = Liveness()
    counts = [
        len(crowd.due([], strangers(1000), NOW + second * PROBE_EVERY)) for second in range(10)
    ]
    assert counts == [FIRST_BURST, *[1] * 9], "while nobody is known to be there"
    crowd.heard("ada", NOW + 10)
    assert len(crowd.due([], strangers(2000), NOW + 100)) == BURST == crowd.at_once(NOW + 100)
    assert (
        len(crowd.due([], strangers(2000), NOW + 10 + ALIVE))
        == FIRST_BURST
        == crowd.at_once(NOW + 10 + ALIVE)
    )


def test_among_330_records_of_nobody_in_eleven_places_a_newcomer_tries_every_honest_peer_at_once():
    """Whole swarms begin at one moment: what each of them loses here, all lose."""
    sybils = [(f"sybil-{number}", (f"sybils-{number % 11}",), 0) for number in range(330)]
    honest = [(f"honest-{number}", (f"net-{number}",), 0) for number in range(4)]
    for seed in range(20):
        assert {peer for peer, *_ in honest} <= set(
            Liveness(str(seed)).due([], [*sybils, *honest], NOW)
        )


def test_a_place_where_nobody_answers_is_probed_ever_more_rarely_until_somebody_does():
    liveness, known = Liveness(), strangers(1000, "198.51.100.0/24")
    probed = [second for second in range(600) if liveness.due([], known, NOW + second)]
    assert len(probed) < FREE_MISSES + 20
    assert probed[-1] - probed[-2] == LONGEST_PLACE_PAUSE
    liveness.reached(["198.51.100.0/24"])
    assert len(liveness.due([], known, NOW + 600)) == FREE_MISSES + 1


def test_links_are_called_in_turn_before_they_count_as_gone_and_take_no_probe_from_others():
    liveness, others = Liveness(), strangers(100)
    for number, pause in ((1, REFRESH), (20, 40.0), (60, LONGEST_REFRESH)):
        links = [f"link-{one}" for one in range(number)]
        for link in links:
            liveness.heard(link, NOW)
        assert not set(links) & set(liveness.due(links, others, NOW + pause - 1))
        chosen = liveness.due(links, others, NOW + pause, most=100)
        assert set(chosen[:number]) == set(links) and len(chosen) > number
        assert not set(links) & set(liveness.due(links, others, NOW + pause + 1)), (
            "may still answer"
        )
        assert set(links) <= set(liveness.due(links, [], NOW + pause + RETRY, most=100))


def test_of_unknown_peers_those_come_first_whose_places_have_fewest_links():
    crowded = [(f"peer-{number}", ("net",), 3) for number in range(20)]
    assert Liveness().due([], [*crowded, ("alone", ("other",), 0)], NOW, most=1) == ["alone"]
