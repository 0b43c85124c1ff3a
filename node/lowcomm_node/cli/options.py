"""Options of commands that are settings of the node, made from what ``NodeSettings`` declares."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.owner.settings import SETTINGS, Section, default_of, flag_of, kind_of


def setting(name: str, text: str | None = None, panel: str | None = None) -> Any:
    """The option for one setting; ``text`` replaces its help where a command differs."""
    declared = SETTINGS[name]
    if text is None:
        default = default_of(name)
        text = f"{declared.text}; default: {default}." if default else f"{declared.text}."
    # Typer gives a switch a --no- form, unless its flag is named.
    flag = [] if not declared.unit and declared.negation else [flag_of(name)]
    return typer.Option(*flag, help=text, metavar=declared.unit or None, rich_help_panel=panel)


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings, or for all of them.

    The command receives them as one dictionary, ``flags``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = [_parameter(name, grouped=not names) for name in names or SETTINGS]
        own = [one for one in signature(command).parameters.values() if one.name != "flags"]

        @wraps(command)
        def taking(**given: Any) -> None:
            command(flags={option.name: given.pop(option.name) for option in options}, **given)

        parameters = [*options, *own]
        taking.__signature__ = signature(command).replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return taking

    return decorate


def _parameter(name: str, grouped: bool) -> Parameter:
    section = SETTINGS[name].section
    panel = section.value if grouped and section is not Section.SWARM else None
    annotation = Annotated[_typed(name) | None, setting(name, panel=panel)]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _typed(name: str) -> Any:
    """What Typer checks by itself; what else there is to check, ``NodeSettings`` does."""
    kind = kind_of(name)
    if kind == tuple[str, ...]:
        return list[str]
    return kind if kind is Path or (kind is bool and not SETTINGS[name].unit) else str
