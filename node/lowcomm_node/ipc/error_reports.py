"""How an error of the trainer is reported to the daemon. Loads neither codecs nor torch."""

import traceback
from pathlib import Path

from lowcomm_node.errors import Diverged
from lowcomm_node.ipc.failures import Kind
from lowcomm_node.ipc.messages import Failed, Refused
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import CodecError, ImplausibleError, LowcommError


def is_foreseen(error: Exception) -> bool:
    """Whether it is ours, the system's or torch's, so that its text alone tells what happened."""
    return isinstance(error, LowcommError | OSError | MemoryError | RuntimeError)


def text_of(error: Exception) -> str:
    """What an error says. A defect is told with its type and place: its text may be a bare key."""
    if is_foreseen(error):
        return str(error) or type(error).__name__
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    place = f" in {Path(last.filename).name}, line {last.lineno}" if last else ""
    defect = "That is a defect of lowcomm: please report it."
    return f"{type(error).__name__}{place}: {error}. {defect}"


def refusal_of(error: Exception) -> Refused:
    """Why a request failed, whose fault that is, and the exit code that it should lead to."""
    return Refused(
        text=text_of(error),
        exit_code=getattr(error, "exit_code", 1),
        unusable=isinstance(error, CodecError | ImplausibleError),
        deed=error.deed if isinstance(error, ImplausibleError) else Deed.HEAVY,
    )


def failure_of(error: Exception) -> Failed:
    """Why training ends."""
    reason = text_of(error)
    # torch.cuda.OutOfMemoryError is a RuntimeError that says so; the host's own is a MemoryError.
    memory = isinstance(error, MemoryError) or "out of memory" in reason.lower()
    kind = Kind.MEMORY if memory else Kind.ERROR
    kind = Kind.DIVERGED if isinstance(error, Diverged) else kind
    return Failed(reason=reason, kind=kind, exit_code=getattr(error, "exit_code", 1))
