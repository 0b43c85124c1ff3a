"""What a node learns from its trainer, and shows of that."""

import asyncio

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.node.ipc import Event
from lowcomm_node.node.messages import (
    Evaluated,
    Evaluating,
    Finished,
    Held,
    NotSaved,
    Saved,
    Stepped,
    Tokenizing,
)
from lowcomm_node.node.supervisor import Failures
from lowcomm_node.status.events import Board, SavingAgain
from lowcomm_node.status.model import CheckpointStatus
from lowcomm_node.status.words import tokenizing_in_words
from lowcomm_node.sync.exchanger import Exchanger

NOT_SAVED = "checkpoints pause, training goes on, saving is tried again less and less often:"
TOKENIZED = "starting the trainer: the text is tokenized; model, newest checkpoint"
HELD = Waiting(
    WaitCode.SLOW_DISK, "a checkpoint is being written: the disk is slower than training"
)
EVALUATING = Waiting(WaitCode.EVALUATING, "evaluating on held-out text")


class News:
    """Takes in the events of the trainer, one by one."""

    def __init__(self, board: Board, failures: Failures, exchanger: Exchanger) -> None:
        self._board = board
        self._failures = failures
        self._exchanger = exchanger
        self.over = asyncio.Event()
        """Set once the run is over."""
        self.save_seconds: float | None = None
        """What the last checkpoint took."""

    def hear(self, event: Event) -> None:
        """Take in one event, and tell the owner of those that matter to it."""
        match event:
            case Stepped():
                self._board.stepped(event)
                self._failures.stepped(event.steps)
                self._exchanger.on_step(event.swarm_step, event.steps, event.tokens, event.seconds)
                self._board.tell_step(event)
                return
            case Evaluating():
                idle = self._board.waiting in (None, EVALUATING)
                if idle or self._board.phase in ("syncing", "finishing"):
                    self._board.show(EVALUATING)
                return
            case Evaluated():
                self._no_longer(EVALUATING)
                if event.loss is not None:
                    self._board.evaluated(event.loss)
            case Saved():
                self._saved(event)
            case NotSaved():
                self._no_longer(HELD)
                self._board.withdraw(WarningCode.NOT_SAVED)
                self._board.warn(WarningCode.NOT_SAVED, f"{NOT_SAVED} {event.reason}")
            case Held():
                self._board.show(HELD)
                return
            case Tokenizing():
                self._board.tokenizing = event
                self._board.show(_of_tokenizing(event))
                return
            case Finished():
                self.over.set()
            case _:
                pass
        self._board.tell(event)

    def _saved(self, event: Saved) -> None:
        self._no_longer(HELD)
        self.save_seconds = event.seconds
        self._board.checkpoint = CheckpointStatus(step=event.swarm_step, path=event.path)
        if event.after_trouble:
            self._board.withdraw(WarningCode.NOT_SAVED)
            self._board.tell(SavingAgain())

    def _no_longer(self, waiting: Waiting) -> None:
        if self._board.waiting == waiting:
            self._board.show(None)


def _of_tokenizing(now: Tokenizing) -> Waiting:
    """What a node waits for that tokenizes; in the end the trainer builds the model."""
    if now.total and now.done >= now.total:
        return Waiting(WaitCode.STARTING_TRAINER, TOKENIZED)
    return Waiting(WaitCode.TOKENIZING, tokenizing_in_words(now))
