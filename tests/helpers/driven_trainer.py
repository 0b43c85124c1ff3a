"""The real trainer's loop on the thread of a test, which asks and steps when the test says so."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from helpers.tiny import tiny_settings
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import A, Answer, Request, TrainerEvent, create_file
from lowcomm_node.node.messages import Part, RequestFailed, Retransmit
from lowcomm_node.trainer import loop, state
from lowcomm_node.trainer.loop import TrainerLoop
from lowcomm_node.trainer.replica import Replica

E = TypeVar("E", bound=TrainerEvent)


class Heard:
    """The trainer's end of the pipe: keeps what the trainer says."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.told: list[TrainerEvent] = []

    def tell(self, message: Answer | TrainerEvent, number: int | None = None) -> None:
        """See Pipe."""
        if isinstance(message, TrainerEvent):
            self.told.append(message)
        elif number is not None:
            self.answers[number] = message

    def start_reading(self, consume: Callable[..., None], gone: Callable[[], None]) -> None:
        """See Pipe: nothing comes but what the test asks."""


def write_documents(folder: Path) -> Path:
    """Files of seven letters, so that most windows hold several documents; the folder."""
    (folder / "text").mkdir(parents=True)
    for name in ("a", "b", *map(str, range(200))):
        (folder / "text" / f"{name}.txt").write_text(f"seven{name:>2.2}", encoding="utf-8")
    return folder


class Driven:
    """One trainer's loop."""

    def __init__(self, folder: Path, peer: str, more: str, **settings: Any) -> None:
        self.heard = Heard()
        self.memory = create_file()
        self.loop = TrainerLoop(self.heard, self.memory)  # type: ignore[arg-type]
        self.peer = peer
        self._number = 0
        text = folder / "text"
        text.mkdir(exist_ok=True)
        for name, words in (
            ("a.txt", "A short text, and again a short text. "),
            ("b.txt", "One that is held out. "),
        ):
            if not (text / name).exists():
                (text / name).write_text(words * 300, encoding="utf-8")
        if "[data]" not in more:
            more += '\n[data]\nsource = "local"\n'
        told = tiny_settings(folder, peer, more, data=f"text:{text}", **settings)
        self.built = self.ask(messages.Build(settings=told))

    @property
    def replica(self) -> Replica:
        """What it trains."""
        return self.loop.replica

    def send(self, request: Request[Any]) -> int:
        """Ask for something; it is begun, and its number is returned."""
        self._number += 1
        number = self._number
        self.loop._boundary.put(lambda: self.loop._carry_out(request, number))
        self.loop._serve(wait=False)
        return number

    def settle(self) -> None:
        """All that was begun on other threads is done, and its results are taken in."""
        for executor in (self.loop._coder, self.loop._writer):
            executor.submit(lambda: None).result()
        self.loop._serve(wait=False)

    def answer(self, number: int) -> Answer | None:
        """What was answered to a request, if anything."""
        return self.heard.answers.get(number)

    def ask(self, request: Request[A]) -> A:
        """Ask for something that the trainer can do; the answer."""
        number = self.send(request)
        self.settle()
        return self.answered(number, request)

    def answered(self, number: int, request: Request[A]) -> A:
        """What this request was answered."""
        answer = self.answer(number)
        assert isinstance(answer, request.answer), f"{request} was answered {answer}"
        return answer  # type: ignore[return-value]

    def refusal(self, request: Request[Any]) -> RequestFailed:
        """Ask for something that the trainer can't do; why."""
        number = self.send(request)
        self.settle()
        return self.refused(number)

    def refused(self, number: int) -> RequestFailed:
        """Why the request of this number failed."""
        answer = self.answer(number)
        assert isinstance(answer, RequestFailed), answer
        return answer

    def events(self, kind: type[E]) -> list[E]:
        """News of this kind."""
        return [one for one in self.heard.told if isinstance(one, kind)]

    def steps(self, count: int) -> None:
        """Take inner steps, do between them what is due, and tell of all of them."""
        self.ask(messages.Train(on=True))
        for _ in range(count):
            self.loop._serve(wait=False)
            self.loop._step()
        self.loop._settle()  # of the last one, which a GPU may still compute
        self.loop._serve(wait=False)

    def slot(self, slot: int, size: int) -> memoryview:
        """Bytes of the arena."""
        return self.loop.arena.view(slot, size)


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
            one.loop.end_threads()
            os.close(one.memory)
        torch.set_num_threads(before)
        loop.LOOK = look


def image(one: Driven) -> dict[str, Any]:
    """All that a replica is, to the bit."""
    parts, meta = state.snapshot(one.replica)
    tensors = {f"{part}/{name}": one for part, of in parts.items() for name, one in of.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | meta


def begin(one: Driven, other: Driven, fragment: int = 0, realign: bool = False) -> None:
    """Both capture a fragment and decode the other's: a whole pair exchange but the merge."""
    capture = messages.CaptureContribution(fragment=fragment, slot=0, realign=realign, ahead=0)
    sizes = {here.peer: here.ask(capture).sizes[0] for here in (one, other)}
    for here, there in ((one, other), (other, one)):
        again = bring(here, there, fragment, Part.WHOLE, sizes[there.peer])
        if again is not None:  # blocks of a modulo codec whose range was too narrow
            resent = there.ask(messages.Resend(fragment=fragment, slot=0, blocks=again.blocks))
            bring(here, there, fragment, Part.AGAIN, resent.size)


def bring(here: Driven, there: Driven, fragment: int, part: Part, size: int) -> Retransmit | None:
    """Pass what lies in the slot of one to the other, which decodes it."""
    here.slot(1, size)[:] = there.slot(0, size)
    receive = messages.Receive(
        fragment=fragment, part=part, peer=there.peer, slot=1, offset=0, size=size
    )
    return here.ask(receive).again


def finish(one: Driven, other: Driven, fragment: int = 0, **more: Any) -> tuple[int, int]:
    """Both are told to merge; the numbers of these requests."""
    tokens = {here.peer: 10 for here in sorted((one, other), key=lambda here: here.peer)}
    numbers = [here.send(merge_of(here, tokens, fragment, **more)) for here in (one, other)]
    for here in (one, other):
        here.settle()
    return numbers[0], numbers[1]


def merge_of(
    one: Driven,
    over: dict[str, int],
    fragment: int = 0,
    swarm_step: int | None = None,
    keep_momentum: bool = False,
) -> messages.Merge:
    """A merge; without ``swarm_step`` at the one where the trainer is."""
    return messages.Merge(
        fragment=fragment,
        over=over,
        swarm_step=one.replica.clock.step if swarm_step is None else swarm_step,
        keep_momentum=keep_momentum,
    )
