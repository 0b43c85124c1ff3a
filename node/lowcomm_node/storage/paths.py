"""The paths of a node's files, under one home folder."""

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from lowcomm_node.errors import ConfigError


def absolute(path: Path | str) -> Path:
    """Expand ``~`` and make a path absolute. Raises ConfigError if that needs a folder that does
    not exist."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        user = Path(path).parts[0]
        reason = f"no home folder of {user} is known: write the whole path, or set HOME"
    except FileNotFoundError:
        reason = "the current folder has been removed: change to another one"
    raise ConfigError(f"{path}: {reason}.")


def data_folder(program: str) -> Path:
    """The folder of a program among the user's data. Raises ConfigError."""
    try:
        return absolute(platformdirs.user_data_dir(program))
    except RuntimeError:
        raise ConfigError(
            "No home folder of this user is known: name a folder with --home, or set HOME."
        ) from None


@dataclass(frozen=True)
class Paths:
    """The files of one home. Nothing is created here."""

    home: Path

    @property
    def identity(self) -> Path:
        """The private key, 0600, in libp2p's form."""
        return self.home / "identity.key"

    @property
    def lock(self) -> Path:
        """Held by the daemon of this home."""
        return self.home / "lock"

    @property
    def control(self) -> Path:
        """Socket, port and token of the control API, 0600; exists while the daemon runs."""
        return self.home / "control.json"

    @property
    def control_socket(self) -> Path:
        """Socket (0600) of the control API for commands, where the file system takes sockets."""
        return self.home / "control.sock"

    @property
    def page_link(self) -> Path:
        """A page that leads a browser to that of the node, 0600: its link has a key."""
        return self.home / "open.html"

    @property
    def config(self) -> Path:
        """Settings that the owner wrote."""
        return self.home / "config.toml"

    @property
    def pause(self) -> Path:
        """Until when the owner has paused this node; exists while it is paused."""
        return self.home / "pause.json"

    @property
    def data(self) -> Path:
        """Cache of tokenized text."""
        return self.home / "data"

    @property
    def compiled(self) -> Path:
        """What torch has compiled for the GPU, for the next start."""
        return self.home / "compiled"

    @property
    def runs(self) -> Path:
        """One folder per run, named by its fingerprint."""
        return self.home / "runs"

    def run(self, fingerprint: str) -> Path:
        """Folder of one run."""
        return self.runs / fingerprint

    def signed_run(self, fingerprint: str) -> Path:
        """The signed specification of one run."""
        return self.run(fingerprint) / "run.json"

    def remembered_peers(self, fingerprint: str) -> Path:
        """Peers and bootstrap servers of one run that have answered, for the next start."""
        return self.run(fingerprint) / "doors.json"

    def claim(self, fingerprint: str) -> Path:
        """The claim by which this node came to a run; valid for no other peer."""
        return self.run(fingerprint) / "claim"

    def uses(self, fingerprint: str) -> Path:
        """Claims of other peers on invites of a run, so that a use stays used."""
        return self.run(fingerprint) / "uses"

    def removals(self, fingerprint: str) -> Path:
        """The newest list of peers that the creator of a run has removed."""
        return self.run(fingerprint) / "removals"

    def amendments(self, fingerprint: str) -> Path:
        """The creator's amendments of a run."""
        return self.run(fingerprint) / "amendments"

    def tokenizer(self, fingerprint: str) -> Path:
        """The tokenizer of one run, beside its checkpoints."""
        return self.run(fingerprint) / "tokenizer.json"

    def start(self, fingerprint: str) -> Path:
        """Weights that one run begins with: files that came from peers, and links to others."""
        return self.run(fingerprint) / "start"

    def incoming(self, fingerprint: str) -> Path:
        """State of one run that is being copied from others."""
        return self.run(fingerprint) / "incoming"

    def gathered(self, fingerprint: str) -> Path:
        """Slow weights of peers of one run, while an export averages them."""
        return self.run(fingerprint) / "gathered"

    def snapshots(self, fingerprint: str) -> Path:
        """State of one run for others to copy, while the node runs."""
        return self.run(fingerprint) / "snapshots"

    def journal(self, fingerprint: str) -> Path:
        """What this node did in one run: SQLite, with a write-ahead log beside it."""
        return self.run(fingerprint) / "journal.db"

    def tracked(self, fingerprint: str) -> Path:
        """How far trackers have read the journal of one run, a file each."""
        return self.run(fingerprint) / "tracked"

    def slow(self, fingerprint: str) -> Path:
        """Slow weights of one run, while a trainer runs."""
        return self.run(fingerprint) / "slow"

    def checkpoints(self, fingerprint: str) -> Path:
        """Checkpoints of one run."""
        return self.run(fingerprint) / "checkpoints"
