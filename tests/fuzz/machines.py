"""Whole exchanges: what partners send, in any order, through the code that reads it into the
machines that decide."""

from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from target import MAX_PIECES, Made, cut, join, target

from lowcomm_node.errors import LinkLost
from lowcomm_node.node.messages import Retransmit
from lowcomm_node.sync import frames
from lowcomm_node.sync.link import GroupLink, Incoming, PairLink
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange import pair as pairs
from lowcomm_protocol.exchange.judging import UsualNorm, growth, plausible_norm
from lowcomm_protocol.exchange.robust import MEANS, robust_mean
from lowcomm_protocol.matching import Offer, Readiness, consider
from lowcomm_protocol.messages import exchange_pb2 as pb

ME, ADA, BOB = "peer-b", "peer-a", "peer-c"
SIZE = 5000
DATA = bytes(range(250)) * (SIZE // 250)
OFFER = Offer(
    protocol=3, run_id="00" * 32, plan="11" * 32, codec="fp32", fragment=0, round=1,
    swarm_step=40, steps=20,
    tokens=10_240, version=2, slow_digest=b"",
)  # fmt: skip
READY = Readiness(
    training=True,
    busy=False,
    has_room=True,
    min_steps=5,
    step_is_supported=True,
    fragment_count=4,
    longest=60,
)


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run what never waits: its streams are lists. No event loop, so an input takes
    microseconds."""
    try:
        work.send(None)
    except StopIteration:
        return
    finally:
        work.close()
    raise AssertionError("waits for what nobody brings")


class Said:
    """A stream on which all has been said already."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.frames, self.sent = iter(pieces), 0

    async def receive(self) -> pb.Frame | None:
        data = next(self.frames, None)
        if data is None:
            return None
        try:
            return pb.Frame.FromString(data)
        except DecodeError:
            raise ProtocolViolation("sent bytes that are no frame") from None

    async def send(self, frame: pb.Frame) -> None:
        self.sent += 1

    async def close(self) -> None: ...

    def cancel(self) -> None: ...


def content(data: bytes = DATA, part: Any = pb.WHOLE) -> bytes:
    return pb.Frame(
        content=pb.Content(size=len(data), digest=sha256(data).digest(), part=part)
    ).SerializeToString()


def chunk(data: bytes = DATA, offset: int = 0) -> bytes:
    return pb.Frame(chunk=pb.Chunk(offset=offset, data=data)).SerializeToString()


def said(*told: pb.Frame) -> list[bytes]:
    return [frame.SerializeToString() for frame in told]


CONFIRM = said(pb.Frame(confirm=pb.Confirm(members=pairs.members_digest([ME, ADA]))))
ABANDON = said(pb.Frame(abandon=pb.Abandon(reason="no more")))


@target
def offer() -> Made:
    def run(data: bytes) -> None:
        try:
            message = pb.Offer.FromString(data)
        except DecodeError:
            return
        try:
            theirs = frames.from_message(message)
        except ProtocolViolation:
            return
        assert max(theirs.steps, theirs.tokens, theirs.swarm_step) < 1 << 53
        consider(theirs, OFFER, READY)
        assert frames.from_message(frames.to_message(theirs)) == theirs

    return run, [frames.to_message(OFFER).SerializeToString(), pb.Offer().SerializeToString()]


@target
def refusal() -> Made:
    def run(data: bytes) -> None:
        try:
            reason, words = frames.read_refusal(pb.Refuse.FromString(data))
        except (DecodeError, ProtocolViolation):
            return
        assert reason and words

    return run, [
        pb.Refuse(reason=one, detail="why").SerializeToString()
        for one in ("busy", "full", "no such reason")
    ]


@target
def pair_link() -> Made:
    def run(data: bytes) -> None:
        pieces = list(cut(data))[:MAX_PIECES]
        into = bytearray(SIZE + 64)
        link = PairLink(ADA, Said(pieces))  # type: ignore[arg-type]
        asks = bool(pieces) and len(pieces[0]) % 2 == 0

        async def on_content(size: int, again: bool) -> Retransmit | None:
            assert size <= SIZE
            return Retransmit(blocks=b"\x80", least=100, most=100) if asks and not again else None

        try:
            drive(
                link.read(
                    memoryview(into)[:SIZE],
                    10,
                    on_content,
                    lambda blocks: None,
                    lambda members: None,
                )
            )
        except (LinkLost, ProtocolViolation) as error:
            assert len(str(error)) < 500
        assert into[SIZE:] == bytes(64), "written beside the slot"

    whole = [content(), chunk(DATA[:3000]), chunk(DATA[3000:], 3000)]
    resend = said(pb.Frame(resend=pb.Resend(blocks=b"\x80")))
    again = [content(DATA[:100]), chunk(DATA[:100])]
    return run, [
        join(b"", *whole, *CONFIRM), join(*whole, *resend, *CONFIRM),
        join(*whole, *again, *CONFIRM), join(*whole[:2], *ABANDON),
    ]  # fmt: skip


@target
def group_link() -> Made:
    def run(data: bytes) -> None:
        into = bytearray(SIZE + 64)
        link = GroupLink(ADA, Said(list(cut(data))[:MAX_PIECES]))  # type: ignore[arg-type]

        async def place(announced: Any) -> memoryview:
            return memoryview(into)[:SIZE]

        async def on_content(incoming: Incoming) -> None:
            assert incoming.whole

        try:
            drive(link.read(place, on_content, _read_all))
        except (LinkLost, ProtocolViolation) as error:
            assert len(str(error)) < 500
        assert into[SIZE:] == bytes(64), "written beside the slot"

    return run, [join(*_of_member()), join(*_of_member()[:3], *ABANDON)]


def _of_member() -> list[bytes]:
    """What a member of a group of three says, from its roll to its commit."""
    members, digest = sorted([ME, ADA, BOB]), sha256(DATA).digest()
    told = said(frames.roll(members), frames.members(members, members))
    last = said(frames.held([digest] * 3, bytes(8)), frames.commit([True] * 3, [True] * 3))
    return [*told, content(part=pb.SHARE), chunk(), content(part=pb.MEAN), chunk(), *last]


def _read_all(frame: pb.Frame) -> None:
    """As ``GroupRound`` reads what members tell; of a list of members, in a roll of three."""
    match frame.WhichOneof("kind"):
        case "roll":
            frames.read_roll(frame.roll)
        case "members":
            frames.read_members(frame.members, (ADA, ME, BOB))
        case "held":
            frames.read_held(frame.held)
        case "commit":
            frames.read_commit(frame.commit)


class Machine:
    """An exchange that is told things; every violation costs its peer, as in ``Round``."""

    def __init__(self, exchange: base.Gathering) -> None:
        self.exchange, self.applied = exchange, 0

    def take(self, effects: list[base.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, base.Apply):
                self.applied += 1
                assert ME in effect.members and len(effect.members) > 1
                assert set(effect.members) <= {ME, ADA, BOB}, "applies what is a stranger's"

    def tell(self, event: Any) -> None:
        over = self.exchange.over
        try:
            effects = self.exchange.handle(event)
        except ProtocolViolation as error:
            effects = self.exchange.handle(
                base.Lost(peer=getattr(event, "peer", ""), reason=str(error))
            )
        assert not (over and effects), "does something after its end"
        self.take(effects)

    def end(self) -> None:
        for event in (base.GatheringClosed(), base.DeadlinePassed(), base.DeadlinePassed()):
            self.tell(event)
        assert self.exchange.over, "outlives its deadline"
        assert self.applied <= 1


def events(data: bytes, read: Callable[[str, pb.Frame], Any], own: Sequence[Any]) -> list[Any]:
    """Pieces as events: the first byte of each says who speaks, or which of our own events
    happens."""
    told = []
    for piece in list(cut(data))[:MAX_PIECES]:
        if not piece:
            continue
        if piece[0] >= 128:
            told.append(own[piece[0] % len(own)])
            continue
        peer = (ADA, BOB, "stranger")[piece[0] % 3]
        try:
            told.append(read(peer, pb.Frame.FromString(piece[1:])))
        except (DecodeError, ProtocolViolation) as error:
            told.append(base.Lost(peer=peer, reason=str(error)))
    return [event for event in told if event is not None]


def _of_all(peer: str, frame: pb.Frame) -> Any:
    match frame.WhichOneof("kind"):
        case "hello":
            return base.Accepted(peer=peer, offer=frames.from_message(frame.hello), called_us=True)
        case "accept":
            return base.Accepted(peer=peer, offer=frames.from_message(frame.accept))
        case "refuse":
            reason, words = frames.read_refusal(frame.refuse)
            return base.Refused(peer=peer, reason=reason, detail=words)
        case "abandon":
            return base.Lost(peer=peer, reason=frame.abandon.reason[:200])
        case _:
            return None


@target
def pair() -> Made:
    def read(peer: str, frame: pb.Frame) -> Any:
        match frame.WhichOneof("kind"):
            case "content":
                return pairs.Verified(peer=peer)
            case "confirm":
                return pairs.Confirmed(peer=peer, members=frame.confirm.members)
            case _:
                return _of_all(peer, frame)

    own = [base.Captured(), base.GatheringClosed(), base.DeadlinePassed()]

    def run(data: bytes) -> None:
        machine = Machine(pairs.Exchange(me=ME, candidates=[ADA, BOB]))
        machine.take(machine.exchange.start())
        for event in events(data, read, own):
            if event == own[0] and machine.exchange.stage is not base.Stage.CAPTURING:
                continue  # our own trainer's, which does nothing unasked
            machine.tell(event)
        machine.end()

    message = frames.to_message(OFFER)
    accept, hello = (said(pb.Frame(**{kind: message}))[0] for kind in ("accept", "hello"))
    refuse = said(pb.Frame(refuse=pb.Refuse(reason="busy")))[0]
    return run, [
        join(b"\0" + accept, bytes([129]), b"\0" + content(), b"\0" + CONFIRM[0]),
        join(b"\0" + refuse, b"\1" + accept, bytes([129]), b"\1" + content(), b"\1" + CONFIRM[0]),
        join(b"\0" + hello, bytes([129]), b"\0" + ABANDON[0]),
    ]


@target
def group() -> Made:
    members, digest = sorted([ME, ADA, BOB]), sha256(DATA).digest()

    def read(peer: str, frame: pb.Frame) -> Any:
        match frame.WhichOneof("kind"):
            case "roll":
                return groups.RollCame(peer=peer, roll=frames.read_roll(frame.roll))
            case "members":
                return groups.MembersCame(
                    peer=peer, members=frames.read_members(frame.members, tuple(members))
                )
            case "content" if frame.content.part == pb.SHARE:
                return groups.ShardVerified(peer=peer)
            case "content":
                return groups.MeanVerified(peer=peer, digest=frame.content.digest)
            case "held":
                held, salt = frames.read_held(frame.held)
                return groups.HeldCame(peer=peer, held=held, salt=salt)
            case "commit":
                shards, heard = frames.read_commit(frame.commit)
                return groups.CommitCame(peer=peer, shards=shards, heard=heard)
            case _:
                return _of_all(peer, frame)

    own = [
        base.Captured(), groups.Reduced(digest=digest), base.GatheringClosed(),
        groups.AgreeingClosed(), groups.ReduceClosed(),
        groups.ConfirmingClosed(), base.DeadlinePassed(),
    ]  # fmt: skip

    def run(data: bytes) -> None:
        machine = Machine(groups.GroupExchange(me=ME, candidates=[ADA, BOB], group=3))
        machine.take(machine.exchange.start())
        captured = reduced = False
        for event in events(data, read, own):
            if isinstance(event, base.Captured):
                if captured or machine.exchange.stage is not base.Stage.CAPTURING:
                    continue
                captured = True
            if isinstance(event, groups.Reduced):
                if reduced or machine.exchange.stage is not base.Stage.AVERAGING:
                    continue
                reduced = True
            machine.tell(event)
        machine.end()

    accept = said(pb.Frame(accept=frames.to_message(OFFER)))[0]

    def story(*before: bytes) -> bytes:
        def each(frame: bytes) -> list[bytes]:
            return [b"\0" + frame, b"\1" + frame]

        roll, named, share, _, mean, _, held, commit = _of_member()
        first = [*each(accept), *each(roll), *each(named), bytes([133])]
        return join(
            *before, *first, *each(share), bytes([134]), *each(mean), *each(held), *each(commit)
        )

    return run, [story(), story(bytes([130])), story(b"\2" + accept)]


@target
def norms() -> Made:
    """Not bytes from a peer, but what a contribution of any values does to the means."""

    def run(data: bytes) -> None:
        values = np.frombuffer(data[: len(data) // 16 * 16], dtype="<f4").copy()
        if values.size == 0 or not np.isfinite(values).all() or np.abs(values).max() > 1e15:
            return
        contributions = [torch.from_numpy(row) for row in values.reshape(4, -1)]
        for kind in MEANS:
            mean = robust_mean(kind, contributions, [1, 2, 1, 1])
            assert bool(torch.isfinite(mean).all())
        usual = UsualNorm()
        for number, one in enumerate(contributions):
            norm = float(one.norm())
            usual.saw(f"peer{number}", norm)
            usual.applied(norm, growth(1.0, len(data)))
        assert plausible_norm(1.0, usual.value) >= 0.0

    rng = np.random.default_rng(0)
    return run, [rng.normal(0, scale, 64).astype("<f4").tobytes() for scale in (1e-6, 1.0, 1e6)]
