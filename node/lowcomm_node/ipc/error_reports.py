"""How an error of the trainer is reported to the daemon. Loads neither codecs nor torch."""

import traceback
from pathlib import Path

from lowcomm_node.errors import Diverged
from lowcomm_node.ipc.failures import Kind
from lowcomm_node.ipc.messages import Failed, Refused
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import CodecError, ImplausibleError, LowcommError

_NO_ROOM = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


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


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no room for a tensor."""
    if isinstance(error, MemoryError):
        return True
    # torch's are RuntimeErrors that say so: of CUDA, of cuBLAS, and of the host.
    told = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(words in told for words in _NO_ROOM)


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
    kind = Kind.MEMORY if is_out_of_memory(error) else Kind.ERROR
    kind = Kind.DIVERGED if isinstance(error, Diverged) else kind
    return Failed(reason=reason, kind=kind, exit_code=getattr(error, "exit_code", 1))
