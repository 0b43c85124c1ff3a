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


@pytest.mark.soak  # test_guides.py joins by invite, test_run_admission.py has who is refused
def test_an_invite_lets_in_as_many_as_it_says_and_nobody_else(swarm: Swarm, stubborn: Any) -> None:
    swarm.bootstrap()
    create(swarm, 'admission = "invite"')
    token = invite(swarm)["invite"]
    creator, invited = swarm.node("creator"), swarm.node("invited", "--invite", token)
    invited.until_completed(1)
    invited_id = (invited.status() or {})["peer_id"]

    assert_one_clear_line(join(swarm, "nobody"), 77, "takes invited peers only", "--invite")
    assert_one_clear_line(join(swarm, "nobody", "--invite", token[:-1]), 78, "paste the whole text")
    late = join(swarm, "late", "--invite", token)
    assert_one_clear_line(late, 77, "All 1 uses", "before", "ask the run's creator for another")

    # Those who do not care are refused by the others, with the reason counted.
    uninvited = stubborn("uninvited")
    uninvited.until(lambda s: s["phase"] == "training", "training alone")
    refused = creator.until(
        lambda s: s["refusals"].get("record.not-invited"), "the record of the uninvited refused"
    )
    assert refused["exchanges"]["completed"] >= 1
    uninvited_id = (uninvited.status() or {})["peer_id"]
    for node in (creator, invited):
        assert uninvited_id not in [peer["peer_id"] for peer in node.peers()]
    uninvited.until(
        lambda s: any("does not take us" in text for text in s["warnings"]),
        "the uninvited told why",
    )
    assert (uninvited.status() or {})["exchanges"]["completed"] == 0

    # A restart needs no invite: it is the same peer.
    assert invited.end() == 0
    again = swarm.node("invited")
    status = again.until_completed(1)
    assert status["peer_id"] == invited_id


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


@pytest.mark.soak
def test_a_list_takes_its_members_only(swarm: Swarm) -> None:
    swarm.bootstrap()
    member = run("lowcomm_node", "id", "--home", str(swarm.folder / "member")).stdout.strip()
    create(swarm, 'admission = "list"', f'members = ["{member}"]')
    swarm.node("creator")
    node = swarm.node("member")
    node.until_completed(1)
    assert_one_clear_line(join(swarm, "other"), 77, "not on the list")
    # Who has a new name each time can't be on it, and leaves no key behind.
    assert_one_clear_line(join(swarm, "passing", "--ephemeral"), 77, "not on the list")
    assert not (swarm.folder / "passing" / "identity.key").exists()


@pytest.mark.soak
def test_an_ephemeral_node_leaves_no_key_behind(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    lasting, passing = swarm.node("lasting"), swarm.node("passing", "--ephemeral")
    passing.until_completed(1)
    first = (passing.status() or {})["peer_id"]
    assert first != lasting.until(bool, "up")["peer_id"]
    assert passing.end() == 0
    assert not (passing.home / "identity.key").exists()
    again = swarm.node("passing", "--ephemeral")
    assert again.until(lambda s: s["phase"] == "training", "training")["peer_id"] != first
