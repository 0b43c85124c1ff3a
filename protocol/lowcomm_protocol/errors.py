"""The tree of errors.

    LowcommError                 anything that we raise on purpose; str() names the thing, the value and the remedy
    ├── SpecError                a run specification that is not valid, or settings that do not work together
    ├── VersionError             a peer, record or run of another protocol version
    ├── SignatureError           a signature, fingerprint or peer id that does not match
    ├── RecordError              a record that is malformed, stale, or lives too long
    ├── PlanError                a fragment plan that can't be made, or that does not fit a model
    ├── CodecError               bytes or a vector that a codec can't take
    ├── ImplausibleError         a contribution that is valid but far from what honest peers send
    └── ProtocolViolation        a peer did what the protocol does not allow

The node adds its own branches in ``lowcomm_node.errors``.
"""


class LowcommError(Exception):
    """Anything that lowcomm raises on purpose. The message names the thing, the value and the remedy."""


class SpecError(LowcommError):
    """A run specification that is not valid, or settings that do not work together."""


class VersionError(LowcommError):
    """A peer, record or run specification of another protocol version."""


class SignatureError(LowcommError):
    """A signature, fingerprint or peer id that does not match."""


class RecordError(LowcommError):
    """A record that is malformed, stale, or claims too long a life."""


class PlanError(LowcommError):
    """A fragment plan that can't be made, or that does not fit a model."""


class CodecError(LowcommError):
    """Bytes or a vector that a codec can't take."""


class ImplausibleError(LowcommError):
    """A contribution that is valid but far from what honest peers send."""


class ProtocolViolation(LowcommError):
    """A peer did what the protocol does not allow."""
