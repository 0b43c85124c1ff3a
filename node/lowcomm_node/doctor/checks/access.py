"""Checks of what lies before the internet: name servers, proxies, and login pages."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic
from urllib.parse import urlsplit

from lowcomm_node.doctor.observations import Observations
from lowcomm_node.doctor.report import Finding, State
from lowcomm_node.net.addresses import host_of, name_of, port_of
from lowcomm_node.system.units import clean, place

ALWAYS = "a.root-servers.net"
"""A name that exists as long as there are names; it is tried where this node uses none."""
NAME_DEADLINE = 6.0
REPLY_DEADLINE = 4.0
MAX_PEERS = 2
MAX_REPLY = 2048
HTTP_PORT = 80
LOGIN = 511
"""Network Authentication Required, RFC 6585."""
RESOLV = Path("/etc/resolv.conf")
PROXIES = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}


@dataclass(frozen=True)
class Reply:
    """What answers a browser's question at the host of a peer that does not answer."""

    host: str
    port: int
    is_peers: bool
    """Whether this is the port of the peer, not that of the web."""
    data: bytes
    """The beginning of it."""


def names(seen: Observations) -> Finding | None:
    """Whether names can be resolved; None if nothing was looked for."""
    if not seen.asked:
        return None
    used = tuple(dict.fromkeys(filter(None, map(name_of, seen.asked))))
    tried, servers = resolve(used or (ALWAYS,)), _name_servers()
    figures = {"tried": tried, "servers": servers}
    failed = [f"{name}: {reason}" for name, reason in tried.items() if reason]
    if not failed:
        return Finding("names", State.OK, f"{', '.join(tried)} can be resolved", "", figures)
    asked = f"asked {', '.join(servers)}" if servers else f"{RESOLV} names no name server"
    value = f"{'; '.join(failed)} ({asked})"
    remedy = f"name a server that answers in {RESOLV}, or give addresses as numbers: /ip4/..."
    if used:
        return Finding("names", State.FAULT, value, remedy, figures)
    remedy += "; this node's addresses are numbers, so it trains, but can fetch nothing by name"
    return Finding("names", State.WARNING, value, remedy, figures)


def proxy(seen: Observations) -> Finding | None:
    """Variables that name a proxy, which nothing here uses; None without any."""
    # Only the names: a value may hold a password.
    found = sorted(name for name in os.environ if name.lower() in PROXIES and os.environ[name])
    if not found:
        return None
    value = f"ignores {', '.join(found)}: peers are called directly"
    return Finding("proxy", State.OK, value, "", {"ignored": found})


def portal(seen: Observations) -> Finding | None:
    """Whether a login page is why nobody answers; None if none is seen."""
    for reply in replies(seen):
        if page := login_page(reply):
            at = place(reply.host, reply.port)
            return Finding(
                "portal",
                State.FAULT,
                f"a web page answers in the place of {at}: this network wants a login first",
                f"open {page} in a browser and log in, or use another network",
                {"page": page, "host": reply.host, "port": reply.port},
            )
    return None


def resolve(names: Sequence[str]) -> dict[str, str]:
    """Why each name can't be resolved; empty if it can."""
    reasons = dict.fromkeys(names, "no name server answers")

    def ask(name: str) -> None:
        try:
            socket.getaddrinfo(name, None)
            reasons[name] = ""
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                reasons[name] = "there is no such name"
        except (OSError, UnicodeError) as error:
            reasons[name] = str(error)

    # Threads that nothing joins at the end: a resolver without an answer takes half a minute.
    threads = [Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    until = monotonic() + NAME_DEADLINE
    for thread in threads:
        thread.join(max(0.0, until - monotonic()))
    return dict(reasons)


def _name_servers() -> list[str]:
    try:
        lines = [
            line.split()
            for line in RESOLV.read_text(errors="replace", encoding="utf-8").splitlines()
        ]
    except OSError:
        return []
    return [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]


def replies(seen: Observations) -> list[Reply]:
    """What answers over plain TCP where nobody answers as a peer."""
    if seen.survey is not None and seen.survey.helpers:
        return []
    silent = seen.survey.silent if seen.survey is not None else ()
    places = {(host_of(address), port_of(address)) for address in (*seen.asked, *silent)}
    peers = sorted((host, port) for host, port in places if host and port)[:MAX_PEERS]
    asked = [(host, at, at == port) for host, port in peers for at in (port, HTTP_PORT)]

    def ask(host: str, port: int, is_peers: bool) -> Reply:
        request = f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return Reply(host, port, is_peers, reply_of(host, port, request.encode()))

    with ThreadPoolExecutor() as pool:
        return [reply for reply in pool.map(ask, *zip(*asked, strict=True)) if reply.data]


def reply_of(host: str, port: int, question: bytes = b"", size: int = MAX_REPLY) -> bytes:
    """The beginning of what answers over plain TCP; empty if nothing does."""
    reply, until = b"", monotonic() + REPLY_DEADLINE
    with suppress(OSError), socket.create_connection((host, port), REPLY_DEADLINE) as call:
        call.sendall(question)
        while len(reply) < size and (left := until - monotonic()) > 0:
            call.settimeout(left)
            more = call.recv(size - len(reply))
            if not more:
                break
            reply += more
    return reply


def login_page(reply: Reply) -> str:
    """Where a browser is sent by what answers in a peer's place; empty if that is no login page."""
    head = reply.data.partition(b"\r\n\r\n")[0].decode("latin-1").splitlines()
    words = head[0].split() if head else []
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
        return ""
    fields = (line.partition(":") for line in head[1:])
    locations = (value for name, _, value in fields if name.strip().lower() == "location")
    location = clean(next(locations, "").strip())
    host = urlsplit(location).hostname or ""
    if host and host != reply.host and words[1].startswith("3"):
        return location[:200]
    # Where a peer listens there is no web page; at port 80 a host may have one of its own.
    if reply.is_peers or int(words[1]) == LOGIN:
        return f"http://{place(reply.host, reply.port)}/"
    return ""
