"""What must hold for how long slow weights have parted: the row of merges with one other alone."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

import pytest

from helpers.slow_lines import LineExchange, Swarm
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.position import RecentPartners

SIZES = (1_060_000,) * 4
Meeting = tuple[str, int]
"""The partner, and own inner steps at the capture."""


def test_who_meets_the_same_peer_again_has_parted_from_all_others():
    company = RecentPartners()
    assert company.apart(0, "b") == 0, "nothing is known"
    company.merged(0, "b", 10)
    assert company.apart(0, "c") == 0, "one merge alone parts nobody"
    for steps in (14, 22):
        company.merged(0, "b", steps)
    assert company.apart(0, "c") == 12
    assert company.apart(0, "b") == 0, "not from the one we met"
    assert company.apart(1, "c") == 0, "each fragment counts for itself"
    company.merged(0, "c", 30)
    assert company.apart(0, "b") == company.apart(0, "c") == 0, "it brought what others learned"


@pytest.mark.parametrize("consensus", [1.0, 0.0])
def test_a_capture_knows_for_how_long_slow_weights_that_may_differ_have_parted(consensus: float):
    swarm = Swarm((20e6, 20e6), SIZES)
    if not consensus:
        sync = swarm.spec.sync.model_copy(update={"consensus": 0.0, "outer": "nesterov"})
        for peer in swarm.peers.values():
            peer.machine.spec = swarm.spec.model_copy(update={"sync": sync})
    captured: list[tuple[int, int]] = []
    merged: dict[tuple[str, int], list[Meeting]] = defaultdict(list)

    class Watched(LineExchange):
        def capture(self, members: tuple[str, ...]) -> None:
            (partner,) = self.one.partners
            met = merged[self.peer.name, self.one.fragment]
            captured.append((self.one.apart, parted(met, partner)))
            super().capture(members)

        def apply(self, effect: events.Apply) -> None:
            super().apply(effect)
            ripe, merge = self.peer.ripening.pop()
            (partner,) = self.one.partners

            def merge_and_tell() -> None:
                merged[self.peer.name, self.one.fragment].append((partner, self.captured_steps))
                merge()

            self.peer.ripening.append((ripe, merge_and_tell))

    for peer in swarm.peers.values():
        peer.new_exchange = lambda one, peer=peer: Watched(peer, one)
    swarm.train(60)
    told = [apart for apart, _ in captured]
    if consensus:
        assert told == [steps for _, steps in captured]
        assert max(told) > 0, "some have met the same peer twice in a row"
    else:
        assert set(told) == {0}, "slow weights are equal, or are made so"


def parted(met: Sequence[Meeting], partner: str) -> int:
    """Own steps from the first to the last of the last merges, all with one other peer."""
    if not met or met[-1][0] == partner:
        return 0
    row = list(takewhile(lambda one: one[0] == met[-1][0], reversed(met)))
    return row[0][1] - row[-1][1]
