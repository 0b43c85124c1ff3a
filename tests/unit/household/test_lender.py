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

from helpers.households import DEADLINE, Lending, lending, linked, pids, written
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost, RetryLater
from lowcomm_node.household import lender as lender_module
from lowcomm_node.household import pairing
from lowcomm_node.household.lender import MAX_OF_ADDRESS, MAX_UNPROVED
from lowcomm_node.household.link import borrowed, make_context
from lowcomm_node.household.machines import Household

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


async def receive(link: socket.socket, size: int, piece: int = 65536) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < size:
        data = await soon(loop.sock_recv(link, piece))
        assert data, f"ended after {len(got)} bytes"
        got += data
    return got


async def check_ended(link: socket.socket) -> None:
    """Wait for the end of a link; what the worker did not read any more resets it."""
    with contextlib.suppress(ConnectionResetError):
        assert await soon(asyncio.get_running_loop().sock_recv(link, 1)) == b""


async def check_open(link: socket.socket) -> None:
    """Have an echo."""
    await asyncio.get_running_loop().sock_sendall(link, b"still here")
    assert await receive(link, 10) == b"still here"


async def refusal(lender: Lending, home: Path) -> str:
    """Why a paired head gets no worker."""
    with pytest.raises(RetryLater) as refused:
        async with asyncio.timeout(DEADLINE), borrowed(lender.address, home):
            pass
    return str(refused.value)


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
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "echo") as link:
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(link, GIFT))
        assert await receive(link, len(GIFT), piece=3001) == GIFT
        await soon(sending)


@pytest.mark.parametrize("do", ["ignore", "fill"])
async def test_an_end_that_reads_nothing_stops_the_other_after_a_few_megabytes(
    do: str, tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, do) as link:
        taken = 0
        if do == "ignore":
            with pytest.raises(TimeoutError):
                while True:
                    async with asyncio.timeout(1):
                        await asyncio.get_running_loop().sock_sendall(link, bytes(65536))
                    taken += 65536
        else:

            async def is_stopped() -> bool:
                nonlocal taken
                before, taken = taken, written(tmp_path)
                return taken > 30_000_000 or 0 < taken == before

            await until_async(is_stopped, DEADLINE, "the worker is stopped")
        assert 0 < taken < 30_000_000


async def test_the_worker_gets_what_the_owner_of_the_lender_allows(tmp_path: Path, ada: Path):
    own = {"device": "cpu", "max_bytes": 10**9}
    async with lending(tmp_path, [ada], **own) as lender, linked(lender, ada, "tell") as link:
        got = b""
        while not got.endswith(b"}"):
            got += await receive(link, 1)
        assert json.loads(got) == {"device": "cpu", "max_memory_bytes": 10**9}


# who computes for whom


async def test_a_second_start_of_a_head_replaces_the_first_and_another_head_is_refused(
    tmp_path: Path, ada: Path, bob: Path
):
    async with lending(tmp_path, [ada, bob]) as lender:
        async with linked(lender, ada, "ignore") as first:
            pid = await worker_of(tmp_path)
            async with linked(lender, ada, "echo") as second:
                await gone(pid)
                await check_ended(first)
                assert "end that first" in await refusal(lender, bob)
                await check_open(second)
        await lender.until_told("ended", 2)
        async with linked(lender, bob, "echo") as third:
            await check_open(third)


async def test_starts_of_one_head_at_the_same_time_leave_one_worker(tmp_path: Path, ada: Path):
    others = set(psutil.Process().children())
    async with lending(tmp_path, [ada]) as lender, contextlib.AsyncExitStack() as stack:
        links = (stack.enter_async_context(linked(lender, ada, "ignore")) for _ in range(5))
        done = await asyncio.gather(*links, return_exceptions=True)
        assert any(isinstance(one, socket.socket) for one in done), done

        async def is_one_left() -> bool:
            return len(set(psutil.Process().children()) - others) == 1

        await until_async(is_one_left, DEADLINE, "one worker is left")


# ends


async def test_the_end_of_the_head_ends_the_worker(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "ignore") as link:
        pid = await worker_of(tmp_path)
        link.close()
        await gone(pid)
        assert (await lender.until_told("ended")).endswith("computes here no longer.")


async def test_a_connection_that_is_reset_ends_the_worker(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "ignore") as link:
        pid = await worker_of(tmp_path)
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == lender.port:
                held = socket.socket(fileno=os.dup(connection.fd))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                held.shutdown(socket.SHUT_RDWR)
                held.close()
        await gone(pid)
        await check_ended(link)


async def test_a_worker_that_fails_closes_the_link_after_its_last_bytes_and_says_why(
    tmp_path: Path, ada: Path, capfd: pytest.CaptureFixture[str]
):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "fail") as link:
        assert await receive(link, 1_000_000) == b"last words" * 100_000
        await check_ended(link)
        assert "ended with 1" in await lender.until_told("ended")
        assert "the reason why" in capfd.readouterr().err, "at the lender's terminal"


async def test_a_worker_that_ends_ends_its_children_after_its_last_bytes(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "leave") as link:
        pid, got = await worker_of(tmp_path), b""
        # What the worker does not read must not take back what it has written.
        unread = asyncio.get_running_loop().sock_sendall(link, bytes(20_000_000))
        sending = asyncio.create_task(unread)
        while not (tmp_path / "pids.done").exists():
            got += await receive(link, 65536)
        await gone(pid)
        got += await receive(link, 10_000_000 - len(got))
        assert got == b"last words" * 1_000_000
        await check_ended(link)  # its child would hold it open
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_worker_that_is_killed_closes_the_link(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "ignore") as link:
        os.kill(await worker_of(tmp_path), signal.SIGKILL)
        await check_ended(link)
        assert "died of SIGKILL" in await lender.until_told("ended")


async def test_a_worker_that_takes_more_memory_than_allowed_is_ended(tmp_path: Path, ada: Path):
    bound = 200_000_000
    async with (
        lending(tmp_path, [ada], max_bytes=bound) as lender,
        linked(lender, ada, "grow") as link,
    ):
        await check_ended(link)
        assert "--max-memory allows 200.0 MB" in await lender.until_told("too_large")


async def test_a_command_that_is_not_there_is_a_reason(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada], command=[str(tmp_path / "none")]) as lender:
        assert "can't start a worker: No such file" in await refusal(lender, ada)


async def test_the_end_of_the_lender_ends_the_worker(tmp_path: Path, ada: Path):
    async with contextlib.AsyncExitStack() as ends:
        async with lending(tmp_path, [ada]) as lender:
            link = await ends.enter_async_context(linked(lender, ada, "ignore"))
            pid = await worker_of(tmp_path)
        await gone(pid)
        await check_ended(link)
        with pytest.raises(LinkLost, match="can't be reached"):
            async with borrowed(lender.address, ada):
                pass


async def test_a_head_that_is_forgotten_loses_its_worker_and_gets_in_no_more(
    tmp_path: Path, ada: Path
):
    async with lending(tmp_path, [ada]) as lender, linked(lender, ada, "ignore") as link:
        pid = await worker_of(tmp_path)
        # As `lend --forget` does, in a process of its own.
        Household(tmp_path / "lender").forget(lender.household.machines()[0].name)
        await gone(pid)
        await check_ended(link)
        with pytest.raises(LinkLost, match=r"pair them again|lost|closed"):
            async with borrowed(lender.address, ada):
                pass


# strangers


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stranger_is_refused_before_anything_of_it_is_parsed(
    shows: bool, tmp_path: Path, ada: Path, monkeypatch: pytest.MonkeyPatch
):
    parsed: list[bytes] = []

    def read(kind: Any, line: bytes) -> Any:
        parsed.append(line)
        return plain(kind, line)

    plain = pairing.read
    monkeypatch.setattr(pairing, "read", read)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    async with lending(tmp_path, [ada]) as lender:
        assert len(parsed) == 1, "it reads what a machine that pairs proposes"
        if shows:
            other = Household(tmp_path / "stranger")
            tls = make_context(other, lender.household.certificate.der, is_lender=False)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", lender.port, ssl=tls)
            writer.write(parsed[0] + b"\n")
            assert await soon(reader.read(100)) == b""
            writer.transport.abort()
        async with linked(lender, ada, "echo") as link:
            await check_open(link)
        assert len(parsed) == len(lender.events("started")) == 1


async def test_a_lender_with_another_key_than_the_pinned_one_is_refused(tmp_path: Path, ada: Path):
    async with lending(tmp_path, [ada]) as lender:
        known = Household(ada).lender(lender.address)
    async with lending(tmp_path / "else", [ada]) as other:
        Household(ada).add(known.model_copy(update={"address": other.address}))
        with pytest.raises(LinkLost, match="is not the machine that was paired"):
            async with borrowed(other.address, ada):
                pass
        assert not other.events("started")


async def test_a_thousand_half_open_connections_leave_the_lender_small_and_the_head_its_way(
    tmp_path: Path, ada: Path, bob: Path
):
    loop = asyncio.get_running_loop()
    async with lending(tmp_path, [ada, bob]) as lender, linked(lender, ada, "echo") as link:

        def held() -> Counter[str]:
            """Connections that the lender holds, by address."""
            found = psutil.Process().net_connections("tcp")
            own = [one for one in found if one.laddr.port == lender.port and one.raddr]
            return Counter(one.raddr.ip for one in own)

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
                    assert "end that first" in await refusal(lender, bob)
                    counts = held() - Counter({"127.0.0.1": 1})  # the link
                    most = max(most, counts.total())
                    assert max(counts.values()) <= MAX_OF_ADDRESS, counts
                    sizes.append(tracemalloc.get_traced_memory()[0])
                for early in silent[:-200]:
                    early.close()
                del silent[:-200]
            await check_open(link)
        finally:
            tracemalloc.stop()
            for one in silent:
                one.close()
        assert MAX_OF_ADDRESS < most <= MAX_UNPROVED
        assert max(sizes) - sizes[2] < 1_000_000, sizes


async def test_connections_that_prove_nothing_end_in_time(
    tmp_path: Path, ada: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lender_module, "DEADLINE", 0.2)
    async with lending(tmp_path, [ada]) as lender:
        reader, writer = await asyncio.open_connection("127.0.0.1", lender.port)
        assert await soon(reader.read(10)) == b""
        writer.close()
