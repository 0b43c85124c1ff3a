"""What must hold for the swarm's page: strangers choose words and numbers on it, and anybody may
look."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lowcomm_bootstrap import web
from lowcomm_bootstrap.web import (
    JSON,
    MOST_POINTS,
    ObservedSwarm,
    Series,
    SwarmPage,
    badge,
)
from lowcomm_node.web.http import MAX_CONNECTIONS
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import PeerInfo, Phase, SelfReport, write_record
from lowcomm_protocol.spec.run import parse_toml, sign_run

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW"
RUN = sign_run(
    parse_toml('run.name = "tea"\nrun.description = "<script>alert(1)</script>"'),
    Identity(b"c" * 32),
)
NOW = 1_800_000_000.0


def record(number: int, issued: float = NOW, **told: Any) -> tuple[str, bytes]:
    """A peer of the run, and what it tells."""
    identity = Identity(bytes([number]) * 32)
    info = PeerInfo(
        peer_id=identity.peer_id,
        run_id=RUN.run_id,
        phase=Phase.TRAINING,
        issued=issued,
        expires=issued + 60,
        swarm_step=100,
        tokens_per_second=500.0,
        report=SelfReport(**told),
    )
    return identity.peer_id, write_record(info, identity)


async def ask(page: SwarmPage, path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    """One request to the application; its answer."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    await page(scope, None, send)
    told = {name.decode(): text.decode() for name, text in sent[0]["headers"]}
    return {"status": sent[0]["status"], "headers": told, "body": sent[1]["body"]}


@pytest.fixture
async def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SwarmPage]:
    """The page of a server that has seen three peers of one run."""
    monkeypatch.setattr(web, "time", lambda: NOW + 1)
    page = SwarmPage(tmp_path / "history.json", lambda: ADDRESS, "127.0.0.1", 0)
    told = {"held_out_loss": 2.0, "tokens": 1000, "release": "0.2.0"}
    records = dict(record(k, name=f"peer {k}", **told) for k in (1, 2, 3))
    page.saw(RUN, records, {next(iter(records))})
    page.looked({RUN.run_id})
    yield page
    await page.close()


async def test_it_tells_what_peers_told_and_of_how_many_it_is(page: SwarmPage) -> None:
    told = json.loads((await ask(page, JSON))["body"])
    (run,) = told["runs"]
    assert run["run"] == f"tea@{RUN.fingerprint}"
    assert (run["peers"], run["proved"], run["training"]) == (3, 1, 3)
    assert (run["tokens"], run["tokens_per_second"], run["swarm_step"]) == (3000, 1500.0, 100)
    assert (run["held_out_loss"], run["held_out_loss_of"]) == (2.0, 3)
    assert run["releases"] == {"0.2.0": 3}
    assert [one["proved"] for one in run["leaders"]].count(True) == 1
    assert run["join"] == f"lowcomm-node join --peers {ADDRESS} --run tea@{RUN.fingerprint}"
    assert len(run["history"]) == 1 and len(run["history"][0]) == len(told["figures"])


async def test_viewers_cost_no_look_and_no_rendering(page: SwarmPage) -> None:
    made = page.made
    first = await ask(page, JSON)
    for _ in range(100):
        assert (await ask(page, JSON))["body"] is first["body"]
    again = await ask(page, JSON, if_none_match=first["headers"]["etag"])
    assert (again["status"], again["body"]) == (304, b"")
    packed = await ask(page, JSON, accept_encoding="gzip, br")
    assert gzip.decompress(packed["body"]) == first["body"]
    assert packed["headers"]["content-length"] == str(len(packed["body"]))
    assert page.made == made


@pytest.mark.parametrize("path", [*web.FILES, JSON, f"/badge/{RUN.fingerprint}.svg"])
async def test_every_address_forbids_what_is_not_its_own(page: SwarmPage, path: str) -> None:
    answer = await ask(page, path)
    assert answer["status"] == 200 and answer["body"]
    assert "default-src 'none'" in answer["headers"]["content-security-policy"]
    assert answer["headers"]["x-content-type-options"] == "nosniff"
    assert (await ask(page, path, "HEAD"))["body"] == b""


async def test_words_of_strangers_become_no_markup(page: SwarmPage) -> None:
    peer, told = record(4, name="<img src=x onerror=alert(1)>", tokens=10**6)
    page.saw(RUN, {peer: told}, set())
    page.looked({RUN.run_id})
    (run,) = json.loads((await ask(page, JSON))["body"])["runs"]
    assert run["leaders"][0]["name"] == "<img src=x onerror=alert(1)>"
    answer = await ask(page, JSON)
    assert answer["headers"]["content-type"] == "application/json"
    script = (web.PAGE / "swarm.js").read_text()
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script
    view = run | {"run": '"><script>@x', "steps": 10}
    ElementTree.fromstring(badge(view))
    assert "<script>" not in badge(view)


async def test_samples_stand_with_their_peer_the_proved_one_first(page: SwarmPage) -> None:
    said = {
        number: record(number, sample=f"tale {number}", sample_step=90) for number in range(4, 9)
    }
    page.saw(RUN, dict(said.values()), {said[6][0]})
    page.looked({RUN.run_id})
    (run,) = json.loads((await ask(page, JSON))["body"])["runs"]
    first, *others = run["samples"]
    assert (first["peer"], first["step"], first["text"]) == (said[6][0], 90, "tale 6")
    assert len(others) == 2


def test_a_flood_of_identities_takes_no_proved_peer_off_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "MOST_PEERS", 3)
    flood = dict(record(k) for k in range(1, 9))
    honest, own = record(9)
    swarm = ObservedSwarm(RUN)
    swarm.saw(flood | {honest: own}, {honest}, NOW + 1)
    assert honest in swarm.peers and len(swarm.peers) == 3


def test_a_series_spans_the_life_of_a_run_in_a_bounded_number_of_points() -> None:
    series, swarm = Series(), ObservedSwarm(RUN)
    swarm.saw(dict([record(1, held_out_loss=3.0)]), set(), NOW)
    view = swarm.view(NOW, ADDRESS)
    for second in range(0, 30 * 24 * 3600, 30):
        series.add(view, NOW + second)
    assert MOST_POINTS / 2 <= len(series.points) <= MOST_POINTS
    times = [point[0] or 0.0 for point in series.points]
    assert times[0] == NOW and times[-1] > NOW + 29 * 24 * 3600 and times == sorted(times)


async def test_one_address_that_holds_all_connections_keeps_no_other_out(
    page: SwarmPage,
) -> None:
    page.open()
    request = b"GET /swarm.css HTTP/1.1\r\nHost: x\r\n\r\n"

    async def connect(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", page.port, local_addr=(source, 0)
        )
        writer.write(request)
        return reader, writer

    writers = []
    async with asyncio.timeout(60):
        try:
            visitor, asking = await connect("127.0.0.2")
            writers.append(asking)
            for _ in range(MAX_CONNECTIONS + 20):
                _, writer = await connect("127.0.0.1")
                writers.append(writer)
            another, writer = await connect("127.0.0.3")
            writers.append(writer)
            assert (await another.readline()).startswith(b"HTTP/1.1 200")
            asking.write(request)  # still connected
            for _ in range(2):
                await visitor.readuntil(b"HTTP/1.1 200 OK")
        finally:
            for writer in writers:
                writer.close()
