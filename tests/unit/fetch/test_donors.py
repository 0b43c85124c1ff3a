"""What must hold for whose state a late peer copies: nobody's that lies, as far as others tell."""

from types import SimpleNamespace
from typing import Any

from lowcomm_node.fetch.catch_up import CatchUp
from lowcomm_protocol.peers.records import Phase

NOTHING: Any = None
OWN = 100


def donors(
    *claims: int,
    distrusted: tuple[int, ...] = (),
    drifted: bool = False,
    own: int = OWN,
    phase: Phase = Phase.TRAINING,
) -> list[int]:
    """The claims of those that are asked, of peers that claim these swarm steps."""
    infos = [
        SimpleNamespace(peer_id=f"peer{number}", swarm_step=claim, phase=phase)
        for number, claim in enumerate(claims)
    ]
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(sync=SimpleNamespace(interval=20, consensus=1.0, fragments=1, group=2))
    )
    membership: Any = SimpleNamespace(donors=lambda: infos)
    catch_up = CatchUp(
        run=run, trainer=NOTHING, channels=NOTHING, membership=membership, down=NOTHING,
        disk_quota=NOTHING, folder=NOTHING,
        trusts=lambda peer: int(peer.removeprefix("peer")) not in distrusted, show=NOTHING,
        warn=NOTHING, tell=NOTHING,
    )  # fmt: skip
    return sorted((one.swarm_step for one in catch_up._donors(own, drifted)), reverse=True)


def test_of_peers_that_have_finished_a_newcomer_copies_what_no_merge_can_bring_it():
    assert donors(20, 20, own=0) == []
    assert donors(20, 20, own=0, phase=Phase.FINISHED) == [20, 20]
    assert donors(20, 20, own=10, phase=Phase.FINISHED) == [], "it has learned something itself"


def test_who_claims_what_nobody_comes_near_to_is_no_donor():
    assert donors(10**15, 5000, 4990) == [5000, 4990]


def test_one_that_is_a_little_ahead_of_all_others_does_not_get_every_late_peer():
    assert donors(5190, 5000, 4990) == [5000, 4990]
    assert donors(5000, 4990, 4990 + 200, drifted=True) == [5000, 4990]
    assert donors(OWN + 200, OWN + 10, OWN) == [], "nobody alone makes others copy"


def test_one_alone_is_believed_for_every_late_peer_of_a_pair_is_in_that_place():
    assert donors(5000) == [5000]


def test_who_is_left_out_is_no_donor():
    assert donors(5000, 4990, 4980, distrusted=(0,)) == [4990, 4980]


def test_who_has_left_out_everybody_copies_from_them_all_the_same_if_it_has_drifted():
    assert donors(5000, 4990, distrusted=(0, 1)) == []
    assert donors(5000, 4990, distrusted=(0, 1), drifted=True) == [5000, 4990]
    assert donors(5000, 4990, distrusted=(0,), drifted=True) == [4990], "whom it trusts comes first"


def test_who_is_where_the_others_are_needs_no_donor_unless_it_has_drifted():
    assert donors(OWN, OWN + 20, OWN - 20) == []
    assert donors(OWN, OWN + 20, OWN - 20, drifted=True) == [OWN + 20, OWN, OWN - 20]
