"""The paths of a node's files, under one home folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from lowcomm_node.errors import ConfigError

START = "start"


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


class _InHome:
    """File or folder of the home."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: "Paths", kind: type["Paths"]) -> Path:
        return paths.home / self._name


class _OfRun:
    """File or folder of one run, by the run's fingerprint."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: "Paths", kind: type["Paths"]) -> Callable[[str], Path]:
        return lambda fingerprint: paths.runs / fingerprint / self._name


@dataclass(frozen=True)
class Paths:
    """The files of one home. Nothing is created here."""

    home: Path

    identity = _InHome("identity.key")  # the private key, 0600, in libp2p's form
    lock = _InHome("lock")  # held by the daemon of this home
    control = _InHome("control.json")  # socket, port and token of the running daemon's API, 0600
    control_socket = _InHome("control.sock")  # of that API for commands, 0600
    page_link = _InHome("open.html")  # leads a browser to the node's page, by a key: 0600
    config = _InHome("config.toml")  # settings that the owner wrote
    household_key = _InHome(
        "household.pem"
    )  # key and certificate for machines of a household, 0600
    household = _InHome("household.json")  # machines paired with this one, 0600
    pause = _InHome("pause.json")  # until when the owner has paused this node, if at all
    data = _InHome("data")  # cache of tokenized text
    packs = _InHome("packs")  # pieces of packed text, a folder each
    compiled = _InHome("compiled")  # kernels of torch for the GPU, for the next start
    runs = _InHome("runs")  # folders of runs, named by their fingerprints
    run = _OfRun("")  # folder of one run
    signed_run = _OfRun("run.json")  # the signed specification of one run
    remembered_peers = _OfRun("doors.json")  # peers and bootstrap servers that have answered
    claim = _OfRun("claim")  # the claim by which this node came to a run; valid for no other peer
    uses = _OfRun("uses")  # claims of other peers on invites of a run, so that a use stays used
    removals = _OfRun("removals")  # the newest list of peers that the creator of a run has removed
    amendments = _OfRun("amendments")  # the creator's amendments of a run
    read = _OfRun("read")  # statements of peers on the pieces of packed text that they have read
    tokenizer = _OfRun("tokenizer.json")  # the tokenizer of one run, beside its checkpoints
    start = _OfRun(START)  # weights to begin with: files from peers, and links to the owner's
    incoming = _OfRun("incoming")  # state of one run that is being copied from others
    gathered = _OfRun("gathered")  # slow weights of peers of one run, while an export averages them
    snapshots = _OfRun("snapshots")  # state of one run for others to copy, while the node runs
    journal = _OfRun("journal.db")  # SQLite, with a write-ahead log beside it
    tracked = _OfRun("tracked")  # how far trackers have read the journal of one run, a file each
    slow = _OfRun("slow")  # slow weights of one run, while a trainer runs
    checkpoints = _OfRun("checkpoints")  # checkpoints of one run
