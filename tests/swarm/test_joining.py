"""Who may join: real nodes, some of which do not care what the run says."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import Node, Process, Swarm, assert_one_clear_line, run
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
REMOVED_WITHIN = 60.0


class Stubborn(Node):
    """A node that joins and stays whether or not the run takes it."""

    def __init__(self, home: Path, address: str, *arguments: str) -> None:
        Process.__init__(
            self, home, "stubborn", "join", "--json", "--home", str(home), "--peers", address,
            "--threads", "1",
            # Records that outlive the test: only the others' own checks can take it off their
            # lists.
            "--poll", "1", "--record-life", "600", "--exchange-deadline", "15", *arguments,
        )  # fmt: skip


@pytest.fixture
def stubborn(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts stubborn nodes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def start(name: str, *arguments: str) -> Stubborn:
        node = Stubborn(swarm.folder / name, swarm.address, *arguments)
        swarm.processes.append(node)
        return node

    return start


def create(swarm: Swarm, *settings: str) -> None:
    """Publish a run of the home ``creator``."""
    spec = swarm.spec()
    spec.write_text(spec.read_text().replace("[model]", "\n".join([*settings, "[model]"])))
    done = run(
        "lowcomm_node",
        "create",
        str(spec),
        "--peers",
        swarm.address,
        "--home",
        str(swarm.folder / "creator"),
    )
    assert done.returncode == 0, done.stderr


def invite(swarm: Swarm, *options: str) -> dict[str, Any]:
    """What ``lowcomm-node invite`` makes in the creator's home."""
    done = run(
        "lowcomm_node", "invite", "--json", "--home", str(swarm.folder / "creator"), *options
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def join(swarm: Swarm, name: str, *arguments: str) -> Any:
    """A ``join`` that is expected to end at once."""
    home = str(swarm.folder / name)
    return run(
        "lowcomm_node",
        "join",
        "--json",
        "--home",
        home,
        "--peers",
        swarm.address,
        "--threads",
        "1",
        *arguments,
    )


def completed_with(node: Node, peer_id: str) -> int:
    return next((peer["completed"] for peer in node.peers() if peer["peer_id"] == peer_id), 0)


# minutes; the rules are in tests/unit/peers/test_admission.py and test_run_admission.py
@pytest.mark.soak
def test_a_removed_peer_is_out_within_a_minute_whether_it_cares_or_not(
    swarm: Swarm, stubborn: Any
) -> None:
    swarm.bootstrap()
    create(swarm, 'admission = "invite"')
    token = invite(swarm, "--uses", "2")["invite"]
    creator, honest = swarm.node("creator"), swarm.node("honest", "--invite", token)
    rogue = stubborn("rogue", "--invite", token)
    rogue.until_completed(1)
    rogue_id, honest_id = (rogue.status() or {})["peer_id"], honest.until(bool, "up")["peer_id"]
    until(lambda: completed_with(creator, rogue_id), 60, "the creator exchanges with the rogue")

    # The creator's node runs while it removes: that needs no restart, and no address.
    removed = run("lowcomm_node", "remove", rogue_id, "--json", "--home", str(creator.home))
    assert removed.returncode == 0, removed.stderr
    assert json.loads(removed.stdout)["removed"] == [rogue_id]
    for node in (creator, honest):
        until(
            lambda node=node: rogue_id not in [peer["peer_id"] for peer in node.peers()],
            REMOVED_WITHIN,
            "off the list",
        )
        node.until(
            lambda s: all(rogue_id not in r["partners"] for r in s["exchanges_running"]),
            "no exchange with it",
        )
    before = (rogue.status() or {})["exchanges"]["completed"]
    creator.until(lambda s: s["refusals"].get("call.removed"), "a call of the removed refused")
    honest.until_completed(2)
    assert (rogue.status() or {})["exchanges"]["completed"] == before
    assert rogue_id not in [peer["peer_id"] for peer in creator.peers()]

    # One that cares saves, leaves, and is told why when it tries again.
    assert run("lowcomm_node", "remove", honest_id, "--home", str(creator.home)).returncode == 0
    assert honest.child.wait(REMOVED_WITHIN + 45) == 77, honest.output[-2000:]
    assert f"{honest_id} was removed from this run by its creator" in honest.output
    assert honest.events("saved"), "its work is not lost"
    assert_one_clear_line(join(swarm, "honest"), 77, "was removed")
    # A mistake can be undone.
    back = run(
        "lowcomm_node",
        "remove",
        "--undo",
        honest_id,
        "--peers",
        swarm.address,
        "--home",
        str(creator.home),
    )
    assert back.returncode == 0, back.stderr
    swarm.node("honest").until_completed(1)
