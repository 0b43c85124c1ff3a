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
from lowcomm_node.errors import NodeError
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.status.events import EVENTS, read_notice
from lowcomm_node.status.model import read, to_json
from lowcomm_node.system.command import ending_signals
from lowcomm_node.web import api

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def check_json(node: Node) -> None:
    """What a node answers and prints has the very keys that docs/page.md describes."""
    for query in (api.STATUS, api.PEERS, api.EXCHANGES):
        # The journal is written a moment after an exchange is counted.
        told = until(
            lambda query=query: node.ask(lambda client: client._call(query)), 30, query.name
        )
        assert to_json(read(query.answer, told)) == told, query.name
    events = [json.loads(line) for line in node.output.splitlines() if line.startswith('{"time"')]
    assert (
        {"phase", "swarm.connected", "exchange.applied"}
        <= {event["event"] for event in events}
        <= set(EVENTS)
    )
    assert all(json.loads(json.dumps(read_notice(event).to_json())) == event for event in events)


def shared_by_name(pids: list[int]) -> set[str]:
    """Files of shared memory that these processes have mapped and others can find."""
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    files = {line.partition("/dev/shm/")[2] for line in maps}
    return {file for file in files if file and Path("/dev/shm", file).exists()}


def test_who_leaves_is_gone_at_once_and_nothing_is_left_even_after_sigkill(
    swarm: Swarm, notified: Notified, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    sockets = set(runtime_folder().iterdir())
    by_name = swarm.address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")
    a, b = (swarm.node(name, "--record-life", "600", address=by_name) for name in "ab")
    with notified.manages(monkeypatch):
        c = swarm.node("c", "--record-life", "600", address=by_name)
    until_exchanged((a, b, c), 1)
    check_json(a)
    with pytest.raises(NodeError, match="has a chat template"):  # so the trainer was asked
        a.ask(lambda client: client.generate("", 5, 0.0, 0, ["hi"]))
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
    assert not shared_by_name([a.child.pid, *family]), "nothing could be left of shared memory"
    a.end(signal.SIGKILL)
    until(lambda: not alive(family), 10, "its processes gone")
    until(lambda: set(runtime_folder().iterdir()) <= sockets, 10, "its sockets gone")
