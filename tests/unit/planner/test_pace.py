"""Bytes of an exchange are those that coders write; the interval that results is the one at which
peers of the protocol exchange in virtual time."""

import numpy as np
import pytest

from helpers.slow_lines import MBIT, Swarm
from lowcomm_node.planner import pace
from lowcomm_node.planner.line import Line
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.spec.run import RunSpec

SECONDS = 400.0
SIZE = 1_000_000
"""Bytes of a coded fragment."""
NUMEL = 5000


def sync_of(method: str = "lowcomm", **changes):
    return RunSpec.model_validate(
        {"run": {"name": "a"}, "sync": {"method": method, **changes}}
    ).sync


@pytest.mark.parametrize("mbit", [2.0, 10.0])
def test_the_interval_is_that_of_peers_in_virtual_time(
    mbit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FILLED", 1.0)  # its lines are never idle
    monkeypatch.setattr(pace, "START_TRIPS", 0.0)  # and carry at once what they can
    swarm = Swarm((8 * mbit * MBIT, 80 * mbit * MBIT), (SIZE,) * 4, peers=2, first=1.0)
    swarm.train(SECONDS)
    taken = sum(peer.steps for peer in swarm.peers.values())
    really = taken * len(swarm.sizes) / swarm.applied
    line = Line(up=f"{mbit}Mbit", down=f"{10 * mbit}Mbit", step_seconds=swarm.step, peers=2)
    # No headers of packets there.
    coded, values = SIZE / pace.FRAMING, 0.1 * pace.VALUES_A_SECOND
    planned = pace.pace_on(line, swarm.spec.sync, coded, values)
    assert planned.interval == pytest.approx(really, rel=0.15)


@pytest.mark.parametrize("codec", ["fp32", "mod4"])
def test_contents_of_a_pair_are_what_its_coder_writes(codec: str) -> None:
    near = np.linspace(-1, 1, NUMEL, dtype=np.float32)
    one, two = coder(codec, NUMEL), coder(codec, NUMEL)
    out, back = memoryview(bytearray(one.max_size)), memoryview(bytearray(one.max_size))
    for _ in range(2):  # modulo codecs know how far both are apart from the second time on
        vector = near + np.float32(1e-3) * np.cos(np.arange(NUMEL, dtype=np.float32))
        size = one.encode(vector, out)
        there = two.encode(near.copy(), back)
        one.decode(back[:there], np.empty(NUMEL, dtype=np.float32))
        two.decode(out[:size], np.empty(NUMEL, dtype=np.float32))
        one.commit()
        two.commit()
    assert pace.contents(sync_of("lowcomm", codec=codec), NUMEL, 2) == size


@pytest.mark.parametrize("members", [2, 3, 8])
def test_contents_of_a_group_are_what_the_member_that_sends_most_writes(members: int) -> None:
    one, bounds = shard_coder("q2", NUMEL, feedback=True), shard_bounds(NUMEL, members)
    sent = []
    for mine, (start, stop) in enumerate(bounds):
        out = memoryview(bytearray(one.max_size))
        shares = one.encode(np.ones(NUMEL, dtype=np.float32), mine, bounds, out)
        mean = one.reduce(np.ones(stop - start, dtype=np.float32), start, out)
        one.forget()
        sent.append(sum(shares) + (members - 1) * mean)
    assert pace.contents(sync_of("streaming-diloco"), NUMEL, members) == max(sent)
