"""The node's branch of the tree of errors; each knows the exit status of the command that it ends.

LowcommError                 all that we raise on purpose; str(): the thing, the value, the remedy
└── NodeError            1   something on this machine; the branches say what
    ├── NotRunning       3   a command needs the daemon, and none answers
    ├── Unhealthy        4   the daemon answers, but something that it needs does not work
    ├── Incompatible     5   this release or machine can't take part in that run
    ├── NoPeers          6   nobody of the run can be reached
    ├── NotAdmitted     77   the run does not take this peer
    ├── ConfigError     78   a flag, a setting or a path that its owner must correct
    ├── DataError       78   training text that is missing, malformed or too short
    ├── CheckpointError  1   a saved state that is missing, damaged, or not what was expected
    ├── TrainerError     1   the trainer process died, or can't do what it was asked
    │   ├── TrainerLost  1   it has died, or does not answer: what it was asked is undone
    │   ├── Diverged     1   steps in a row gave no finite gradients
    │   ├── NotFinite    1   weights or moments that are not finite: never saved, sent or loaded
    │   └── Unusable     1   a contribution of another peer that can't be decoded, or is implausible
    ├── LinkLost         1   a stream to a peer broke off, or can't be opened; costs one exchange
    │   ├── GaveUp       1   the peer has told that it gives up, and why
    │   └── TooSlow      1   what the peer sends would not come before the deadline
    ├── RetryLater      75   nothing is wrong, only the moment: the same call works later
    ├── DiskFull        75   a folder without room; what was there before is untouched
    └── PortInUse       75   another program holds an address that we were told to use
"""

from lowcomm_protocol.errors import LowcommError, Offence


class NodeError(LowcommError):
    """Something on this machine. ``exit_code`` is the exit status of a command that it ends."""

    exit_code: int = 1


class NotRunning(NodeError):
    """A command needs the daemon, and none answers."""

    exit_code = 3


class Unhealthy(NodeError):
    """The daemon answers, but something that it needs does not work."""

    exit_code = 4


class Incompatible(NodeError):
    """This release or machine can't take part in that run."""

    exit_code = 5


class NoPeers(NodeError):
    """Nobody of the run can be reached."""

    exit_code = 6


class NotAdmitted(NodeError):
    """The run does not take this peer: it is not listed, not invited, or was removed."""

    exit_code = 77


class ConfigError(NodeError):
    """A flag, a setting or a path that its owner must correct."""

    exit_code = 78


class DataError(NodeError):
    """Training text that is missing, malformed or too short."""

    exit_code = 78


class CheckpointError(NodeError):
    """A saved state that is missing, damaged, or not what was expected."""


class TrainerError(NodeError):
    """The trainer process died, or can't do what it was asked."""


class TrainerLost(TrainerError):
    """The trainer has died, or does not answer: what it was asked is undone."""


class Diverged(TrainerError):
    """Many inner steps in a row gave no finite gradients."""


class NotFinite(TrainerError):
    """Weights, slow weights or moments hold NaN or infinity: they are never saved, sent or
    loaded."""


class Unusable(TrainerError):
    """A contribution of another peer that can't be decoded, or is implausible; ``deed``: what is
    held against the peer."""

    def __init__(self, message: str, deed: Offence | None = Offence.HEAVY) -> None:
        super().__init__(message)
        self.deed = deed


class LinkLost(NodeError):
    """A stream to a peer broke off, or can't be opened. It costs one exchange, no more."""


class GaveUp(LinkLost):
    """The peer has told that it gives up, and why: nothing that is held against it."""


class TooSlow(LinkLost):
    """What the peer sends would not come before the deadline."""


class RetryLater(NodeError):
    """Nothing is wrong, only the moment: the same call works later."""

    exit_code = 75


class DiskFull(NodeError):
    """A folder without room; what was there before is untouched."""

    exit_code = 75


class PortInUse(NodeError):
    """Another program holds an address that we were told to use."""

    exit_code = 75
