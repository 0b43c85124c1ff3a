"""Several processes of one replica: the first trains and exchanges, the others follow it.

    trainer, rank 0 ──socket──► rank 1, 2, ...     one line for each thing that all do together
          └──────── vectors in shared memory ────┘  a fragment or a weight, each copies its rows

Ranks other than 0 know neither text nor peers nor slow weights. Rank 0 sends each its windows of a
batch. Vectors in memory that they share carry what all do between two steps (``team.py``). A rank
that dies ends the trainer, which goes on from its newest checkpoint.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from lowcomm_node.data.stream import IGNORED
from lowcomm_node.errors import ConfigError, TrainerError
from lowcomm_node.models.adapters import adapted
from lowcomm_node.models.base import Model, family_of
from lowcomm_node.models.devices import card_of, choose_device
from lowcomm_node.node.messages import TrainingDevice, is_foreseen, text_of
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.command import die_with_parent, end
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.gpu import prepare, use
from lowcomm_node.trainer.shard import Shard, Step
from lowcomm_node.trainer.team import Board, Rank, Team, values_of
from lowcomm_node.trainer.world import World
from lowcomm_protocol.spec.run import RunSpec, parse_canonical

DEADLINE = 600.0
"""Seconds for the others to do what all do; a step has a deadline of its own (``world.py``)."""
END_DEADLINE, REASON_DEADLINE = 10.0, 2.0
"""Seconds for a rank to end, and to learn why one did."""
RETRY = 600.0
"""Seconds between two tries of a device that was lost."""
SIDES = {"cpu": 256}
SIDE = 2048
"""Rows of the matrices by which devices are compared: a product takes about a millisecond."""
WARM_UP = 0.05
"""Seconds of products before one is timed: a GPU at rest has a slow clock."""
TIMES = 5
CUT_SHORT = 3
"""Exit code of a rank that ends because another one did."""


@dataclass(frozen=True)
class Orders:
    """What a rank builds its part of a replica from."""

    spec: str
    world: World
    home: str
    meeting: str = ""
    """File by which the ranks meet."""
    separator: int | None = None
    """Token that ends a document, where attention keeps within documents."""
    start: tuple[str, ...] = ()
    moments: str = "fp32"
    threads: int = 1
    max_vram: float | None = None


class Follower:
    """Rank 0's view of another rank."""

    def __init__(
        self,
        device: str,
        board: int,
        rank: int = 0,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Start it, to try whether the device is there; ``send`` orders then. ``on_lost`` is
        called, on another thread, if it ends by itself."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), board)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lowcomm_node.trainer.ranks", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        self.device, self.name = device, f"{device} (rank {rank})" if rank else device
        self.reason = ""
        """Why it ended, in its own words."""
        self._sock = ours
        self._answered, self._answer = -1, None
        self._is_gone = self._is_stopped = False
        self._on_lost = on_lost
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.send({"device": device})

    def send(self, order: Mapping[str, Any], windows: Sequence[Tensor] = ()) -> None:
        """Send one line, and windows of int32."""
        with suppress(OSError):  # it is gone, which ``wait`` tells
            self._sock.sendall(json.dumps(order).encode() + b"\n")
            for one in windows:
                self._sock.sendall(one.contiguous().numpy().data)

    @property
    def is_here(self) -> bool | None:
        """Whether it can use its device; None while it tries."""
        return False if self._is_gone else True if self._answered >= 0 else None

    def wait(self, number: int) -> Any:
        """Its answer to the order of this number. Raises TrainerError if it died."""
        with self._news:
            came = self._news.wait_for(lambda: self._answered >= number or self._is_gone, DEADLINE)
            if self._answered >= number:
                return self._answer
        if came:
            raise TrainerError(self.fate())
        raise TrainerError(f"{self.name} does not answer for {DEADLINE:.0f} s.")

    def fate(self, until: float = 0.0) -> str:
        """Why it ended, in a sentence; empty while it runs, or if another one's end ended it."""
        with self._news:
            if not self._news.wait_for(lambda: self._is_gone, max(0.0, until - monotonic())):
                return ""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(REASON_DEADLINE)
        code = self.process.returncode
        if code == CUT_SHORT:
            return ""
        ending = f"was killed (signal {-code})" if code and code < 0 else f"ended with code {code}"
        return f"{self.name} failed: {self.reason or f'its process {ending}.'}"

    def stop(self) -> None:
        """End it."""
        self._is_stopped = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        try:
            self.process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._sock.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                with self._news:
                    self.reason = told.get("failed", "")
                    self._answered = told.get("number", self._answered)
                    self._answer = told.get("answer")
                    self._news.notify_all()
        with self._news:
            self._is_gone = True
            self._news.notify_all()
        if self._answered >= 0 and not self._is_stopped and (reason := self.fate()):
            self._on_lost(reason)


class Ranks(Team):
    """All ranks of a replica: the processes of the devices of one machine."""

    def __init__(
        self, devices: Sequence[str], folder: Path, on_lost: Callable[[str], None]
    ) -> None:
        """Start the others, on all of these devices that can be used; we take the first.

        ``folder``: of this run alone. ``on_lost`` is called, on another thread, if one ends by
        itself. Raises ConfigError or RuntimeError if none can be used.
        """
        super().__init__()
        self._meeting = folder / "ranks"
        started = [
            Follower(one, self._descriptor, rank, on_lost)
            for rank, one in enumerate(devices[1:], start=1)
        ]
        self._followers = [one for one in started if self._came(one)]
        self.devices = tuple(TrainingDevice(**one.wait(0)) for one in self._followers)
        """All that train, by rank."""
        try:
            self.devices = (try_out(devices[0]), *self.devices)
        except (RuntimeError, ConfigError) as error:
            self.lost[devices[0]] = str(error).partition("\n")[0]
            if not self._followers:
                raise
            self._followers.pop(0).stop()
            self.devices = (try_out(self.devices[0].name), *self.devices[1:])
        names = [one.name for one in self.devices]
        check_alike(names)
        self.devices = tuple(
            replace(one, name=f"{one.name} (rank {rank})") if one.name in names[:rank] else one
            for rank, one in enumerate(self.devices)
        )
        for rank, one in enumerate(self._followers, start=1):
            one.name = f"{one.device} (rank {rank})"
        self.size = len(self.devices)
        self._tries: list[Follower] = []
        self._next_try = monotonic() + RETRY
        self._number = 0

    def _came(self, one: Follower) -> bool:
        try:
            one.wait(0)
        except TrainerError as error:
            self.lost[one.device] = one.reason or str(error)
            one.stop()
        return one.device not in self.lost

    def returned(self) -> str:
        for one in self._tries:
            if (is_here := one.is_here) is None:
                return ""
            one.stop()
            if is_here:
                return one.device
        self._tries = []
        if self.lost and monotonic() >= self._next_try:
            self._next_try = monotonic() + RETRY
            self._tries = [Follower(one, self._descriptor) for one in self.lost]
        return ""

    def meet(self, device: torch.device, orders: Orders) -> World:
        """Send the others their orders, and meet them; what we are among them."""
        self._meeting.parent.mkdir(parents=True, exist_ok=True)
        self._meeting.unlink(missing_ok=True)  # a trainer that was killed has left its own
        for rank, one in enumerate(self._followers, start=1):
            world = replace(orders.world, rank=rank, size=self.size)
            one.send(asdict(replace(orders, world=world, meeting=str(self._meeting))))
        self.world = replace(orders.world, size=self.size)
        with self._explained():
            self.world.join(device, self._meeting)
        return self.world

    def stop(self) -> None:
        for one in (*self._followers, *self._tries):
            one.stop()
        self.world.leave()
        super().stop()
        self._meeting.unlink(missing_ok=True)

    def train(self, tokens: Tensor, targets: Tensor, step: Step) -> Callable[[], list[float]]:
        cut = self._shard.gradient.cut
        order = {"do": "step", "step": asdict(step), "cut": [cut.windows, cut.recompute]}
        return self._send(order, (tokens, targets))

    def total_loss(self, tokens: Tensor, targets: Tensor) -> float:
        return sum(self._all({"do": "evaluate"}, (tokens, targets)))

    def _send(self, order: dict[str, Any], windows: Sequence[Tensor] = ()) -> Any:
        """Have all ranks begin with an order; our own answer."""
        self._number += 1
        order["number"] = self._number
        for rank, one in enumerate(self._followers, start=1):
            mine = windows_of(windows, rank, self.size)
            order["windows"] = list(mine[0].shape) if mine else []
            one.send(order, [part.int() for part in mine])
        with self._explained():
            return self._rank.take(order, windows_of(windows, 0, self.size))

    def _all(self, order: dict[str, Any], windows: Sequence[Tensor] = ()) -> list[Any]:
        """Answers of all ranks. Raises TrainerError if one died."""
        mine = self._send(order, windows)
        with self._explained():
            return [mine, *(one.wait(self._number) for one in self._followers)]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors that follow from the end of another rank name that."""
        try:
            yield
        except (RuntimeError, TrainerError) as error:
            until = monotonic() + REASON_DEADLINE
            fates = [fate for one in self._followers if (fate := one.fate(until))]
            if fates:
                raise TrainerError(fates[0]) from error
            raise


def check_alike(names: Sequence[str]) -> None:
    """Raise ConfigError for devices that can't train together."""
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise ConfigError(
            f"--device {','.join(names)}: these are of {len(kinds)} kinds, and can't share a step: "
            "name devices of one kind."
        )
    if kinds != {"cpu"} and len(set(names)) < len(names):
        raise ConfigError(f"--device {','.join(names)}: one is named twice: name each once.")


def windows_of(batch: Sequence[Tensor], rank: int, size: int) -> list[Tensor]:
    """The windows of a batch that are a rank's. All ranks get as many: who would have fewer gets
    one of which nothing is learned."""
    if not batch:
        return []
    tokens, targets = (one[rank::size] for one in batch)
    if len(tokens) < -(-len(batch[0]) // size):
        tokens = torch.cat((tokens, batch[0][:1]))
        targets = torch.cat((targets, torch.full_like(batch[1][:1], IGNORED)))
    return [tokens, targets]


def try_out(name: str) -> TrainingDevice:
    """Compute on a device, to see that it is there, and how fast it is. Raises ConfigError,
    RuntimeError."""
    device = choose_device(name)
    use(device)
    side = SIDES.get(device.type, SIDE)
    matrix, taken, end = torch.ones(side, side, device=device), list[float](), inf
    while len(taken) < TIMES:
        began = monotonic()
        (matrix @ matrix)[0, 0].item()
        now = monotonic()
        end = min(end, now + WARM_UP)
        if began >= end:
            taken.append(now - began)
    gpu, seconds = card_of(device), median(taken)
    return TrainingDevice(name=str(device), pid=os.getpid(), gpu=gpu, seconds=seconds)


def serve(sock: socket.socket, board: int) -> None:
    """Follow rank 0 until it is gone."""
    lines = sock.makefile("rb")

    def tell(**told: Any) -> None:
        sock.sendall(json.dumps(told).encode() + b"\n")

    try:
        tried = try_out(json.loads(lines.readline())["device"])
        device = torch.device(tried.name)
        tell(number=0, answer=asdict(tried))
        if not (line := lines.readline()):
            return
        sent = json.loads(line)
        orders, world = Orders(**sent), World(**sent["world"])
        prepare(device, Paths(Path(orders.home)).compiled)
        torch.set_num_threads(orders.threads)
        memory.limit_vram(device, orders.max_vram)
        spec = parse_canonical(orders.spec)
        world.join(device, Path(orders.meeting))
        model = blank(spec, device, list(map(Path, orders.start)))
        model.separator = orders.separator
        shard = Shard(model, spec, device, None, orders.moments, world)
        rank = Rank(shard, Board(board, values_of(shard)))
        while line := lines.readline():
            order = json.loads(line)
            shape = order["windows"]
            windows = [read_windows(lines, shape) for _ in range(2)] if shape else []
            answer = rank.take(order, windows)
            is_step = order["do"] == "step"
            tell(number=order["number"], answer=None if is_step else answer)
    except Exception as error:
        # What tells rank 0 that a rank is gone, tells the others, too: theirs is not the reason.
        if any(sign in str(error) for sign in ("onnection", "NCCL", "Broken pipe")):
            end(CUT_SHORT)
        if not is_foreseen(error):
            traceback.print_exc()
        with suppress(OSError):
            tell(failed=text_of(error))
        end(1)


def blank(spec: RunSpec, device: torch.device, files: Sequence[Path]) -> Model:
    """The model of a rank but 0: of arbitrary weights, or an adapted one as it begins."""
    if spec.adapter is not None:
        return adapted(spec.model, spec.adapter, spec.run.seed, files, device)
    return family_of(spec.model).blank(spec.model)


def read_windows(lines: BinaryIO, shape: Sequence[int]) -> Tensor:
    """Windows as ``Follower.send`` sends them, int64."""
    data = bytearray(lines.read(4 * prod(shape)))
    return torch.frombuffer(data, dtype=torch.int32).view(*shape).long()


def main() -> NoReturn:
    """Entry of a rank but 0: ``python -m lowcomm_node.trainer.ranks SOCKET BOARD``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    end(0)


if __name__ == "__main__":
    main()
