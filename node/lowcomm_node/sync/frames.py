"""Offers, refusals and what members tell each other, as frames and back; nothing of a frame is used
before it is checked here."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.agreeing import MAX_PEER_ID
from lowcomm_protocol.exchange.events import MemberMessage
from lowcomm_protocol.exchange.tally import DIGEST_BYTES
from lowcomm_protocol.exchange.underway import KEPT, STATE_MARK_BYTES
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

Sized = TypeVar("Sized", str, bytes)
Value = TypeVar("Value")
_LIMIT = 2**53
"""Steps, tokens and versions beyond this are nonsense, and would not survive JSON."""


def to_message(offer: Offer) -> pb.Offer:
    """An offer as it travels."""
    values: dict[str, Any] = dict(vars(offer))
    values |= {name: bytes.fromhex(values[name]) for name in ("run_id", "plan")}
    return pb.Offer(**values)


def from_message(message: pb.Offer) -> Offer:
    """Check an offer. Raises ProtocolViolation if a field is out of bounds."""
    numbers = (message.round, message.swarm_step, message.steps, message.tokens, message.version)
    digests = (message.slow_digest, message.momentum_digest)
    if (
        max(numbers) >= _LIMIT
        or len(message.run_id) != 32
        or len(message.plan) != 32
        or len(message.codec) > 32
        or any(len(digest) not in (0, 32) for digest in digests)
        or len(message.previous) > KEPT
        or any(len(one) != STATE_MARK_BYTES for one in message.previous)
    ):
        raise ProtocolViolation("sent an offer with a field out of bounds")
    values: dict[str, Any] = {one.name: getattr(message, one.name) for one in fields(Offer)}
    values |= {"run_id": message.run_id.hex(), "plan": message.plan.hex()}
    values |= {"previous": tuple(message.previous)}
    return Offer(**values)


def refuse(refusal: Refusal) -> pb.Frame:
    """The frame that refuses an offer."""
    return pb.Frame(refuse=pb.Refuse(reason=refusal.value))


def read_refusal(message: pb.Refuse) -> Refusal:
    """The reason. Raises ProtocolViolation for one that there is not."""
    try:
        return Refusal(message.reason)
    except ValueError:
        raise ProtocolViolation(f"refused for the unknown reason {message.reason[:30]!r}") from None


def frame_of(message: MemberMessage) -> pb.Frame:
    """The frame of a message without contents."""
    match message:
        case events.Confirm(members=members):
            return pb.Frame(confirm=pb.Confirm(members=members))
        case events.Roll(roll=roll):
            return pb.Frame(roll=pb.Roll(peers=roll))
        case events.Members(members=named):
            return pb.Frame(members=pb.Members(peers=named))
        case events.Holdings(held=held):
            return pb.Frame(held=pb.Held(digests=held))
        case events.Commit(shards=shards, heard=heard):
            return pb.Frame(commit=pb.Commit(applied=shards, known=heard))
        case _:
            raise AssertionError(f"{message} is of no frame")


def message_of(peer: str, frame: pb.Frame) -> MemberMessage:
    """The message of such a frame, bounded; the machine checks the rest. Raises
    ProtocolViolation."""
    match frame.WhichOneof("kind"):
        case "confirm":
            return events.Confirm(peer=peer, members=frame.confirm.members)
        case "roll":
            return events.Roll(peer=peer, roll=_bounded(frame.roll.peers, MAX_PEER_ID))
        case "members":
            return events.Members(peer=peer, members=_bounded(frame.members.peers, MAX_PEER_ID))
        case "held":
            return events.Holdings(peer=peer, held=_bounded(frame.held.digests, DIGEST_BYTES))
        case "commit":
            applied, known = frame.commit.applied, frame.commit.known
            return events.Commit(peer=peer, shards=_at_most(applied), heard=_at_most(known))
        case kind:
            raise ProtocolViolation(f"sent {kind!r} where a message of a member was expected")


def _bounded(values: Sequence[Sized], longest: int) -> tuple[Sized, ...]:
    entries = _at_most(values)
    if any(len(value) > longest for value in entries):
        raise ProtocolViolation(f"sent an entry of more than {longest} characters or bytes")
    return entries


def _at_most(values: Sequence[Value]) -> tuple[Value, ...]:
    if len(values) > MAX_GROUP:
        raise ProtocolViolation(f"sent {len(values)} entries, where a group has {MAX_GROUP}")
    return tuple(values)
