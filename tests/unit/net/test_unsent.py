"""What must hold for what our connections leave unsent: all are found among this process's
descriptors, and the kernel keeps little of each that can't be sent yet."""

import asyncio
import socket
from pathlib import Path

from helpers.waiting import until_async
from lowcomm_node.net.unsent import LEAST_UNSENT, MOST_UNSENT, connections, keep_little_unsent


def unsent(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


async def test_every_connection_of_this_process_keeps_little_unsent():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
        server.accept()[0] as callee,
    ):

        async def are_bounded() -> bool:
            return all(LEAST_UNSENT <= unsent(end) <= MOST_UNSENT for end in (caller, callee))

        assert not await are_bounded()

        watching = asyncio.create_task(keep_little_unsent())
        try:
            await until_async(are_bounded, 30, "both ends are bounded")
        finally:
            watching.cancel()


def test_only_connections_are_found_and_no_descriptor_is_left_open():
    before = set(Path("/proc/self/fd").iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = []
        for connection in connections():
            with connection:
                names.append(connection.getsockname())
        assert server.getsockname() in names
    assert set(Path("/proc/self/fd").iterdir()) == before
