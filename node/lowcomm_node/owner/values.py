"""Types of the owner's settings: what may be written for each, and how it is shown again."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.schedule import Schedule, read_schedule
from lowcomm_node.storage.paths import absolute
from lowcomm_node.system.units import NONE, read_duration, read_rate, write_duration, write_rate
from lowcomm_protocol.errors import AdmissionError

MAX_RECORD_LIFE = 600.0
"""As ``lowcomm_protocol.peers.records.MAX_LIFE``: peers refuse a record that claims more."""
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(@[0-9a-f]{12,64})?")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?")


def _absolute(folder: Path) -> Path:
    try:
        return absolute(folder)
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _check_run(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise ValueError(
            "expected NAME or NAME@FINGERPRINT (12 to 64 hexadecimal digits), as `create` prints it"
        )
    return run


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


def _check_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return device


def _check_checkpointing(value: str) -> str:
    if value not in ("auto", "on", "off"):
        raise ValueError("expected auto, on or off")
    return value


def _check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        if not address.startswith("/") or "/p2p/" not in address:
            raise ValueError(
                f"{address!r} is not an address such as /ip4/203.0.113.7/tcp/31330/p2p/12D3KooW"
            )
    return tuple(dict.fromkeys(addresses))


def _check_endpoints(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{endpoint!r} is not host:port, such as node.example.org:31331")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(
                f"{endpoint!r}: an address of IPv6 stands in brackets, such as [2001:db8::7]:31331"
            )
    return endpoints


def _none(value: Any) -> Any:
    return None if value == NONE else value


Folder = Annotated[Path, AfterValidator(_absolute)]
Text = Annotated[str, Field(min_length=1)]
Run = Annotated[str, AfterValidator(_check_run)]
"""``NAME`` or ``NAME@FINGERPRINT``."""
Invite = Annotated[SecretStr, AfterValidator(_check_invite)]
PeerName = Annotated[str, AfterValidator(_check_name)]
Device = Annotated[str, AfterValidator(_check_device)]
Checkpointing = Annotated[str, AfterValidator(_check_checkpointing)]
"""Of activations."""
Addresses = Annotated[tuple[str, ...], AfterValidator(_check_addresses)]
"""Multiaddresses of peers or bootstrap servers, each once."""
Endpoint = Annotated[str, AfterValidator(lambda one: _check_endpoints((one,))[0])]
"""``host:port``."""
Endpoints = Annotated[tuple[str, ...], Field(max_length=8), AfterValidator(_check_endpoints)]
"""``host:port`` each."""
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GiB = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
RecordLife = Annotated[float, Field(ge=1, le=MAX_RECORD_LIFE, allow_inf_nan=False)]
PeerCount = Annotated[Annotated[int, Field(ge=1, le=1024)] | None, BeforeValidator(_none)]
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
Hours = Annotated[
    Schedule | None,
    BeforeValidator(lambda value: read_schedule(str(value))),
    PlainSerializer(lambda hours: NONE if hours is None else str(hours), when_used="json"),
]
"""When to train; None, written none: at any time."""
