"""What must hold for what a node tells of itself: every listener gets every event, and what is kept
is bounded."""

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.node.messages import Stepped
from lowcomm_node.status.events import (
    MAX_WAITING,
    MAX_WARNINGS,
    Board,
    Caution,
    Resumed,
    SavingAgain,
)


def stepped(number: int) -> Stepped:
    return Stepped(swarm_step=number, steps=number, tokens=number, loss=1.5)


def test_every_listener_gets_every_event_with_its_time():
    board = Board()
    listeners = [board.subscribe(), board.subscribe()]
    board.tell(SavingAgain())
    assert [listener.get_nowait().event for listener in listeners] == [SavingAgain()] * 2
    board.unsubscribe(listeners[0])
    board.tell(Resumed())
    assert listeners[0].empty()
    assert listeners[1].get_nowait().time > 0


def test_inner_steps_are_told_to_those_who_asked_for_every_one():
    board = Board()
    curious, calm = board.subscribe(), board.subscribe(every_step=False)
    board.tell_step(stepped(1))
    assert (curious.qsize(), calm.qsize()) == (1, 0)


def test_who_does_not_read_loses_the_oldest_events():
    board = Board()
    listener = board.subscribe()
    for number in range(MAX_WAITING + 3):
        board.tell_step(stepped(number))
    assert listener.qsize() == MAX_WAITING
    assert listener.get_nowait().event == stepped(3)


def test_a_phase_is_told_once_however_often_what_it_waits_for_changes():
    board = Board()
    listener = board.subscribe()
    copying = Waiting(WaitCode.COPYING_STATE, "copying")
    board.enter("syncing", Waiting(WaitCode.LOOKING_FOR_PEERS, "looking for peers"))
    board.enter("syncing", copying)
    assert (board.phase, board.waiting, listener.qsize()) == ("syncing", copying, 1)


def test_only_the_last_warnings_are_kept_and_those_that_hold_no_longer_go():
    board = Board()
    for number in range(MAX_WARNINGS + 5):
        board.warn(WarningCode.NOT_SAVED if number % 2 else WarningCode.CLOCK, str(number))
    assert len(board.warnings) == MAX_WARNINGS
    assert board.warnings[-1] == Caution(WarningCode.CLOCK, str(MAX_WARNINGS + 4))
    board.withdraw(WarningCode.NOT_SAVED)
    assert len(board.warnings) == MAX_WARNINGS // 2
    assert all(one.code is WarningCode.CLOCK for one in board.warnings)


def test_what_others_are_told_of_our_position_is_nothing_before_the_first_step():
    board = Board()
    assert board.position() == (0, 0, 0.0)
    board.advance(swarm_step=40, steps=20, tokens_per_second=1.5)
    assert board.position() == (40, 20, 1.5)
