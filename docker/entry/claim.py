"""What the node's container starts with: gives each replica a home of its own, tells it where the
swarm is, becomes it.

/state         the volume that all replicas share
/state/0       the home of one: identity, checkpoints; /state/1 that of another, ...
/state/0.slot  locked by the replica whose home it is, to its last process; says which container
that was
/state/numba   compiled kernels: the first replica compiles, the others load them
/tmp/home      in each container leads to its own; LOWCOMM_HOME says so, also for
               `lowcomm-node status` in it

A container that is started again takes the home that it had; a new one takes the first that nobody
has. Only the kernel holds locks, so a replica that was killed leaves its home to the next. Standard
library only: it runs before anything else."""

import fcntl
import os
import socket
import sys
import time
from pathlib import Path

STATE, LINK = Path("/state"), Path("/tmp/home")
MOST = 1024
"""Replicas that may share a volume."""
ADDRESSES = "ADDRESSES"
"""The variable that names the file in which the bootstrap server beside us tells its addresses."""
PATIENCE = 300.0
"""Seconds to wait for that file."""
POLL = 0.5
"""Seconds between two looks for it: who writes it is in another container, and the standard library
can't watch a folder."""


def claim(state: Path, container: str) -> tuple[int, Path]:
    """Descriptor of the lock, and the home; the lock lasts as long as the descriptor, also through
    exec. Raises OSError."""
    had = [path.stem for path in state.glob("*.slot") if _holder(path) == container]
    for name in (*had, *(str(number) for number in range(MOST))):
        lock = os.open(state / f"{name}.slot", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        os.ftruncate(lock, 0)
        os.pwrite(lock, container.encode(), 0)
        os.set_inheritable(lock, True)
        (state / name).mkdir(mode=0o700, exist_ok=True)
        return lock, state / name
    raise OSError(f"{state}: all {MOST} homes are taken: give these replicas a volume of their own")


def read_addresses(file: Path, patience: float = PATIENCE) -> str:
    """The addresses in a file, separated by commas, once it is there. Raises OSError."""
    ends = time.monotonic() + patience
    while not file.exists():
        if time.monotonic() > ends:
            raise OSError(
                f"{file} is not there after {patience:.0f} s: does the bootstrap server run?"
            )
        time.sleep(POLL)
    return ",".join(file.read_text(encoding="utf-8").split())


def spread(home: str, devices: Path = Path("/dev")) -> str | None:
    """The GPU of a home: as many homes as there are GPUs have one each. None where there is
    none."""
    count = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))
    return f"cuda:{int(home) % count}" if count else None


def point(link: Path, home: Path) -> None:
    """Let ``link`` lead to ``home``."""
    link.unlink(missing_ok=True)
    link.symlink_to(home)


def prepare() -> None:
    """Claim a home and learn the addresses, as far as the environment leaves that to us."""
    if os.environ.get("LOWCOMM_HOME") == str(LINK):
        _, home = claim(STATE, socket.gethostname())
        point(LINK, home)
        print(f"the home of this replica is {home}", file=sys.stderr, flush=True)
        if os.environ.pop("SPREAD_GPUS", None) and (device := spread(home.name)):
            os.environ.setdefault("LOWCOMM_DEVICE", device)
    file = os.environ.pop(ADDRESSES, None)
    if file and not os.environ.get("LOWCOMM_PEERS"):
        os.environ["LOWCOMM_PEERS"] = read_addresses(Path(file))


def _holder(slot: Path) -> str:
    try:
        return slot.read_text(encoding="utf-8")
    except OSError:
        return ""


def main() -> None:
    """``claim.py lowcomm-node COMMAND...``: ``join`` and ``data serve`` need a home."""
    if sys.argv[2:3] == ["join"] or sys.argv[2:4] == ["data", "serve"]:
        try:
            prepare()
        except OSError as error:
            sys.exit(f"error: {error}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
