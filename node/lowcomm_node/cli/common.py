"""The command line itself: options that commands share, and output."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, getdoc, signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.settings import BASIC, SETTINGS, NodeSettings, default_of, kind_of
from lowcomm_node.owner.settings import flag_of as flag_of_setting
from lowcomm_node.owner.sources import LoadedSettings, find_home, load_settings
from lowcomm_node.status.model import to_json
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.units import read_duration
from lowcomm_node.web.client import ControlClient

app = typer.Typer(
    help="Train one model together with peers that you do not know, over ordinary internet links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TYPES = {bool: "", int: "N", float: "SECONDS", str: "TEXT", Path: "PATH", list[str]: "TEXT"}
"""Placeholders of options in the help."""
_HELP = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


# options


def setting(name: str, text: str | None = None, panel: str | None = None) -> Any:
    """The option for a setting of the node; ``text`` replaces its help where a command differs."""
    declared = SETTINGS[name]
    if text is None:
        default = default_of(name)
        text = f"{declared.text}; default: {default}." if default else f"{declared.text}."
    # Typer gives a switch a --no- form, unless its flag is named.
    flag = [] if not declared.unit and declared.negation else [flag_of_setting(name)]
    flag += [declared.other_flag] if declared.other_flag else []
    return typer.Option(*flag, help=text, metavar=declared.unit, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class Here:
    """Values of the options that all commands share."""

    home: Path | None = None
    as_json: bool = False
    level: int = 0
    """Log level beyond the usual one."""

    @property
    def folder(self) -> Path:
        """The home that the options name. Raises ConfigError."""
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
    groups: Mapping[str, Sequence[Parameter]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, with the options that all share: it receives them as ``here``.

    The help of a parameter stands in the docstring, below ``Args:``. ``groups``: options in place
    of a parameter, which receives them as a dictionary.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        text, _, arguments = (getdoc(function) or "").partition("\n\nArgs:\n")
        helps = {key: " ".join(help_.split()) for key, help_ in _HELP.findall(arguments)}
        expanded = groups or {}
        declared = [one for one in signature(function).parameters.values() if one.name != "here"]
        given = [
            *chain.from_iterable(expanded.get(one.name, [_helped(one, helps)]) for one in declared),
            *(one for one in _SHARED if home or one.name != "home"),
        ]

        @wraps(function)
        def taking(**values: Any) -> None:
            for group, options in expanded.items():
                values[group] = {one.name: values.pop(one.name) for one in options}
            here = Here(
                home=values.pop("home", None),
                as_json=values.pop("json_"),
                level=values.pop("verbose") - values.pop("quiet"),
            )
            function(here=here, **values)

        taking.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # the terminal wraps it
        whole = signature(function).replace(parameters=given)
        taking.__signature__ = whole  # pyright: ignore[reportAttributeAccessIssue]
        of.command(name or function.__name__)(taking)
        return function

    return decorate


def _helped(parameter: Parameter, helps: Mapping[str, str]) -> Parameter:
    is_needed = parameter.default is Parameter.empty
    kind, info = parameter.annotation, typer.Argument() if is_needed else typer.Option()
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    info = copy(info)
    info.help = helps.get(parameter.name, info.help)
    if info.metavar is None and isinstance(info, OptionInfo):
        words = (word for plain, word in _TYPES.items() if kind in (plain, plain | None))
        info.metavar = next(words, None)
    return parameter.replace(annotation=Annotated[kind, info])


def option(name: str, kind: Any, text: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """An option that stands in no signature; ``more``: as `typer.Option` takes it."""
    return _parameter(name, kind, typer.Option(*flags, help=text, **more), default)


def setting_options(names: Sequence[str] | None = None) -> list[Parameter]:
    """Options for settings of the node; without ``names``, for all."""
    options: list[Parameter] = []
    for name in names or SETTINGS:
        kind = kind_of(name)
        panel = "Advanced" if names is None and name not in BASIC else None
        # What Typer does not check, ``NodeSettings`` does.
        plain = kind is Path or (kind is bool and not SETTINGS[name].unit)
        typed = list[str] if kind == tuple[str, ...] else kind if plain else str
        options.append(_parameter(name, typed, setting(name, panel=panel)))
    return options


def _parameter(name: str, kind: Any, info: Any, default: Any = None) -> Parameter:
    annotation = Annotated[kind | None if default is None else kind, info]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


_COUNTED: dict[str, Any] = {"default": 0, "count": True, "metavar": "", "show_default": False}
_SHARED = [
    _parameter("home", Path, setting("home")),
    option("json_", bool, "Machine-readable output.", "--json", default=False, metavar=""),
    option("quiet", int, "Log less; twice: errors only.", "--quiet", "-q", **_COUNTED),
    option("verbose", int, "Log more, and show tracebacks.", "--verbose", "-v", **_COUNTED),
]


# what commands are about


def newest(home: Path, fingerprint: str | None, file: str, what: str) -> Path:
    """The ``file`` of the named run, or of the run used last. Raises ConfigError if there is none,
    which calls it ``what``."""
    known = Paths(home).runs.glob(f"*/{file}")
    found = [path for path in known if path.parent.name.startswith(fingerprint or "")]
    if not found:
        named = f" of run {fingerprint}" if fingerprint else ""
        raise ConfigError(f"{home} holds no {what}{named}: name a node's folder with --home.")
    return max(found, key=lambda path: path.stat().st_mtime)


def seconds_of(duration: str, option: str = "") -> float:
    """Read a duration such as 30m. Raises ConfigError, which begins with ``option``."""
    try:
        return read_duration(duration)
    except ValueError as error:
        raise ConfigError(f"{option}{error}.") from None


def read_settings(flags: dict[str, Any]) -> LoadedSettings:
    """The settings of a command. Warnings go to stderr. Raises ConfigError."""
    loaded = load_settings(flags)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded
