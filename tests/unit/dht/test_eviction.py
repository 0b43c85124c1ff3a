"""Which record gives way when a storer is full."""

from lowcomm_node.dht.eviction import Kept, Rank, first_to_go, those_to_go

_next = iter(range(10**6))


def entry(network: str, rank: Rank = Rank.BROUGHT, size: int = 1000, owner: str = "") -> Kept:
    number = next(_next)
    prefixes = (network, network.rpartition(".")[0] + ".0/24") if "." in network else (network,)
    return Kept(number, size, rank, owner or f"peer {number}", prefixes, number)


def test_the_lowest_rank_goes_first_and_our_own_never():
    own, answered, brought, told = (entry("203.0.113.1", rank) for rank in reversed(Rank))
    assert first_to_go([own, answered, brought, told]) is told
    assert first_to_go([own, answered, brought]) is brought
    assert first_to_go([own]) is None


def test_of_equals_the_network_that_holds_most_loses_its_newest():
    crowd = [entry(f"198.51.100.{number}") for number in range(5)]
    alone = entry("203.0.113.1")
    assert first_to_go([*crowd, alone]) is crowd[-1]


def test_within_a_network_the_address_that_holds_most_loses():
    many, neighbour = [entry("198.51.100.1") for _ in range(3)], entry("198.51.100.2")
    assert first_to_go([*many, neighbour]) is many[-1]


def test_behind_one_address_whoever_signed_most_loses():
    runs = [entry("198.51.100.1", owner="busy creator") for _ in range(3)]
    other = entry("198.51.100.1", owner="other creator")
    assert first_to_go([*runs, other]) is runs[-1]


def test_a_newcomer_that_would_go_first_is_refused_and_nobody_else_goes():
    flood = [entry("198.51.100.1", Rank.TOLD) for _ in range(5)]
    assert those_to_go(entry("198.51.100.1", Rank.TOLD), flood, 500) is None
    assert those_to_go(entry("203.0.113.1", Rank.TOLD), flood, 1500) == [flood[4], flood[3]]


def test_who_renews_keeps_its_age_and_is_never_lowered_by_others():
    mine = entry("203.0.113.1", Rank.BROUGHT)
    replayed = mine.renewed(entry("198.51.100.1", Rank.TOLD, size=1100))
    assert (replayed.rank, replayed.networks, replayed.since) == (
        mine.rank,
        mine.networks,
        mine.since,
    )
    raised = mine.renewed(entry("192.0.2.1", Rank.OWN))
    assert (raised.rank, raised.since) == (Rank.OWN, mine.since)
