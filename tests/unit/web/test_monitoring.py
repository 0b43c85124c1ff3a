"""What must hold for docker/monitoring/: Prometheus reads our figures and rules, the rules tell
what they should and nothing else, and Grafana finds what the compose file gives it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.statuses import make_status
from lowcomm_node.status.metrics import answer_metrics

DOCKER = Path(__file__).parents[3] / "docker"
MONITORING = DOCKER / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
EVERYTHING: dict[str, Any] = {
    "phase": "training",
    "trainer": {
        "loss": 2.5,
        "val_loss_last": 2.6,
        "learning_rate": 0.1,
        "tokens_per_second": 1.0,
        "memory": {"reckoned": 3, "taken": 1, "most": 2},
    },
    "exchanges": {"completed": 7, "since_applied": 3.0},
    "limits": {"max_up": 625_000.0, "max_down": 1.0},
    "refusals": {"call.replayed": 3},
}
"""A status from which every metric has a sample."""


def promtool(*arguments: str, folder: Path = MONITORING, read: bytes = b"") -> str:
    """What it says, once it is content."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: apt-get install prometheus, as make test-tools does")
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=folder,
        input=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    told = done.stdout.decode()
    assert done.returncode == 0, told
    return told


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def mounts(service: str) -> dict[str, Path]:
    """Where the files of a service are in its container, and here."""
    volumes = read(DOCKER / "compose.monitoring.yaml")["services"][service]["volumes"]
    places = [volume.split(":") for volume in volumes]
    assert all(rights == ["ro"] for _, _, *rights in places)
    return {inside: DOCKER / outside for outside, inside, *_ in places}


def test_promtool_has_nothing_to_say_against_our_figures():
    told = answer_metrics(make_status(**EVERYTHING)).body
    assert told.count(b"# TYPE") >= 25
    assert promtool("check", "metrics", read=bytes(told)) == ""


def test_prometheus_reads_settings_and_rules():
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "6 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path):
    shutil.copy(MONITORING / "rules.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("rules_test.yml"), tmp_path)
    promtool("test", "rules", "rules_test.yml", folder=tmp_path)


def test_prometheus_finds_the_nodes_of_the_compose_file():
    services = read(DOCKER / "compose.monitoring.yaml")["services"]
    inside = mounts("prometheus")
    settings = read(inside["/etc/prometheus/prometheus.yml"])
    assert all(f"/etc/prometheus/{rules}" in inside for rules in settings["rule_files"])
    [job] = settings["scrape_configs"]
    [found] = job["dns_sd_configs"]
    assert all(name in read(DOCKER / "compose.yaml")["services"] for name in found["names"])
    assert services["node"]["environment"]["LOWCOMM_METRICS"] == f"0.0.0.0:{found['port']}"
    assert f'job="{job["job_name"]}"' in inside["/etc/prometheus/rules.yml"].read_text()


def test_grafana_finds_its_dashboard_and_the_dashboard_its_source():
    inside = mounts("grafana")
    assert all(place.is_file() for place in inside.values())
    [source] = read(inside["/etc/grafana/provisioning/datasources/lowcomm.yaml"])["datasources"]
    [provider] = read(inside["/etc/grafana/provisioning/dashboards/lowcomm.yaml"])["providers"]
    [dashboard] = [place for place in inside if place.endswith(".json")]
    assert str(Path(dashboard).parent) == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    asked = [panel["datasource"] for panel in DASHBOARD["panels"]]
    assert all(one == {"type": source["type"], "uid": source["uid"]} for one in asked)
    assert f"/d/{DASHBOARD['uid']} " in (DOCKER / "compose.monitoring.yaml").read_text()


def test_panels_lie_beside_each_other():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "Grafana has 24 columns"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
