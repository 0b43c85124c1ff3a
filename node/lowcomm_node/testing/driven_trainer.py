"""A trainer's loop on the thread of a test: requests are carried out and steps are taken when the test says so."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowcomm_node.testing.tiny import tiny_settings
from lowcomm_node.trainer import loop
from lowcomm_node.trainer.arena import create_file
from lowcomm_node.trainer.loop import TrainerLoop
from lowcomm_node.trainer.replica import Replica


class Heard:
    """The trainer's end of the pipe: keeps what it tells."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        """See Pipe."""
        self.told.append(message)

    def start_reading(self, consume: Callable[[dict[str, Any] | None], None]) -> None:
        """See Pipe: nothing comes but what the test asks."""


class Driven:
    """One trainer's loop."""

    def __init__(self, folder: Path, peer: str, more: str, **settings: Any) -> None:
        self.heard, self.memory = Heard(), create_file()
        self.loop = TrainerLoop(self.heard, self.memory)  # type: ignore[arg-type]
        self.peer, self._number = peer, 0
        text = folder / "text"
        text.mkdir(exist_ok=True)
        for name, words in (("a.txt", "A short text, and again a short text. "), ("b.txt", "One that is held out. ")):
            if not (text / name).exists():
                (text / name).write_text(words * 300)
        told = tiny_settings(folder, peer, more + '\n[data]\nsource = "local"\n', data=f"text:{text}", **settings)
        self.built = self.ask("build", settings=told.to_dict())

    @property
    def replica(self) -> Replica:
        """What it trains."""
        return self.loop.replica

    def send(self, do: str, **request: Any) -> int:
        """Ask for something; it is begun, and its number is returned."""
        self._number += 1
        self.loop._boundary.put({"do": do, "id": self._number, **request})
        self.loop._serve(wait=False)
        return self._number

    def settle(self) -> None:
        """All that was begun on other threads is done, and its results are taken in."""
        for executor in (self.loop._coder, self.loop._writer):
            executor.submit(lambda: None).result()
        self.loop._serve(wait=False)

    def answer(self, number: int) -> dict[str, Any] | None:
        """What was answered to a request, if anything."""
        return next((one for one in self.heard.told if one.get("re") == number), None)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Ask for something; the answer."""
        number = self.send(do, **request)
        self.settle()
        answer = self.answer(number)
        assert answer is not None, f"{do} was not answered"
        return answer

    def events(self, name: str) -> list[dict[str, Any]]:
        """News of this name."""
        return [one for one in self.heard.told if one.get("event") == name]

    def steps(self, count: int) -> None:
        """Take inner steps, and do between them what is due."""
        self.ask("train", on=True)
        for _ in range(count):
            self.loop._serve(wait=False)
            self.loop._step()
        self.loop._serve(wait=False)

    def slot(self, slot: int, size: int) -> memoryview:
        """Bytes of the arena."""
        return self.loop._arena.view(slot, size)


@contextmanager
def driven(folder: Path, *peers: str, more: str = "", **settings: Any) -> Iterator[list[Driven]]:
    """Such loops, which are ended afterwards."""
    before, look = torch.get_num_threads(), loop.LOOK
    loop.LOOK = 0.0  # nothing comes from elsewhere
    loops: list[Driven] = []
    try:
        for peer in peers:
            loops += [Driven(folder, peer, more, **settings)]
        yield loops
    finally:
        for one in loops:
            one.loop._coder.shutdown()
            one.loop._writer.shutdown()
            os.close(one.memory)
        torch.set_num_threads(before)
        loop.LOOK = look


def begin(one: Driven, other: Driven, fragment: int = 0, realign: bool = False) -> None:
    """Both capture a fragment and take in what the other brings: all of an exchange in a pair but the merge."""
    for here in (one, other):
        captured = here.ask("capture", fragment=fragment, slot=0, realign=realign, ahead=0)
        assert "error" not in captured, captured
        here.size = captured["size"]  # type: ignore[attr-defined]
    for here, there in ((one, other), (other, one)):
        size = there.size  # type: ignore[attr-defined]
        here.slot(1, size)[:] = there.slot(0, size)
        got = here.ask("receive", fragment=fragment, peer=there.peer, slot=1, size=size)
        assert "error" not in got, got
        if got["again"]:  # blocks of a modulo codec whose range was too narrow
            size = there.ask("resend", fragment=fragment, slot=0, blocks=got["again"])["size"]
            here.slot(1, size)[:] = there.slot(0, size)
            patched = here.ask("patch", fragment=fragment, peer=there.peer, slot=1, size=size)
            assert "error" not in patched, patched


def finish(one: Driven, other: Driven, fragment: int = 0, **more: Any) -> tuple[int, int]:
    """Both are told to merge; the numbers of these requests."""
    tokens = {here.peer: 10 for here in sorted((one, other), key=lambda here: here.peer)}
    numbers = [
        here.send("merge", fragment=fragment, swarm_step=here.replica.clock.step, tokens=tokens, **more)
        for here in (one, other)
    ]
    for here in (one, other):
        here.settle()
    return numbers[0], numbers[1]
