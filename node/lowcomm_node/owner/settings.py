"""Every setting of a node's owner, declared once.

A field of ``NodeSettings`` is an option of ``join`` (``--max-up``), a variable of the environment
(``LOWCOMM_MAX_UP``), a key of ``config.toml`` (``max_up``), a line of ``lowcomm-node config`` and a
row of ``docs/node.md``. All of them are made from its name, its type, its default and what its
``Setting`` says. ``sources`` reads them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.rules import Schedule, read_schedule
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.system.machine import LAST
from lowcomm_node.system.units import NONE, read_duration, read_rate, write_duration, write_rate
from lowcomm_protocol.errors import AdmissionError

if TYPE_CHECKING:
    from lowcomm_protocol.spec.run import RunSpec

MAX_RECORD_LIFE = 600.0
"""As ``lowcomm_protocol.peers.records.MAX_LIFE``: peers refuse a record that claims more."""


def _check_folder(folder: Path) -> Path:
    try:
        return absolute(folder)
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _check_invite(invite: SecretStr) -> SecretStr:
    from lowcomm_protocol.peers.invites import read_token  # most commands need no cryptography

    try:
        read_token(invite.get_secret_value())
    except AdmissionError as error:
        raise ValueError(str(error).rstrip(".")) from None
    return invite


def _check_name(name: str) -> str:
    from lowcomm_protocol.peers.records import MAX_NAME, is_name  # most commands need none of it

    if not is_name(name):
        raise ValueError(f"expected at most {MAX_NAME} printable characters")
    return name


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        if not address.startswith("/") or "/p2p/" not in address:
            raise ValueError(
                f"{address!r} is not an address such as /ip4/203.0.113.7/tcp/31330/p2p/12D3KooW"
            )
    return tuple(dict.fromkeys(addresses))


def _check_endpoint(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not host:port, such as node.example.org:31331")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(
            f"{endpoint!r}: an address of IPv6 stands in brackets, such as [2001:db8::7]:31331"
        )
    return endpoint


def _check_mirror(url: str) -> str:
    if not re.fullmatch(r"https://[!-~]{1,300}", url):
        raise ValueError(f"{url!r} is not an address such as https://example.org/NAME.pack")
    return url


Folder = Annotated[Path, AfterValidator(_check_folder)]
Text = Annotated[str, Field(min_length=1)]
Run = Annotated[
    str,
    _matching(
        r"[a-z0-9][a-z0-9._-]{0,63}(@[0-9a-f]{12,64})?",
        "NAME or NAME@FINGERPRINT (12 to 64 hexadecimal digits), as `create` prints it",
    ),
]
"""``NAME`` or ``NAME@FINGERPRINT``."""
Invite = Annotated[SecretStr, AfterValidator(_check_invite)]
PeerName = Annotated[str, AfterValidator(_check_name)]
DEVICES = "(auto, cpu, mps, cuda, cuda:N, xpu or xpu:N), several such as 0,1, or all"
_ONE = r"(cpu|(cuda:|xpu:)?\d{1,2})"
Device = Annotated[
    str, _matching(rf"auto|all|cpu|mps|cuda|xpu|{_ONE}(,{_ONE}){{0,15}}", f"one device {DEVICES}")
]
Checkpointing = Annotated[str, _matching("auto|on|off", "auto, on or off")]
"""Of activations."""
Moments = Annotated[str, _matching("fp32|bf16|int8", "fp32, bf16 or int8")]
"""Forms in which the inner optimizer may keep its moments."""
Ways = Annotated[str, _matching("auto|replicas|stages", "auto, replicas or stages")]
"""What machines of a household do."""
Addresses = Annotated[tuple[str, ...], AfterValidator(_check_addresses)]
"""Multiaddresses of peers or bootstrap servers, each once."""
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""``host:port``."""
Endpoints = Annotated[
    tuple[str, ...],
    Field(max_length=8),
    AfterValidator(lambda endpoints: tuple(map(_check_endpoint, endpoints))),
]
Mirrors = Annotated[
    tuple[str, ...],
    Field(max_length=8),
    AfterValidator(lambda urls: tuple(map(_check_mirror, urls))),
]
"""Addresses of packs."""
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GiB = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
RecordLife = Annotated[float, Field(ge=1, le=MAX_RECORD_LIFE, allow_inf_nan=False)]
PeerCount = Annotated[
    Annotated[int, Field(ge=1, le=1024)] | None,
    BeforeValidator(lambda value: None if value == NONE else value),
]
"""None, written none: as many as nodes take by themselves."""
Rate = Annotated[
    float | None,
    BeforeValidator(lambda value: read_rate(str(value))),
    PlainSerializer(write_rate, when_used="json"),
]
"""Bytes a second, written such as 20Mbit or 2.5MB; None, written none: no limit."""
Duration = Annotated[
    float,
    BeforeValidator(lambda value: read_duration(str(value))),
    PlainSerializer(write_duration, when_used="json"),
]
"""Seconds, written such as 90s, 30m or 2h."""
Programs = Annotated[
    tuple[str, ...],
    AfterValidator(lambda names: tuple(filter(None, map(str.strip, ",".join(names).split(","))))),
]
"""Names of processes."""
Percent = Annotated[int, Field(ge=10, le=100), BeforeValidator(lambda v: str(v).removesuffix("%"))]
Hours = Annotated[
    Schedule | None,
    BeforeValidator(lambda value: read_schedule(str(value))),
    PlainSerializer(lambda hours: NONE if hours is None else str(hours), when_used="json"),
]
"""When to train; None, written none: at any time."""


@dataclass(frozen=True)
class Setting:
    """Description of a field, beside its name, its type with the bounds, and its default."""

    text: str
    """Description for the help, without a full stop."""
    unit: str = ""
    """Placeholder for its value in the help, such as SECONDS; empty for a switch."""
    unset: str = ""
    """Effect of leaving it unset, where its default does not say that."""
    negation: bool = True
    """Whether a switch has a ``--no-`` form, too."""
    while_running: bool = False
    """Whether ``lowcomm-node limits`` changes it in a running node."""
    other_flag: str = ""
    """Another spelling of its option."""
    flag: str = ""
    """Its option, where that is not named after the field."""


def _setting(text: str, unit: str = "", default: Any = None, **more: Any) -> Any:
    described = Setting(text, unit, **more)
    return Field(default, json_schema_extra={"setting": described})  # type: ignore


class NodeSettings(BaseModel):
    """The settings of one node."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    home: Folder = _setting(
        "Folder of this node's identity, checkpoints and settings",
        "FOLDER",
        default=...,
        unset="lowcomm in your data folder",
    )
    peers: Addresses = _setting(
        "Address of a bootstrap server or peer; may be repeated", "ADDRESS", default=()
    )
    run: Run | None = _setting("NAME or NAME@FINGERPRINT", "RUN", unset="the only run there is")
    invite: Invite | None = _setting(
        "What the run's creator sent you; or set LOWCOMM_INVITE", "INVITE"
    )
    name: PeerName | None = _setting(
        "What others see this node called, such as on a swarm's page", "NAME"
    )
    ephemeral: bool = _setting(
        "A fresh identity, in memory only: for containers", default=False, negation=False
    )
    show_sample: bool = _setting(
        "Show on the swarm's page what the model writes here; it may quote your training text",
        default=False,
        negation=False,
    )
    stay: bool = _setting("Serve the state to others after the run has finished", default=False)

    data: Text | None = _setting(
        "Your training text: file, folder or glob of text, JSON lines or Parquet; or packs of the "
        "run, which are read in place",
        "PATH",
        unset="packs come from peers",
    )
    field: Text = _setting(
        "Field of JSON lines, or column of Parquet, with the text", "NAME", default="text"
    )
    tokenizer: Text | None = _setting(
        "The run's tokenizer.json, where it has one", "PATH", unset="from peers"
    )
    weights: Folder | None = _setting(
        "Folder with the weights that the run begins with, where it names any",
        "FOLDER",
        unset="from peers",
    )

    max_data: GiB | None = _setting(
        "Disk space for the run's packed text: pieces that are not read make room",
        "GiB",
        unset="all of it",
    )
    mirror: Mirrors = _setting(
        "https address of a pack, or of a folder of packs if it ends in /, to be asked where peers "
        "give too little; may be repeated",
        "URL",
        default=(),
    )
    allow_mirrors: bool = _setting(
        "Ask the mirrors that the run's creator names, too", default=False
    )
    local_mirrors: bool = _setting(
        "Whether --mirror may lead to this machine or its own network", default=False
    )

    host: Text | None = _setting(
        "Address to listen on",
        "HOST",
        unset="loopback if all --peers are there, else all interfaces",
    )
    port: Port = _setting("TCP port for exchanges", "PORT", default=0, unset="0, any free one")
    dht_port: Port = _setting("TCP port for the DHT", "PORT", default=0, unset="0, any free one")
    announce: Endpoints = _setting(
        "host:port at which others reach you, where it differs; may be repeated",
        "HOST:PORT",
        default=(),
    )
    control_port: Port = _setting(
        "Loopback port of the control API", "PORT", default=0, unset="0, any free one"
    )
    metrics: Endpoint | None = _setting(
        "host:port at which Prometheus reads /metrics, without a token",
        "HOST:PORT",
        unset="nowhere",
    )

    device: Device = _setting(
        f"One device {DEVICES}", "DEVICE", default="auto", other_flag="--devices"
    )
    lenders: Annotated[tuple[str, ...], Field(max_length=16)] = _setting(
        "Address of a machine of yours that computes too, where `lowcomm-node lend` runs; may be "
        "repeated",
        "ADDRESS",
        default=(),
        flag="--with",
    )
    household: Ways = _setting(
        "What machines named by --with do: each computes whole windows (replicas), or holds some "
        "blocks of the model (stages); auto takes stages where this one can't hold all",
        "auto|replicas|stages",
        default="auto",
    )
    threads: Annotated[int, Field(ge=1, le=4096)] | None = _setting(
        "CPU threads of the trainer", "COUNT", unset="as many as it has cores"
    )
    nice: Annotated[int, Field(ge=0, le=19)] = _setting(
        "0 to 19: how far training steps back for other programs, from not at all to "
        "taking only what they leave",
        "LEVEL",
        default=LAST,
    )
    max_memory: Positive | None = _setting(
        "Memory for daemon and trainer together: a run that needs more is refused, a trainer "
        "that takes more is ended",
        "GiB",
        unset="what is free at the start",
    )
    max_vram: GiB | None = _setting("GPU memory that training may use", "GiB", unset="all of it")
    micro_batch: Annotated[int, Field(ge=1, le=1_000_000)] | None = _setting(
        "Windows of a batch that go through the model at once; what a step learns stays",
        "COUNT",
        unset="as many as fit into memory",
    )
    activation_checkpointing: Checkpointing = _setting(
        "Whether to compute activations again, which takes less memory and about a third "
        "more time: on, off, or auto, where not one window fits otherwise",
        "auto|on|off",
        default="auto",
    )
    moments: Moments = _setting(
        "What the optimizer's moments are kept in: bf16 and int8 take a half and a quarter of the "
        "memory; checkpoints and peers get fp32",
        "fp32|bf16|int8",
        default="fp32",
    )
    max_disk: GiB | None = _setting("Disk space this node may use", "GiB", unset="all of it")
    checkpoint_every: Annotated[int, Field(ge=1)] = _setting(
        "Inner steps that a crash may cost at most", "STEPS", default=100
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = _setting("Checkpoints to keep", "COUNT", default=3)

    max_up: Rate = _setting(
        "Contents sent a second, such as 20Mbit or 2.5MB", "RATE", while_running=True
    )
    max_down: Rate = _setting("Contents received a second; as --max-up", "RATE", while_running=True)
    max_peers: PeerCount = _setting(
        "Peers to talk with at once", "COUNT", unset="none, which is 64", while_running=True
    )

    schedule: Hours = _setting(
        'Hours in which to train, such as 22:00-07:00 or "Mon-Fri 18:00-08:00"',
        "HOURS",
        unset="none, which is always",
    )
    only_idle: bool = _setting("Train only while nobody uses this machine", default=False)
    idle_after: Duration = _setting("How long nobody must have used it", "TIME", default=600.0)
    on_battery: bool = _setting("Whether to train on battery: yes or no", "yes|no", default=True)
    not_while: Programs = _setting(
        "Programs while which not to train, such as steam,blender", "NAMES", default=()
    )
    yield_to_gpu: bool = _setting(
        "Pause while another process computes on the GPU, and for two minutes after", default=False
    )
    max_gpu_temp: Annotated[int, Field(ge=40, le=110)] | None = _setting(
        "Temperature of an NVIDIA card at which steps wait until it has cooled by 5", "CELSIUS"
    )
    gpu_power: Annotated[int, Field(ge=1, le=10_000)] | None = _setting(
        "Power of an NVIDIA card while the node trains; without root it rests instead", "WATTS"
    )
    duty: Percent = _setting(
        "Percentage of the time in which steps compute", "PERCENT", default=100
    )

    record_life: RecordLife = _setting(
        "How long a record of this node is valid; renewed after a third at the latest",
        "SECONDS",
        default=MAX_RECORD_LIFE,
    )
    poll: Positive = _setting(
        "Time between two looks at the DHT; more where there are many peers", "SECONDS", default=2.0
    )
    join_deadline: Positive = _setting(
        "How long to look for the swarm at the first start", "SECONDS", default=30.0
    )
    exchange_deadline: Positive = _setting(
        "How long one exchange may take, at most", "SECONDS", default=300.0
    )

    @property
    def paths(self) -> Paths:
        """Where the files of this node lie."""
        return Paths(self.home)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.record_life < 2 * self.poll:
            raise ValueError(
                f"record_life = {self.record_life:g} must be at least twice poll = {self.poll:g}, "
                "or others think this node dead between two of its records"
            )
        return self


SETTINGS: dict[str, Setting] = {
    name: field.json_schema_extra["setting"]  # type: ignore
    for name, field in NodeSettings.model_fields.items()
}
"""Description of each field, by its name."""
BASIC = (
    "home", "peers", "run", "invite", "name", "stay", "data", "tokenizer", "device", "max_memory",
    "max_disk", "max_up", "max_down", "schedule", "only_idle",
)  # fmt: skip
"""Settings that the help and docs show first."""
CHANGEABLE = tuple(name for name, setting in SETTINGS.items() if setting.while_running)
"""Settings that ``lowcomm-node limits`` can change."""


def unused(settings: NodeSettings, spec: "RunSpec") -> Iterator[str]:
    """Yield the files of the owner that a run does not use, and why, in words."""
    for name, is_needed, instead in (
        (
            "data",
            spec.data.source in ("local", "packed"),
            f'the text "{spec.data.source}" of the run',
        ),
        ("tokenizer", spec.data.tokenizer == "local", f'the tokenizer "{spec.data.tokenizer}"'),
        ("weights", bool(spec.start.files), "random weights to begin with"),
    ):
        if (value := getattr(settings, name)) is not None and not is_needed:
            yield f"{flag_of(name)} {value} has no effect: {spec.run.name} takes {instead}"


def flag_of(name: str) -> str:
    """How a setting is given to a command."""
    setting = SETTINGS.get(name)
    return (setting and setting.flag) or f"--{name.replace('_', '-')}"


def kind_of(name: str) -> Any:
    """The type of a value as its owner writes it: text, if a reader converts it."""
    field = NodeSettings.model_fields[name]
    if any(isinstance(one, BeforeValidator) for one in field.metadata):
        return str
    kind: Any = field.annotation
    if NoneType in get_args(kind):
        [kind] = [one for one in get_args(kind) if one is not NoneType]
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def default_of(name: str) -> str:
    """Effect of leaving a setting unset, for its owner; empty for a switch that is off."""
    default = NodeSettings(home=Path()).model_dump(mode="json")[name]
    if SETTINGS[name].unset or default in (None, []):
        return SETTINGS[name].unset
    if isinstance(default, bool):
        return "yes" if default else ""
    return f"{default:g}" if isinstance(default, float) else str(default)
