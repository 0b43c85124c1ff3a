"""What the owner of this machine decides: flag, ``LOWCOMM_*`` environment, ``config.toml``, default, in this order.

Nothing that comes from the network ends up here. Every value remembers where it was set, which ``lowcomm-node config``
shows.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import platformdirs
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.schedule import Timetable, read_timetable
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.units import NONE, read_duration, read_rate, write_duration, write_rate
from lowcomm_protocol.errors import AdmissionError

if TYPE_CHECKING:
    from lowcomm_protocol.peers.invites import Token

PREFIX = "LOWCOMM_"
OTHERS = "LOWCOMM_BOOTSTRAP_"
"""Of the bootstrap server, which may have the same environment."""
MAX_RECORD_LIFE = 600.0
"""As ``lowcomm_protocol.peers.records.MAX_LIFE``: peers refuse a record that claims more."""
_LISTS = ("peers", "announce")
_SECRETS = ("invite",)
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(@[0-9a-f]{12,64})?")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?")


def _read_limit(value: Any) -> float | None:
    return read_rate(str(value))


def _read_schedule(value: Any) -> Timetable | None:
    return read_timetable(str(value))


def _read_duration(value: Any) -> float:
    return read_duration(str(value))


Port = Annotated[int, Field(ge=0, le=65535)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float | None, BeforeValidator(_read_limit), PlainSerializer(write_rate, when_used="json")]
"""Bytes a second, written such as 20Mbit or 2.5MB; None, written none: as many as come."""

Schedule = Annotated[
    Timetable | None,
    BeforeValidator(_read_schedule),
    PlainSerializer(lambda schedule: NONE if schedule is None else str(schedule), when_used="json"),
]
Duration = Annotated[float, BeforeValidator(_read_duration), PlainSerializer(write_duration, when_used="json")]
"""Seconds, written such as 90s, 30m or 2h."""
GiB = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class NodeSettings(BaseModel):
    """The settings of one node; each is a flag of ``join``, a ``LOWCOMM_*`` variable and a key of ``config.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    home: Path
    """Folder of identity, checkpoints and control file."""
    peers: tuple[str, ...] = ()
    """Multiaddresses of any peers or bootstrap servers of the swarm."""
    run: str | None = None
    """``NAME`` or ``NAME@FINGERPRINT``; None: the only run that the swarm knows."""
    invite: SecretStr | None = None
    """What the run's creator sent, where the run takes invited peers only. Never shown."""
    ephemeral: bool = False
    """A fresh identity, in memory only; the one of the home is neither read nor made."""
    data: Text | None = None
    """Training text of this machine: a file, folder or glob, or ``text:``, ``jsonl:``, ``parquet:`` and a path."""
    field: Text = "text"
    """Field of JSON lines, or column of Parquet, that holds the text."""
    tokenizer: Text | None = None
    """A tokenizer.json of this machine, where the run asks for a local one."""
    host: Text | None = None
    """Address to listen on; None: loopback if all peers are on loopback, else all interfaces."""
    port: Port = 0
    """TCP port for exchanges; 0: any free one."""
    dht_port: Port = 0
    """TCP port for the DHT; 0: any free one."""
    announce: tuple[str, ...] = Field(default=(), max_length=8)
    """``host:port`` at which others can dial this node, where it differs from what it listens on."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads of the trainer; None: as many as torch likes."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 100
    """Inner steps that a crash may cost at most: a checkpoint is on the disk in time."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Checkpoints to keep."""
    max_memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """GiB that daemon and trainer may use together."""
    max_vram: GiB | None = None
    """GiB of the GPU's memory that training may take."""
    max_disk: GiB | None = None
    """GiB of the disk that the files of the home may take."""
    nice: Annotated[int, Field(ge=0, le=19)] = 5
    """How far the trainer steps back where other programs want the processor: 0 not at all, 19 always."""
    max_up: Rate = None
    """Contents that go out, over all streams together."""
    max_down: Rate = None
    """Contents that come in, over all streams together."""
    max_peers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Peers to talk with at once; None: 64."""
    schedule: Schedule = None
    """When to train, local time, such as 22:00-07:00; None, written none: at any time."""
    only_idle: bool = False
    """Train only while nobody uses this machine."""
    idle_after: Duration = 600.0
    """How long nobody must have used it."""
    on_battery: bool = True
    """Whether to train while this machine runs on its battery."""
    control_port: Port = 0
    """Loopback port of the control API; 0: any free one."""
    stay: bool = False
    """Stay and serve the state to others after the run has finished."""
    record_life: Annotated[float, Field(ge=1, le=MAX_RECORD_LIFE, allow_inf_nan=False)] = 30.0
    """Seconds that others believe this node alive after its last record."""
    poll: Seconds = 2.0
    """Seconds between two looks at the DHT."""
    join_deadline: Seconds = 30.0
    """Seconds to look for the swarm at the first start; later ones need none."""
    exchange_deadline: Seconds = 300.0
    """Seconds that one exchange may take, at most; by themselves nodes wait for what peers with slow steps or lines need."""

    @property
    def paths(self) -> Paths:
        """Where the files of this node lie."""
        return Paths(self.home)

    @property
    def token(self) -> "Token | None":
        """The invite that was given."""
        return _read_token(self.invite) if self.invite is not None else None

    @field_validator("max_peers", mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        return None if value == NONE else value

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("run")
    @classmethod
    def _known_form(cls, run: str | None) -> str | None:
        if run is not None and not _RUN.fullmatch(run):
            raise ValueError("expected NAME or NAME@FINGERPRINT (12 to 64 hexadecimal digits), as `create` prints it")
        return run

    @field_validator("invite")
    @classmethod
    def _whole_invite(cls, invite: SecretStr | None) -> SecretStr | None:
        if invite is not None:
            try:
                _read_token(invite)
            except AdmissionError as error:
                raise ValueError(str(error).rstrip(".")) from None
        return invite

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError("expected auto, cpu, cuda or cuda:N")
        return device

    @field_validator("peers")
    @classmethod
    def _multiaddresses(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            if not peer.startswith("/") or "/p2p/" not in peer:
                raise ValueError(f"{peer!r} is not an address such as /ip4/203.0.113.7/tcp/31330/p2p/12D3KooW")
        return tuple(dict.fromkeys(peers))

    @field_validator("announce")
    @classmethod
    def _host_and_port(cls, announce: tuple[str, ...]) -> tuple[str, ...]:
        for address in announce:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address!r} is not host:port, such as node.example.org:31331")
            if ":" in host and not (host.startswith("[") and host.endswith("]")):
                raise ValueError(f"{address!r}: an address of IPv6 stands in brackets, such as [2001:db8::7]:31331")
        return announce

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.record_life < 2 * self.poll:
            raise ValueError(
                f"record_life = {self.record_life:g} must be at least twice poll = {self.poll:g}, "
                "or others think this node dead between two of its records"
            )
        return self


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and where each value comes from: ``flag``, a variable, a file, or ``default``."""

    settings: NodeSettings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    """What was passed over, in words for the owner."""


def load_settings(flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> LoadedSettings:
    """Merge flag, environment, ``config.toml`` of the home and default. A flag that is None or empty was not given.

    An unknown variable is passed over with a warning: other programs may share the prefix. Raises ConfigError that names
    the nearest key for an unknown one of the file, and the source of a value that is not valid.
    """
    env = os.environ if env is None else env
    given = {key: value for key, value in (flags or {}).items() if value is not None and value not in ((), [])}
    home, home_source = _home(given, env)
    layers = [
        *((key, value, f"flag --{key.replace('_', '-')}") for key, value in given.items()),
        *((key, value, f"environment {variable}") for variable, key, value in _from_environment(env)),
        *_from_file(Paths(home).config),
    ]
    values: dict[str, Any] = {"home": home}
    sources = dict.fromkeys(NodeSettings.model_fields, "default") | {"home": home_source}
    for key, value, source in layers:
        if key not in values:
            values[key], sources[key] = value, source
    return LoadedSettings(_validate(values, sources), sources, tuple(_unknown_variables(env)))


def change_settings(settings: NodeSettings, changes: Mapping[str, Any]) -> NodeSettings:
    """Settings with changes, each as its owner writes it. Raises ConfigError that names what is not valid."""
    sources = {name: f"--{name.replace('_', '-')}" for name in NodeSettings.model_fields}
    checked = _validate({"home": settings.home, **changes}, sources)
    return settings.model_copy(update={name: getattr(checked, name) for name in changes})


def find_home(flag: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """The home folder alone: ``--home``, ``LOWCOMM_HOME``, systemd's ``STATE_DIRECTORY``, or the user's data folder."""
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
        chosen, source = platformdirs.user_data_dir("lowcomm"), "default"
    return Path(chosen).expanduser().absolute(), source


def _variables(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that may be settings: name, key, value."""
    for variable, value in env.items():
        if variable.startswith(PREFIX) and not variable.startswith(OTHERS) and value:
            yield variable, variable.removeprefix(PREFIX).lower(), value


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for variable, key, value in _variables(env):
        if key in NodeSettings.model_fields:
            yield variable, key, value.replace(",", " ").split() if key in _LISTS else value


def _unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    for variable, key, _ in _variables(env):
        if key not in NodeSettings.model_fields:
            near = get_close_matches(key, NodeSettings.model_fields, 1)
            meant = f"did you mean {PREFIX}{near[0].upper()}?" if near else "`lowcomm-node config` lists all settings."
            yield f"environment: the variable {variable} is no setting and has no effect; {meant}"


def _from_file(path: Path) -> list[tuple[str, Any, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: make it readable, or choose another --home.") from None
    known = [name for name in NodeSettings.model_fields if name != "home"]
    for key in content:
        if key == "home":
            raise ConfigError(f"{path}: home can't be set in a file of the home; use --home or {PREFIX}HOME.")
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; {_nearest(key, known)}")
    return [(key, value, str(path)) for key, value in content.items()]


def _validate(values: dict[str, Any], sources: Mapping[str, str]) -> NodeSettings:
    try:
        return NodeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(f"settings: {message}.") from None
        key = str(first["loc"][0])
        if key not in sources:
            raise ConfigError(f"settings: unknown key {key!r}; {_nearest(key, list(sources))}") from None
        shown = "..." if key in _SECRETS else repr(str(values[key])[:200])
        raise ConfigError(f"{sources[key]}: {key} = {shown}: {message}.") from None


def _read_token(invite: SecretStr) -> "Token":
    from lowcomm_protocol.peers.invites import read_token  # most commands need no cryptography

    return read_token(invite.get_secret_value())


def _nearest(key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
