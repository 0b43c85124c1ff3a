"""What must hold for swarms of cells: each learns as one group, and they stay together."""

from collections import defaultdict

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.simulation import Member
from lowcomm_node.simulation.network import Conditions
from lowcomm_node.simulation.swarm import Swarm
from lowcomm_node.trainer import capture
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec

pytestmark = pytest.mark.slow
PEERS = 7


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = f"The {number}th of forty short texts, all much alike. " * 12
        (folder / f"{number}.txt").write_text(words)
    return open_data(f"text:{folder}", "bytes", folder / "cache")


def trained(dataset: Dataset, *more: Member, steps: int = 64, **sync: object) -> Swarm:
    """Peers in two cells, after so many steps."""
    model = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}
    settings = {
        "run": {"name": "test", "steps": steps},
        "model": model,
        "train": {"batch": 4, "warmup": 5, "learning_rate": 0.01},
        "sync": {"method": "streaming-diloco", "interval": 4, "cells": 2} | sync,
    }
    members = [*[Member()] * PEERS, *more]
    spec = RunSpec.model_validate(settings)
    swarm = Swarm(spec, dataset, members, Conditions(), Replica, compiled=False, evaluations=0)
    swarm.network.run()
    return swarm


def cells_of(swarm: Swarm) -> list[list[Replica]]:
    cells: defaultdict[int, list[Replica]] = defaultdict(list)
    for peer in swarm.peers:
        cells[peer.cell].append(peer.replica)
    return list(cells.values())


def apart(swarm: Swarm) -> float:
    """Distance between the slow weights of the two cells."""
    one, other = (torch.cat(cell[0].phi) for cell in cells_of(swarm))
    return float((one - other).norm())


def test_a_cell_holds_equal_slow_weights_and_reads_keep_two_cells_together(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = trained(dataset)
    cells = cells_of(swarm)
    assert sorted(map(len, cells)) == [2, 5]
    for cell in cells:
        for fragment in range(len(cell[0].phi)):
            assert len({replica.slow_digest(fragment) for replica in cell}) == 1
    assert sum(peer.realigned for peer in swarm.peers) == 0
    monkeypatch.setattr(capture, "MIXED", 0.0)
    assert apart(swarm) < 0.5 * apart(trained(dataset))


def test_a_late_peer_copies_the_state_of_its_own_cell(dataset: Dataset) -> None:
    swarm = trained(dataset, Member(joins=30.3))
    late = swarm.peers[-1]
    assert late.applied > 0 and late.realigned == 0
    for cell in cells_of(swarm):
        assert len({replica.slow_digest(0) for replica in cell}) == 1


def test_a_giver_that_lies_moves_a_cell_no_further_than_progress_does(dataset: Dataset) -> None:
    swarm = trained(dataset, steps=16, codec="fp32", error_feedback=False)
    reader = cells_of(swarm)[0]
    members = tuple(sorted(replica.peer_id for replica in reader))
    for replica in reader:
        replica.capture(0, members=members)
    one = reader[0]
    held = one.captures[0]
    assert isinstance(held, capture.GroupCapture)
    start, stop = held.bounds[held.mine]
    held.beyond = torch.full((stop - start,), 1e3)
    out = memoryview(bytearray(8 * held.numel + 4096))
    held.encode(out)
    held.reduce({one.peer_id: 1}, out)
    progress = (held.theta - held.phi)[start:stop].norm()
    assert held.mean[start:stop].norm() < 2.1 * progress
