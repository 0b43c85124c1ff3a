"""Addresses of peers, as text and as p2pd's bytes: what is read, what is refused, and never with a
lot of work."""

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.errors import ConfigError
from lowcomm_node.net import addresses
from lowcomm_node.net.addresses import (
    EntryPoint,
    decode,
    encode,
    parse_announced,
    parse_entry_point,
    quic_beside,
)
from lowcomm_protocol.identity import Identity

ADA, BOB, CLEO = (Identity(seed * 32) for seed in (b"a", b"b", b"c"))
P2P = b"\xa5\x03"


@pytest.mark.parametrize(
    "dial",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/tcp/1",
        "/dns4/a.example.org/tcp/65535",
        "/dns/localhost/tcp/31337",
        "/ip4/203.0.113.7/udp/31337/quic-v1",
        f"/ip4/203.0.113.7/udp/31337/quic-v1/p2p/{BOB.peer_id}/p2p-circuit",
    ],
)
def test_an_address_is_split_into_peer_and_place(dial: str) -> None:
    entry = parse_entry_point(f" {dial}/p2p/{ADA.peer_id}\n")
    assert (entry.dial, entry.peer_id, str(entry)) == (
        dial,
        ADA.peer_id,
        f"{dial}/p2p/{ADA.peer_id}",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:31337",
        ADA.peer_id,
        f"/p2p/{ADA.peer_id}",
        "/ip4/203.0.113.7/tcp/31337",
        "/ip4/203.0.113.7/tcp/31337/p2p/Qmabc",
        f"/ip4/203.0.113.7/tcp/0/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/{'9' * 5000}/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/٣/p2p/{ADA.peer_id}",
        f"/ip6/203.0.113.7/tcp/1/p2p/{ADA.peer_id}",
        f"/ip6/fe80::1%eth0/tcp/1/p2p/{ADA.peer_id}",
        f"/dns4//tcp/1/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/udp/31337/quic/p2p/{ADA.peer_id}",
        f"/unix/tmp/x/tcp/1/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/000031337/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{ADA.peer_id}/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/Qmabc/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/1/p2p/{BOB.peer_id}/p2p-circuit/p2p/{CLEO.peer_id}/p2p-circuit/p2p/{ADA.peer_id}",
    ],
)
def test_a_malformed_address_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_entry_point(text)
    assert text[:60] in str(caught.value)
    assert "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW" in str(caught.value)


@pytest.mark.parametrize(
    ("dial", "relay"),
    [
        ("/ip4/203.0.113.7/tcp/31337", None),
        ("/ip6/2001:db8::1/udp/65535/quic-v1", None),
        ("/dns4/a.example.org/tcp/1", None),
        (f"/dns6/b.example.org/tcp/300/p2p/{BOB.peer_id}/p2p-circuit", BOB.peer_id),
    ],
)
def test_an_address_is_the_same_after_its_way_as_bytes(dial: str, relay: str | None) -> None:
    entry = parse_entry_point(f"{dial}/p2p/{ADA.peer_id}")
    assert entry.relay == relay
    assert decode(encode(entry.dial)) == dial


def test_the_bytes_of_an_address_are_those_of_the_specification() -> None:
    # https://github.com/multiformats/multiaddr: ip4 = 4, tcp = 6, p2p = 421, p2p-circuit = 290
    relay = base58.b58decode(BOB.peer_id)
    expected = (
        bytes([4, 203, 0, 113, 7, 6, 0x7A, 0x69])
        + b"\xa5\x03"
        + bytes([len(relay)])
        + relay
        + b"\xa2\x02"
    )
    assert encode(f"/ip4/203.0.113.7/tcp/31337/p2p/{BOB.peer_id}/p2p-circuit") == expected


def test_an_announced_address_has_no_peer_id_or_the_own_one() -> None:
    dial = "/dns4/boot.example.org/tcp/31337"
    assert (
        parse_announced(dial, ADA.peer_id)
        == parse_announced(f"{dial}/p2p/{ADA.peer_id}", ADA.peer_id)
        == dial
    )
    for wrong in (
        f"{dial}/p2p/{BOB.peer_id}",
        "/dns4/boot.example.org/tcp/0",
        "boot.example.org:31337",
    ):
        with pytest.raises(ConfigError, match="can't be announced"):
            parse_announced(wrong, ADA.peer_id)


@pytest.mark.parametrize("size", [43, 400, 60_000])
def test_a_peer_id_that_is_far_too_long_is_not_even_spelled_out(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        addresses.base58,
        "b58encode",
        lambda _: pytest.fail("takes time by the square of the length"),
    )
    length = (
        bytes([size])
        if size < 128
        else bytes([size & 127 | 128, size >> 7 & 127 | (128 if size >> 14 else 0)])
    )
    length += bytes([size >> 14]) if size >> 14 else b""
    assert decode(P2P + length + bytes(size)) is None


@given(st.binary(max_size=600))
def test_no_bytes_do_harm(data: bytes) -> None:
    assert len(decode(data) or "") < 2000


def test_an_address_that_would_be_too_long_for_a_record_is_not_announced() -> None:
    name = ".".join(["a" * 60] * 4)
    with pytest.raises(ConfigError, match="can't be announced"):
        parse_announced(f"/dns4/{name}/tcp/1", ADA.peer_id)
    assert parse_announced("/dns4/example.org/tcp/1", ADA.peer_id)


def test_quic_is_looked_for_beside_tcp_but_not_on_this_machine() -> None:
    def beside(dial: str) -> EntryPoint | None:
        return quic_beside(EntryPoint(ADA.peer_id, dial))

    assert beside("/ip4/44.1.1.1/tcp/7") == EntryPoint(ADA.peer_id, "/ip4/44.1.1.1/udp/7/quic-v1")
    assert beside("/dns4/example.org/tcp/7") is not None
    assert beside("/ip4/127.0.0.1/tcp/7") is None
    assert beside("/ip4/44.1.1.1/udp/7/quic-v1") is None
    assert beside(f"/ip4/44.1.1.1/tcp/7/p2p/{BOB.peer_id}/p2p-circuit") is None
