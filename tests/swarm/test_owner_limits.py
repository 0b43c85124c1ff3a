"""The owner's limits on a running node: from the command line to the exchange, and kept for the
next start."""

import json

import pytest

from helpers.processes import Swarm, run, until_exchanged

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def test_limits_are_taken_shown_changed_and_kept(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    a, b = swarm.node("a", "--max-down", "100Mbit"), swarm.node("b")
    until_exchanged((a, b), 1)

    def limits(*arguments: str) -> dict[str, object]:
        told = run("lowcomm_node", "limits", "--json", "--home", str(a.home), *arguments)
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    told = limits()
    assert (told["max_up"], told["max_down"], told["max_peers"]) == (None, 12.5e6, 64)
    assert told["turned_away"] == 0

    # Exchanges go on at the new rate, over the windows that it asks for.
    told = limits("--max-up", "4Mbit", "--max-down", "4Mbit", "--max-peers", "3")
    assert (told["max_up"], told["max_down"], told["max_peers"]) == (5e5, 5e5, 3)
    a.until_completed(2)
    status = a.until(lambda s: s["limits"]["up"] > 0 and s["limits"]["down"] > 0, "contents pass")
    assert status["limits"]["max_up"] == 5e5

    # At a rate at which no exchange could end, it says so instead of failing again and again.
    limits("--max-up", "64kbit")
    a.until(lambda s: "raise --max-up" in (s["waiting"] or ""), "the reason is told")
    assert (
        "5Mbit or 5MB"
        in run("lowcomm_node", "limits", "--home", str(a.home), "--max-up", "5Mb").stderr
    )

    # What was changed is what the next start finds, where no flag says otherwise.
    assert a.end() == 0
    found = json.loads(run("lowcomm_node", "config", "--json", "--home", str(a.home)).stdout)
    assert (found["max_up"]["value"], found["max_peers"]["value"]) == ("64kbit", 3)
    assert found["max_up"]["source"] == str(a.home / "config.toml")
