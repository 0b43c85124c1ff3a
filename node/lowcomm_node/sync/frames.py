"""Offers, refusals and what members tell each other, as frames and back; nothing of a frame is used
before it is checked here."""

from dataclasses import fields
from typing import Any

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.agreeing import MAX_PEER_ID
from lowcomm_protocol.exchange.events import MemberMessage
from lowcomm_protocol.exchange.tally import DIGEST_BYTES
from lowcomm_protocol.exchange.underway import KEPT, STATE_MARK_BYTES
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

_LIMIT = 2**53
"""Steps, tokens and versions beyond this are nonsense, and would not survive JSON."""
_MESSAGES: dict[str, tuple[type[MemberMessage], dict[str, str]]] = {
    "confirm": (events.Confirm, {"members": "members"}),
    "roll": (events.Roll, {"roll": "peers"}),
    "members": (events.Members, {"members": "peers"}),
    "held": (events.Holdings, {"held": "digests"}),
    "commit": (events.Commit, {"shards": "applied", "heard": "known"}),
}
"""Messages without contents, by the kind of their frame, with their names of its fields."""


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
    kind, names = next(
        (kind, names) for kind, (made, names) in _MESSAGES.items() if made is type(message)
    )
    values = {theirs: getattr(message, ours) for ours, theirs in names.items()}
    return pb.Frame(**{kind: values})  # type: ignore[arg-type]


def message_of(peer: str, frame: pb.Frame) -> MemberMessage:
    """The message of such a frame, bounded; the machine checks the rest. Raises
    ProtocolViolation."""
    kind = frame.WhichOneof("kind")
    if kind not in _MESSAGES:
        raise ProtocolViolation(f"sent {kind!r} where a message of a member was expected")
    message, names = _MESSAGES[kind]
    sent = getattr(frame, kind)
    values = {ours: _bounded(getattr(sent, theirs)) for ours, theirs in names.items()}
    return message(peer=peer, **values)


def _bounded(value: Any) -> Any:
    """Check a list of a group's members, their digests or votes."""
    if isinstance(value, bytes):
        return value
    if len(value) > MAX_GROUP:
        raise ProtocolViolation(f"sent {len(value)} entries, where a group has {MAX_GROUP}")
    for entry in value:
        longest = MAX_PEER_ID if isinstance(entry, str) else DIGEST_BYTES
        if not isinstance(entry, bool) and len(entry) > longest:
            raise ProtocolViolation(f"sent an entry of more than {longest} characters or bytes")
    return tuple(value)
