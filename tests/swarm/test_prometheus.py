"""A real Prometheus with our settings and rules beside a real swarm: every question of the
dashboard has an answer, and a node that stops is missed, as long as it is away."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from helpers.processes import START, Node, Swarm, free_port, until_exchanged
from helpers.waiting import until

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs prometheus: apt-get install prometheus, as make test-tools does",
    ),
]
MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
QUESTIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LATE = 5 * START
"""Seconds that a machine with others on it may take."""


class Prometheus:
    """One that looks every second, and whose alerts come after seconds instead of minutes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._targets = folder / "targets.json"
        settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        [job] = settings["scrape_configs"]
        # in place of an engine's DNS, which forgets a container that has stopped
        del job["dns_sd_configs"]
        job["file_sd_configs"] = [{"files": ["targets.json"], "refresh_interval": "1s"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        rules = (MONITORING / "rules.yml").read_text()
        (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 2s", rules))
        self.look_at([])
        address = f"127.0.0.1:{free_port()}"
        with (folder / "log").open("wb") as log:
            self.child = subprocess.Popen(
                [
                    "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
                    f"--web.listen-address={address}",
                ],
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        self._client = httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False)

    def look_at(self, addresses: list[str]) -> None:
        """Ask these nodes from now on."""
        self._targets.write_text(json.dumps([{"targets": addresses}]))

    def ask(self, question: str) -> list[dict[str, Any]]:
        """What it answers; nothing while it does not."""
        return self._get("/query", query=question).get("result", [])

    def fires(self) -> set[tuple[str, str]]:
        """Alerts that fire, by name and node."""
        alerts = self._get("/alerts").get("alerts", [])
        told = [one["labels"] for one in alerts if one["state"] == "firing"]
        return {(labels["alertname"], labels["instance"]) for labels in told}

    def close(self) -> None:
        """End it."""
        self._client.close()
        self.child.terminate()
        self.child.wait(30)

    def _get(self, path: str, **question: str) -> dict[str, Any]:
        try:
            return self._client.get(path, params=question).json().get("data", {})
        except httpx.TransportError:
            return {}


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Ended in any case."""
    prometheus = Prometheus(tmp_path / "prometheus")
    try:
        yield prometheus
    finally:
        prometheus.close()


def test_the_dashboard_has_data_and_a_stopped_node_is_missed(swarm: Swarm, prometheus: Prometheus):
    swarm.bootstrap("--run", str(swarm.spec("lowcomm", start_peers=2, evaluate_every=10)))
    metrics = {name: f"127.0.0.1:{free_port()}" for name in ("a", "b")}
    nodes = {name: join(swarm, name, address) for name, address in metrics.items()}
    prometheus.look_at(list(metrics.values()))
    until_exchanged(nodes.values(), 1, LATE)

    for question in QUESTIONS:
        told = until(lambda: prometheus.ask(question), 60, question)  # noqa: B023
        assert all(re.fullmatch(r"[-+.\de]+", sample["value"][1]) for sample in told), question
    each = prometheus.ask("lowcomm_loss_nats{text='held_out'}")
    assert {sample["metric"]["instance"] for sample in each} == set(metrics.values())
    assert ("NodeGone", metrics["a"]) not in prometheus.fires()

    nodes["b"].end()
    until(lambda: ("NodeGone", metrics["b"]) in prometheus.fires(), 60, "b does not answer")
    prometheus.look_at([metrics["a"]])
    until(lambda: len(prometheus.ask("up == 1")) == len(prometheus.ask("up")) == 1, 60, "forgotten")
    until(lambda: ("NodeGone", metrics["b"]) in prometheus.fires(), 60, "b is missed all the same")
    until(lambda: ("Alone", metrics["a"]) in prometheus.fires(), LATE, "a trains alone")
    assert ("NodeGone", metrics["a"]) not in prometheus.fires()

    elsewhere = f"127.0.0.1:{free_port()}"
    join(swarm, "b", elsewhere)
    prometheus.look_at([metrics["a"], elsewhere])
    until(lambda: not any(name == "NodeGone" for name, _ in prometheus.fires()), LATE, "b is back")


def join(swarm: Swarm, name: str, address: str) -> Node:
    """Start a node, or start it again, with metrics at an address."""
    return swarm.node(name, "--metrics", address)
