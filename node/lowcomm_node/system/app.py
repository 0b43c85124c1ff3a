"""A command line of typer: its ``--version``, errors and exit codes; the event loop."""

import asyncio
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.catalogue import code_of
from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.system.command import INTERRUPTED, ONLY_ELSEWHERE, check_system
from lowcomm_node.system.release import describe
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import LowcommError, SignatureError, SpecError, VersionError
from lowcomm_protocol.spec.document import expected_in_words

_VERBOSE = re.compile(r"-v+|--verbose")


def add_version(app: typer.Typer, program: str) -> None:
    """Give a command line its ``--version``."""

    @app.callback(invoke_without_command=True)
    def version(
        show: Annotated[
            bool,
            typer.Option("--version", help="Show release, commit and protocol.", is_eager=True),
        ] = False,
    ) -> None:
        if show:
            print(f"{program} {describe(PROTOCOL_VERSION)}")
            raise typer.Exit


def run_app(app: typer.Typer, find_p2pd: Callable[[], Path]) -> int:
    """Run a command line; its exit code. Errors on purpose become one line."""
    try:
        try:
            code = app(standalone_mode=False)
        except SystemExit as stop:
            code = 1 if isinstance(stop.code, str) else stop.code
        sys.stdout.flush()  # what is buffered must fail here, not in Python's own exit
        return code or 0
    except LowcommError as error:
        return _fail(error)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            return _fail(NodeError(_in_words(error)))
        # The reader of our output, or the terminal, has gone; Python would complain about it once
        # more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name not in ONLY_ELSEWHERE:
            raise
        try:
            check_system(find_p2pd)
        except NodeError as reason:
            return _fail(reason)
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        code = _tell_usage(error)
        if code is None:
            raise
        return code


def _exit_code(error: LowcommError) -> int:
    """The exit code that an error ends a command with (docs/design.md)."""
    if isinstance(error, NodeError):
        return error.exit_code
    if isinstance(error, VersionError):
        return 5
    return ConfigError.exit_code if isinstance(error, SpecError | SignatureError) else 1


def _tell_usage(error: Exception) -> int | None:
    """Print an error of a command line; the exit code, or None for other errors.

    Typer may bring its own copy of click, so its errors are known by their methods.
    """
    if not hasattr(error, "format_message"):
        return None
    click: Any = error
    if hasattr(click.__cause__, "errors"):  # pydantic's
        click.message = expected_in_words(click.__cause__.errors()[0])
    if type(error).__name__ == "NoArgsIsHelpError":
        click.show()
    else:
        path = getattr(getattr(error, "ctx", None), "command_path", "")
        more = f" `{path} --help` shows what there is." if path else ""
        print(f"error: {click.format_message().rstrip('.')}.{more}", file=sys.stderr)
    return click.exit_code


def _in_words(error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.filename is not None:
        remedy = "free some" if is_full else "correct its permissions"
        return f"{error.filename}: {error.strerror}: name another path, or {remedy}."
    if is_full:
        return f"{error.strerror}: free some where this command writes, or where its output goes."
    return f"{error.strerror or error}: --verbose shows where."


def _fail(error: LowcommError) -> int:
    """One line on stderr, and a JSON object where a program reads; for -v the traceback as well."""
    status, arguments = _exit_code(error), sys.argv[1:]
    if any(_VERBOSE.fullmatch(argument) for argument in arguments):
        traceback.print_exc()
    if "--json" in arguments:
        content = {"error": str(error), "code": code_of(type(error)), "exit_code": status}
        print(json.dumps(content))
    print(f"error: {error}", file=sys.stderr)
    return status


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop where it is there, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
