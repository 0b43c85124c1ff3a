"""The life of a swarm: peers come, die, come back, leave; the door closes and opens again."""

import json
import signal
from pathlib import Path

import pytest

from helpers.processes import (
    Node,
    Notified,
    Swarm,
    alive,
    descendants,
    environments,
    run,
    until_exchanged,
)
from helpers.waiting import until
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.status.events import EVENTS, read_notice
from lowcomm_node.status.model import PeerStatus, Status, read, to_json
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.command import ending_signals
from lowcomm_node.web.api import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.soak  # three minutes; peers and doors that die are in tests/chaos/test_soak.py
def test_a_swarm_outlives_its_peers_and_its_door(swarm: Swarm) -> None:
    swarm.bootstrap()
    spec = str(swarm.spec(evaluate_every=100))
    created = run(
        "lowcomm_node", "create", spec, "--peers", swarm.address, "--home", str(swarm.folder / "c")
    )
    assert created.returncode == 0, created.stderr
    a, b, c = (swarm.node(name) for name in "abc")
    until_exchanged((a, b, c), 2)

    # One dies: the others go on within one exchange deadline, and nobody hangs.
    c.until(lambda s: s["checkpoint"], "a checkpoint to resume from")
    before = c.status()
    assert before is not None
    family = descendants(c.child.pid)
    assert c.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not alive(family), 10, "trainer and p2pd of the killed daemon gone")
    a.until_completed(2, deadline=40)

    # It comes back: same identity, resumes.
    c = swarm.node("c")
    now = c.until(lambda s: s["phase"] == "training", "training again")
    assert now["peer_id"] == before["peer_id"]
    c.until_completed(1)

    # The door closes: the swarm trains on; a late peer needs no door, only any peer.
    swarm.processes[0].end()
    a.until_completed(2)
    # It opens again: new peers come in, and begin where the others are.
    swarm.bootstrap()
    late = swarm.node("late")
    status = late.until(lambda s: s["phase"] == "training", "the late peer training")
    assert late.events("state.adopted"), late.output[-2000:]
    first = status["trainer"]["val_loss_first"]
    assert first == late.events("evaluated")[0]["loss"], (
        "the loss it reports first is the first that it measured"
    )
    donors = {node.until(bool, "answering")["peer_id"]: node for node in (a, b, c)}
    donor = donors[late.events("state.adopted")[0]["donors"][0]]
    measured = [event["loss"] for event in donor.events("evaluated")]
    assert first == pytest.approx(measured[-1], rel=0.05)
    assert measured[0] > 1.2 * measured[-1], "fresh weights would be told from the donor's"
    late.until_completed(1)


def check_json(node: Node) -> None:
    """What a node answers and prints has the very keys that docs/json.md describes."""
    for path, kind in (
        ("status", Status),
        ("peers", list[PeerStatus]),
        ("rounds", list[ExchangeEnded]),
    ):
        told = node.ask(lambda client, path=path: client._call("GET", f"{ROOT}/{path}"))
        assert told and to_json(read(kind, told)) == told, path
    events = [json.loads(line) for line in node.output.splitlines() if line.startswith('{"time"')]
    assert (
        {"phase", "swarm.connected", "exchange.applied"}
        <= {event["event"] for event in events}
        <= set(EVENTS)
    )
    assert all(json.loads(json.dumps(read_notice(event).to_json())) == event for event in events)


def test_who_leaves_is_gone_at_once_and_nothing_is_left_even_after_sigkill(
    swarm: Swarm, notified: Notified, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    sockets, shared = set(runtime_folder().iterdir()), set(Path("/dev/shm").iterdir())
    by_name = swarm.address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")
    a, b = (swarm.node(name, "--record-life", "600", address=by_name) for name in "ab")
    with notified.manages(monkeypatch):
        c = swarm.node("c", "--record-life", "600", address=by_name)
    until_exchanged((a, b, c), 1)
    check_json(a)
    # The service manager of one of them is kept informed, by it alone.
    notified.until("STATUS=training")
    notified.until("WATCHDOG=1", 2)
    assert notified.told[0].startswith("EXTEND_TIMEOUT_USEC=") and notified.count("READY=1") == 1
    assert notified.count("STOPPING=1") == 0
    assert not any("NOTIFY_SOCKET" in one for one in environments(descendants(c.child.pid)))
    for node, how in ((b, "finish"), (c, "signal")):
        family = descendants(node.child.pid)
        assert len(family) >= 2, "trainer and p2pd"
        leaver = (node.status() or {})["peer_id"]
        assert leaver in [peer["peer_id"] for peer in a.peers()]
        if how == "finish":
            assert (
                node.until(lambda s: s["limits"]["peers"], "peers that it talks with")["limits"][
                    "peers"
                ]
                <= 2
            )
            done = run("lowcomm_node", "finish", "--home", str(node.home))
            assert done.returncode == 0
            assert node.child.wait(30) == 0
            newest = max((node.home / "runs").glob("*/checkpoints/step-*"))
            assert (
                f"the model:   {newest}\n" in done.stdout and f"--home {node.home}\n" in done.stdout
            )
            (told,) = node.events("contributed")
            assert (
                told["checkpoint"] == str(newest)
                and told["exchanges"] >= 1
                and told["bytes_sent"] > 0
            )
        else:
            assert node.end(ending_signals()[-1]) == 0  # SIGHUP; others are ended by SIGTERM
            assert notified.count("STOPPING=1") == 1
        # Its record would live for ten minutes more: only a goodbye can have removed it.
        until(
            lambda gone=leaver: gone not in [peer["peer_id"] for peer in a.peers()],
            5,
            "gone from the other's peers",
        )
        assert alive(family) == []
        assert not (node.home / "control.json").exists()
        newest = run("lowcomm_node", "checkpoint", "verify", "--json", "--home", str(node.home))
        assert newest.returncode == 0 and newest.stdout.strip() != "{}", newest.stderr

    assert set(runtime_folder().iterdir()) > sockets
    family = descendants(a.child.pid)
    a.end(signal.SIGKILL)
    until(lambda: not alive(family), 10, "its processes gone")
    until(lambda: set(runtime_folder().iterdir()) <= sockets, 10, "its sockets gone")
    assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.mark.parametrize(
    "method",
    [
        "lowcomm",
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in ("streaming-diloco", "diloco", "gossip")
        ),
    ],
)
def test_three_nodes_finish_a_run_together(swarm: Swarm, method: str) -> None:
    swarm.bootstrap("--run", str(swarm.spec(method, steps=120, start_peers=3)))
    nodes = [swarm.node(name) for name in "abc"]
    for node in nodes:
        assert node.child.wait(240) == 0, node.output[-3000:]
    applied = [len(node.events("exchange.applied")) for node in nodes]
    assert min(applied) >= 1 and sum(applied) >= 8, (applied, nodes[0].output[-3000:])
    if "diloco" in method:
        whole = [
            event
            for node in nodes
            for event in node.events("exchange.applied")
            if len(event["partners"]) == 2
        ]
        assert whole, "no exchange of the whole group"
