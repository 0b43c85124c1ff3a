"""What must hold for findings on what lies between: names, login pages, and lines that lose large packets."""

import asyncio
import socket
from dataclasses import replace

import pytest

from lowcomm_node.doctor.between import judge_names, judge_packets, judge_silence
from lowcomm_node.doctor.findings import State
from lowcomm_node.doctor.line import ALWAYS, look_at_names, look_behind_silence
from lowcomm_node.doctor.sights import Names, Packets, Silence, Survey
from lowcomm_node.libp2p.multiaddress import EntryPoint
from lowcomm_node.probing.measuring import Speed
from lowcomm_protocol.identity import Identity

PEER = Identity(b"h" * 32).peer_id
HOST, PORT = "44.128.0.11", 31337
FOUND = b"HTTP/1.1 302 Found\r\nLocation: https://login.hotel.example:8443/?from=x\r\n\r\n"


def entry(number: int) -> EntryPoint:
    return EntryPoint(PEER, f"/ip4/44.128.0.{number}/tcp/{PORT}")


def packets(*told: tuple[bool, bool]) -> Survey:
    """What helpers told of large packets, out and in."""
    return Survey(packets=tuple(Packets(entry(k), *one) for k, one in enumerate(told, 10)), outward="192.168.1.7")


@pytest.mark.parametrize("told", [[(False, True)], [(False, False)] * 3, [(True, False), (True, False)]])
def test_large_packets_that_nobody_gets_are_our_own_lines_fault(told: list[tuple[bool, bool]]):
    (finding,) = judge_packets(packets(*told))
    assert finding.state is State.FAULT and "the line of this machine" in finding.value
    assert "192.168.1.7" in finding.remedy and "mtu 1280" in finding.remedy
    assert ("tcp_mtu_probing" in finding.remedy) == (not told[0][0]), "which helps what goes out alone"


def test_large_packets_that_some_get_are_not_our_own_lines_fault():
    (finding,) = judge_packets(packets((True, True), (False, True)))
    assert finding.state is State.WARNING and "out (1 of 2 got one)" in finding.value


def test_a_line_that_carries_all_is_well():
    (finding,) = judge_packets(packets((True, True)))
    assert finding.state is State.OK
    assert judge_packets(Survey()) == [], "nobody could tell"


def test_a_rate_over_quic_does_not_hide_that_tcp_loses_large_packets():
    """QUIC finds out what fits, so a rate is measured where TCP carries no contribution."""
    (finding,) = judge_packets(replace(packets((False, False)), speed=Speed(0.1, 1e6, 1e6)))
    assert finding.state is State.FAULT and "over TCP" in finding.value


@pytest.mark.parametrize(
    ("one", "page"),
    [
        (Silence(HOST, PORT, True, FOUND), "https://login.hotel.example:8443/?from=x"),
        (Silence(HOST, PORT, True, b"HTTP/1.0 200 OK\r\n\r\nHello"), f"http://{HOST}:{PORT}/"),
        (Silence(HOST, 80, False, FOUND), "https://login.hotel.example:8443/?from=x"),
        (Silence(HOST, 80, False, b"HTTP/1.1 511 Network Authentication Required\r\n\r\n"), f"http://{HOST}:80/"),
    ],
)
def test_a_web_page_in_a_peers_place_is_a_login_page(one: Silence, page: str):
    (finding,) = judge_silence([one])
    assert (finding.name, finding.state) == ("portal", State.FAULT)
    assert finding.remedy.startswith(f"open {page} in a browser")


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n\r\na page of its own",
        f"HTTP/1.1 301 Moved\r\nLocation: https://{HOST}/\r\n\r\n".encode(),
        b"HTTP/1.1 302 Found\r\nLocation: /index.html\r\n\r\n",
        b"SSH-2.0-x",
        b"HTTP/1.1",
        b"",
    ],
)
def test_a_web_server_beside_a_peer_is_none(reply: bytes):
    assert judge_silence([Silence(HOST, 80, False, reply)]) == []


def test_what_a_login_page_tells_can_write_nothing_to_a_terminal():
    reply = b"HTTP/1.1 302 Found\r\nLocation: http://x.example/\x1b[31m" + b"a" * 3000 + b"\r\n\r\n"
    (finding,) = judge_silence([Silence(HOST, 80, False, reply)])
    assert "\x1b" not in finding.remedy and len(finding.remedy) < 400


def test_a_peer_that_answers_a_few_bytes_and_no_more_tells_of_lost_packets():
    (finding,) = judge_silence([Silence(HOST, PORT, True, b"\x13/multistream/1.0.0\n")])
    assert (finding.name, finding.state) == ("packets", State.WARNING)


def test_a_name_that_this_node_needs_and_nobody_resolves_is_a_fault():
    (finding,) = judge_names(Names(True, (("boot.example", "no name server answers"),), ()))
    assert finding.state is State.FAULT and "names no name server" in finding.value
    (finding,) = judge_names(Names(True, (("boot.exmple", "there is no such name"),), ("192.168.1.1",)))
    assert "boot.exmple: there is no such name" in finding.value and "192.168.1.1" in finding.value


def test_names_that_this_node_does_not_need_are_a_warning_at_most():
    (finding,) = judge_names(Names(False, (("a.example", "no name server answers"),), ("192.168.1.1",)))
    assert finding.state is State.WARNING and "so it trains" in finding.remedy
    assert judge_names(Names(False, (("a.example", ""),), ()))[0].state is State.OK
    assert judge_names(None) == []


async def test_what_answers_in_a_peers_place_is_asked_as_a_browser_asks():
    asked = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(FOUND)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await look_behind_silence([EntryPoint(PEER, f"/ip4/127.0.0.1/tcp/{port}")])
    assert [one.reply for one in found if one.is_its_own] == [FOUND]
    assert asked[0].startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")


async def test_names_are_resolved_and_numbers_need_none(monkeypatch: pytest.MonkeyPatch):
    def resolve(name: str, _: object) -> list[object]:
        if name == "boot.example":
            return []
        raise socket.gaierror(socket.EAI_NONAME if name == "boot.exmple" else socket.EAI_AGAIN, "")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    told = await look_at_names([f"/dns4/{name}/tcp/1/p2p/{PEER}" for name in ("boot.example", "boot.exmple", "a.b")])
    expected = (("boot.example", ""), ("boot.exmple", "there is no such name"), ("a.b", "no name server answers"))
    assert (told.used, told.tried) == (True, expected)
    told = await look_at_names([f"/ip4/{HOST}/tcp/1/p2p/{PEER}"])
    assert (told.used, told.tried) == (False, ((ALWAYS, "no name server answers"),))
