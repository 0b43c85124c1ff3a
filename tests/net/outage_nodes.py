"""Real nodes and bootstrap servers on the hosts of a laboratory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))

from kit import TINY, Node, Process, command, environment
from laboratory import Host

from waiting import until

START = 120.0


class HostProcess(Process):
    """A child on a host, whose output goes to a file; the laboratory ends it."""

    def __init__(self, host: Host, home: Path, module: str, *arguments: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.host, self.home, self.log = host, home, home / "log"
        with self.log.open("ab") as file:
            self.child = host.popen(
                command(module, *arguments), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment()
            )


class HostNode(HostProcess, Node):
    """One ``lowcomm-node join`` on a host."""

    def __init__(self, host: Host, home: Path, address: str, *arguments: str) -> None:
        HostProcess.__init__(
            self, host, home, "lowcomm_node", "join", "--json", "--home", str(home), "--peers", address,
            "--threads", "1", "--poll", "1", "--record-life", "15", "--exchange-deadline", "15", *arguments,
        )  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        """Its status; its control API listens on the loopback of its host."""
        with self.host.inside():
            return Node.status(self)

    def peers(self) -> list[dict[str, Any]]:
        """The peers that it sees."""
        with self.host.inside():
            return Node.peers(self)


def start_bootstrap(host: Host, folder: Path, version: int = 4, method: str = "noloco") -> str:
    """Start a bootstrap server with a run of a tiny model; its address."""
    spec = folder / "run.toml"
    spec.write_text(TINY.format(method=method, steps=1_000_000, start_peers=2, evaluate_every=100_000))
    home = folder / host.name
    server = HostProcess(
        host,
        home,
        "lowcomm_bootstrap",
        "serve",
        "--json",
        "--home",
        str(home),
        "--run",
        str(spec),
        "--relay-peers",
        "0",
    )

    def ready() -> list[dict[str, Any]]:
        assert server.child.poll() is None, server.output[-3000:]
        return server.events("ready")

    addresses = until(ready, START, "the bootstrap server is ready")[0]["addresses"]
    wanted = f"/ip{version}/{host.addresses[version]}/tcp/"
    return next(address for address in addresses if address.startswith(wanted))
