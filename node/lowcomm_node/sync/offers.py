"""Offers as messages, and back; nothing of a message is used before it is checked here."""

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.underway import KEPT, MARK_BYTES
from lowcomm_protocol.matching import REFUSAL_TEXT, SLICE_DIGEST_BYTES, Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb

_LIMIT = 2**53
"""Steps, tokens and versions beyond this are nonsense, and would not survive JSON."""


def to_message(offer: Offer) -> pb.Offer:
    """An offer as it travels."""
    return pb.Offer(
        protocol=offer.protocol,
        run_id=bytes.fromhex(offer.run_id),
        plan=bytes.fromhex(offer.plan),
        codec=offer.codec,
        fragment=offer.fragment,
        round=offer.round,
        swarm_step=offer.swarm_step,
        steps=offer.steps,
        tokens=offer.tokens,
        version=offer.version,
        slow_digest=offer.slow_digest,
        momentum_digest=offer.momentum_digest,
        seconds=offer.seconds,
        slice_digest=offer.slice_digest,
        previous=offer.previous,
    )


def from_message(message: pb.Offer) -> Offer:
    """Check an offer. Raises ProtocolViolation if a field is out of bounds."""
    numbers = (message.round, message.swarm_step, message.steps, message.tokens, message.version)
    if max(numbers) >= _LIMIT or len(message.run_id) != 32 or len(message.plan) != 32:
        raise ProtocolViolation("sent an offer with a field out of bounds")
    digests = (message.slow_digest, message.momentum_digest)
    if len(message.slice_digest) not in (0, SLICE_DIGEST_BYTES):
        raise ProtocolViolation("sent an offer with a field out of bounds")
    if len(message.codec) > 32 or any(len(digest) not in (0, 32) for digest in digests):
        raise ProtocolViolation("sent an offer with a field out of bounds")
    if len(message.previous) > KEPT or any(len(one) != MARK_BYTES for one in message.previous):
        raise ProtocolViolation("sent an offer with a field out of bounds")
    return Offer(
        protocol=message.protocol,
        run_id=message.run_id.hex(),
        plan=message.plan.hex(),
        codec=message.codec,
        fragment=message.fragment,
        round=message.round,
        swarm_step=message.swarm_step,
        steps=message.steps,
        tokens=message.tokens,
        version=message.version,
        slow_digest=message.slow_digest,
        momentum_digest=message.momentum_digest,
        seconds=message.seconds,
        slice_digest=message.slice_digest,
        previous=tuple(message.previous),
    )


def refuse(refusal: Refusal) -> pb.Frame:
    """The frame that refuses an offer."""
    return pb.Frame(refuse=pb.Refuse(reason=refusal.value, detail=REFUSAL_TEXT[refusal]))


def read_refusal(message: pb.Refuse) -> tuple[Refusal, str]:
    """The reason and our own words for it; a stranger's words are not shown."""
    try:
        refusal = Refusal(message.reason)
    except ValueError:
        raise ProtocolViolation(f"refused for the unknown reason {message.reason[:30]!r}") from None
    return refusal, REFUSAL_TEXT[refusal]
