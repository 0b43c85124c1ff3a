"""What must hold for a lender and its links: real TLS on loopback, real processes as workers."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import ssl
import struct
import tracemalloc
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.households import DEADLINE, Lending, lending, pids, written
from helpers.waiting import until_async
from lowcomm_node.errors import ConfigError, LinkLost, RetryLater
from lowcomm_node.household import lender as lender_module
from lowcomm_node.household.lender import MAX_OF_ADDRESS, MAX_UNPROVED
from lowcomm_node.household.link import MAX_LINE, Link, describe, lent, make_context
from lowcomm_node.household.machines import Household
from lowcomm_node.net.tls import certificate_of
from lowcomm_node.system.release import release

GIFT = random.Random(1).randbytes(4_000_000)


@pytest.fixture
def ada(tmp_path: Path) -> Path:
    """The home of a head."""
    return tmp_path / "ada"


@pytest.fixture
def bob(tmp_path: Path) -> Path:
    """The home of another head."""
    return tmp_path / "bob"


async def soon(work: Awaitable[Any]) -> Any:
    """What a work gives, which must not take long."""
    return await asyncio.wait_for(work, DEADLINE)


async def receive(link: Link, size: int, piece: int = 65536) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < size:
        data = await soon(loop.sock_recv(link.socket, piece))
        assert data, f"ended after {len(got)} bytes"
        got += data
    return got


async def begun(lender: Lending, home: Path, do: str, **settings: Any) -> Link:
    link = await soon(lent(lender.address, home, {"do": do, **settings}))
    link.socket.setblocking(False)
    return link


async def has_ended(link: Link) -> bool:
    """Whether a link has ended here; what the worker did not read any more resets it."""
    try:
        return await soon(asyncio.get_running_loop().sock_recv(link.socket, 1)) == b""
    except ConnectionResetError:
        return True


async def gone(pid: int) -> None:
    async def is_gone() -> bool:
        return not psutil.pid_exists(pid)

    await until_async(is_gone, DEADLINE, f"{pid} has ended")


async def worker_of(folder: Path, number: int = 1) -> int:
    """The process of a worker, once it has begun."""

    async def has_begun() -> bool:
        return len(pids(folder)) >= number

    await until_async(has_begun, DEADLINE, "a worker has begun")
    return pids(folder)[number - 1]


# bytes


async def test_bytes_come_through_both_ways_as_they_are_however_slowly_they_are_read(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "echo")
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(link.socket, GIFT))
        assert await receive(link, len(GIFT), piece=3001) == GIFT
        await soon(sending)
        await link.close()
        assert await soon(link_ended(link)) == ""


async def link_ended(link: Link) -> str:
    with contextlib.suppress(asyncio.CancelledError):
        return await link.ended()
    return ""


@pytest.mark.parametrize("do", ["ignore", "fill"])
async def test_an_end_that_reads_nothing_stops_the_other_after_a_few_megabytes(
    do: str, tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, do)
        taken = 0
        if do == "ignore":
            with pytest.raises(TimeoutError):
                while True:
                    async with asyncio.timeout(1):
                        await asyncio.get_running_loop().sock_sendall(link.socket, bytes(65536))
                    taken += 65536
        else:

            async def is_stopped() -> bool:
                nonlocal taken
                before, taken = taken, written(tmp_path)
                return taken > 30_000_000 or 0 < taken == before

            await until_async(is_stopped, DEADLINE, "the worker is stopped")
        assert 0 < taken < 30_000_000
        await link.close()


async def test_the_worker_gets_the_settings_and_what_the_owner_of_the_lender_allows(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada], device="cpu", max_bytes=10**9) as lender:
        asked = {"rank": [1, 2.5, None], "device": "cuda"}
        link = await begun(lender, ada, "tell", **asked)
        got = b""
        while not got.endswith(b"}"):
            got += await receive(link, 1)
        own = {"do": "tell", "device": "cpu", "max_memory_bytes": 10**9}
        assert json.loads(got) == asked | own
        await link.close()


# who computes for whom


async def test_a_lender_says_what_it_has(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada], device="cpu", max_bytes=10**9) as lender:
        found = await soon(describe(lender.address, ada))
        assert found.release == release() and found.free_bytes == 10**9 and not found.gpus
        assert 0 < found.cores <= (os.cpu_count() or 1)
        assert found.computes_for == found.last_end == ""
        link = await begun(lender, ada, "echo")
        [head] = lender.household.machines()
        assert (await soon(describe(lender.address, ada))).computes_for == head.name
        await link.close()


async def test_a_second_start_of_a_head_replaces_the_first_and_another_head_is_refused(
    tmp_path: Path, ada: Path, bob: Path
):
    async with lending(tmp_path, [ada, bob]) as lender:
        first = await begun(lender, ada, "ignore")
        pid = await worker_of(tmp_path)
        second = await begun(lender, ada, "echo")
        await gone(pid)
        assert await has_ended(first)
        with pytest.raises(RetryLater, match="end that first"):
            await soon(lent(lender.address, bob, {"do": "echo"}))
        await asyncio.get_running_loop().sock_sendall(second.socket, b"still here")
        assert await receive(second, 10) == b"still here"
        await second.close()
        await lender.until_told("ended", 2)
        third = await begun(lender, bob, "echo")
        for link in (first, third):
            await link.close()


# ends


async def test_the_end_of_the_head_ends_the_worker(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "ignore")
        pid = await worker_of(tmp_path)
        link.socket.close()
        await gone(pid)
        assert "was closed here" in await soon(link.ended())
        await lender.until_told("ended")


async def test_a_connection_that_is_reset_ends_the_worker(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "ignore")
        pid = await worker_of(tmp_path)
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == lender.port:
                held = socket.socket(fileno=os.dup(connection.fd))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                held.shutdown(socket.SHUT_RDWR)
                held.close()
        await gone(pid)
        assert await has_ended(link)
        await link.close()


async def test_a_worker_that_fails_closes_the_link_after_its_last_bytes_and_says_why(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "fail")
        assert await receive(link, 1_000_000) == b"last words" * 100_000
        assert await has_ended(link)
        reason = await soon(link.ended())
        assert "ended: exit code 1." in reason and reason.endswith("the reason why")
        assert len(reason) < 2500
        assert "exit code 1" in lender.events("ended")[0]
        await link.close()


async def test_a_worker_that_ends_closes_the_link_though_a_child_of_it_holds_the_socket(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "leave")
        pid = await worker_of(tmp_path)
        try:
            got = b""
            # What the worker does not read must not take back what it has written.
            unread = asyncio.get_running_loop().sock_sendall(link.socket, bytes(20_000_000))
            sending = asyncio.create_task(unread)
            while not (tmp_path / "pids.done").exists():
                got += await receive(link, 65536)
            await gone(pid)
            got += await receive(link, 10_000_000 - len(got))
            assert got == b"last words" * 1_000_000
            assert await has_ended(link)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await link.close()
        finally:
            os.killpg(pid, signal.SIGKILL)


async def test_a_worker_that_is_killed_closes_the_link(tmp_path: Path, ada: Path, bob: Path):
    async with lending(tmp_path, [ada, bob]) as lender:
        link = await begun(lender, ada, "ignore")
        os.kill(await worker_of(tmp_path), signal.SIGKILL)
        assert await has_ended(link)
        assert "died of SIGKILL" in await soon(link.ended())
        assert (await describe(lender.address, bob)).last_end == "", "that is not bob's to know"
        await link.close()


async def test_a_worker_that_takes_more_memory_than_allowed_is_ended(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada], max_bytes=200_000_000) as lender:
        link = await begun(lender, ada, "grow")
        assert "--max-memory allows 200.0 MB" in await soon(link.ended())
        await link.close()


async def test_a_command_that_is_not_there_is_a_reason(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada], command=[str(tmp_path / "none")]) as lender:
        with pytest.raises(RetryLater, match="can't start a worker: No such file"):
            await soon(lent(lender.address, ada, {}))


async def test_the_end_of_the_lender_ends_the_worker(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "ignore")
        pid = await worker_of(tmp_path)
    await gone(pid)
    assert "can't be reached" in await soon(link.ended())
    await link.close()


async def test_a_head_that_is_forgotten_loses_its_worker_and_gets_in_no_more(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        link = await begun(lender, ada, "ignore")
        pid = await worker_of(tmp_path)
        # As `lend --forget` does, in a process of its own.
        Household(tmp_path / "lender").forget(lender.household.machines()[0].name)
        await gone(pid)
        with pytest.raises(LinkLost, match=r"pair them again|lost|closed"):
            await soon(describe(lender.address, ada))
        await link.close()


# strangers


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All messages that a lender has parsed."""
    lines: list[bytes] = []

    def read(kind: Any, line: bytes) -> Any:
        lines.append(line)
        return plain(kind, line)

    plain = lender_module.read
    monkeypatch.setattr(lender_module, "read", read)
    return lines


def stranger(folder: Path, lender: Lending, shows: bool) -> ssl.SSLContext:
    """TLS of a machine that knows the certificate of a lender, and has one of its own."""
    pinned = certificate_of(bytes.fromhex(lender.household.key))
    made = make_context(Household(folder / "stranger"), is_lender=False, pinned=pinned)
    if not shows:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stranger_is_refused_before_anything_of_it_is_parsed(
    shows: bool, tmp_path: Path, ada: Path, parsed: list[bytes]
):
    async with lending(tmp_path, [ada]) as lender:
        tls = stranger(tmp_path, lender, shows)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", lender.port, ssl=tls)
            writer.write(b'{"ask":"describe"}\n')
            assert await soon(reader.read(100)) == b""
            writer.transport.abort()
        assert parsed == []
        await soon(describe(lender.address, ada))
        assert len(parsed) == 1


async def test_a_lender_with_another_key_than_the_pinned_one_is_asked_nothing(
    tmp_path: Path, ada: Path, parsed: list[bytes]
):
    async with lending(tmp_path, [ada]) as lender:
        known = Household(ada).lender(lender.address)
    async with lending(tmp_path / "else", [ada]) as other:
        Household(ada).add(known.model_copy(update={"address": other.address}))
        with pytest.raises(LinkLost, match="is not the machine that was paired"):
            await soon(describe(other.address, ada))
        assert parsed == []


@pytest.mark.parametrize(
    "line",
    [
        b"x" * (MAX_LINE + 70_000),
        b"[" * 60_000 + b"\n",
        b"{}\n",
        b'{"ask":"run"}\n',
        b'{"ask":"start"}\nmore',
        b'{"ask":"start","settings":[]}\n',
        b'{"ask":"start","settings":{"a":NaN}}\n',
        b'{"ask":"start","settings":{},"command":["sh"]}\n',
        b"\xff\n",
    ],
)
async def test_a_head_that_asks_nonsense_is_refused_and_starts_nothing(
    line: bytes, tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender:
        pinned = certificate_of(bytes.fromhex(lender.household.key))
        tls = make_context(Household(ada), is_lender=False, pinned=pinned)
        reader, writer = await asyncio.open_connection("127.0.0.1", lender.port, ssl=tls)
        writer.write(line)
        with contextlib.suppress(ConnectionError):
            assert b"started" not in await soon(reader.read(1000))
        writer.transport.abort()
        await soon(describe(lender.address, ada))
        assert not lender.events("started") and not pids(tmp_path)


async def test_settings_that_can_not_be_sent_are_one_clear_error(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender:
        with pytest.raises(ConfigError, match="that are no JSON"):
            await lent(lender.address, ada, {"a": object()})
        with pytest.raises(ConfigError, match="65,536 are allowed"):
            await lent(lender.address, ada, {"a": "x" * MAX_LINE})
        with pytest.raises(ConfigError, match="is not paired"):
            await lent("127.0.0.9", ada, {})


async def test_a_thousand_half_open_connections_leave_the_lender_small_and_the_head_its_way(
    tmp_path: Path, ada: Path
):
    loop = asyncio.get_running_loop()
    async with lending(tmp_path, [ada]) as lender:

        def held() -> Counter[str]:
            """Connections that the lender holds, by address."""
            found = psutil.Process().net_connections("tcp")
            own = [one for one in found if one.laddr.port == lender.port and one.raddr]
            return Counter(one.raddr.ip for one in own)

        link = await begun(lender, ada, "echo")
        silent: list[socket.socket] = []
        most, sizes = 0, list[int]()
        tracemalloc.start()
        try:
            for number in range(1000):
                one = socket.socket()
                one.setblocking(False)
                # One address, then sixteen, then that of the head.
                last = 2 if number < 100 else 1 if number > 800 else 2 + number % 16
                one.bind((f"127.0.0.{last}", 0))
                await soon(loop.sock_connect(one, ("127.0.0.1", lender.port)))
                if number % 2:
                    await loop.sock_sendall(one, b"\x16\x03\x01\x02\x00\x01")  # a part of a hello
                silent.append(one)
                if number % 100 == 90:
                    await soon(describe(lender.address, ada))
                    counts = held() - Counter({"127.0.0.1": 1})  # the link
                    most = max(most, counts.total())
                    assert max(counts.values()) <= MAX_OF_ADDRESS, counts
                    sizes.append(tracemalloc.get_traced_memory()[0])
                for early in silent[:-200]:
                    early.close()
                del silent[:-200]
            await loop.sock_sendall(link.socket, b"still here")
            assert await receive(link, 10) == b"still here"
            await link.close()
        finally:
            tracemalloc.stop()
            for one in silent:
                one.close()
        assert MAX_OF_ADDRESS < most <= MAX_UNPROVED
        assert lender.lender.count_unproved() <= MAX_UNPROVED
        assert max(sizes) - sizes[2] < 1_000_000, sizes


async def test_connections_that_prove_nothing_end_in_time(
    tmp_path: Path, ada: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lender_module, "DEADLINE", 0.2)
    async with lending(tmp_path, [ada]) as lender:
        reader, writer = await asyncio.open_connection("127.0.0.1", lender.port)
        assert await soon(reader.read(10)) == b""
        writer.close()

        async def none_left() -> bool:
            return lender.lender.count_unproved() == 0

        await until_async(none_left, DEADLINE, "it is forgotten")
