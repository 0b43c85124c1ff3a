"""Pulses: what changes with every step of a peer, between two of its records."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from lowcomm_protocol.errors import Reason, RecordError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import (
    Claims,
    Count,
    Loss,
    PeerInfo,
    Phase,
    is_from_future,
    read_signed,
    sign,
)
from lowcomm_protocol.peers.shards import MAX_BITS

MAX_PULSE_BYTES = 512
MAX_AGE = 600.0
"""Seconds after which a pulse is refused: a replay would bring back what is long over."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Phase and progress of a peer at one moment."""

    peer_id: str
    issued: float
    """Unix time, seconds."""
    phase: Phase
    swarm_step: Count = 0
    steps: Count = 0
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    tokens: Count = 0
    held_out_loss: Loss = 0.0
    exchanges: Count = 0
    reading: Claims = b""
    gives_text: bool = False
    bits: Annotated[int, Field(le=MAX_BITS)] = 0
    """Depth of its shard."""

    def update(self, info: PeerInfo) -> PeerInfo:
        """The contents of the peer's record with these figures, if they are newer."""
        if self.issued <= max(info.issued, info.as_of):
            return info
        names = ("phase", "swarm_step", "steps", "tokens_per_second", "reading", "gives_text")
        figures = {name: getattr(self, name) for name in names}
        report = replace(
            info.report,
            tokens=self.tokens,
            held_out_loss=self.held_out_loss,
            exchanges=self.exchanges,
        )
        return replace(info, **figures, report=report, as_of=self.issued, bits=self.bits)


_PULSE = TypeAdapter(Pulse)


def write_pulse(pulse: Pulse, run_id: str, identity: Identity) -> bytes:
    """Sign and serialize a pulse."""
    values = dict(vars(pulse))
    issued = values.pop("issued")
    return sign(identity, _purpose(run_id), pb.Pulse(issued_ms=round(issued * 1000), **values))


def read_pulse(data: bytes, run_id: str, now: float) -> Pulse:
    """Check a serialized pulse at Unix time ``now``. Raises RecordError, SignatureError."""
    signed, message = read_signed(data, pb.Pulse, "pulse", MAX_PULSE_BYTES)
    names = Pulse.__dataclass_fields__.keys() - {"issued"}
    values = {name: getattr(message, name) for name in names}
    try:
        pulse = _PULSE.validate_python(values | {"issued": message.issued_ms / 1000})
    except ValidationError as error:
        field = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise RecordError(f"A pulse with {field} out of bounds is refused.") from None
    if is_from_future(pulse.issued, now):
        raise RecordError("A pulse from the future is refused.", reason=Reason.FROM_FUTURE)
    if pulse.issued < now - MAX_AGE:
        raise RecordError("A pulse that is too old is refused.", reason=Reason.EXPIRED)
    verify(pulse.peer_id, _purpose(run_id), signed.payload, signed.signature)
    return pulse


def _purpose(run_id: str) -> str:
    return f"pulse in {run_id}"
