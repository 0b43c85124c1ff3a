"""The client of the control API: commands ask the daemon of this machine.

home/control.json names the socket file, or the port of 127.0.0.1 where that is missing. The daemon
removes both when it ends; after a crash they stay, so its pid is checked.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil
from pydantic import TypeAdapter

from lowcomm_node.errors import ConfigError, NodeError, NotRunning, Unhealthy
from lowcomm_node.status.model import Limits, read
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web import api
from lowcomm_node.web.api import ROOT, TIMEOUT, Query

T = TypeVar("T")
POLL = 0.1
"""Seconds between two looks at whether the daemon lives: only its parent could wait for it."""
_START = "start it with `lowcomm-node join --peers ADDR`"


@dataclass(frozen=True)
class ControlEndpoint:
    """Where the daemon of a home answers: the content of its control file."""

    port: int
    token: str = field(repr=False)
    pid: int
    peer_id: str = ""
    socket: str = ""
    """Path of the socket file; empty if there is none."""


def read_endpoint(home: Path) -> ControlEndpoint:
    """Read the control file.

    Raises NotRunning if there is none or its process is gone, ConfigError if it is unreadable.
    """
    path = Paths(home).control
    try:
        endpoint = TypeAdapter(ControlEndpoint).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise NotRunning(
            f"No node runs in {home}: {_START}, or name its folder with --home."
        ) from None
    except PermissionError:
        raise ConfigError(
            f"{path} belongs to another user: run this command as the user of the node."
        ) from None
    except ValueError:
        raise NotRunning(
            f"{path} is damaged, so the node can't be found: end it by hand if it runs, then "
            f"{_START}."
        ) from None
    if not _alive(endpoint.pid):
        raise NotRunning(
            f"The node of {home} (process {endpoint.pid}) ended without a goodbye: {_START}; it "
            "resumes."
        )
    return endpoint


class ControlClient:
    """A connection to the daemon of one home; use as a context manager.

    Every method raises NotRunning if no daemon answers, Unhealthy if it does not answer in time,
    and NodeError with its reason if it refuses.
    """

    def __init__(self, home: Path, timeout: float = TIMEOUT) -> None:
        self.home = home
        self.endpoint = read_endpoint(home)
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.endpoint.port}",
            headers={"Authorization": f"Bearer {self.endpoint.token}"},
            timeout=timeout,
            trust_env=False,  # no proxy between two processes of one machine
            transport=httpx.HTTPTransport(
                # A cleaner of /tmp may have removed it.
                uds=self.endpoint.socket if Path(self.endpoint.socket).is_socket() else None,
                # Plain HTTP: loading the machine's certificates for nothing takes longer than the
                # call.
                verify=False,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def ask(self, query: Query[T], *values: Any, **named: Any) -> T:
        """The answer to a query: values in the order of its parameters, or by name."""
        asked = dict(zip(query.parameters, values, strict=False)) | named
        return read(query.answer, self._call(query, **asked))

    status = partialmethod(ask, api.STATUS)
    peers = partialmethod(ask, api.PEERS)
    exchanges = partialmethod(ask, api.EXCHANGES)
    finish = partialmethod(ask, api.FINISH)
    stop = partialmethod(ask, api.STOP)
    pause = partialmethod(ask, api.PAUSE)
    resume = partialmethod(ask, api.RESUME)
    generate = partialmethod(ask, api.GENERATE)
    doctor = partialmethod(ask, api.DOCTOR)
    ping = partialmethod(ask, api.PING)
    gather = partialmethod(ask, api.GATHER)

    def limits(self, changes: Mapping[str, str] | None = None) -> Limits:
        """The limits on traffic and their use, after these changes."""
        if not changes:
            return self.ask(api.LIMITS)
        return read(Limits, self._call(api.CHANGE_LIMITS, **changes))

    def link(self) -> str:
        """A link to the node's page that lets one browser in, once."""
        key = self._call(api.Order("link", "", dict))["key"]
        return f"http://127.0.0.1:{self.endpoint.port}/#{key}"

    def wait_ended(self, timeout: float, poll: Callable[[], None] | None = None) -> bool:
        """Wait until the daemon is gone; whether it is, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while _alive(self.endpoint.pid):
            if time.monotonic() > deadline:
                return False
            if poll is not None:
                poll()
            time.sleep(POLL)
        return True

    def _call(self, query: Query[Any], **asked: Any) -> Any:
        given: dict[str, Any] = {"params" if query.method == "GET" else "json": asked}
        if query.timeout != TIMEOUT:
            given["timeout"] = query.timeout
        pid, port = self.endpoint.pid, self.endpoint.port
        try:
            response = self._http.request(query.method, f"{ROOT}/{query.name}", **given)
            _check(response)
            return response.json() if response.content else None
        except httpx.TimeoutException as error:
            raise Unhealthy(
                f"The node (process {pid}) does not answer: see its logs, or end it with `kill "
                f"{pid}` and start it again; it resumes from its last checkpoint."
            ) from error
        except httpx.TransportError as error:
            raise NotRunning(
                f"No node answers for {self.home} (process {pid}, port {port}): it has just ended, "
                f"or another program has its number; {_START}."
            ) from error
        except ValueError as error:
            raise Unhealthy(f"What answers on port {port} is not a node: {_START}.") from error


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        content = response.json()
        message, code = str(content["error"]), int(content.get("exit_code", 1))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"The node answered {response.status_code}", 1
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise Unhealthy(
            "The node refuses the token of control.json: it has just been restarted; try again."
        )
    error = NodeError(message)
    error.exit_code = code
    raise error


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True
