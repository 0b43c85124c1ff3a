"""What all commands share: options, output, and exit codes."""

import asyncio
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.catalogue.message import code_of
from lowcomm_node.cli.options import setting
from lowcomm_node.errors import NodeError
from lowcomm_node.owner.sources import LoadedSettings, load_settings
from lowcomm_node.status.wire import to_json
from lowcomm_node.system.command import INTERRUPTED, tell_usage
from lowcomm_protocol.errors import LowcommError, SignatureError, SpecError, VersionError

Home = Annotated[Path | None, setting("home")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Quiet = Annotated[
    int, typer.Option("--quiet", "-q", count=True, help="Log less; twice: errors only.")
]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Log more, and show tracebacks.")
]
_VERBOSE = re.compile(r"-v+|--verbose")


def show(content: object, as_json: bool, text: str) -> None:
    """Print a result, a record or what JSON has words for, for a program or for a person."""
    print(json.dumps(to_json(content)) if as_json else text)


def read_settings(flags: dict[str, Any]) -> LoadedSettings:
    """The settings of a command. Warnings go to stderr. Raises ConfigError."""
    loaded = load_settings(flags)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def run(app: typer.Typer) -> int:
    """Run a command line; its exit code."""
    try:
        code = _run(app)
        sys.stdout.flush()  # what is buffered must fail here, not in Python's own exit
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            return _tell(_in_words(error), 1, code_of(NodeError))
        # The reader of our output, or the terminal, has gone; Python would complain about it once
        # more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(app: typer.Typer) -> int:
    try:
        code = app(standalone_mode=False)
    except LowcommError as error:
        return _tell(str(error), exit_code(error), code_of(type(error)))
    except ModuleNotFoundError as error:
        from lowcomm_node.net.p2pd import find_p2pd
        from lowcomm_node.system.command import ONLY_ELSEWHERE, check_system

        if error.name not in ONLY_ELSEWHERE:
            raise
        try:
            check_system(find_p2pd)
        except NodeError as reason:
            return _tell(str(reason), exit_code(reason), code_of(type(reason)))
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        code = 1 if isinstance(stop.code, str) else stop.code
    except Exception as error:
        code = tell_usage(error)
        if code is None:
            raise
    return code or 0


def _in_words(error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.filename is not None:
        remedy = "name another path, or " + ("free some" if is_full else "correct its permissions")
        return f"{error.filename}: {error.strerror}: {remedy}."
    if is_full:
        return f"{error.strerror}: free some where this command writes, or where its output goes."
    return f"{error.strerror or error}: --verbose shows where."


def _tell(message: str, status: int, code: str) -> int:
    """One line on stderr, and a JSON object where a program reads; for -v the traceback as well."""
    arguments = sys.argv[1:]
    if any(_VERBOSE.fullmatch(argument) for argument in arguments):
        traceback.print_exc()
    if "--json" in arguments:
        print(json.dumps({"error": message, "code": code, "exit_code": status}))
    print(f"error: {message}", file=sys.stderr)
    return status


def exit_code(error: LowcommError) -> int:
    """The exit code that an error ends a command with (docs/design.md)."""
    if isinstance(error, NodeError):
        return error.exit_code
    if isinstance(error, VersionError):
        return 5
    return 78 if isinstance(error, SpecError | SignatureError) else 1


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop where it is there, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
