"""What must hold for the node's page: whoever opens the link gets in once, nobody else does, and
nothing on it comes from another host."""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.statuses import make_status
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web.access import (
    COMES_BACK,
    LINK_LASTS,
    MAX_BROWSERS,
    MAX_LINKS,
    Access,
    Browsers,
)
from lowcomm_node.web.api import QUERIES, ROOT
from lowcomm_node.web.client import ControlClient
from lowcomm_node.web.page import FILES, FOLDER
from lowcomm_node.web.server import ControlServer

MAX_PAGE = 300_000
"""Bytes of all that a browser loads."""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server, with no token."""
    node: Any = SimpleNamespace(status=make_status, resume=lambda: None)
    server = ControlServer(node, Paths(tmp_path))
    await server.start(0, "me")
    port = json.loads(Paths(tmp_path).control.read_text())["port"]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    await server.close()


async def link(home: Path) -> str:
    def ask() -> str:
        with ControlClient(home) as client:
            return client.link()

    return await asyncio.to_thread(ask)


async def test_a_link_lets_one_browser_in_once(browser: httpx.AsyncClient, tmp_path: Path):
    address, _, key = (await link(tmp_path)).partition("#")
    assert address == f"{browser.base_url}/"
    told = await browser.post(f"{ROOT}/session", json={"key": key})
    bearer = {"Authorization": f"Bearer {told.json()['token']}"}
    assert (await browser.get(f"{ROOT}/status", headers=bearer)).json()["phase"] == "training"
    assert (await browser.post(f"{ROOT}/resume", headers=bearer)).status_code == 200
    again = await browser.post(f"{ROOT}/session", json={"key": key})
    assert again.status_code == 401
    assert "lowcomm-node web" in again.json()["error"]


@pytest.mark.parametrize("body", [{}, {"key": ""}, {"key": 7}, {"key": "x" * 1000}, []])
async def test_who_brings_no_key_gets_no_token(browser: httpx.AsyncClient, body: Any):
    assert (await browser.post(f"{ROOT}/session", json=body)).status_code in (400, 401)
    for path in ("status", "events", "openapi.json", "samples"):
        assert (await browser.get(f"{ROOT}/{path}")).status_code == 401


async def test_the_api_tells_metrics_to_who_has_the_token(
    browser: httpx.AsyncClient, tmp_path: Path
):
    token = json.loads(Paths(tmp_path).control.read_text())["token"]
    assert (await browser.get(f"{ROOT}/metrics")).status_code == 401
    told = await browser.get(f"{ROOT}/metrics", headers={"Authorization": f"Bearer {token}"})
    assert told.headers["content-type"].startswith("text/plain")
    assert 'lowcomm_phase{phase="training"} 1.0' in told.text


def test_links_end_with_time_and_the_oldest_make_room():
    now = 0.0
    access = Access(lambda: now)
    first = access.issue_link()
    assert access.redeem(first) is not None
    late = access.issue_link()
    now = LINK_LASTS + 1
    assert access.redeem(late) is None
    oldest = access.issue_link()
    newer = [access.issue_link() for _ in range(MAX_LINKS)]
    assert access.redeem(oldest) is None
    assert access.redeem(newer[0]) is not None


def test_browsers_are_known_again_at_the_same_port_for_a_while(tmp_path: Path):
    now = [1000.0]
    path = tmp_path / "browsers.json"

    def started(port: int) -> Browsers:
        browsers = Browsers(path, lambda: now[0])
        browsers.remember()
        browsers.serve_at(port)
        return browsers

    first = started(7)
    browser = first.let_in()
    assert browser.token not in path.read_text()
    assert browser.token not in repr(browser)
    assert path.stat().st_mode & 0o777 == 0o600
    now[0] = path.stat().st_mtime + COMES_BACK - 1
    assert started(7).remember() == 7
    assert started(7).admits(browser.token)
    assert not started(7).admits(browser.token[:-1])
    assert not started(8).admits(browser.token), "who sits at the old port may have been told it"
    now[0] += 2
    assert not started(7).admits(browser.token)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"port": 1}', '{"port": 1, "browsers": {"a": 5}}']
)
def test_a_damaged_file_of_browsers_lets_nobody_in(tmp_path: Path, text: str):
    path = tmp_path / "browsers.json"
    path.write_text(text)
    browsers = Browsers(path)
    browsers.remember()
    browsers.serve_at(1)
    assert not browsers.admits("")
    browser = browsers.let_in()
    assert browsers.admits(browser.token)


def test_the_oldest_browser_makes_room():
    browsers = Browsers()
    there = [browsers.let_in() for _ in range(MAX_BROWSERS + 1)]
    assert not browsers.admits(there[0].token)
    assert all(browsers.admits(one.token) for one in there[1:])


async def test_a_node_proves_to_its_browsers_that_it_is_theirs(
    browser: httpx.AsyncClient, tmp_path: Path
):
    key = (await link(tmp_path)).partition("#")[2]
    told = (await browser.post(f"{ROOT}/session", json={"key": key})).json()

    async def proof(**body: str) -> str | None:
        return (await browser.post(f"{ROOT}/proof", json=body)).json()["proof"]

    secret = hashlib.sha256(told["token"].encode()).digest()
    said = f"n1:{browser.base_url.port}".encode()
    assert (
        await proof(name=told["name"], nonce="n1") == hmac.new(secret, said, "sha256").hexdigest()
    )
    assert await proof(name=told["name"], nonce="n1") != await proof(name=told["name"], nonce="n2")
    assert await proof(name="somebody", nonce="n1") is None
    assert await proof(name=told["name"], nonce="") is None
    assert await proof(name=told["name"], nonce="n" * 65) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
async def test_requests_of_other_pages_and_of_rebound_names_are_refused(
    browser: httpx.AsyncClient, tmp_path: Path, headers: dict[str, str]
):
    token = json.loads(Paths(tmp_path).control.read_text())["token"]
    told = {"Authorization": f"Bearer {token}", **headers}
    for path in ("/", f"{ROOT}/status"):
        assert (await browser.get(path, headers=told)).status_code == 403
    assert (await browser.post(f"{ROOT}/session", json={}, headers=headers)).status_code == 403


async def test_the_page_loads_its_own_files_only_and_little_of_them(browser: httpx.AsyncClient):
    total = 0
    for path in FILES:
        told = await browser.get(path)
        assert told.status_code == 200
        policy = told.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        total += len(told.content)
        if not path.startswith("/uplot"):
            named = told.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
            assert not re.findall(r"https?://", named), path
            assert "innerHTML" not in told.text, "what peers chose enters as text"
    assert total < MAX_PAGE
    assert (FOLDER / "uplot" / "LICENSE").read_text().startswith("The MIT License")


def test_the_page_and_its_script_name_the_same_elements():
    page = (FOLDER / "index.html").read_text()
    script = "".join(file.read_text() for file in FOLDER.glob("*.js"))
    there = re.findall(r'id="([\w-]+)"', page)
    assert len(there) == len(set(there))
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(there)
    assert set(re.findall(r'(?:for|aria-labelledby)="([\w-]+)"', page)) <= set(there)


async def test_openapi_describes_every_route(browser: httpx.AsyncClient, tmp_path: Path):
    token = json.loads(Paths(tmp_path).control.read_text())["token"]
    bearer = {"Authorization": f"Bearer {token}"}
    told = (await browser.get(f"{ROOT}/openapi.json", headers=bearer)).json()
    assert told["openapi"].startswith("3.1")
    names = {path.removeprefix(f"{ROOT}/") for path in told["paths"]}
    assert {one.name for one in QUERIES} | {"limits", "events", "pause", "link"} <= names
    assert "swarm_step" in json.dumps(told["components"]["schemas"])
    text = json.dumps(told)
    named = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert named <= set(told["components"]["schemas"]), "every reference leads somewhere"
    for path in told["paths"]:
        method = next(iter(told["paths"][path])).upper()
        if path != f"{ROOT}/events":
            assert (await browser.request(method, path)).status_code == 401, "there is such a route"
