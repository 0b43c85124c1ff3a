"""What lies between this machine and everybody: name servers, login pages, and lines that lose large packets.

names    the names that this node uses are resolved, or a name that always exists
portal   where nobody answers: TCP to the same hosts, which a login page answers in their place
packets  a ping of a few bytes, and one of many, over TCP: QUIC finds out what fits, TCP mostly does not
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lowcomm_node.doctor.sights import Names, Silence
from lowcomm_node.libp2p.interface import OpenStream
from lowcomm_node.libp2p.multiaddress import EntryPoint, host_of, name_of, port_of
from lowcomm_node.probing.asker import CONNECT_DEADLINE, Asker
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import PROTOCOL as PROBES

ALWAYS = "a.root-servers.net"
"""A name that exists as long as there are names; where none is used here."""
NAME_DEADLINE = 6.0
PORTAL_DEADLINE = 4.0
PING_DEADLINE = 6.0
SMALL, LARGE = 64, 8192
"""Bytes: what fits into any packet, and several packets full."""
HTTP_PORT = 80
MOST_HOSTS = 2
MOST_REPLY = 2048
RESOLV = Path("/etc/resolv.conf")


class Opens(Protocol):
    """Opens streams to peers that are connected."""

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open one. Raises LinkLost."""
        ...


async def look_at_names(addresses: Iterable[str]) -> Names:
    """Resolve the names in multiaddresses. Never raises."""
    used = tuple(dict.fromkeys(filter(None, map(name_of, addresses))))
    asked = used or (ALWAYS,)
    answers = await asyncio.gather(*(_resolve(name) for name in asked))
    return Names(bool(used), tuple(zip(asked, answers, strict=True)), _name_servers())


async def _resolve(name: str) -> str:
    """Why a name can't be resolved; empty if it can."""
    loop, done = asyncio.get_running_loop(), asyncio.Future[str]()

    def tell(reason: str) -> None:
        if not done.done():
            done.set_result(reason)

    def ask() -> None:
        try:
            socket.getaddrinfo(name, None)
            reason = ""
        except socket.gaierror as error:
            reason = "there is no such name" if error.errno == socket.EAI_NONAME else "no name server answers"
        except (OSError, UnicodeError) as error:
            reason = str(error)
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, reason)

    # A thread that nobody waits for at the end: a resolver without an answer takes half a minute.
    threading.Thread(target=ask, daemon=True).start()
    try:
        async with asyncio.timeout(NAME_DEADLINE):
            return await done
    except TimeoutError:
        return "no name server answers"


def _name_servers() -> tuple[str, ...]:
    try:
        lines = RESOLV.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "nameserver")


async def look_behind_silence(entries: Sequence[EntryPoint]) -> tuple[Silence, ...]:
    """What answers over plain TCP where nobody answers as a peer. Never raises."""
    places = {(host, port) for entry in entries if (host := host_of(entry.dial)) and (port := port_of(entry.dial))}
    hosts = sorted(places)[:MOST_HOSTS]
    asked = [(host, at, port) for host, port in hosts for at in (port, HTTP_PORT)]
    replies = await asyncio.gather(*(_get(host, at) for host, at, _ in asked))
    return tuple(
        Silence(host, at, at == port, reply) for (host, at, port), reply in zip(asked, replies, strict=True) if reply
    )


async def _get(host: str, port: int) -> bytes:
    """What is said to somebody who asks as a browser does; empty if nothing is."""
    writer = None
    reply = b""
    try:
        async with asyncio.timeout(PORTAL_DEADLINE):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            while len(reply) < MOST_REPLY and (more := await reader.read(MOST_REPLY - len(reply))):
                reply += more
    except (OSError, TimeoutError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return reply


async def large_ping(streams: Opens, entry: EntryPoint, out: bool) -> bool | None:
    """Whether a ping larger than a packet gets out, or else in, where a small one does.

    None if that can't be told. Never raises.
    """
    if not await _pinged(streams, entry, pb.Ping(content=bytes(SMALL), wanted=SMALL)):
        return None
    return await _pinged(streams, entry, pb.Ping(content=bytes(LARGE)) if out else pb.Ping(wanted=LARGE))


async def _pinged(streams: Opens, entry: EntryPoint, ping: pb.Ping) -> bool | None:
    """Whether a ping is answered, over a stream of its own; None if it is refused, which tells nothing."""

    async def ask() -> bool | None:
        with Asker(await streams.open_stream(entry.peer_id, PROBES, CONNECT_DEADLINE)) as asker:
            await asker.send(ping)
            pong = await asker.receive()
            return None if pong.refused else len(pong.content) == ping.wanted

    return await in_time(ask, PING_DEADLINE)


async def in_time(work: Callable[[], Awaitable[bool | None]], seconds: float) -> bool | None:
    """What ``work`` gives; False if it takes longer or fails."""
    try:
        async with asyncio.timeout(seconds):
            return await work()
    except (TimeoutError, LowcommError):
        return False
