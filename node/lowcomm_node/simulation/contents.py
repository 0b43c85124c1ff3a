"""What exchanges of simulated replicas carry: contributions, coded to bytes, decoded by the
receiver's capture.

A kind of exchange has one entry in `CONTENTS`.
"""

from abc import abstractmethod
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from lowcomm_node.simulation.driver import SimulatedExchange
from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.codecs import nearby
from lowcomm_protocol.errors import CodecError, ImplausibleError, LowcommError, Offence
from lowcomm_protocol.exchange import events, kinds
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import lot

if TYPE_CHECKING:  # which imports this module
    from lowcomm_node.simulation.peer import SimulatedPeer

ENDLESS = 8
"""How often a liar sends contents that have no end."""


class Contents(SimulatedExchange):
    """Captures and merges at step boundaries, and what is decoded in between."""

    peer: "SimulatedPeer"

    def __init__(self, peer: "SimulatedPeer", one: Underway) -> None:
        super().__init__(peer, one)
        self.replica = peer.replica
        self.fragment = one.fragment

    @abstractmethod
    def code(self) -> None:
        """Code our contribution, which has been captured. Raises CodecError."""

    @abstractmethod
    def decode(self, other: str, kind: str, data: bytes) -> Any:
        """Decode contents; the event that follows. Raises CodecError or ImplausibleError."""

    @abstractmethod
    def pool(self, effect: events.Apply) -> None:
        """Make the mean of what is applied."""

    def capture(self, members: tuple[str, ...]) -> None:
        self.peer.at_boundary.append(self._capture)

    def _capture(self) -> None:
        one = self.one
        if one.machine.over:
            return
        self.replica.capture(self.fragment, one.realign, one.members, one.ahead, one.apart)
        self.peer.realigned += one.realign
        self.replica.captures[self.fragment].keep_momentum = one.keep_momentum
        try:
            self.code()
        except CodecError as error:
            self.tell(events.GaveUp(reason=str(error)))
            return
        self.captured()

    def use(self, other: str, kind: str, payload: bytes) -> None:
        try:
            event = self.decode(other, kind, payload)
        except (CodecError, ImplausibleError) as error:
            self.fail(other, str(error), deed=self.offence(error), stands=True)
            return
        if event is not None:
            self.tell(event)

    def offence(self, error: LowcommError) -> Offence | None:
        """What is held against the sender of contents that can't be used."""
        implausible = isinstance(error, ImplausibleError)
        self.peer.implausible += implausible
        return error.deed if implausible else Offence.HEAVY

    def apply(self, effect: events.Apply) -> None:
        self.pool(effect)
        self.replica.outer(self.fragment)
        ripe = self.replica.captures[self.fragment].steps + self.peer.sync.overlap
        self.peer.ripening.append((ripe, lambda: self._merge(effect.swarm_step)))

    def _merge(self, swarm_step: int) -> None:
        replica = self.replica
        replica.merge(self.fragment, swarm_step)
        self.peer.applied += 1
        progress = replica.schedule[self.fragment]
        merged = events.Merged(
            swarm_step=replica.clock.step,
            steps=progress.merged_steps,
            tokens=progress.merged_tokens,
            slow_digest=bytes.fromhex(replica.slow_digest(self.fragment)),
            momentum_digest=bytes.fromhex(replica.momentum_digest(self.fragment)),
        )
        self.tell(merged)

    def drop(self) -> None:
        self.peer.failed += 1
        self.replica.drop(self.fragment)
        if self.one.call is None:
            self.replica.schedule.skip(self.fragment, self.replica.clock.step)

    def tokens(self, peers: tuple[str, ...]) -> dict[str, int]:
        """What weighs the contributions of these members, in this order."""
        return {peer: (self.one.machine.offer_of(peer) or self.one.offer).tokens for peer in peers}

    def send(self, other: str, kind: str, data: bytes) -> None:
        """Send contents."""
        stream, peer = self.links[other], self.peer
        for _ in range(ENDLESS if peer.lie == "endless" else 1):
            peer.bytes_sent += len(data)
            self.network.send(stream, peer.name, kind, data, len(data), peer.delay)


class PairContents(Contents):
    """Two peers send each other the whole fragment."""

    CONTENTS = frozenset({"content", "resend", "again"})
    WHOLE = frozenset({"content", "again"})
    content = b""

    @property
    def captured_pair(self) -> PairCapture:
        """Of our replica."""
        return cast("PairCapture", self.replica.capture_of(self.fragment))

    def decode(self, other: str, kind: str, data: bytes) -> Any:
        capture = self.captured_pair
        if kind == "content" and (again := capture.receive(other, memoryview(data))):
            self.send(other, "resend", again)
            return None
        if kind == "resend":
            self.send(other, "again", self._coded(lambda out: capture.resend(data, out)))
            return None
        if kind == "again":
            capture.patch(other, memoryview(data))
        return events.WholeContribution(peer=other)

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.WholeContribution(peer=other):
                self.send(other, "content", self.content)
            case _:
                super().effect(effect)

    def code(self) -> None:
        self.content = self._coded(lambda out: sum(self.captured_pair.encode(out)))

    def _coded(self, encode: Callable[[memoryview], int]) -> bytes:
        out = bytearray(self.captured_pair.coder.max_size)
        return self.peer.altered(bytes(out[: encode(memoryview(out))]))

    def pool(self, effect: events.Apply) -> None:
        self.captured_pair.pool(self.tokens(effect.members))


class GroupContents(Contents):
    """Every member averages one shard."""

    CONTENTS = frozenset({"shard", "mean", "missed"})
    WHOLE = frozenset({"shard", "mean"})
    mean = b""

    def __init__(self, peer: "SimulatedPeer", one: Underway) -> None:
        super().__init__(peer, one)
        self.shares: dict[str, bytes] = {}

    @property
    def captured_group(self) -> GroupCapture:
        """Of our replica."""
        return cast("GroupCapture", self.replica.capture_of(self.fragment))

    def decode(self, other: str, kind: str, data: bytes) -> Any:
        if kind == "missed":
            self._take_over(memoryview(data))
            return events.MissedSteps(peer=other)
        if kind == "shard":
            if other not in self.one.muted:
                self._receive(other, memoryview(data))
            return events.Shard(peer=other)
        self.captured_group.receive_mean(other, memoryview(data))
        return events.ShardMean(peer=other, digest=sha256(data).digest())

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.MissedSteps(peer=other):
                lacking = self.one.lacking
                assert lacking is not None
                missed = self.replica.missed(self.fragment, lacking.steps[other])
                self.send(other, "missed", self.peer.altered(missed))
            case events.Shard(peer=other):
                self.send(other, "shard", self.shares[other])
            case events.Reduce(contributors=contributors):
                self._reduce(contributors)
            case events.ShardMean(peer=other):
                self.send(other, "mean", self.mean)
            case _:
                super().effect(effect)

    def code(self) -> None:
        capture = self.captured_group
        out, start = bytearray(8 * capture.numel + 4096), 0
        for owner, size in zip(capture.members, capture.encode(memoryview(out)), strict=True):
            self.shares[owner] = self.peer.altered(bytes(out[start : start + size]))
            start += size

    def _receive(self, other: str, data: memoryview) -> None:
        try:
            self.captured_group.receive(other, data)
        except (CodecError, ImplausibleError) as error:
            if len(self.one.members) < groups.OUTVOTE:
                raise
            self.tell(events.Unused(peer=other, reason=str(error), deed=self.offence(error)))

    def _take_over(self, data: memoryview) -> None:
        lacking = self.one.lacking
        assert lacking is not None
        digests = lacking.slow_digest.hex(), lacking.momentum_digest.hex()
        steps = lacking.steps[self.peer.name]
        self.replica.take_over(self.fragment, data, steps, digests)
        self.peer.taken_over += steps

    def _reduce(self, contributors: tuple[str, ...]) -> None:
        capture = self.captured_group
        out = bytearray(8 * capture.numel + 4096)
        if not self.one.realign:
            self._read_another_cell()
        used = tuple(peer for peer in contributors if peer not in self.one.muted)
        self.mean = bytes(out[: capture.reduce(self.tokens(used), memoryview(out))])
        self.tell(events.Reduced(digest=sha256(self.mean).digest()))
        for other, error in capture.left_out.items() if not self.one.machine.over else ():
            self.fail(other, str(error), deed=self.offence(error), stands=True)

    def _read_another_cell(self) -> None:
        """Take in another cell's slow weights in our shard; the giver serves at once."""
        capture, world, fragment = self.captured_group, self.peer.world, self.fragment
        others = [one for one in world.others(self.peer) if one.cell != self.peer.cell]
        if not others:
            return
        where = f"{self.peer.name}/{fragment}/{self.one.offer.round}"
        giver = min(others, key=lambda one: lot(where, one.name))
        start, stop = capture.bounds[capture.mine]
        codes = self.replica.nearby[fragment].codes(start, stop)
        out = bytearray(nearby.largest(stop - start))
        size = giver.replica.give_slow(fragment, start, codes, memoryview(out))
        giver.bytes_sent += size
        self.peer.bytes_sent += len(codes)
        self.replica.take_slow(fragment, memoryview(out)[:size])

    def pool(self, effect: events.Apply) -> None:
        owners = [
            owner for owner, applied in zip(effect.members, effect.shards, strict=True) if applied
        ]
        self.captured_group.pool(owners)


CONTENTS: dict[str, type[Contents]] = {
    kinds.PAIR.name: PairContents,
    kinds.GROUP.name: GroupContents,
}
"""By the name of the kind; a kind of your own adds an entry."""
