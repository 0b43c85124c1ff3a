"""What must hold when a creator splits a swarm that trains into cells."""

import json
from collections import Counter

import pytest

from helpers.processes import Node, Swarm, run
from helpers.waiting import until
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_protocol.peers.shards import cell_of

# CI sees cells in tests/unit/sync/test_cells.py, and amendments in test_amending.py.
pytestmark = [pytest.mark.swarm, pytest.mark.soak, pytest.mark.timeout(400)]


def test_nodes_that_are_split_into_cells_train_on_in_them_and_mix(swarm: Swarm) -> None:
    swarm.bootstrap()
    home, spec = str(swarm.folder / "creator"), swarm.spec("streaming-diloco", start_peers=4)
    options = "--peers", swarm.address, "--home", home, "--json"
    created = run("lowcomm_node", "create", str(spec), *options)
    assert created.returncode == 0, created.stderr
    run_id = json.loads(created.stdout)["run_id"]

    names, cells = list[str](), Counter[int]()
    for number in range(100):
        key = swarm.folder / f"node-{number}" / "identity.key"
        key.parent.mkdir()
        cell = cell_of(run_id, load_or_create_identity(key).peer_id, 2)
        if cells[cell] < 2:
            cells[cell] += 1
            names.append(key.parent.name)
        if len(names) == 4:
            break
    nodes = [swarm.node(name) for name in names]
    for node in nodes:
        node.until_completed(1)
    done = run("lowcomm_node", "amend", "--home", home, "--set", "sync.cells=2", "--at", "1")
    assert done.returncode == 0, done.stderr

    def mixes(node: Node) -> bool:
        last = node.events("exchange.applied")[-5:]
        in_cells = [len(one["partners"]) == 1 for one in last]
        is_whole = not any("realigned" in one["reason"] for one in last)
        return is_whole and all(in_cells) and any("mixed" in one["reason"] for one in last)

    until(lambda: all(map(mixes, nodes)), 120, "each mixes with another cell")
