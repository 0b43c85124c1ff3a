"""Messages in a stream of probes: each with its length in front of it, as libp2p does."""

import asyncio
import socket

from lowcomm_node.errors import LinkLost
from lowcomm_node.libp2p.control import read_message
from lowcomm_protocol.peers.probes import MAX_MESSAGE


async def send_message(stream: socket.socket, data: bytes) -> None:
    """Send one message. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, _length(len(data)) + data)
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None


async def receive_message(stream: socket.socket) -> bytes:
    """The next message. Raises LinkLost, also at the end of the stream."""
    try:
        return await read_message(stream, MAX_MESSAGE)
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None


def _length(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + _length(number >> 7)
