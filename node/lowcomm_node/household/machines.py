"""The key of this machine, and the machines that it is paired with, in its home.

    household.json: {"version": 1, "machines": [{"name": ..., "key": ..., "address": ...}, ...]}

A certificate follows from the 32 bytes of its key (`net.tls`), so the key pins it.
"""

import socket
import ssl
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lowcomm_node.errors import ConfigError
from lowcomm_node.household import PORT
from lowcomm_node.net.tls import certificate_of, make_certificate, read_certificate
from lowcomm_node.storage.files import create_private, folder_lock, write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.units import place
from lowcomm_protocol.peers.records import MAX_NAME, is_name


@lru_cache
def certificate_der(key: str) -> bytes:
    """The certificate of a key (hexadecimal) in DER. Raises ValueError if it is no key."""
    return ssl.PEM_cert_to_DER_cert(certificate_of(bytes.fromhex(key)).decode())


def _check_name(name: str) -> str:
    if not is_name(name) or not name.strip():
        raise ValueError("expected a printable name")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[Hex32, AfterValidator(lambda key: certificate_der(key) and key)]
"""The 32 bytes of a public key."""


class Strict(BaseModel):
    """Base of messages between machines, and of what is kept of them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(Strict):
    """A machine paired with this one."""

    name: Name
    key: Key
    address: Annotated[str, Field(max_length=300)] = ""
    """``host:port`` of a lender; empty for a head."""

    def replaces(self, other: "Machine") -> bool:
        """Whether it is the same head, or the same lender by key or address."""
        if self.address and self.address == other.address:
            return True
        return self.key == other.key and bool(self.address) == bool(other.address)


class _Content(Strict):
    version: Literal[1] = 1
    machines: tuple[Machine, ...]


class Household:
    """The machines around this one. All methods raise ConfigError for a file that is damaged."""

    def __init__(self, home: Path) -> None:
        """Make this machine's key if it has none. Raises ConfigError, DiskFull."""
        self._paths = Paths(home)
        self.key_file = self._paths.household_key
        """Key and certificate, as `ssl` reads them."""
        try:
            if not self.key_file.exists():
                made = make_certificate()
                home.mkdir(parents=True, exist_ok=True, mode=0o700)
                create_private(self.key_file, made.private_pem + made.pem)
            data = self.key_file.read_bytes()
            self.certificate = read_certificate(data)
            if not data.endswith(self.certificate.pem):
                raise ValueError("the certificate is not that of the key")
        except (ValueError, TypeError) as error:
            raise _damaged(self.key_file) from error
        self.key = self.certificate.public_key.hex()
        name = "".join(filter(str.isprintable, socket.gethostname().partition(".")[0]))
        self.name = name[:MAX_NAME].strip() or "machine"
        """What other machines call this one: its host name."""

    def machines(self) -> tuple[Machine, ...]:
        """All paired machines, as the file has them now."""
        path = self._paths.household
        try:
            return _Content.model_validate_json(path.read_bytes()).machines
        except FileNotFoundError:
            return ()
        except ValueError as error:
            raise _damaged(path) from error

    def heads(self) -> dict[bytes, Machine]:
        """The machines that may ask this one to compute, by their certificates in DER."""
        known = self.machines()
        return {certificate_der(head.key): head for head in known if not head.address}

    def lender(self, address: str) -> Machine:
        """The lender at an address. Raises ConfigError if none is paired."""
        at = place(*read_address(address))
        for machine in self.machines():
            if machine.address == at:
                return machine
        raise ConfigError(
            f"{address} is not paired with this machine: `lowcomm-node lend --pair` there shows a "
            f"code, and `lowcomm-node pair {address} --code CODE` pairs them."
        )

    def add(self, machine: Machine) -> Machine:
        """Keep a machine in place of what had its key or address, under a name of its own."""
        with folder_lock(self._paths.home):
            others = [other for other in self.machines() if not machine.replaces(other)]
            names = {other.name for other in others if other.key != machine.key}
            more = (f"{machine.name[: MAX_NAME - 4]}-{number}" for number in count(2))
            name = next(one for one in chain([machine.name], more) if one not in names)
            machine = machine.model_copy(update={"name": name})
            self._write([*others, machine])
        return machine

    def forget(self, name: str) -> None:
        """Pair with a machine no more. Raises ConfigError if none has that name."""
        with folder_lock(self._paths.home):
            machines = self.machines()
            others = [machine for machine in machines if machine.name != name]
            if len(others) == len(machines):
                names = ", ".join(sorted({machine.name for machine in machines})) or "none"
                raise ConfigError(f"--forget {name}: no such machine is paired: there is {names}.")
            self._write(others)

    def _write(self, machines: list[Machine]) -> None:
        content = _Content(machines=tuple(machines))
        write_atomic(self._paths.household, content.model_dump_json(indent=1).encode(), 0o600)


def read_address(text: str) -> tuple[str, int]:
    """Host and port of such as ``192.168.1.20`` or ``desk.local:31340``. Raises ConfigError."""
    try:
        is_v6 = text.count(":") > 1 and "[" not in text
        parts = urlsplit(f"//[{text}]" if is_v6 else f"//{text}")
        if parts.hostname and parts.netloc == parts.geturl().strip("/") and "@" not in text:
            return parts.hostname, parts.port or PORT
    except ValueError:  # no port, or no address of IPv6
        pass
    raise ConfigError(
        f"{text[:100]!r} is not an address such as 192.168.1.20, desk.local or 192.168.1.20:{PORT}:"
        " write the one that `lowcomm-node lend` shows."
    )


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"{path} is damaged: restore it, or remove it and pair the machines again.")
