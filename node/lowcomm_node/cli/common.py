"""The command line itself: options that commands share, output, errors, and exit codes."""

import asyncio
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.catalogue import code_of
from lowcomm_node.errors import NodeError
from lowcomm_node.owner.settings import SETTINGS, NodeSettings, Section, default_of, kind_of
from lowcomm_node.owner.settings import flag_of as flag_of_setting
from lowcomm_node.owner.sources import LoadedSettings, find_home, load_settings
from lowcomm_node.status.model import to_json
from lowcomm_node.system.command import INTERRUPTED, exit_code, tell_usage
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.errors import LowcommError

app = typer.Typer(
    help="Train one model together with peers that you do not know, over ordinary internet links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBOSE = re.compile(r"-v+|--verbose")


# options


def setting(name: str, text: str | None = None, panel: str | None = None) -> Any:
    """The option for a setting of the node; ``text`` replaces its help where a command differs."""
    declared = SETTINGS[name]
    if text is None:
        default = default_of(name)
        text = f"{declared.text}; default: {default}." if default else f"{declared.text}."
    # Typer gives a switch a --no- form, unless its flag is named.
    flag = [] if not declared.unit and declared.negation else [flag_of_setting(name)]
    return typer.Option(*flag, help=text, metavar=declared.unit or None, rich_help_panel=panel)


_SHARED = {
    "home": (Annotated[Path | None, setting("home")], None),
    "json_": (Annotated[bool, typer.Option("--json", help="Machine-readable output.")], False),
    "quiet": (
        Annotated[
            int, typer.Option("--quiet", "-q", count=True, help="Log less; twice: errors only.")
        ],
        0,
    ),
    "verbose": (
        Annotated[
            int, typer.Option("--verbose", "-v", count=True, help="Log more, and show tracebacks.")
        ],
        0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Here:
    """Values of the options that all commands share."""

    home: Path | None = None
    as_json: bool = False
    level: int = 0
    """Log level beyond the usual one."""

    @property
    def folder(self) -> Path:
        """The home that is meant. Raises ConfigError."""
        return find_home(self.home)

    def node(self) -> ControlClient:
        """The running node of this home. Raises NotRunning."""
        return ControlClient(self.folder)

    def settings(self, **flags: Any) -> NodeSettings:
        """The settings of this home. Raises ConfigError."""
        return read_settings({"home": self.home, **flags}).settings

    def log(self) -> None:
        """Show what happens meanwhile on stderr."""
        configure_logs(self.level - 1, self.as_json)

    def show(self, content: object, text: str) -> None:
        """Print a result for a program, or for a person."""
        print(json.dumps(to_json(content)) if self.as_json else text)


def command(
    name: str | None = None,
    *,
    of: typer.Typer = app,
    home: bool = True,
    settings: Sequence[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, with the options that all share: it receives them as ``here``.

    ``settings`` become options, too; empty: all that there are. The function receives them as one
    dictionary, ``flags``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in signature(function).parameters.values() if one.name != "here"]
        given = (
            [] if settings is None else [_parameter(one, settings) for one in settings or SETTINGS]
        )
        own = [one for one in own if one.name != "flags"]
        shared = [
            Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
            for key, (annotation, default) in _SHARED.items()
            if home or key != "home"
        ]

        @wraps(function)
        def taking(**values: Any) -> None:
            if settings is not None:
                values["flags"] = {one.name: values.pop(one.name) for one in given}
            here = Here(
                home=values.pop("home", None),
                as_json=values.pop("json_"),
                level=values.pop("verbose") - values.pop("quiet"),
            )
            function(here=here, **values)

        whole = signature(function).replace(parameters=[*given, *own, *shared])
        taking.__signature__ = whole  # pyright: ignore[reportAttributeAccessIssue]
        of.command(name)(taking)
        return function

    return decorate


def _parameter(name: str, chosen: Sequence[str]) -> Parameter:
    section = SETTINGS[name].section
    panel = section.value if not chosen and section is not Section.SWARM else None
    kind = kind_of(name)
    # What Typer does not check, ``NodeSettings`` does.
    plain = kind is Path or (kind is bool and not SETTINGS[name].unit)
    typed: Any = list[str] if kind == tuple[str, ...] else kind if plain else str
    annotation = Annotated[typed | None, setting(name, panel=panel)]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def read_settings(flags: dict[str, Any]) -> LoadedSettings:
    """The settings of a command. Warnings go to stderr. Raises ConfigError."""
    loaded = load_settings(flags)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


# errors and exit codes


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


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop where it is there, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
