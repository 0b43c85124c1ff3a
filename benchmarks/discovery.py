"""What it costs a node to know others: bytes and CPU a minute, by the number of peers.

    python benchmarks/discovery.py [--only KEY ...]

    computed  from records, pulses and introductions as they are, and from production's pauses
    gossip    the same calls, counted in simulated swarms (tests/helpers/gossip.py)
    real      nodes with production's defaults on this machine, in a network of their own (root,
              util-linux and iproute2); their trainers take one step a minute, so none exchanges.
              Bytes are what crosses that network, headers included, a peer of the DHT

Bytes are kilobytes that a node sends in a minute; `keeper_a_second` those of a keeper of a shard in
a second. Writes each result to benchmarks/results/discovery.json; skips those that are there.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any

import kit

from helpers import light_process
from helpers.gossip import Gossip, Member
from helpers.processes import Node, Swarm
from helpers.waiting import until
from lowcomm_node.dht.records import ASKED, LOOKS, REPLICAS
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_node.swarm.membership import look_pause
from lowcomm_node.swarm.own_record import renewal_pause
from lowcomm_protocol.peers.roster import LONGEST_REFRESH, OF_LINK, REFRESH
from lowcomm_protocol.peers.shards import MOST
from lowcomm_protocol.peers.view import ACTIVE, PASSIVE, SHUFFLED

OUT = kit.RESULTS / "discovery.json"
RECORD, STORED, BARE = 799, 880, 180
"""Bytes of a record, of one as keepers send it, and of an introduction with a pulse alone."""
SECONDS = 240.0
"""Length of a measurement, in which each link is called twice."""
LIGHT = f"""
import sys
from lowcomm_node.node.process import Trainer
Trainer._command = lambda self: [sys.executable, {light_process.__file__!r}, "pace:60"]
from lowcomm_node.__main__ import main
main()
"""


def computed(peers: int) -> dict[str, Any]:
    """Kilobytes that a node sends in a minute, by kind, and what a keeper of a shard sends."""
    settings, links, bits = NodeSettings(home=Path()), min(peers - 1, ACTIVE), 0
    while peers >> bits > MOST:
        bits += 1
    shard, known = peers / 2**bits, min(peers, 1 + ACTIVE + PASSIVE)
    looks = 60 / look_pause(settings.poll, settings.record_life, known)
    asked = ASKED if bits else (REPLICAS + ASKED * (LOOKS - 1)) / LOOKS
    calls = links * 60 / min(LONGEST_REFRESH, max(REFRESH, OF_LINK * links))
    keys = min(bits, 2) + 1
    renewals = 60 / renewal_pause(settings.record_life, links) * keys * REPLICAS
    sent = {
        "calls": calls * introduction(peers) / 1000,
        "renewals": renewals * STORED / 1000,
        "looks": looks * asked * shard * STORED / 1000,
    }
    sent |= {"all": sum(sent.values())}
    sent |= {"keeper_a_second": shard * looks / 60 * asked / REPLICAS * shard * STORED / 1000}
    return {"peers": peers} | {kind: round(value, 1) for kind, value in sent.items()}


def introduction(peers: int) -> int:
    """Bytes of what one end of a call hands over."""
    return BARE + (SHUFFLED * (RECORD + 3) if peers > ACTIVE + 1 else 0)


def gossip(peers: int) -> dict[str, Any]:
    """Calls of simulated peers once their views are full."""
    before, swarm = process_time(), Gossip(Network(0, Conditions()), peers)
    for number in range(peers):
        place = f"10.{number >> 8}.{number & 255}.0/24"
        swarm.join(Member(swarm, f"peer-{number}"), [place])
    swarm.run(200.0)
    swarm.calls = 0
    swarm.run(200.0)
    calls = swarm.calls * 60 / 200 / peers
    return {
        "peers": peers,
        "links": round(sum(len(one.view.active) for one in swarm.members.values()) / peers, 1),
        "calls_a_minute": round(calls, 1),
        "calls": round(2 * calls * introduction(peers) / 1000, 1),
        "cpu_seconds": round(process_time() - before, 1),
    }


class Light(Node):
    """A node whose trainer has no model."""

    pace = ("--nice", "5")

    @staticmethod
    def launch(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """See `Process`."""
        return subprocess.Popen([command[0], "-c", LIGHT, *command[3:]], **options)


def real(peers: int) -> dict[str, Any]:
    """What nodes on this machine send and compute."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # a short path for sockets
        swarm, nodes = Swarm(Path(folder)), list[Node]()
        try:
            swarm.bootstrap("--run", str(swarm.spec("noloco", interval=1000)))
            for number in range(peers):
                node = Light(swarm.folder / f"node-{number}", swarm.address)
                swarm.processes.append(node)
                nodes.append(node)
                if number % 4 == 3:  # their starts fill both cores
                    node.until(lambda s: s["phase"] == "training", "training", 300)
            for node in nodes:
                until(lambda node=node: len(node.peers()) >= min(peers - 1, ACTIVE // 2), 300, "")
            sleep(60.0)  # what newcomers cause is over
            began, sent, cpu = monotonic(), crossed(), [kit.cpu_of(n.child.pid) for n in nodes]
            sleep(SECONDS)
            minutes = (monotonic() - began) / 60
            total = sum(kit.cpu_of(n.child.pid) for n in nodes) - sum(cpu)
            return {
                "peers": peers,
                "links": round(sum(len(node.peers()) for node in nodes) / peers, 1),
                "all": round((crossed() - sent) / 1000 / minutes / (peers + 1), 1),
                "cpu_seconds_a_minute": round(total / minutes / peers, 2),
            }
        finally:
            swarm.close()


def report(results: dict[str, dict[str, Any]]) -> str:
    """All results as tables."""
    tables = list[str]()
    for kind in ("computed", "gossip", "real"):
        rows = [one for key, one in results.items() if key.startswith(kind)]
        rows = sorted(rows, key=lambda one: one["peers"])
        names = [name for name in rows[0] if name != "machine"] if rows else []
        head = [f"{kind}: peers", *(name.replace("_", " ") for name in names[1:])]
        tables.append(kit.table(head, ([f"{one[name]:,}" for name in names] for one in rows)))
    return "\n\n".join(tables) + "\n"


def crossed() -> int:
    """Bytes that were sent over loopback."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    f"{kind.__name__}-{peers}": partial(kind, peers)
    for kind, sizes in (
        (computed, (4, 10, 16, 32, 64, 100, 1000, 3000, 10_000)),
        (gossip, (100, 1000, 3000, 10_000)),
        (real, (4, 16, 32, 64)),
    )
    for peers in sizes
}


def main() -> int:
    """Measure what is missing."""
    if "LC_ALONE" not in os.environ:
        inside = f'ip link set lo up; mount -t sysfs sys /sys; exec {sys.executable} "$@"'
        command = ["unshare", "--net", "--mount", "sh", "-c", inside, "sh", *sys.argv]
        os.execvpe(command[0], command, os.environ | {"LC_ALONE": "1"})
    kit.measure_missing(kit.parser(__doc__), JOBS, OUT)
    OUT.with_suffix(".md").write_text(report(kit.read(OUT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
