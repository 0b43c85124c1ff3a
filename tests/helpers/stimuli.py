"""A log of all that a peer's machine was told and looked up, which another machine can be told
again."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.events import Effect, PeerEvent, PeerView
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.spec.run import RunSpec


@dataclass(frozen=True)
class Stimulus:
    """One event, what was looked up meanwhile, and what was decided."""

    now: float
    event: PeerEvent
    effects: list[Effect]
    seen: list[tuple[str, Any]]


@dataclass
class Log:
    """Everything that a machine was told, in order."""

    me: str
    spec: RunSpec
    run_id: str
    deadlines: Deadlines
    stimuli: list[Stimulus] = field(default_factory=list[Stimulus])

    def replay(self) -> list[list[Effect]]:
        """What a new machine decides that is told the same. Raises AssertionError if it looks up
        something else."""
        around: Any = _Replayed()
        machine = Peer(self.me, self.spec, self.run_id, around, self.deadlines)
        decided: list[list[Effect]] = []
        for one in self.stimuli:
            around.seen = deque(one.seen)
            decided.append(machine.handle(one.now, one.event))
            assert not around.seen, f"did not look up {around.seen[0]}"
        return decided


class RecordedPeer(Peer):
    """A machine that keeps a log."""

    def __init__(
        self,
        me: str,
        spec: RunSpec,
        run_id: str,
        surroundings: PeerView,
        deadlines: Deadlines | None = None,
    ) -> None:
        around = _Recorded(surroundings)
        super().__init__(me, spec, run_id, around, deadlines)
        self.log = Log(me, spec, run_id, self.budget.deadlines)
        self._recorded = around

    def handle(self, now: float, event: PeerEvent) -> list[Effect]:
        """See Peer."""
        self._recorded.seen = []
        effects = super().handle(now, event)
        self.log.stimuli.append(Stimulus(now, event, list(effects), self._recorded.seen))
        return effects


class _Recorded:
    """A view that notes what was looked up."""

    def __init__(self, surroundings: PeerView) -> None:
        self.seen: list[tuple[str, Any]] = []
        self._through = surroundings

    def __getattr__(self, name: str) -> Any:
        def look(*args: Any, **named: Any) -> Any:
            answer = getattr(self._through, name)(*args, **named)
            self.seen.append((name, answer))
            return answer

        return look

    partners: Any
    training: Any
    furthest: Any
    knows: Any
    sharing: Any
    has_room_for: Any
    transfer_seconds: Any


class _Replayed:
    """A view that answers as before."""

    def __init__(self) -> None:
        self.seen: deque[tuple[str, Any]] = deque()

    def _answer(self, name: str) -> Any:
        known, answer = self.seen.popleft()
        assert known == name, f"looked up {name} where {known} had been looked up"
        return answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self._answer(name)


class FreeView:
    """The part of a ``PeerView`` in which every peer is known, and nothing is limited."""

    def knows(self, peer: str) -> bool:
        return True

    def sharing(self) -> int:
        return 0

    def has_room_for(self, place: str, callers: Sequence[str], free: int) -> bool:
        return True

    def transfer_seconds(self, size: int, streams: int) -> float:
        return 0.0
