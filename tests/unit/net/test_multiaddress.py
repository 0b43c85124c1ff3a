"""Addresses that strangers write: read or refused, and never a lot of work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.errors import ConfigError
from lowcomm_node.net import addresses as multiaddress
from lowcomm_node.net.addresses import (
    EntryPoint,
    decode,
    parse_announced,
    quic_beside,
)
from lowcomm_protocol.identity import peer_id_of

ADA, RELAY = (peer_id_of(bytes([number]) * 32) for number in (1, 2))
P2P = b"\xa5\x03"


@pytest.mark.parametrize("size", [43, 400, 60_000])
def test_a_peer_id_that_is_far_too_long_is_not_even_spelled_out(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        multiaddress.base58,
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
        parse_announced(f"/dns4/{name}/tcp/1", ADA)
    assert parse_announced("/dns4/example.org/tcp/1", ADA)


def test_quic_is_looked_for_beside_tcp_but_not_on_this_machine() -> None:
    assert quic_beside(EntryPoint(ADA, "/ip4/44.1.1.1/tcp/7")) == EntryPoint(
        ADA, "/ip4/44.1.1.1/udp/7/quic-v1"
    )
    assert quic_beside(EntryPoint(ADA, "/dns4/example.org/tcp/7")) is not None
    assert quic_beside(EntryPoint(ADA, "/ip4/127.0.0.1/tcp/7")) is None
    assert quic_beside(EntryPoint(ADA, "/ip4/44.1.1.1/udp/7/quic-v1")) is None
    assert quic_beside(EntryPoint(ADA, f"/ip4/44.1.1.1/tcp/7/p2p/{RELAY}/p2p-circuit")) is None
