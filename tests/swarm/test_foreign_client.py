"""What docs/protocol.md and exchange.proto say is enough: a client that shares no code with ours
takes part in a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lowcomm_protocol.messages
from helpers.processes import Swarm, environment
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
CLIENT = Path(__file__).with_name("foreign.py")


def test_a_client_from_the_documents_alone_completes_describe_fetch_and_a_swap(
    swarm: Swarm,
) -> None:
    swarm.bootstrap("--run", str(swarm.spec("noloco")))
    node = swarm.node("a")
    status = node.until(lambda s: s["phase"] == "training", "training")
    (run,) = (node.home / "runs").glob(
        "*/run.json"
    )  # the value of the run's record in the DHT, as it was found there
    proto = Path(next(iter(lowcomm_protocol.messages.__path__))) / "exchange.proto"
    # -P: nothing that lies beside it is found. Our packages may be installed: that it uses none, it
    # tells itself.
    outside = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", str(CLIENT), str(proto), status["addresses"][0], status["peer_id"],
            str(run)],
        capture_output=True, text=True, timeout=240, check=False, env=outside,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + node.output[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["imported"] == []
    assert told["phase"] == "training"
    assert 0 < told["distance"] < 1, (
        "the node contributes weights of the same model, a few steps further"
    )

    def applied() -> list[dict[str, object]]:
        return [
            event
            for event in node.events("exchange.applied")
            if event["partners"] == [told["peer_id"]]
        ]

    until(applied, 30, "the node has taken the outer step")
    after = node.until(lambda s: s["exchanges"]["completed"] >= 1, "it is counted")
    assert after["exchanges"]["in_doubt"] == 0
    assert after["refusals"] == {}
