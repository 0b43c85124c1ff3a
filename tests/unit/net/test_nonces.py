"""What must hold for nonces: each is good once, memory is bounded, and nobody fills the table of
another."""

from lowcomm_node.net.nonces import MAX_FLOORS, Nonces

FLOOD, HONEST = "192.0.2.1", "198.51.100.1"


def call(
    nonces: Nonces,
    peer: str,
    place: str,
    number: int,
    now: float = 0.0,
    issued: float | None = None,
) -> bool:
    """Whether a call is taken."""
    nonce, issued = number.to_bytes(16, "big"), now if issued is None else issued
    if nonces.was_used(peer, nonce, issued, now):
        return False
    nonces.use(peer, place, nonce, issued, now)
    return True


def test_a_nonce_is_good_once_for_its_peer_and_forgotten_after_its_life():
    nonces = Nonces(180.0)
    assert call(nonces, "a", HONEST, 1) and call(nonces, "b", HONEST, 1)
    assert not call(nonces, "a", FLOOD, 1, 180.0)
    assert call(nonces, "a", FLOOD, 1, 181.0) and len(nonces) == 1


def test_thirty_free_keys_of_one_address_take_nothing_from_others_and_are_heard_themselves():
    nonces = Nonces(180.0, of_peer=40, of_address=100, of_all=400)
    assert call(nonces, "honest", HONEST, 0)
    for number in range(3000):
        assert call(nonces, f"flood {number % 30}", FLOOD, number, number / 100)
    assert len(nonces) == 101
    assert not call(nonces, "honest", HONEST, 0, 30.0), "it is remembered"
    assert call(nonces, "honest", HONEST, 1, 30.0) and call(nonces, "neighbour", FLOOD, 1, 30.0)


def test_of_many_addresses_the_one_that_holds_most_gives_way():
    nonces = Nonces(180.0, of_peer=100, of_address=100, of_all=100)
    honest = [call(nonces, "honest", HONEST, number) for number in range(10)]
    flood = [
        call(nonces, f"flood {one}", f"192.0.{one % 9}.1", one, 1.0 + one) for one in range(150)
    ]
    assert all(honest + flood) and len(nonces) == 100
    assert not any(call(nonces, "honest", HONEST, number, 160.0) for number in range(10))


def test_what_was_forgotten_is_not_good_twice():
    nonces = Nonces(180.0, of_peer=3, of_address=5)
    for number in range(5):
        assert call(nonces, "a", HONEST, number, float(number))
    assert not any(
        call(nonces, "a", place, number, 5.0, float(number))
        for number in range(5)
        for place in (HONEST, FLOOD)
    )
    for number in range(9):
        call(nonces, f"b{number}", HONEST, 0, 6.0)
    assert not call(nonces, "a", FLOOD, 4, 7.0, 4.0), "its address had too many"


def test_memory_does_not_grow_with_callers():
    nonces = Nonces(180.0, of_peer=2, of_address=10, of_all=50)
    for number in range(2 * MAX_FLOORS):
        call(nonces, f"peer {number}", f"10.0.{number // 256 % 256}.{number % 256}", number)
    assert len(nonces) == len(nonces._peers) == 50 and len(nonces._addresses) == 50
    assert len(nonces._floors) == MAX_FLOORS
