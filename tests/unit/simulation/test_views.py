"""What must hold for peers that know each other by their views alone."""

from statistics import mean, pstdev

import pytest

from helpers.gossip import Gossip, Member, Sybil, in_degrees, largest_component
from helpers.quadratic import Swarm, spec_of
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.peers.view import ACTIVE

pytestmark = pytest.mark.slow

PEERS = 300
SEEDS = [0, pytest.param(1, marks=pytest.mark.soak)]


def gossiping(seed: int, count: int = PEERS) -> Gossip:
    gossip = Gossip(Network(seed, Conditions()), count)
    for number in range(count):
        gossip.join(Member(gossip, f"peer-{number}"), [f"10.{number >> 8}.{number & 255}.0/24"])
    gossip.run(120.0)
    return gossip


@pytest.mark.parametrize("seed", SEEDS)
def test_links_are_spread_evenly_and_half_of_the_peers_may_die_at_once(seed: int):
    gossip = gossiping(seed)
    degrees = in_degrees(gossip.members.values()).values()
    assert mean(degrees) > 0.9 * ACTIVE
    assert pstdev(degrees) < 0.4 * mean(degrees)
    for peer in gossip.random.sample(list(gossip.members), PEERS // 2):
        gossip.remove(peer)
    assert largest_component(gossip.members.values()) > 0.99
    gossip.run(300.0)
    left = list(gossip.members.values())
    lost = sum(peer not in gossip.members for one in left for peer in one.view.active)
    assert lost < 0.01 * ACTIVE * len(left)
    assert mean(in_degrees(left).values()) > 0.9 * ACTIVE


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_is_in_twenty_views_within_a_minute(seed: int):
    gossip = gossiping(seed)
    newcomer = Member(gossip, "newcomer")
    gossip.join(newcomer, ["192.0.2.0/24"])
    gossip.run(60.0)
    assert sum("newcomer" in member.view for member in gossip.members.values()) >= 20
    assert len(newcomer.view.active) >= 20


def test_pairs_that_know_a_quarter_of_the_swarm_mix_as_well_as_pairs_that_know_all():
    spec = spec_of("noloco", interval=20)
    of_views, of_all = (Swarm(spec, 200, 240.0, views=views).run() for views in (True, False))
    due = 200 * (240 // 20 - 1)
    assert of_views.outcomes[Outcome.APPLIED] > 0.9 * due
    assert of_views.effects["Penalty"] == 0
    assert of_views.spread < 1.1 * of_all.spread


@pytest.mark.parametrize("share", [pytest.param(0.1, marks=pytest.mark.soak), 0.3])
def test_keys_of_few_addresses_get_no_more_links_than_these_addresses_have(share: float):
    gossip, addresses = gossiping(0), PEERS // 10
    names = [f"sybil-{number}" for number in range(round(PEERS * share / (1.0 - share)))]
    honest = list(gossip.members.values())
    for number, name in enumerate(names):
        gossip.join(Sybil(gossip, name, names), [f"192.0.{number % addresses}.0/24"])
    gossip.run(300.0)
    links = [len(member.view.active.keys() & set(names)) for member in honest]
    assert sum(links) > 0, "they have not tried"
    held = sum(len(member.view.active) for member in honest)
    assert sum(links) / held < addresses / (addresses + PEERS)
