"""Streams of exchanges: what partners send, in any order, through the code that reads it."""

from collections.abc import Coroutine, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from target import MAX_PIECES, Made, cut, join, target

from lowcomm_node.errors import LinkLost
from lowcomm_node.sync import frames
from lowcomm_node.sync.link import GroupLink, Incoming, PairLink
from lowcomm_node.trainer.judging import UsualNorm, growth, plausible_norm
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import pair as pairs
from lowcomm_protocol.exchange.robust import MEANS, robust_mean
from lowcomm_protocol.matching import Offer, consider
from lowcomm_protocol.messages import exchange_pb2 as pb

ME, ADA, BOB = "peer-b", "peer-a", "peer-c"
SIZE = 5000
DATA = bytes(range(250)) * (SIZE // 250)
OFFER = Offer(
    protocol=3, run_id="00" * 32, plan="11" * 32, codec="fp32", fragment=0, round=1,
    swarm_step=40, steps=20,
    tokens=10_240, version=2, slow_digest=b"",
)  # fmt: skip


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
        consider(theirs, OFFER, 4, [])
        assert frames.from_message(frames.to_message(theirs)) == theirs

    return run, [frames.to_message(OFFER).SerializeToString(), pb.Offer().SerializeToString()]


@target
def refusal() -> Made:
    def run(data: bytes) -> None:
        try:
            reason = frames.read_refusal(pb.Refuse.FromString(data))
        except (DecodeError, ProtocolViolation):
            return
        assert reason

    return run, [
        pb.Refuse(reason=one).SerializeToString() for one in ("busy", "full", "no such reason")
    ]


@target
def pair_link() -> Made:
    def run(data: bytes) -> None:
        pieces = list(cut(data))[:MAX_PIECES]
        into = bytearray(SIZE + 64)
        link = PairLink(ADA, Said(pieces))  # type: ignore[arg-type]
        asks = bool(pieces) and len(pieces[0]) % 2 == 0

        async def place(announced: Any) -> tuple[memoryview, int]:
            return memoryview(into)[:SIZE], 10

        async def on_content(content: Incoming) -> None:
            assert content.size <= SIZE
            link.awaits_more = asks and not link.awaits_more

        try:
            drive(link.read(place, on_content, lambda members: None))
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

        async def place(announced: Any) -> tuple[memoryview, int]:
            return memoryview(into)[:SIZE], SIZE

        async def on_content(incoming: Incoming) -> None:
            assert incoming.whole

        try:
            drive(link.read(place, on_content, lambda frame: frames.message_of(ADA, frame)))
        except (LinkLost, ProtocolViolation) as error:
            assert len(str(error)) < 500
        assert into[SIZE:] == bytes(64), "written beside the slot"

    return run, [join(*_of_member()), join(*_of_member()[:3], *ABANDON)]


def _of_member() -> list[bytes]:
    """What a member of a group of three says, from its roll to its commit."""
    members, digest = sorted([ME, ADA, BOB]), sha256(DATA).digest()
    roll, named = pb.Roll(peers=members), pb.Members(peers=members)
    told = said(pb.Frame(roll=roll), pb.Frame(members=named))
    held, votes = pb.Held(digests=[digest] * 3), pb.Commit(applied=[True] * 3, known=[True] * 3)
    last = said(pb.Frame(held=held), pb.Frame(commit=votes))
    return [*told, content(part=pb.SHARE), chunk(), content(part=pb.MEAN), chunk(), *last]


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
