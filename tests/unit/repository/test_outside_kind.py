"""What must hold for a kind of exchange of another package: it is trained with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.simulation import Member, contents, simulate
from lowcomm_node.simulation.contents import Contents
from lowcomm_node.trainer.capture import CAPTURES, PairCapture
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base, kinds, story
from lowcomm_protocol.exchange.base import Effect, Gathering, Stage
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.spec.run import RunSpec

STEPS = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Iterator[Dataset]:
    folder, threads = tmp_path_factory.mktemp("text"), torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(20):
        (folder / f"{number}.txt").write_text(
            f"The {number}th of twenty short texts, all much alike. " * 12
        )
    yield open_data(f"text:{folder}", "bytes", folder / "cache")
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Came:
    """The message of a partner has come."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Send(Effect):
    """Send the only message."""

    peer: str


@dataclass
class Echo(Gathering):
    """One message each way: a contribution that has come is its own confirmation."""

    _met: set[str] = field(default_factory=set)

    def start(self) -> list[Effect]:
        self._members |= {peer: base.Member(base.OFFERED) for peer in self.candidates[:1]}
        return [base.Dial(peer=peer) for peer in self.candidates[:1]] or self._close_gathering()

    def handle(self, event: Any) -> list[Effect]:
        match event:
            case _ if self.over:
                return []
            case base.Accepted():
                return self._on_accepted(event)
            case base.Refused(peer=peer, reason=reason, detail=detail):
                return self._on_refused(peer, reason, detail)
            case base.GatheringClosed():
                return self._on_gathering_closed()
            case base.Captured():
                return [Send(peer=self.partners[0]), *self._come(self.me)]
            case Came(peer=peer):
                return self._come(peer)
            case base.Lost(peer=peer, reason=reason):
                return self._end(reason) if self.is_open(peer) else []
            case _:
                return self._end("gave up, or ran past its deadline")

    def _begin(self) -> list[Effect]:
        self.stage = Stage.CAPTURING
        return [base.Capture(members=tuple(sorted([self.me, *self.partners])))]

    def _come(self, peer: str) -> list[Effect]:
        self._met.add(peer)
        members = tuple(sorted([self.me, *self.partners]))
        if self._met != set(members):
            return []
        self.stage = Stage.APPLIED
        offer = self.offer_of(self.partners[0])
        assert offer is not None
        return [base.Apply(members=members, swarm_step=offer.swarm_step)]

    def _step(self, peer: str, member: base.Member, event: str) -> list[Effect]:
        if event == base.ACCEPTED_INPUT and member.state != base.OFFERED:
            raise ProtocolViolation(f"{peer} has accepted twice.")
        ways = {
            base.ACCEPTED_INPUT: "partner",
            base.REFUSED_INPUT: base.REFUSED,
            base.FAILED_INPUT: base.LOST,
        }
        member.state = ways[event]
        return []


class EchoContents(Contents):
    CONTENTS = WHOLE = frozenset({"echo"})

    def event(self, other: str, kind: str, payload: Any) -> Any:
        raise AssertionError(f"{kind} is no message of ours")

    def effect(self, effect: Effect) -> None:
        assert isinstance(effect, Send)
        self.send(effect.peer, "echo", self.content)

    def code(self) -> None:
        capture = self.replica.capture_of(self.fragment)
        out = bytearray(capture.coder.max_size)
        self.content = bytes(out[: capture.encode(memoryview(out))])

    def decode(self, other: str, kind: str, data: bytes) -> Any:
        self.replica.capture_of(self.fragment).receive(other, memoryview(data))
        return Came(peer=other)

    def pool(self, effect: base.Apply) -> None:
        told.append(self.one)
        self.replica.capture_of(self.fragment).pool(self.tokens(effect.members))


class EchoCapture(PairCapture):
    """It weighs nothing: who has trained more counts no more."""

    def pool(self, over: Mapping[str, int]) -> None:
        super().pool(dict.fromkeys(over, 1))


told: list[Underway] = []
ECHO = kinds.Kind(
    name="echo",
    fits=lambda sync: sync.group == 2,
    machine=lambda me, candidates, group: Echo(me=me, candidates=candidates),
    timetable=lambda hello, deadline: [
        (hello, base.GatheringClosed()),
        *kinds.timetable(hello, deadline),
    ],
    contents=1,
    slots=2,
    all_call=False,
    events=(Came,),
)


def test_a_kind_of_exchange(dataset):
    told.clear()
    spec = RunSpec.model_validate(
        {
            "run": {"name": "outside", "steps": STEPS},
            "model": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16},
            "train": {"batch": 4, "warmup": 2, "learning_rate": 0.01},
            "sync": {"method": "noloco", "interval": 6},
        }
    )
    with contents.registered(ECHO, EchoContents, EchoCapture):
        alone = simulate(
            spec.model_copy(update={"sync": spec.sync.model_copy(update={"group": 1})}), dataset, 3
        )
        result = simulate(spec, dataset, [Member(), Member(), Member(speed=0.9)])
        for one in told:
            decided = [
                effect for _, effects in story.replay(one.story.to_json()) for effect in effects
            ]
            assert isinstance(decided[-1], base.Apply), (
                "its story is told and replayed as that of any kind"
            )
    assert result.applied == len(told) > 4
    assert result.spread < alone.spread / 3, "it brings peers together"
    assert kinds.kind_of(spec.sync) is kinds.PAIR, "it is unregistered"
    assert "echo" not in contents.CONTENTS and "echo" not in CAPTURES
    with pytest.raises(KeyError):
        kinds.kind_named("echo")
