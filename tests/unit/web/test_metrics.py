"""What must hold for metrics: Prometheus can read them, they are those of the status, and what
peers choose is no label."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.statuses import make_status
from lowcomm_node.errors import PortInUse
from lowcomm_node.web.http import bind, serve_metrics

MONITORING = Path(__file__).parents[3] / "docker" / "monitoring"
STATUS = make_status(
    phase="training",
    trainer={
        "steps": 40,
        "tokens": 5120,
        "loss": 2.5,
        "swarm_step": 43,
        "accelerators": [
            {"device": "cuda:0", "kind": "gpu", "name": "A", "load": 0.5, "memory_taken": 3},
            {"device": "cuda:1", "kind": "gpu", "name": "A", "temperature": 60, "speed": 0.9},
        ],
    },
    exchanges={"completed": 7, "failed": 2},
    bytes_sent=1000,
    limits={"max_up": 625_000.0},
    refusals={"call.replayed": 3},
)
TOLD = {"now": STATUS}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    sock = bind("127.0.0.1", 0, "--metrics")
    port = sock.getsockname()[1]
    sock.close()
    listening = serve_metrics(lambda: TOLD["now"], f"127.0.0.1:{port}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    await listening.close()


async def scrape(client: httpx.AsyncClient) -> Samples:
    told = await client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(told.text)
        for sample in family.samples
    }


async def test_metrics_are_those_of_the_status(client: httpx.AsyncClient):
    told = await scrape(client)
    assert told["lowcomm_steps_total", ()] == 40
    assert told["lowcomm_swarm_step", ()] == 43
    assert told["lowcomm_loss_nats", (("text", "training"),)] == 2.5
    assert told["lowcomm_exchanges_total", (("outcome", "applied"),)] == 7
    assert told["lowcomm_content_bytes_total", (("direction", "sent"),)] == 1000
    assert told["lowcomm_refusals_total", (("what", "call.replayed"),)] == 3
    first, second = (("device", "cuda:0"),), (("device", "cuda:1"),)
    assert told["lowcomm_accelerator_load_ratio", first] == 0.5
    assert ("lowcomm_accelerator_load_ratio", second) not in told
    assert told["lowcomm_accelerator_memory_bytes", first] == 3
    assert told["lowcomm_accelerator_temperature_celsius", second] == 60
    assert told["lowcomm_accelerator_speed_ratio", second] == 0.9
    assert told["lowcomm_phase", (("phase", "training"),)] == 1
    assert sum(value for (name, _), value in told.items() if name == "lowcomm_phase") == 1


async def test_names_follow_prometheus_and_nothing_else_is_served(client: httpx.AsyncClient):
    for name, labels in await scrape(client):
        assert name.startswith("lowcomm_")
        assert not {"peer", "fragment", "partner"} & dict(labels).keys()
    for path in ("/", "/api/v1/status"):
        assert (await client.get(path)).status_code == 404


async def test_dashboard_and_alerts_ask_for_metrics_that_there_are(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    status = make_status(
        exchanges={"since_applied": 3.0},
        trainer={
            "memory": {"reckoned": 3, "taken": 1, "most": 2},
            "skipped_steps": 0,
            "tokens_per_second": 1.0,
            "swarm_step": 1,
            "loss": 2.0,
        },
        refusals={"call.replayed": 3},
    )
    monkeypatch.setitem(TOLD, "now", status)
    there = {name for name, _ in await scrape(client)} | {"lowcomm"}
    for file in ("rules.yml", "grafana/dashboard.json"):
        asked = set(re.findall(r"lowcomm\w*", (MONITORING / file).read_text()))
        assert len(asked) > 5
        assert asked <= there, file


async def test_an_address_that_is_taken_is_named(client: httpx.AsyncClient):
    port = client.base_url.port
    with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port} .*--metrics"):
        serve_metrics(lambda: STATUS, f"127.0.0.1:{port}")
