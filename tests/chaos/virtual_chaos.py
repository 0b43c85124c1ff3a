"""Virtual peers (``helpers/virtual.py``) to which faults happen by plan: on the way of their
messages, or to their processes."""

from collections.abc import Callable

from faults import Boundary, Fault, Injector, Kind, Plan

from helpers.virtual import CALM, DEADLINE, LAST_WORDS, Part, Swarm, VirtualPeer, Weather, check
from lowcomm_node.simulation.network import SimulatedStream
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.underway import Underway

PAIR_FRAMES = ("hello", "accept", "content", "confirm")
GROUP_FRAMES = ("hello", "accept", "roll", "members", "shard", "mean", "holdings", "commit")
_REQUESTS: dict[type[events.Effect], str] = {
    events.Capture: "capture",
    events.Reduce: "reduce",
    events.Apply: "merge",
}
PAIR_REQUESTS = ("capture", "merge")
GROUP_REQUESTS = ("capture", "reduce", "merge")
CHAOTIC = frozenset({Kind.DROP, Kind.DUPLICATE, Kind.REORDER})
"""What no transport of ours does: then honest peers may accuse each other, but nothing else may go
wrong."""


class ChaoticSwarm(Swarm):
    """A calm swarm, but for what is planned for some of its peers, by their places."""

    def __init__(
        self, seed: int, size: int, group: int, plans: dict[int, Plan], weather: Weather = CALM
    ) -> None:
        super().__init__(seed, size, group, weather)
        names = list(self.peers)
        self.injectors = {names[place]: Injector(plan) for place, plan in plans.items()}
        self.story += f", plans {plans}"
        self.hurt: set[str] = set()
        """Peers whose process or trainer was hit: what they hold afterwards is their last
        checkpoint."""
        self._awake: dict[str, float] = {}
        """When a peer that stands still goes on."""
        self._held_back: dict[tuple[SimulatedStream, str], Callable[[], None]] = {}
        self._stalled: set[tuple[SimulatedStream, str]] = set()
        for name in self.injectors:
            self._watch(self.peers[name])

    @property
    def fired(self) -> list[Fault]:
        """What has gone wrong."""
        return [fault for injector in self.injectors.values() for fault in injector.fired]

    @property
    def victims(self) -> list[VirtualPeer]:
        """The peers that faults are planned for."""
        return [self.peers[name] for name in self.injectors]

    # messages

    def send(
        self,
        stream: SimulatedStream,
        sender: str,
        kind: str,
        payload: object = None,
        size: int = 0,
        late: float = 0.0,
    ) -> None:
        def pass_on(later: float = 0.0) -> None:
            super(ChaoticSwarm, self).send(stream, sender, kind, payload, size, late + later)

        if (stream, sender) in self._stalled:
            return
        fault = self._due(sender, Boundary.FRAME, kind)
        if fault is None or self._happens_to_process(fault, self.peers[sender]):
            if not self.peers[sender].dead or fault is None:
                pass_on()
            held = self._held_back.pop((stream, sender), None)
            if held is not None:
                held()
            return
        match fault.kind:
            case Kind.DELAY:
                pass_on(fault.seconds)
            case Kind.DUPLICATE:
                pass_on()
                pass_on()
            case Kind.REORDER:
                self._held_back[stream, sender] = pass_on
            case Kind.STALL:
                self._stalled.add((stream, sender))
            case Kind.TRUNCATE | Kind.CORRUPT:
                # What is too short or does not match its digest costs the stream when it is read;
                # nothing after it is.
                super().send(stream, sender, "closed", late=late)
                self._stalled.add((stream, sender))
                self.at(stream.arrived[stream.other(sender)], lambda: self.break_(stream))
            case _:
                assert fault.kind is Kind.DROP

    def _due(self, name: str, boundary: Boundary, what: str) -> Fault | None:
        injector = self.injectors.get(name)
        return injector.due(boundary, what) if injector is not None else None

    # processes

    def _watch(self, peer: VirtualPeer) -> None:
        after, receive, new_exchange = peer.after, peer.receive, peer.new_exchange

        def when_awake(action: Callable[[], None]) -> None:
            awake = self._awake.get(peer.name, 0.0)
            if self.now < awake:
                self.at(awake, lambda: None if peer.dead else action())
            else:
                action()

        def watched(one: Underway) -> Part:
            part = new_exchange(one)
            carry_out = part.carry_out
            part.carry_out = lambda effect: self._carry_out(part, effect, carry_out)
            return part

        peer.after = lambda seconds, action: after(seconds, lambda: when_awake(action))
        peer.receive = lambda stream, kind, payload: when_awake(
            lambda: receive(stream, kind, payload)
        )
        peer.new_exchange = watched

    def _carry_out(
        self, part: Part, effect: events.Effect, carry_out: Callable[[events.Effect], None]
    ) -> None:
        request = _REQUESTS.get(type(effect))
        fault = self._due(part.peer.name, Boundary.PIPE, request) if request is not None else None
        if fault is None:
            carry_out(effect)
        elif self._happens_to_process(fault, part.peer):
            if not part.peer.dead:
                carry_out(effect)
        else:
            self._happens_to_trainer(fault, part, effect, carry_out)

    def _happens_to_process(self, fault: Fault, peer: VirtualPeer) -> bool:
        """Let it happen, if it is nothing that happens to a message or a trainer."""
        match fault.kind:
            case Kind.KILL:  # the kernel closes its streams; what was on its way may be gone
                peer.die(noticed=True)
                self.hurt.add(peer.name)
            case Kind.EXIT:
                for stream in peer.streams:
                    self.close(stream, peer.name)
                peer.over = True
                self.hurt.add(peer.name)
            case Kind.STOP:
                self._awake[peer.name] = self.now + fault.seconds
                peer.began += fault.seconds  # its own clocks stood still as well
            case Kind.CLOCK_STEP:  # beyond all deadlines
                peer.set_clock(DEADLINE + LAST_WORDS)
            case _:
                return False
        return True

    def _happens_to_trainer(
        self,
        fault: Fault,
        part: Part,
        effect: events.Effect,
        carry_out: Callable[[events.Effect], None],
    ) -> None:
        merging = isinstance(effect, events.Apply)
        if merging:
            if fault.kind is not Kind.DELAY:
                self.hurt.add(
                    part.peer.name
                )  # the exchange is applied, and this trainer has not done it
            carry_out(effect)
        elif fault.kind is Kind.OUT_OF_MEMORY:
            part.peer.after(
                0.0, lambda: part.tell(events.GaveUp(reason="the trainer ran out of memory"))
            )
        elif fault.kind is Kind.DELAY:
            part.peer.after(fault.seconds, lambda: None if part.decided else carry_out(effect))


def check_chaos(swarm: ChaoticSwarm) -> None:
    """What must hold whatever has gone wrong."""
    if any(fault.kind in CHAOTIC for fault in swarm.fired):
        swarm.violations.clear()
    for name in swarm.hurt:
        swarm.peers[name].over = True
    check(swarm)
