"""What must hold for the node's page: whoever opens the link gets in once, nobody else does, and
nothing on it comes from another host."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.statuses import make_status
from lowcomm_node.status.events import Board
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web.access import LINK_SECONDS, MAX_BROWSERS, MAX_LINKS, Access
from lowcomm_node.web.api import ROOT
from lowcomm_node.web.client import ControlClient
from lowcomm_node.web.http import FOLDER
from lowcomm_node.web.server import ControlServer

MAX_PAGE = 300_000
"""Bytes of all that a browser loads."""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server, with no token."""
    node: Any = SimpleNamespace(status=make_status, peers=list, resume=lambda: None)
    server = ControlServer(node, Board(), Paths(tmp_path))
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
    for path in ("status", "events", "samples"):
        assert (await browser.get(f"{ROOT}/{path}")).status_code == 401


def test_links_end_with_time_and_the_oldest_make_room():
    now = 0.0
    access = Access(lambda: now)
    first = access.issue_link()
    assert access.redeem(first) is not None
    late = access.issue_link()
    now = LINK_SECONDS + 1
    assert access.redeem(late) is None
    oldest = access.issue_link()
    newer = [access.issue_link() for _ in range(MAX_LINKS)]
    assert access.redeem(oldest) is None
    assert access.redeem(newer[0]) is not None
    tokens = [access.redeem(access.issue_link()) for _ in range(MAX_BROWSERS + 1)]
    assert not access.admits(f"Bearer {tokens[0]}"), "the oldest browser makes room"
    assert access.admits(f"Bearer {tokens[-1]}")


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
    files = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.*")]
    for path in ["/", *(f"/{file}" for file in files)]:
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
