"""What must hold for a peer's view of a swarm, whatever others do."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from lowcomm_protocol.peers import view as view_module
from lowcomm_protocol.peers.view import (
    ACTIVE,
    DISPLACE_EVERY,
    LISTED,
    OF_PLACE,
    OF_RELAY,
    PASSIVE,
    SHUFFLED,
    SLACK,
    View,
)

NOW = 1000.0


def filled(count: int, listed: bool = True, view: View | None = None) -> View:
    """A view that has learned of peers in as many networks."""
    view = view or View("me")
    for number in range(count):
        view.learn(f"peer-{number}", [f"net-{number}/24"], NOW, listed)
    return view


def link_all(view: View, now: float = NOW) -> None:
    """Ask the candidates for links, those of the least crowded places first."""
    while candidates := [peer for peer in view.passive if view.is_candidate(peer)]:
        assert view.link(min(candidates, key=view.crowd), now)


def test_a_small_swarm_is_known_whole_wherever_its_peers_are():
    view = View("me")
    for number in range(ACTIVE):
        view.learn(f"peer-{number}", [f"127.0.{number // 40}.0/24"], NOW, number % 2 == 0)
    link_all(view)
    assert len(view.active) == ACTIVE and not view.is_partial


def test_a_newcomer_gets_the_younger_link_of_a_network_with_two_and_no_two_do_at_once():
    view = View("me")
    for number in range(ACTIVE + SLACK):
        network = number // 2 if number < 40 else number
        view.learn(f"peer-{number}", [f"10.0.{network}.0/24"], NOW, True)
        assert view.link(f"peer-{number}", NOW + number, asked=True)
    for number in range(3):
        view.learn(f"late-{number}", [f"10.1.{number}.0/24"], NOW, True)
    older = list(view.active)[: len(view.active) // 2]
    alone = [f"peer-{number}" for number in range(40, ACTIVE + SLACK)]
    later = NOW + 1000
    assert not view.link("late-0", later), "nobody asks for it"
    assert not view.link("late-0", later, asked=True, wanted=ACTIVE // 2), "it has half of its own"
    assert view.link("late-0", later, asked=True, wanted=ACTIVE // 2 + 1)
    assert not view.link("late-1", later, asked=True)
    assert view.link("late-1", later + DISPLACE_EVERY, asked=True)
    assert len(view.active) == ACTIVE + SLACK and {*older, *alone} <= {*view.active}


def test_links_that_have_their_networks_to_themselves_give_way_to_none_that_asks():
    view = filled(100)
    for number in range(ACTIVE + SLACK):
        assert view.link(f"peer-{number}", NOW + number, asked=True)
    assert not view.link("peer-90", NOW + 1000, asked=True)


def test_others_replace_a_quarter_of_a_full_view_then_a_16th_a_minute_and_callers_at_once():
    view = filled(PASSIVE)
    before = set(view.passive)
    for second in range(60):
        for number in range(20):
            view.learn(
                f"flood-{second}-{number}", [f"flood-{second}-{number}/24"], NOW + second, True
            )
    assert PASSIVE // 4 < len(before - set(view.passive)) <= PASSIVE // 4 + PASSIVE // 16
    assert len(view.passive) == PASSIVE
    assert view.learn("caller", [], NOW + 59, True, called=True) and "caller" in view


def test_peers_that_are_only_handed_over_get_three_links_in_four():
    view = filled(2 * ACTIVE, listed=False)
    link_all(view)
    assert len(view.active) == ACTIVE - ACTIVE // LISTED
    for number in range(90):
        view.link(f"peer-{number}", NOW)
    assert len(view.active) == ACTIVE, "no more without being asked"
    for _ in range(ACTIVE // LISTED):
        view.forget(list(view.active)[-1])
    assert view.learn("peer-90", [], NOW, True), "now the DHT lists it, too"
    link_all(view)
    assert "peer-90" in view.active


@pytest.mark.parametrize(
    ("places", "others", "links"),
    [
        (["one/24"], 1, (ACTIVE + SLACK) // 2),
        (["one/24", "two/24", "three/24"], 60, OF_PLACE),
        (["one/24", "two/24", "three/24"], 2 * ACTIVE, 1),
        (["relay"], 60, OF_RELAY),
    ],
)
def test_keys_of_few_places_get_no_more_than_their_share_of_the_links(
    places: list[str], others: int, links: int
):
    view = filled(others)
    keys = [f"key-{number}" for number in range(60)]
    for number, key in enumerate(keys):
        view.learn(key, [places[number % len(places)]], NOW, True)
    asked = [view.link(key, NOW + 9 * number, True) for number, key in enumerate(keys)]
    assert len(view.active) == links * len(places)
    assert sum(asked) > len(view.active), "one of theirs gives way to another"
    waiting = [key for key in keys if key in view.passive]
    assert {view.crowd(key) for key in waiting} == {links}
    assert view.wanted and not any(view.is_candidate(key) for key in waiting)


def test_the_oldest_peer_of_the_most_crowded_network_gives_way_in_a_full_view():
    view = filled(PASSIVE - 2)
    for peer in ("first", "second"):
        view.learn(peer, ["crowd/24"], NOW, True)
    view.learn("caller", [], NOW, True, called=True)
    assert "first" not in view and "second" in view and "peer-0" in view


def test_samples_change_with_each_call_and_differ_between_views():
    mine, other = filled(20), filled(20, view=View("other"))
    link_all(mine)
    link_all(other)
    drawn = [mine.sample("") for _ in range(100)]
    assert {len(peers) for peers in drawn} == {SHUFFLED}
    assert {peer for peers in drawn for peer in peers} == mine.active.keys()
    assert drawn != [other.sample("") for _ in range(100)]


def test_a_full_view_drops_a_peer_that_failed_before_any_other():
    view = filled(PASSIVE)
    view.unlink("peer-100", failed=True)
    view.learn("caller", ["elsewhere/24"], NOW, True, called=True)
    assert "peer-100" not in view and "peer-0" in view
    view.link("caller", NOW)
    view.learn("next", ["next/24"], NOW, True, called=True)
    view.unlink("caller")
    assert len(view.passive) == PASSIVE and "caller" in view


def test_a_failed_peer_goes_before_those_of_a_crowded_network_and_a_failed_link_from_a_full_view():
    view = filled(PASSIVE - 1)
    view.learn("crowding", ["net-7/24"], NOW, True)
    view.unlink("peer-100", failed=True)
    view.learn("caller", ["elsewhere/24"], NOW, True, called=True)
    assert "peer-100" not in view and {"peer-7", "crowding"} <= view.passive.keys()
    assert view.link("caller", NOW)
    view.learn("next", ["next/24"], NOW, True, called=True)
    view.unlink("caller", failed=True)
    assert "caller" not in view and len(view.passive) == PASSIVE


def test_peers_of_our_cell_have_links_in_a_full_view_and_give_way_to_no_others():
    cell = {f"cell-{number}" for number in range(30)}
    view = filled(100, view=View("me", cell.__contains__))
    link_all(view)
    assert len(view.active) == ACTIVE and not view.wanted
    for number, peer in enumerate(sorted(cell)):
        view.learn(peer, [f"cell-{number}/24"], NOW, listed=False)
        assert view.wants(peer) and view.is_candidate(peer)
        assert view.link(peer, NOW + number * DISPLACE_EVERY)
    assert cell <= view.active.keys() and len(view.active) == ACTIVE
    for number in range(100, 300):
        view.learn(f"peer-{number}", [f"net-{number % 20}/24"], NOW, True)
        view.link(f"peer-{number}", NOW + 100 * number, asked=True)
    assert cell <= view.active.keys()


def test_a_network_gets_few_links_of_our_cell_too():
    view = filled(2 * ACTIVE, view=View("me", lambda peer: peer.startswith("key")))
    for number in range(10):
        view.learn(f"key-{number}", ["one/24"], NOW, True)
        view.link(f"key-{number}", NOW + number * DISPLACE_EVERY, asked=True)
    assert sum(peer.startswith("key") for peer in view.active) == OF_PLACE


class ViewMachine(RuleBasedStateMachine):
    """Peers come, ask, fail and go in any order; small bounds in place of the real ones."""

    peers = Bundle("peers")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in (("ACTIVE", 4), ("SLACK", 2), ("PASSIVE", 5), ("SHUFFLED", 2)):
            self.patch.setattr(view_module, name, value)
        self.view, self.now, self.learned = View("me"), NOW, dict[str, tuple[str, ...]]()

    def teardown(self) -> None:
        self.patch.undo()

    @rule(
        target=peers,
        number=st.integers(0, 20),
        places=st.lists(st.sampled_from(["a/24", "b/24", "c/24", "relay"]), unique=True),
        listed=st.booleans(),
        called=st.booleans(),
    )
    def learn(self, number: int, places: list[str], listed: bool, called: bool) -> str:
        peer = f"peer-{number}"
        known = peer in self.view
        if self.view.learn(peer, places, self.now, listed, called) and not known:
            self.learned[peer] = tuple(places)
        assert peer in self.view or not called
        return peer

    @rule(peer=peers, asked=st.booleans())
    def link(self, peer: str, asked: bool) -> None:
        known = peer in self.view
        assert self.view.link(peer, self.now, asked) is (peer in self.view.active)
        assert known or peer not in self.view

    @rule(peer=peers, failed=st.booleans())
    def unlink(self, peer: str, failed: bool) -> None:
        known = peer in self.view
        self.view.unlink(peer, failed)
        assert peer not in self.view.active and (known or peer not in self.view)

    @rule(peer=peers)
    def forget(self, peer: str) -> None:
        self.view.forget(peer)
        assert peer not in self.view

    @rule(peer=peers)
    def sample(self, peer: str) -> None:
        handed_over = self.view.sample(peer)
        assert len(handed_over) == min(2, len(self.view.active.keys() - {peer}))
        assert set(handed_over) <= self.view.active.keys() - {peer}

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds(self) -> None:
        view = self.view
        assert len(view.active) <= 6 and len(view.passive) <= 5
        assert not view.active.keys() & view.passive.keys()
        for kept, counts in ((view.active, view._links), (view.passive, view._known)):
            assert all(known.places == self.learned[peer] for peer, known in kept.items())
            places = Counter(place for known in kept.values() for place in known.places)
            assert counts == places


TestViewMachine = ViewMachine.TestCase
TestViewMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
