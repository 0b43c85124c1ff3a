"""What kind of router is in between: only what shows is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.doctor.nat import Nat, Sight, infer

OWN = ("127.0.0.1", "192.168.1.2", "44.128.0.12")
A, B = "44.128.0.10", "44.128.0.11"
OUTER = "44.128.0.13"


def sights(*places: tuple[str, str, int], socket: str = "scout") -> list[Sight]:
    return [Sight(helper, socket, host, port) for helper, host, port in places]


@pytest.mark.parametrize(
    ("seen", "calls_come_in", "kind"),
    [
        ([], None, Nat.UNKNOWN),
        (sights((A, "192.168.1.2", 1)), True, Nat.UNKNOWN),
        (sights((A, "44.128.0.12", 1)), True, Nat.NONE),
        (sights((A, "44.128.0.12", 1)), None, Nat.NONE),
        (sights((A, "44.128.0.12", 1)), False, Nat.FIREWALL),
        (sights((A, OUTER, 1)), True, Nat.OPEN),
        (sights((A, OUTER, 1)), False, Nat.BEHIND),
        (sights((A, OUTER, 1)), None, Nat.BEHIND),
        (sights((A, OUTER, 1), (B, OUTER, 1)), False, Nat.RESTRICTED),
        (sights((A, OUTER, 1), (B, OUTER, 1)), None, Nat.BEHIND),
        (sights((A, OUTER, 1), (B, OUTER, 2)), False, Nat.SYMMETRIC),
        (sights((A, OUTER, 1), (B, OUTER, 2)), None, Nat.SYMMETRIC),
        (sights((A, OUTER, 1), (A, OUTER, 2)), False, Nat.BEHIND),  # the same helper twice: the port may have moved on
        ([*sights((A, OUTER, 1), socket="tcp"), *sights((B, OUTER, 2))], False, Nat.BEHIND),  # different ports of ours
        (sights((A, OUTER, 1), (B, "192.168.1.2", 9)), False, Nat.BEHIND),  # who sits beside us says nothing
    ],
)
def test_a_kind_is_told_by_what_shows_it(seen: list[Sight], calls_come_in: bool | None, kind: Nat):
    assert infer(OWN, seen, calls_come_in) is kind


HOSTS = st.sampled_from([*OWN, OUTER, A, "10.0.0.1", "2a00:128::1", "::1"])
SIGHTS = st.lists(st.builds(Sight, HOSTS, st.sampled_from(["tcp", "scout"]), HOSTS, st.integers(1, 65535)), max_size=6)


@given(SIGHTS, st.sampled_from([True, False, None]))
def test_nobody_is_told_that_calls_come_in_who_was_not_called(seen: list[Sight], calls_come_in: bool | None):
    kind = infer(OWN, seen, calls_come_in)
    if calls_come_in is not True:
        assert kind is not Nat.OPEN
    if calls_come_in is not False:
        assert kind not in (Nat.FIREWALL, Nat.RESTRICTED)
