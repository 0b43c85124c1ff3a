"""What must hold for docker/monitoring/: Prometheus reads our figures and rules, the rules tell
what they should and nothing else, and Grafana finds what the compose file gives it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.statuses import make_status
from lowcomm_node.status.figures import answer_metrics

DOCKER = Path(__file__).parents[3] / "docker"
MONITORING = DOCKER / "monitoring"
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


def test_promtool_has_nothing_to_say_against_our_figures():
    told = answer_metrics(make_status(**EVERYTHING)).body
    assert told.count(b"# TYPE") >= 25
    assert promtool("check", "metrics", read=bytes(told)) == ""


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path):
    shutil.copy(MONITORING / "rules.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("rules_test.yml"), tmp_path)
    promtool("test", "rules", "rules_test.yml", folder=tmp_path)
