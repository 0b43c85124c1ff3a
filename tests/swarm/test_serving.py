"""What must hold for ``data serve``: text is given away by nodes that do not train."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import Node, Process, Swarm, command, environment, lonely_swarm
from helpers.waiting import until
from lowcomm_node.errors import ConfigError, NodeError

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
DEADLINE = 60.0


class TextServer(Node):
    """One ``lowcomm-node data serve``."""

    def __init__(self, home: Path, address: str, *arguments: str) -> None:
        Process.__init__(
            self, home, "lowcomm_node", "data", "serve", *arguments,
            "--json", "--home", str(home), "--peers", address,
        )  # fmt: skip

    def serves(self) -> dict[str, object]:
        """The only part of its text, once it has all of it."""

        def is_whole(status: dict[str, object]) -> bool:
            text = status["text"]
            return bool(text) and text[0]["held"] > text[0]["pieces"]  # type: ignore[index]

        return self.until(is_whole, "serving", DEADLINE)["text"][0]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A server with a run of packed text, which lies in the folder."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Tea number {number}. " * 200)
    with lonely_swarm(tmp_path) as swarm:
        for line in (
            "data pack texts tea.pack --home creator",
            "init --data tea.pack --name tea run.toml",
        ):
            subprocess.run(
                command("lowcomm_node", *line.split()),
                cwd=tmp_path, env=environment(), check=True, timeout=DEADLINE,
            )  # fmt: skip
        swarm.bootstrap("--run", str(tmp_path / "run.toml"))
        yield swarm


def server(swarm: Swarm, name: str, *arguments: str) -> TextServer:
    node = TextServer(swarm.folder / name, swarm.address, *arguments)
    swarm.processes.append(node)
    return node


def test_text_outlives_the_machine_that_had_it_first_and_that_of_another_run_is_refused(
    swarm: Swarm,
) -> None:
    pack = swarm.folder / "tea.pack"
    first = server(swarm, "first", str(pack))
    assert first.serves()["bytes_fetched"] == 0
    second = server(swarm, "second")
    assert second.serves()["bytes_fetched"] == pack.stat().st_size
    assert first.end() == 0
    third = server(swarm, "third")
    assert third.serves()["bytes_fetched"] == pack.stat().st_size
    [copy] = (swarm.folder / "third" / "packs").glob("*/data")
    assert copy.read_bytes() == pack.read_bytes()
    for node in (second, third):
        assert "libtorch" not in Path(f"/proc/{node.child.pid}/maps").read_text()
        status = node.status()
        assert status and status["phase"] == "serving" and status["trainer"]["pid"] is None
    with pytest.raises(NodeError, match="nothing can pause"):
        second.ask(lambda client: client.pause(60))
    until(lambda: second.peers(), DEADLINE, "they see each other")
    assert [peer["phase"] for peer in second.peers()] == ["serving"]

    subprocess.run(
        command("lowcomm_node", "data", "pack", "texts/1*.txt", "other.pack", "--home", "creator"),
        cwd=swarm.folder, env=environment(), check=True, timeout=DEADLINE,
    )  # fmt: skip
    node = server(swarm, "wrong", str(swarm.folder / "other.pack"))
    assert node.child.wait(DEADLINE) == ConfigError.exit_code
    assert "has none of the texts of this run (tea): name its packs" in node.output
