"""Where settings come from: flag, ``LOWCOMM_*`` variable, ``config.toml``, default, in this order.

Every value remembers its source; ``lowcomm-node config`` shows it.
"""

import os
import tomllib
from collections.abc import Mapping
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
LISTED = "`lowcomm-node config` lists all settings."


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
    given = {key: value for key, value in (flags or {}).items() if value not in (None, (), [])}
    home, home_source = _home(given, env)
    file = Paths(home).config
    known = NodeSettings.model_fields
    variables = {
        name.removeprefix(PREFIX).lower(): name
        for name, value in env.items()
        if name.startswith(PREFIX) and not name.startswith(OTHERS) and value
    }
    layers = [(str(file), key, value) for key, value in _read_file(file).items()]
    for key, name in variables.items():
        if key in known:
            is_list = kind_of(key) == tuple[str, ...]
            value = env[name].replace(",", " ").split() if is_list else env[name]
            layers.append((f"environment {name}", key, value))
    layers += [(f"flag {flag_of(key)}", key, value) for key, value in given.items()]
    values = {key: value for _, key, value in layers} | {"home": home}
    sources = dict.fromkeys(known, "default")
    sources |= {key: source for source, key, _ in layers} | {"home": home_source}
    warnings: list[str] = []
    for key, name in variables.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            meant = f"did you mean {PREFIX}{near[0].upper()}?" if near else LISTED
            text = f"environment: the variable {name} is no setting and has no effect; {meant}"
            warnings.append(text)
    return LoadedSettings(_validate(values, sources), sources, tuple(warnings))


def change_settings(settings: NodeSettings, changes: Mapping[str, Any]) -> NodeSettings:
    """Apply changes as an owner writes them. Raises ConfigError that names an invalid one."""
    sources = {name: flag_of(name) for name in changes}
    checked = _validate({"home": settings.home, **changes}, sources)
    return settings.model_copy(update={name: getattr(checked, name) for name in changes})


def find_home(flag: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """The home: by flag, ``LOWCOMM_HOME``, systemd, or the default in the user's data folder."""
    return _home({} if flag is None else {"home": flag}, os.environ if env is None else env)[0]


def _home(flags: Mapping[str, Any], env: Mapping[str, str]) -> tuple[Path, str]:
    # systemd joins several state directories by colons; the first is the unit's main one.
    of_systemd = env.get("STATE_DIRECTORY", "").split(":")[0]
    for chosen, source in (
        (flags.get("home"), "flag --home"),
        (env.get(f"{PREFIX}HOME"), f"environment {PREFIX}HOME"),
        (of_systemd, "environment STATE_DIRECTORY"),
    ):
        if chosen:
            try:
                return absolute(chosen), source
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
    return data_folder("lowcomm"), "default"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text in UTF-8: save it so.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: make it readable, or choose another --home."
        ) from None
    if "home" in content:
        raise ConfigError(
            f"{path}: home can't be set in a file of the home; use --home or {PREFIX}HOME."
        )
    return content


def _validate(values: dict[str, Any], sources: Mapping[str, str]) -> NodeSettings:
    try:
        return NodeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message = expected_in_words(first)
    if not first["loc"]:
        raise ConfigError(f"settings: {message}.")
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(key, NodeSettings.model_fields, 1)
        meant = f"did you mean {near[0]}?" if near else LISTED
        raise ConfigError(f"{sources[key]}: unknown key {key!r}; {meant}")
    shown = "..." if kind_of(key) is SecretStr else repr(str(values[key])[:200])
    raise ConfigError(f"{sources[key]}: {key} = {shown}: {message}.")
