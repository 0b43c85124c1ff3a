"""Offers, refusals and what members of a group agree on, as messages and back; nothing of a message
is used before it is checked here."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.tally import MARK_BYTES, SALT_BYTES, mark
from lowcomm_protocol.exchange.underway import KEPT, STATE_MARK_BYTES
from lowcomm_protocol.matching import REFUSAL_TEXT, SLICE_DIGEST_BYTES, Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

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
        or len(message.slice_digest) not in (0, SLICE_DIGEST_BYTES)
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
    return pb.Frame(refuse=pb.Refuse(reason=refusal.value, detail=REFUSAL_TEXT[refusal]))


def read_refusal(message: pb.Refuse) -> tuple[Refusal, str]:
    """The reason and our own words for it; a stranger's words are not shown."""
    try:
        refusal = Refusal(message.reason)
    except ValueError:
        raise ProtocolViolation(f"refused for the unknown reason {message.reason[:30]!r}") from None
    return refusal, REFUSAL_TEXT[refusal]


def roll(peers: Sequence[str], slice_: Sequence[str] = ()) -> pb.Frame:
    """The frame that says whom we hold streams with; by their places if they are all in the
    ``slice_`` that both ends see."""
    if slice_ and set(peers) <= set(slice_):
        return pb.Frame(roll=pb.Roll(slice=_bits([peer in peers for peer in slice_])))
    return pb.Frame(roll=pb.Roll(peers=peers))


def members(peers: Sequence[str], roll: Sequence[str]) -> pb.Frame:
    """The frame that names a list of members, all of them in our ``roll``."""
    return pb.Frame(members=pb.Members(peers=sum(1 << roll.index(peer) for peer in peers)))


def held(digests: Sequence[bytes], salt: bytes) -> pb.Frame:
    """The frame that says which means we hold; ``salt``: `SALT_BYTES` that nobody can have known.

    Digests themselves would make what a member sends grow with the square of its group.
    """
    marks = b"".join(mark(salt, digest) or bytes(MARK_BYTES) for digest in digests)
    return pb.Frame(held=pb.Held(salt=salt, marks=marks))


def commit(shards: Sequence[bool], heard: Sequence[bool]) -> pb.Frame:
    """The frame that says which shards we would apply, and whose helds we know of."""
    bits = pb.Commit(members=len(shards), applied=_bits(shards), known=_bits(heard))
    return pb.Frame(commit=bits)


def read_roll(message: pb.Roll, slice_: Sequence[str] = ()) -> tuple[str, ...]:
    """The peers of a roll, whose ids the machine checks; ``slice_``: what both ends see, if they
    see the same. Raises ProtocolViolation for places outside of it."""
    if message.slice:
        if message.peers or message.slice >= 1 << len(slice_):
            raise ProtocolViolation("sent a roll by places in a slice that is not ours")
        return _at(slice_, message.slice)
    return tuple(message.peers)


def read_members(message: pb.Members, roll: Sequence[str]) -> tuple[str, ...]:
    """The peers of a list of members, by the sender's ``roll``. Raises ProtocolViolation if it is
    not in form."""
    if not 0 < message.peers < 1 << len(roll):
        raise ProtocolViolation(f"named members {message.peers:#b} of a roll of {len(roll)}")
    return _at(roll, message.peers)


def read_held(message: pb.Held) -> tuple[tuple[bytes, ...], bytes]:
    """The marks of the means that a member holds, and their salt. Raises ProtocolViolation if they
    are not in form."""
    number, rest = divmod(len(message.marks), MARK_BYTES)
    _count("marks", number)
    if rest or len(message.salt) != SALT_BYTES:
        raise ProtocolViolation(f"sent marks that do not have {MARK_BYTES} bytes each, or no salt")
    marks = (message.marks[k * MARK_BYTES : (k + 1) * MARK_BYTES] for k in range(number))
    return tuple(one if any(one) else b"" for one in marks), message.salt


def read_commit(message: pb.Commit) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which shards a member would apply, and of whom it has heard. Raises ProtocolViolation if it
    is not in form."""
    count = message.members
    _count("shards", count)
    if max(message.applied, message.known) >= 1 << count:
        raise ProtocolViolation(f"committed to other shards than those of {count} members")
    return _flags(count, message.applied), _flags(count, message.known)


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << place for place, flag in enumerate(flags) if flag)


def _flags(count: int, bits: int) -> tuple[bool, ...]:
    return tuple(bool(bits >> place & 1) for place in range(count))


def _at(peers: Sequence[str], bits: int) -> tuple[str, ...]:
    return tuple(peer for place, peer in enumerate(peers) if bits >> place & 1)


def _count(what: str, number: int) -> None:
    if not 1 <= number <= MAX_GROUP:
        raise ProtocolViolation(f"sent {number} {what}, where a group has 1 to {MAX_GROUP}")
