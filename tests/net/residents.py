"""What lives in a laboratory, which ends it: bootstrap servers, nodes and lenders, real processes
on the hosts that a test has made."""

import re
from pathlib import Path
from typing import Any

from laboratory import Host

from helpers.processes import TINY, Node, Process, command, environment
from helpers.waiting import until
from lowcomm_node.status.model import to_json

START = 400.0
"""Seconds until a process answers: what it imports takes long where many do so at once."""
PORT = "31330"


class Server(Process):
    """A bootstrap server on a host."""

    def __init__(self, host: Host, home: Path, *arguments: str) -> None:
        self.host = host
        self.launch = host.popen  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(
            home,
            "lowcomm_bootstrap",
            "serve",
            "--json",
            "--port",
            PORT,
            "--home",
            str(home),
            *arguments,
        )

    def address(self, version: int = 4, deadline: float = START) -> str:
        """Where it is reached over TCP and this version of IP, once it is ready."""

        def ready() -> list[dict[str, Any]]:
            assert self.child.poll() is None, self.output[-3000:]
            return self.events("ready")

        told = until(ready, deadline, "the bootstrap server is ready")[-1]["addresses"]
        place = f"/ip{version}/{self.host.addresses[version]}/tcp/"
        return next(address for address in told if address.startswith(place))


class Lender(Process):
    """A machine that lends itself to another of its owner."""

    def __init__(self, host: Host, home: Path, *arguments: str) -> None:
        self.launch = host.popen  # pyright: ignore[reportAttributeAccessIssue]
        self.address = host.address
        super().__init__(home, "lowcomm_node", "lend", "--home", str(home), *arguments)

    def pair(self, host: Host, home: Path) -> None:
        """Pair it with the head on a host."""
        shown = re.compile(r"^  (\w{4}(-\w{4}){3})$", re.M)
        code = until(lambda: shown.search(self.output), START, "a code is shown")
        assert code
        ours = ("--home", str(home), "--code", code[1])
        done = host.run(command("lowcomm_node", "pair", self.address, *ours), env=environment())
        assert done.returncode == 0, done.stderr


class Resident(Node):
    """A node on a host."""

    def __init__(self, host: Host, home: Path, address: str, *arguments: str) -> None:
        self.host = host
        self.launch = host.popen  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(home, address, *arguments)

    def ask(self, question: Any) -> Any:
        """See Node; its control API is on its own loopback."""
        with self.host.inside():
            return super().ask(question)

    def exchanges(self) -> list[dict[str, Any]]:
        """Its last exchanges."""
        return to_json(self.ask(lambda client: client.exchanges(1000)))

    def route(self) -> str | None:
        """The first word of its route to the only other peer."""
        told = [peer["route"] for peer in self.peers() if peer["route"]]
        return told[0].split()[0] if told else None


class Swarm:
    """A bootstrap server with a run, and nodes that enter there."""

    def __init__(
        self, folder: Path, spec: str = TINY, method: str = "lowcomm", start_peers: int = 2
    ) -> None:
        self.folder, self.address = folder, ""
        self._run = folder / "run.toml"
        self._run.parent.mkdir(parents=True, exist_ok=True)
        self._run.write_text(
            spec.format(
                method=method,
                steps=1_000_000,
                start_peers=start_peers,
                evaluate_every=1_000_000,
                interval=10,
            )
        )

    def serve(self, host: Host, *arguments: str, version: int = 4, deadline: float = START) -> None:
        """Start the bootstrap server, and publish the run; nodes enter at its address of this
        version of IP."""
        listen = "::" if version == 6 else host.address
        server = Server(
            host, self.folder / host.name, "--host", listen, "--run", str(self._run), *arguments
        )
        self.address = server.address(version, deadline)

    def node(self, host: Host, *arguments: str) -> Resident:
        """Start a node."""
        return Resident(host, self.folder / host.name, self.address, *arguments)
