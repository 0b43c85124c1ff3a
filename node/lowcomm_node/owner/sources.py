"""Where settings come from: flag, ``LOWCOMM_*`` variable, ``config.toml``, default, in this order.

Every value remembers its source; ``lowcomm-node config`` shows it.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.settings import NodeSettings, flag_of, kind_of
from lowcomm_node.storage.paths import Paths, absolute, data_folder
from lowcomm_protocol.spec.document import expected_in_words

PREFIX = "LOWCOMM_"
OTHERS = "LOWCOMM_BOOTSTRAP_"
"""Of the bootstrap server, which may have the same environment."""


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and where each value comes from: ``flag``, a variable, a file, or ``default``."""

    settings: NodeSettings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    """Ignored variables, for the owner."""


def load_settings(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> LoadedSettings:
    """Merge all sources. A flag that is None or empty counts as not given.

    An unknown variable causes a warning only: other programs may share the prefix. Raises
    ConfigError for an unknown key of the file, with the nearest known one, and for an invalid
    value, with its source.
    """
    env = os.environ if env is None else env
    given = {
        key: value
        for key, value in (flags or {}).items()
        if value is not None and value not in ((), [])
    }
    home, home_source = _home(given, env)
    layers = [
        *((key, value, f"flag {flag_of(key)}") for key, value in given.items()),
        *(
            (key, value, f"environment {variable}")
            for variable, key, value in _from_environment(env)
        ),
        *_from_file(Paths(home).config),
    ]
    values: dict[str, Any] = {"home": home}
    sources = dict.fromkeys(NodeSettings.model_fields, "default") | {"home": home_source}
    for key, value, source in layers:
        if key not in values:
            values[key], sources[key] = value, source
    return LoadedSettings(_validate(values, sources), sources, tuple(_unknown_variables(env)))


def change_settings(settings: NodeSettings, changes: Mapping[str, Any]) -> NodeSettings:
    """Apply changes as an owner writes them. Raises ConfigError that names an invalid one."""
    sources = {name: flag_of(name) for name in NodeSettings.model_fields}
    checked = _validate({"home": settings.home, **changes}, sources)
    return settings.model_copy(update={name: getattr(checked, name) for name in changes})


def find_home(flag: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """The home: by flag, ``LOWCOMM_HOME``, systemd, or the default in the user's data folder."""
    return _home({} if flag is None else {"home": flag}, os.environ if env is None else env)[0]


def _home(flags: Mapping[str, Any], env: Mapping[str, str]) -> tuple[Path, str]:
    if "home" in flags:
        chosen, source = str(flags["home"]), "flag --home"
    elif env.get(f"{PREFIX}HOME"):
        chosen, source = env[f"{PREFIX}HOME"], f"environment {PREFIX}HOME"
    elif env.get("STATE_DIRECTORY"):
        # systemd joins several state directories by colons; the first is the unit's main one.
        chosen, source = env["STATE_DIRECTORY"].split(":")[0], "environment STATE_DIRECTORY"
    else:
        return data_folder("lowcomm"), "default"
    try:
        return absolute(chosen), source
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _variables(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that may be settings: name, key, value."""
    for variable, value in env.items():
        if variable.startswith(PREFIX) and not variable.startswith(OTHERS) and value:
            yield variable, variable.removeprefix(PREFIX).lower(), value


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for variable, key, value in _variables(env):
        if key in NodeSettings.model_fields:
            yield (
                variable,
                key,
                value.replace(",", " ").split() if kind_of(key) == tuple[str, ...] else value,
            )


def _unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    for variable, key, _ in _variables(env):
        if key not in NodeSettings.model_fields:
            near = get_close_matches(key, NodeSettings.model_fields, 1)
            meant = (
                f"did you mean {PREFIX}{near[0].upper()}?"
                if near
                else "`lowcomm-node config` lists all settings."
            )
            yield f"environment: the variable {variable} is no setting and has no effect; {meant}"


def _from_file(path: Path) -> list[tuple[str, Any, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text in UTF-8: save it so.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: make it readable, or choose another --home."
        ) from None
    known = [name for name in NodeSettings.model_fields if name != "home"]
    for key in content:
        if key == "home":
            raise ConfigError(
                f"{path}: home can't be set in a file of the home; use --home or {PREFIX}HOME."
            )
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; {_nearest(key, known)}")
    return [(key, value, str(path)) for key, value in content.items()]


def _validate(values: dict[str, Any], sources: Mapping[str, str]) -> NodeSettings:
    try:
        return NodeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = expected_in_words(first)
        if not first["loc"]:
            raise ConfigError(f"settings: {message}.") from None
        key = str(first["loc"][0])
        if key not in sources:
            raise ConfigError(
                f"settings: unknown key {key!r}; {_nearest(key, list(sources))}"
            ) from None
        shown = "..." if kind_of(key) is SecretStr else repr(str(values[key])[:200])
        raise ConfigError(f"{sources[key]}: {key} = {shown}: {message}.") from None


def _nearest(key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
