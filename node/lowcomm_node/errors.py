"""The node's branch of the tree of errors. ``str()`` names the thing, the value and the remedy."""

from lowcomm_protocol.errors import LowcommError, Offence


class NodeError(LowcommError):
    """Something on this machine. ``exit_code``: exit status of a command that it ends."""

    exit_code: int = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = cls.exit_code if exit_code is None else exit_code


class NotRunning(NodeError, exit_code=3):
    """A command needs the daemon, and none answers."""


class Unhealthy(NodeError, exit_code=4):
    """The daemon answers, but something that it needs does not work."""


class Incompatible(NodeError, exit_code=5):
    """This release or machine can't take part in that run."""


class NoPeers(NodeError, exit_code=6):
    """Nobody of the run can be reached."""


class NotAdmitted(NodeError, exit_code=77):
    """The run does not take this peer: it is not listed, not invited, or was removed."""


class ConfigError(NodeError, exit_code=78):
    """A flag, a setting or a path that its owner must correct."""


class DataError(NodeError, exit_code=78):
    """Training text that is missing, malformed or too short."""


class CheckpointError(NodeError):
    """A saved state that is missing, damaged, or not what was expected."""


class TrainerError(NodeError):
    """The trainer process died, or can't do what it was asked."""


class TrainerLost(TrainerError):
    """The trainer has died, or does not answer: what it was asked is undone."""


class Diverged(TrainerError):
    """Many inner steps in a row gave no finite gradients."""


class NotFinite(TrainerError):
    """Weights or moments hold NaN or infinity: they are never saved, sent or loaded."""


class Unusable(TrainerError):
    """A peer's contribution can't be decoded, or is implausible; ``deed``: the peer's offence."""

    def __init__(self, message: str, deed: Offence | None = Offence.HEAVY) -> None:
        super().__init__(message)
        self.deed = deed


class LinkLost(NodeError):
    """A stream to a peer broke off, or can't be opened. It costs one exchange, no more."""


class PeerGaveUp(LinkLost):
    """The peer has said that it gives up, and why. It is not held against the peer."""


class TooSlow(LinkLost):
    """The peer sends too slowly for the deadline."""


class RetryLater(NodeError, exit_code=75):
    """Nothing is wrong, only the moment: the same call works later."""


class DiskFull(NodeError, exit_code=75):
    """A folder without room; what was there before is untouched."""


class PortInUse(NodeError, exit_code=75):
    """Another program holds an address that this node is to use."""
