"""A swarm that lives in a laboratory: a bootstrap server and nodes, real processes on the hosts that a test has made."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from kit import TINY, Node, Process
from laboratory import Host, Lab

from waiting import until

START = 400.0
"""Seconds until a process answers: what it imports takes long where many do so at once."""
PORT = "31330"


class Server(Process):
    """A bootstrap server on a host."""

    def __init__(self, host: Host, home: Path, *arguments: str) -> None:
        self.launch = host.popen  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(home, "lowcomm_bootstrap", "serve", "--json", "--port", PORT, "--home", str(home), *arguments)

    def addresses(self) -> list[str]:
        """Where it can be reached from outside, once it is ready."""

        def ready() -> list[dict[str, Any]]:
            assert self.child.poll() is None, self.output[-3000:]
            return self.events("ready")

        told = until(ready, START, "the bootstrap server is ready")[-1]["addresses"]
        return [address for address in told if "/127.0.0.1/" not in address and "/ip6/::1/" not in address]


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

    def rounds(self) -> list[dict[str, Any]]:
        """Its last exchanges."""
        return self.ask(lambda client: client.rounds(1000))

    def route(self) -> str | None:
        """The first word of its route to the only other peer."""
        told = [peer["route"] for peer in self.peers() if peer["route"]]
        return told[0].split()[0] if told else None


class Swarm:
    """What lives in a laboratory; its control sockets lie in a folder that goes with it."""

    def __init__(self, lab: Lab, folder: Path, spec: str = TINY, method: str = "lowcomm") -> None:
        self.lab, self.folder = lab, folder
        self.address = ""
        self._run = folder / "run.toml"
        self._run.parent.mkdir(parents=True, exist_ok=True)
        self._run.write_text(spec.format(method=method, steps=1_000_000, start_peers=2, evaluate_every=1_000_000))
        self._end = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def serve(self, host: Host, version: int = 4) -> Server:
        """Start the bootstrap server, and publish the run; nodes enter at its address of this version of IP."""
        listen = "::" if version == 6 else host.address
        server = Server(host, self.folder / "bootstrap", "--host", listen, "--run", str(self._run))
        kind = f"/ip{version}/"
        self.address = next(one for one in server.addresses() if one.startswith(kind) and "/tcp/" in one)
        return server

    def node(self, host: Host, *arguments: str) -> Resident:
        """Start a node."""
        return Resident(host, self.folder / host.name, self.address, *arguments)


def until_exchanged(nodes: list[Resident], more: int, deadline: float, what: str = "exchanges are applied") -> None:
    """Wait until each of these has completed so many more exchanges than it has now."""
    wanted = {node: completed(node) + more for node in nodes}
    # All are asked: one that has ended is told at once.
    until(lambda: min(completed(node) - wanted[node] for node in nodes) >= 0, deadline, what)


def completed(node: Resident) -> int:
    """Exchanges that a node has applied; 0 while it does not answer."""
    status = node.status()
    return status["exchanges"]["completed"] if status else 0
