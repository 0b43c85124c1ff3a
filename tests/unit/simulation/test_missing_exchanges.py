"""What must hold for a simulated group of which a member misses exchanges, over lines that a
realignment would fill for long."""

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch

from helpers.shared_lines import LineNetwork
from lowcomm_node.data import Dataset, open_data
from lowcomm_node.simulation import Conditions, Member
from lowcomm_node.simulation.swarm import Swarm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec

pytestmark = pytest.mark.slow
MODEL = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}
STEPS = 60
SLOW = Conditions(latency=(0.024, 0.026), notice=(0.024, 0.026))
LINE = (3e3, 12e3)
"""A fragment in 2 bits takes a third of a second, in fp32 five seconds."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text("Some short sentences, and all of them much alike. " * 400)
    return open_data(f"text:{folder}", "bytes", folder / "cache")


def run(dataset: Dataset, members: Sequence[Member], seed: int = 0, **sync: object) -> Swarm:
    """A swarm that has trained to its end."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "missed", "seed": seed, "steps": STEPS, "start_peers": 4},
            "model": MODEL,
            "train": {"batch": 4, "warmup": 5, "optimizer": "adamw"},
            "sync": {"method": "streaming-diloco"} | sync,
        }
    )
    with patch("lowcomm_node.simulation.swarm.Network", partial(LineNetwork, line=LINE)):
        swarm = Swarm(spec, dataset, members, SLOW, Replica, False, 0)
    swarm.network.run()
    return swarm


def states(swarm: Swarm) -> list[set[tuple[str, str]]]:
    """What peers hold of each fragment, by digests."""
    return [
        {(peer.replica.slow_digest(p), peer.replica.momentum_digest(p)) for peer in swarm.peers}
        for p in range(len(swarm.peers[0].replica.phi))
    ]


def test_a_member_that_stood_still_takes_over_what_it_has_missed(dataset):
    closed = Member(pauses=((20.2, 9.0),))
    swarm = run(dataset, [Member(), Member(), Member(), closed])
    assert swarm.peers[3].taken_over > 0
    assert sum(peer.realigned for peer in swarm.peers) == 0


def test_after_more_steps_than_are_kept_a_member_copies_a_state_and_costs_nobody_a_realignment(
    dataset,
):
    # The others can't tell it from one that makes up its slow weights, and need not agree on how
    # often it has differed before.
    closed = Member(pauses=((12.2, 26.0),))
    swarm = run(dataset, [Member(), Member(), Member(), closed])
    assert swarm.peers[3].copied > 0
    assert sum(peer.realigned for peer in swarm.peers) == 0
    assert all(len(one) == 1 for one in states(swarm))


def test_two_halves_that_begin_apart_wait_for_each_other(dataset):
    late = Member(pauses=((0.0, 1.5),))
    swarm = run(dataset, [Member(), Member(), late, late])
    assert sum(peer.realigned for peer in swarm.peers) == 0
    assert sum(peer.applied for peer in swarm.peers) > 4 * 4 * (STEPS // 4 - 4)
    assert all(len(one) == 1 for one in states(swarm))
