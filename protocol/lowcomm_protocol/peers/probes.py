"""Probes: a peer asks a bootstrap server, or any other peer, how the internet sees it, whether its
ports can be called, whether a run is kept, and how fast its link is.

Only the address that the request comes from is called, at most MAX_TARGETS ports, and the answer
says only whether the expected peer answered there. So nobody is called without asking, and nobody
learns what else listens.
"""

from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import MAX_REASON, LowcommError, ProtocolViolation, in_words
from lowcomm_protocol.identity import public_key_of
from lowcomm_protocol.messages import exchange_pb2 as pb

PROTOCOL = "/lowcomm/probe/1"
"""The name of the streams in libp2p."""
MAX_TARGETS = 4
MAX_CONTENT = 64 * 1024
"""Bytes of the content of a Ping or Pong."""
MAX_MESSAGE = MAX_CONTENT + 1024
"""Bytes of a serialized Probe or Probed."""
MAX_ENTRY_POINTS = 8
MAX_ADDRESS = 256
"""Characters of a multiaddress."""
MAX_OWN = 16
"""Runs of its operator that a server names."""
_DIGEST = 32


class ProbeKind(Enum):
    """A way in."""

    DIRECT = pb.Target.DIRECT
    """The Exchange service over TLS."""
    TCP = pb.Target.TCP
    QUIC = pb.Target.QUIC


@dataclass(frozen=True)
class Seen:
    """How another peer sees us."""

    address: str
    """Multiaddress that our connection comes from."""
    time: float
    """Its clock, Unix time in seconds."""
    entry_points: tuple[str, ...]
    """Its own addresses, unchecked."""


@dataclass(frozen=True)
class Keeping:
    """Whether a bootstrap server keeps a run."""

    kept: bool = False
    seconds: float | None = None
    """How long it stays without an answering peer; None: for good."""
    reason: str = ""
    """Why it is not kept."""
    swarm_step: int = 0
    """At which its peers have finished it, as they say; 0: they have not."""
    own: tuple[str, ...] = ()
    """Ids of the runs that the operator of the server serves."""

    def to_message(self) -> pb.Kept:
        """Encode the answer."""
        seconds = 0 if self.seconds is None else max(1, round(self.seconds))
        return pb.Kept(
            kept=self.kept,
            seconds=seconds,
            reason=self.reason[:MAX_REASON],
            swarm_step=self.swarm_step,
            own=[bytes.fromhex(run_id) for run_id in self.own[:MAX_OWN]],
        )


def read_kept(message: pb.Kept) -> Keeping:
    """A bootstrap server's answer."""
    seconds, reason = message.seconds or None, in_words(message.reason)
    own = tuple(run_id.hex() for run_id in message.own[:MAX_OWN] if len(run_id) == _DIGEST)
    return Keeping(message.kept, seconds, reason, message.swarm_step, own)


def read_probe(data: bytes) -> pb.Probe:
    """Decode a request. Raises ProtocolViolation."""
    if len(data) > MAX_MESSAGE:
        raise ProtocolViolation(f"sent a probe of {len(data)} bytes: at most {MAX_MESSAGE}")
    try:
        probe = pb.Probe.FromString(data)
    except DecodeError:
        raise ProtocolViolation("sent bytes that are no probe") from None
    if probe.WhichOneof("kind") is None:
        raise ProtocolViolation("sent an empty probe")
    if probe.HasField("keep") and len(probe.keep.run_id) != _DIGEST:
        raise ProtocolViolation(f"named a run by {len(probe.keep.run_id)} bytes")
    return probe


def check_dial_back(message: pb.DialBack) -> None:
    """Raise ProtocolViolation unless all of its targets are ports to call."""
    if not 0 < len(message.targets) <= MAX_TARGETS:
        raise ProtocolViolation(
            f"asked for {len(message.targets)} calls: 1 to {MAX_TARGETS} are possible"
        )
    try:
        public_key_of(message.peer_id)
    except LowcommError:
        raise ProtocolViolation("asked for calls to what is no peer id") from None
    for target in message.targets:
        if not 0 < target.port < 65536:
            raise ProtocolViolation(f"asked for a call to port {target.port}")
        if target.kind not in pb.Target.Kind.values():
            raise ProtocolViolation(f"asked for a call of an unknown kind {target.kind}")
        if len(target.certificate) != (_DIGEST if target.kind == pb.Target.DIRECT else 0):
            raise ProtocolViolation(f"named a certificate by {len(target.certificate)} bytes")


def check_ping(ping: pb.Ping) -> None:
    """Raise ProtocolViolation if a Ping is too large, or asks for too much."""
    if max(len(ping.content), ping.wanted) > MAX_CONTENT:
        raise ProtocolViolation(
            f"sent a ping of {len(ping.content)} and {ping.wanted} bytes: at most {MAX_CONTENT}"
        )


def read_probed(data: bytes, wanted: str) -> pb.Probed:
    """The answer of the ``wanted`` kind, or a refusal. Raises ProtocolViolation."""
    try:
        probed = pb.Probed.FromString(data)
    except DecodeError:
        raise ProtocolViolation("sent bytes that answer nothing") from None
    kind = probed.WhichOneof("kind")
    if kind not in (wanted, "refused"):
        raise ProtocolViolation(f"answered {kind!r} where {wanted!r} was expected")
    return probed


def read_seen(seen: pb.Seen) -> Seen:
    """How we are seen, with untrusted text cut to useful lengths."""
    texts = [text for text in seen.entry_points[:MAX_ENTRY_POINTS] if len(text) <= MAX_ADDRESS]
    return Seen(seen.address[:MAX_ADDRESS], seen.time_ms / 1000, tuple(texts))
