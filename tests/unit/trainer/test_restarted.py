"""A peer that has just come back is judged by the same bound as all: near it, nothing is held
against an honest one."""

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.trainer import state
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.errors import Deed, ImplausibleError
from lowcomm_protocol.peers.trust import BOUND, FORGIVEN, Trust
from lowcomm_protocol.spec.run import RunSpec

STEPS = 5
"""Inner steps of both before they meet."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(
            f"The {number}th of twenty short texts, all much alike. " * 12
        )
    return open_data(f"text:{folder}", "bytes", folder / "cache")


def replica(dataset: Dataset, name: str, method: str) -> Replica:
    model = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}
    spec = RunSpec.model_validate(
        {"run": {"name": "a", "steps": 100}, "model": model, "train": {"batch": 2},
         "sync": {"method": method, "codec": "fp32", "error_feedback": False}},
    )  # fmt: skip
    return Replica(spec, name, dataset, torch.device("cpu"))


def restarted(one: Replica, dataset: Dataset, method: str) -> Replica:
    """What a new process makes of the last checkpoint of a replica."""
    parts, meta = state.snapshot(one)
    again = replica(dataset, one.peer_id, method)
    state.restore(again, parts, meta)
    return again


def brought(times: float, dataset: Dataset, method: str) -> tuple[float, ImplausibleError | None]:
    """A peer restarts and brings progress of ``times`` what is plausible: its norm, and how the
    other judges it."""
    judge, peer = replica(dataset, "judge", method), replica(dataset, "peer", method)
    for one in (judge, peer):
        for _ in range(STEPS):
            one.inner_step()
    peer = restarted(peer, dataset, method)
    judge.usual[0].applied(1.0, 1.0)  # they have met before
    judge.capture(0, members=("judge", "peer"))
    peer.capture(0, members=("judge", "peer"))
    mine, theirs = judge.captures[0], peer.captures[0]
    # All its progress is in our direction, and this large.
    norm = times * mine.bound.limit
    progress = mine.theta - mine.phi
    vector = progress * (norm / float(progress.norm())) + mine.pull * mine.phi
    out = memoryview(bytearray(theirs.coder.max_size))
    size = theirs.coder.encode(vector.numpy(), out)
    try:
        judge.capture_of(0).receive("peer", out[:size])
    except ImplausibleError as error:
        return norm, error
    return norm, None


def costs(error: ImplausibleError | None, times: int = 1) -> float:
    """The score of a peer that is judged so again and again."""
    trust = Trust(interval=100)
    for _ in range(times if error is not None and error.deed is not None else 0):
        assert error is not None and error.deed is not None
        if error.deed is not Deed.STUMBLE:
            trust.hold("peer", error.deed, 0)
        elif trust.stumbled("peer"):
            trust.hold("peer", Deed.LIGHT, 0)
    return trust.score("peer", 0)


@pytest.mark.parametrize("method", ["lowcomm", "noloco"])
def test_a_peer_that_has_restarted_and_brings_a_hair_more_than_is_plausible_has_done_nothing(
    dataset: Dataset, method: str
) -> None:
    _, within = brought(0.999, dataset, method)
    norm, error = brought(17.6 / 17.5, dataset, method)
    assert within is None
    assert error is not None and f"norm {norm:.3g}" in str(error), "it is not merged"
    assert error.deed is not Deed.HEAVY
    assert costs(error, FORGIVEN) == 1.0
    assert costs(error, FORGIVEN + 2) >= BOUND, "nor is it left out where that goes on for a while"


@pytest.mark.parametrize("method", ["lowcomm", "noloco"])
def test_what_is_ten_times_beyond_is_a_heavy_deed(dataset: Dataset, method: str) -> None:
    _, error = brought(10.0, dataset, method)
    assert error is not None and error.deed is Deed.HEAVY
    assert costs(error) == 0.0
