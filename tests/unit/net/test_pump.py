"""What must hold for bytes that move between two sockets."""

import asyncio
import socket

from lowcomm_node.net.pump import pump


async def test_what_an_end_has_written_arrives_though_it_reads_nothing_any_more():
    near, far = socket.socketpair()
    theirs, other = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for one in (near, theirs, other):
        one.setblocking(False)
    size = far.send(bytes(100_000))
    far.close()
    other.send(b"unread")
    loop, got = asyncio.get_running_loop(), b""
    pumping = asyncio.create_task(pump(near, theirs))
    async with asyncio.timeout(30):
        while len(got) < size:
            data = await loop.sock_recv(other, 1000)
            assert data, f"ended after {len(got)} bytes"
            got += data
    assert await pumping is near and got == bytes(size)
    for one in (near, theirs, other):
        one.close()
