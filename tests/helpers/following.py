"""Somebody who follows a page of docs/ line by line, with a real swarm on loopback."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from helpers.processes import Node, Swarm, command, environment

ROOT = Path(__file__).parents[2]
BY_HAND = ("cp", "echo", "ln", "mkdir", "ollama", "python3", "systemctl", "ufw")
"""What a reader does to a machine as its root. Of these lines only the files are looked for."""
DEADLINE = 150.0


def lines(page: str, begin: str = "", end: str = "\n## ") -> list[str]:
    """The commands of a page of docs/, from a heading on; ``end``: up to where, "" is its end."""
    text = (ROOT / "docs" / page).read_text()
    if begin:
        assert begin in text, f"docs/{page} has no {begin!r}"
        text = text.partition(begin)[2]
    text = text.partition(end)[0] if end else text
    return [
        line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in joined(block)
    ]


def joined(block: str) -> Iterator[str]:
    """Its lines, those put together that a backslash continues."""
    yield from filter(None, block.replace("\\\n", " ").splitlines())


class Reader:
    """Does what pages say."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.nodes: dict[str, Node] = {}
        self.told: dict[str, str] = {}
        """What each line has printed, of those that end."""
        self._invite = ""
        self._home = ""

    def follow(self, home: str, lines: list[str]) -> None:
        """Do what these lines say, at the machine with this home.

        Raises AssertionError if one can't be done.
        """
        self._home = home
        for line in lines:
            self._follow(line)

    def _follow(self, line: str) -> None:
        words = [self._filled(word) for word in shlex.split(line, comments=True)]
        set_before = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            set_before[name] = value
        match words:
            case [] | ["export", *_]:
                pass
            case ["pipx", "install", "."]:
                check_commands()
            case ["lowcomm-bootstrap", "serve"]:
                if not self.swarm.address:
                    self.swarm.bootstrap()
            case ["lowcomm-node", "join", "--peers", _, *more]:
                self._join(more, set_before)
            case ["lowcomm-node" | "lowcomm-bootstrap" as program, *arguments]:
                self._run(line, program.replace("-", "_"), arguments, set_before)
            case [program, *arguments] if program in BY_HAND or program.startswith("/opt/"):
                check_files(arguments)
            case _:
                raise AssertionError(f"nobody has tried what a page says: {line}")

    def _filled(self, word: str) -> str:
        """With what the reader puts in place of ADDR and INVITE."""
        word = self.swarm.address if word == "ADDR" else word
        return word.replace("=INVITE", f"={self._invite}")

    def _join(self, more: list[str], variables: dict[str, str]) -> None:
        files = (self.swarm.folder / word for word in more)  # a node starts in another folder
        more = [str(file) if file.exists() else file.name for file in files]
        invite = [f"--invite={variables.pop('LOWCOMM_INVITE')}"] if variables else []
        assert not variables
        files = {word for word in more if (self.swarm.folder / word).exists()}
        named = [str(self.swarm.folder / word) if word in files else word for word in more]
        node = self.swarm.node(self._home, *named, *invite)
        self.nodes[self._home] = node
        node.until(lambda status: status["phase"] == "training", "training", DEADLINE)

    def _run(
        self, line: str, program: str, arguments: list[str], variables: dict[str, str]
    ) -> None:
        """One command to its end."""
        folder = self.swarm.folder
        homes = {
            "LOWCOMM_HOME": str(folder / self._home),
            "LOWCOMM_BOOTSTRAP_HOME": str(folder / "bootstrap"),
        }
        done = subprocess.run(
            command(program, *arguments),
            cwd=folder,
            env=environment() | homes | variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        # A doctor may find a fault with the machine that tests run on, and says so with 4.
        well = (0, 4) if arguments[0] == "doctor" else (0,)
        assert done.returncode in well, f"{line}: {done.returncode}\n{done.stderr}{done.stdout}"
        self.told[line] = done.stdout
        if found := re.search(r"\binvite[1-9A-HJ-NP-Za-km-z]{40,}\b", done.stdout):
            self._invite = self._invite or found[0]


def check_commands() -> None:
    """Installing this checkout puts both commands on the PATH."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"lowcomm-node", "lowcomm-bootstrap"} <= set(project["scripts"])


def check_files(arguments: list[str]) -> None:
    """The files of this checkout that a line names are there."""
    for word in arguments:
        if (folder := word.partition("/")[0]) not in ("", word) and (ROOT / folder).is_dir():
            assert (ROOT / word).exists(), f"{word} is not there"
