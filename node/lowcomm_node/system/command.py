"""The first and last moments of a command: standard streams, imports, Ctrl-C, exit code.

Imports little itself, because Ctrl-C prints a traceback before ``run_command`` runs.
"""

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from lowcomm_protocol.spec.invalid import in_words

INTERRUPTED = 130


def run_command(module: str) -> NoReturn:
    """Import a module, call its ``main``, and end the process with the exit code."""
    open_streams()
    code = 0
    try:
        with importing():
            loaded = import_module(module)
        loaded.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        if not was_interrupted(error):
            raise
        code = INTERRUPTED
    end(code)


def end(code: int) -> NoReturn:
    """End the process at once: unloading torch and gRPC takes seconds, which Docker may not
    wait."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or nobody reads any more
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line at once; go on where nobody reads it, or the disk behind it is full."""
    with suppress(OSError):
        print(text, flush=True)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C led to this error: imports and clean-up may turn one into another."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def tell_usage(error: Exception) -> int | None:
    """Say in a line what is wrong with a command line; the exit code, or None for other errors.

    Typer may bring its own copy of click, so its errors are known by their methods.
    """
    if not hasattr(error, "format_message"):
        return None
    click: Any = error
    if hasattr(click.__cause__, "errors"):  # pydantic's
        click.message = in_words(click.__cause__.errors()[0])
    if type(error).__name__ == "NoArgsIsHelpError":
        click.show()
    else:
        path = getattr(getattr(error, "ctx", None), "command_path", "")
        more = f" `{path} --help` shows what there is." if path else ""
        print(f"error: {click.format_message().rstrip('.')}.{more}", file=sys.stderr)
    return click.exit_code


@contextmanager
def importing() -> Iterator[None]:
    """Context for large imports: a sixth faster, as nothing is searched for garbage meanwhile.

    What modules make stays for good, so later searches leave it out, too. Ctrl-C ends the process
    at once: as an exception, it could be lost in a callback of the import system.
    """
    own = signal.getsignal(signal.SIGINT)
    can_end = own is signal.default_int_handler  # another handler, or none, is a choice to keep
    if can_end:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if can_end:
            signal.signal(signal.SIGINT, own)


def open_streams() -> None:
    """Open standard streams that the caller has closed, and print any text in any locale.

    Otherwise a socket would get the number of a closed stream, and receive what is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
