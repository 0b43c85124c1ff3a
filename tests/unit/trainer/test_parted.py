"""Honest peers whose slow weights have parted are believed; whoever brings more is not."""

from pathlib import Path
from random import Random

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.trainer.capture import PairCapture
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.exchange.position import Company
from lowcomm_protocol.spec.run import RunSpec

SPEC = RunSpec.model_validate(
    {
        "run": {"name": "parted", "steps": 1000},
        "model": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16},
        "train": {"batch": 2, "optimizer": "muon", "warmup": 8},
        "sync": {"method": "lowcomm", "codec": "fp32", "fragments": 1, "overlap": 0},
    }
)
PAIRS = ("ab", "cd")
"""Who meets again and again; then a meets c."""


class Peer:
    """A replica on text of its own, so that its progress points elsewhere."""

    def __init__(self, name: str, folder: Path) -> None:
        draw = Random(name)
        letters = draw.sample("abcdefghijklmnopqrstuvwxyz", 6)
        text = folder / name
        text.mkdir()
        for number in range(20):
            (text / f"{number}.txt").write_text("".join(draw.choices(letters, k=400)))
        data: Dataset = open_data(f"text:{text}", "bytes", text / "cache")
        self.name = name
        self.replica = Replica(SPEC, name, data, torch.device("cpu"))
        self.company = Company()

    @property
    def capture(self) -> PairCapture:
        return self.replica.captures[0]  # type: ignore[return-value]

    def bring(self, to: "Peer") -> memoryview:
        """Capture a contribution to an exchange; coded."""
        self.replica.capture(0, apart=self.company.apart(0, to.name))
        out = memoryview(bytearray(self.capture.coder.max_size))
        return out[: self.capture.encode(out)]

    def merge(self, other: "Peer") -> None:
        self.capture.pool(dict.fromkeys(sorted((self.name, other.name)), 1))
        self.company.merged(0, other.name, self.capture.steps)
        self.replica.outer(0)
        self.replica.merge(0, self.replica.clock.step)


def meet(one: Peer, other: Peer) -> None:
    """A whole exchange."""
    brought = [here.bring(there) for here, there in ((one, other), (other, one))]
    one.capture.receive(other.name, brought[1])
    other.capture.receive(one.name, brought[0])
    one.merge(other)
    other.merge(one)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Peer]:
    """Four peers, of which two halves have met nobody else for four rounds."""
    folder = tmp_path_factory.mktemp("parted")
    found = {name: Peer(name, folder) for name in "abcd"}

    def train() -> None:
        for peer in found.values():
            for _ in range(SPEC.sync.interval):
                peer.replica.inner_step()

    for _ in range(4):
        train()
        for one, other in PAIRS:
            meet(found[one], found[other])
    train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False])
def test_two_halves_that_have_met_only_themselves_believe_each_other(
    peers: dict[str, Peer], knows: bool
):
    a, c = peers["a"], peers["c"]
    a.bring(c)
    contribution = c.bring(a)
    if not knows:
        a.replica.capture(0)
        with pytest.raises(ImplausibleError):  # as all did until a capture knew it
            a.capture.receive("c", contribution)
    else:
        a.capture.receive("c", contribution)
        assert a.capture.norms


@pytest.mark.slow
def test_what_a_liar_may_bring_then_is_what_its_claim_made_plausible_before(
    peers: dict[str, Peer],
):
    a = peers["a"]
    a.replica.capture(0, ahead=10**9)
    claimed = a.capture.bound.limit
    a.bring(peers["c"])
    assert a.capture.bound.limit <= claimed
    lie = a.capture.theta - a.capture.phi
    for norm, is_refused in ((claimed * 1.01, True), (claimed / 10, False)):
        vector = lie * (norm / float(lie.norm())) + a.capture.pull * a.capture.phi
        coded = memoryview(bytearray(vector.numpy().tobytes()))
        if is_refused:
            with pytest.raises(ImplausibleError):
                a.capture.receive("liar", coded)
        else:
            a.capture.receive("liar", coded)
