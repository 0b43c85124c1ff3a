"""What must hold for a simulated swarm that one peer without a trainer keeps waiting: it calls
everybody for everything and takes all calls, asks for 299 seconds, and then sends nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.simulation import Conditions, Member
from lowcomm_node.simulation.network import SimulatedStream
from lowcomm_node.simulation.swarm import Swarm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange import events
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.spec.run import RunSpec

MODEL = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}
STEPS, BEGINS = 200, 50.0
"""Steps of a second each, and when it comes."""
HOLDER, AGAIN = "holder", 0.5
"""Seconds until it calls again where a call has ended."""


class Holder:
    """The peer, as the network sees it."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.swarm, self.network, self.name = swarm, swarm.network, name
        self.calls: dict[tuple[str, int], SimulatedStream] = {}
        self.linked: set[str] = set()
        self.accepted = 0
        self.network.after(BEGINS, self.call)

    def call(self) -> None:
        """Call everybody for everything that no open call is for."""
        over = all(peer.over for peer in self.swarm.peers)
        for peer in self.swarm.peers if not over else ():
            for fragment in range(self.swarm.spec.sync.fragments):
                if (peer.name, fragment) not in self.calls and peer.machine.position.ready:
                    stream = self.network.open(self.name, peer.name)
                    self.calls[peer.name, fragment] = stream
                    offer = peer.machine.position.offer(fragment, 0, 299)
                    self.network.send(stream, self.name, "hello", offer)
        if not over:
            self.network.after(AGAIN, self.call)

    def receive(self, stream: SimulatedStream, kind: str, payload: Any) -> None:
        """See Receiver."""
        other = stream.other(self.name)
        match kind, payload:
            case "hello", Offer() if self.network.now < BEGINS:
                self.network.send(stream, self.name, "refuse", Refusal.NOT_TRAINING)
            case "hello", Offer():
                self.linked.add(other)
                offer = replace(payload, seconds=299)
                self.network.send(stream, self.name, "accept", offer)
            case "accept", _:
                self.linked.add(other)
                self.accepted += 1
            case "roll", _:
                roll = tuple(sorted([self.name, *self.linked]))
                self.network.send(stream, self.name, "roll", events.Roll(peer=other, roll=roll))
            case "members", _:
                self.network.send(stream, self.name, "members", payload)
            case (("closed" | "refuse" | "abandon"), _):
                self.calls = {key: one for key, one in self.calls.items() if one is not stream}
            case _:
                pass  # contents, which it does not answer


class Kept(Swarm):
    """A swarm whose records name the holder, too."""

    def training(self) -> list[str]:
        return [*super().training(), HOLDER]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text("Some short sentences, and all of them much alike. " * 400)
    return open_data(f"text:{folder}", "bytes", folder / "cache")


def run(dataset: Dataset, method: str, hostile: bool) -> tuple[Swarm, Holder | None]:
    """Four honest peers, with the hostile one or without."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "kept", "seed": 3, "steps": STEPS},
            "model": MODEL,
            "train": {"batch": 2, "warmup": 5, "optimizer": "adamw"},
            "sync": {"method": method},
        }
    )
    kind = Kept if hostile else Swarm
    swarm = kind(spec, dataset, [Member()] * 4, Conditions(), Replica, False, 0)
    holder = None
    if hostile:
        holder = swarm.network.peers[HOLDER] = Holder(swarm, HOLDER)
    swarm.network.run()
    return swarm, holder


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "lowcomm",
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in ("diloco", "noloco", "streaming-diloco")
        ),
    ],
)
def test_a_peer_that_asks_for_long_and_sends_nothing_costs_at_most_a_fifth_of_the_exchanges(
    dataset: Dataset, method: str
) -> None:
    (alone, _), (attacked, holder) = (run(dataset, method, hostile) for hostile in (False, True))
    assert holder is not None and holder.accepted >= 4, "it gets in"
    before, after = (sum(peer.applied for peer in one.peers) for one in (alone, attacked))
    print(f"{method}: {before} exchanges without it, {after} with it")
    assert after >= 0.8 * before
    for peer in attacked.peers:
        assert {who for who, _, _ in peer.deeds} <= {holder.name}, "of honest peers nothing is held"
