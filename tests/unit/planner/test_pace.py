"""The interval that results is the one at which peers of the protocol exchange in virtual time."""

from statistics import mean

import pytest

from helpers.slow_lines import MBIT, Swarm
from lowcomm_node.planner import pace
from lowcomm_node.planner.question import Line
from lowcomm_protocol.spec.run import RunSpec

SECONDS = 400.0
SIZE = 1_000_000
"""Bytes of a coded fragment."""


def sync_of(method: str = "lowcomm", **changes):
    return RunSpec.model_validate(
        {"run": {"name": "a"}, "sync": {"method": method, **changes}}
    ).sync


def line_of(mbit: float, latency: float = 0.05) -> Line:
    return Line(up=mbit * MBIT, down=10 * mbit * MBIT, latency=latency)


@pytest.mark.parametrize("mbit", [2.0, 5.0, 10.0, 40.0])
def test_interval_and_wait_are_those_of_peers_in_virtual_time(
    mbit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FILLED", 1.0)  # its lines are never idle
    monkeypatch.setattr(pace, "START_TRIPS", 0.0)  # and carry at once what they can
    swarm = Swarm((8 * mbit * MBIT, 80 * mbit * MBIT), (SIZE,) * 4, peers=2, first=1.0)
    swarm.train(SECONDS)
    taken = sum(peer.steps for peer in swarm.peers.values())
    really = taken * len(swarm.sizes) / swarm.applied
    # No headers of packets there.
    load = pace.Load(bytes=SIZE / pace.FRAMING, values=0.1 * pace.VALUES_A_SECOND)
    planned = (load, swarm.spec.sync, line_of(mbit), swarm.step)
    assert pace.interval_on(*planned) == pytest.approx(really, rel=0.15)
    waited = mean(one for peer in swarm.peers.values() for one in peer.seconds)
    assert pace.merged_seconds(*planned) == pytest.approx(waited, rel=0.15)


def test_a_line_that_carries_the_preset_leaves_its_interval() -> None:
    load = pace.Load(bytes=SIZE, values=0)
    assert pace.interval_on(load, sync_of(), line_of(100.0), 2.0) == 5
    assert pace.fitting_interval(load, sync_of(), line_of(100.0), 2.0) == 5


def test_half_the_line_twice_the_interval() -> None:
    load = pace.Load(bytes=SIZE, values=0)
    wide, narrow = (pace.interval_on(load, sync_of(), line_of(mbit), 0.1) for mbit in (4.0, 2.0))
    assert narrow == pytest.approx(2 * wide, rel=0.01)


def test_contents_take_longer_than_they_fill_a_line_that_is_far_away() -> None:
    load = pace.Load(bytes=SIZE, values=0)
    near, far = line_of(100.0, latency=0.0), line_of(100.0, latency=0.2)
    assert pace.line_seconds(load, near) == pace.line_seconds(load, far)
    longer = pace.contents_seconds(load, far) - pace.contents_seconds(load, near)
    assert longer == pytest.approx(0.2 * pace.START_TRIPS)
    sync = sync_of(overlap=0)
    waits = (pace.START_TRIPS + pace.ROUND_TRIPS["pair"]) * 0.2
    assert pace.steps_of(load, sync, far, 0.01) - pace.steps_of(load, sync, near, 0.01) == (
        pytest.approx(waits / 0.01, abs=1)
    )


def test_the_slower_direction_counts_whichever_it_is() -> None:
    load = pace.Load(bytes=SIZE, values=0)
    up, down = Line(up=1e6, down=9e6, latency=0.1), Line(up=9e6, down=1e6, latency=0.1)
    assert pace.line_seconds(load, up) == pace.line_seconds(load, down)


def test_an_interval_that_fits_results_as_it_is_written() -> None:
    for mbit in (0.5, 2.0, 8.0, 30.0):
        load = pace.Load(bytes=SIZE, values=1e7)
        interval = pace.fitting_interval(load, sync_of(), line_of(mbit), 0.3)
        written = sync_of(interval=interval)
        assert pace.interval_on(load, written, line_of(mbit), 0.3) == interval


def test_a_long_way_is_waited_for_by_an_exchange_and_not_by_the_line() -> None:
    load, near, far = pace.Load(bytes=1000, values=0), line_of(8.0), line_of(8.0, latency=2.0)
    assert pace.steps_of(load, sync_of(), far, 1.0) > pace.steps_of(load, sync_of(), near, 1.0)
    assert pace.line_seconds(load, far) == pace.line_seconds(load, near)
