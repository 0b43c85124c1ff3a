"""What must hold for whose state a late peer copies: nobody's that lies, as far as others tell."""

from types import SimpleNamespace
from typing import Any

from lowcomm_node.daemon import Daemon


def donors(*claims: int, distrusted: tuple[int, ...] = ()) -> list[int]:
    """The claims of those that may be donors, of peers that claim these swarm steps."""
    infos = [SimpleNamespace(peer_id=f"peer{number}", swarm_step=claim) for number, claim in enumerate(claims)]

    def supports(peer_id: str, claim: int) -> bool:
        return claim <= max([0, *(one.swarm_step for one in infos if one.peer_id != peer_id)]) + 200

    exchanger = SimpleNamespace(supports=supports, trusts=lambda peer: int(peer.removeprefix("peer")) not in distrusted)
    node: Any = SimpleNamespace(exchanger=exchanger, membership=SimpleNamespace(donors=lambda: infos))
    return [one.swarm_step for one in Daemon._donors(node)]


def test_who_claims_what_nobody_comes_near_to_is_no_donor():
    assert donors(10**15, 5000, 4990) == [5000, 4990]


def test_one_alone_is_believed_for_every_late_peer_of_a_pair_is_in_that_place():
    assert donors(5000) == [5000]


def test_who_is_left_out_is_no_donor():
    assert donors(5000, 4990, 4980, distrusted=(0,)) == [4990, 4980]
