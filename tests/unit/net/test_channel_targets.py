"""Where gRPC dials a peer that tells several addresses."""

import pytest

from lowcomm_node.net import channels


@pytest.mark.parametrize(
    ("addresses", "has_route", "target"),
    [
        (("203.0.113.7:1", "192.0.2.1:2"), True, "ipv4:203.0.113.7:1,192.0.2.1:2"),
        (("[2001:db8::1]:1", "[2001:db8::2]:2"), True, "ipv6:[2001:db8::1]:1,[2001:db8::2]:2"),
        (("[2001:db8::1]:1", "203.0.113.7:1"), True, "ipv4:203.0.113.7:1"),
        (("[2001:db8::1]:1", "203.0.113.7:1"), False, "ipv6:[2001:db8::1]:1"),
        (("203.0.113.7:1",), False, "ipv4:203.0.113.7:1"),
    ],
)
def test_addresses_of_one_kind_are_dialed_that_this_machine_has_a_route_to(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], has_route: bool, target: str
) -> None:
    monkeypatch.setattr(channels, "_has_route", lambda address: has_route)
    scheme, dialed = channels._callable(addresses)
    assert scheme + ",".join(dialed) == target


def test_every_machine_has_a_route_to_itself() -> None:
    assert channels._has_route("127.0.0.1:1")
