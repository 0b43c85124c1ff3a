"""Exchanges over lines of 20 Mbit/s take as long beside a text that is fetched as without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
from laboratory import Host, Lab
from shaping import Link

from helpers.packed_text import part_of

pytestmark = [pytest.mark.net, pytest.mark.soak, pytest.mark.timeout(300)]

LINE = Link(rate=20e6, delay=0.0125)
COUNT = 8
PIECE = 1024 * 1024


class Texting:
    """A ``texting.py`` on a host."""

    def __init__(self, host: Host, number: int, folder: Path) -> None:
        script = Path(__file__).with_name("texting.py")
        self.child = host.popen(
            [sys.executable, script, str(number), host.address, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(script.parents[1])},
        )
        self.record = self._read()

    def ask(self, **order: Any) -> Any:
        """Its answer."""
        self.begin(**order)
        return self._read()

    def begin(self, **order: Any) -> None:
        """Have it begin something."""
        assert self.child.stdin
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()

    def _read(self) -> Any:
        assert self.child.stdout
        return next(json.loads(line[1:]) for line in self.child.stdout if line[0] == ">")


@pytest.mark.parametrize("direction", ["fetched", "given"])
def test_exchanges_keep_their_time_beside_a_text(direction: str, lab: Lab, tmp_path: Path) -> None:
    data = Random(1).randbytes(64 * PIECE)
    part, digests = part_of(data, PIECE)
    peers = list[Texting]()
    for number, name in enumerate(("ada", "bob", "carol"), 1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "part.json").write_text(part.model_dump_json())
        (folder / "list").write_bytes(digests)
        if name == ("ada" if direction == "given" else "carol"):
            (folder / "text.pack").write_bytes(data)
        peers.append(Texting(lab.public(name, link=LINE, down=LINE), number, folder))
    ada, bob, carol = peers
    alone = ada.ask(exchange=bob.record, count=COUNT)
    taker, giver = (carol, ada) if direction == "given" else (ada, carol)
    taker.ask(fetch=[giver.record])
    beside = ada.ask(exchange=bob.record, count=COUNT)
    fetched = taker.ask(count="fetched")
    print(f"{direction}: {median(beside) / median(alone):.3f} times as long, {fetched:,} bytes")
    assert fetched > 4 * PIECE, "text moves between exchanges"
    assert median(beside) < 1.2 * median(alone)
