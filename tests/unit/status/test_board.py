"""What must hold for what a node tells of itself: every listener gets every event, and what is kept
is bounded."""

from dataclasses import replace

from helpers.light_process import READY
from lowcomm_node.node.messages import InnerStepTaken
from lowcomm_node.node.training import warn_of_devices
from lowcomm_node.status.events import (
    MAX_WAITING,
    MAX_WARNINGS,
    Board,
    Resumed,
    SavingAgain,
    Warned,
)


def stepped(number: int) -> InnerStepTaken:
    return InnerStepTaken(swarm_step=number, steps=number, tokens=number, loss=1.5)


def test_every_listener_gets_every_event_with_its_time():
    board = Board()
    listeners = [board.subscribe(), board.subscribe()]
    board.tell(SavingAgain())
    assert [listener.get_nowait().event for listener in listeners] == [SavingAgain()] * 2
    board.queues.discard(listeners[0])
    board.tell(Resumed())
    assert listeners[0].empty()
    assert listeners[1].get_nowait().time > 0


def test_who_does_not_read_loses_the_oldest_events_and_hears_of_no_step():
    board = Board()
    listener = board.subscribe()
    for number in range(MAX_WAITING + 3):
        board.tell(Warned(text=str(number)))
    board.tell(stepped(1))
    assert listener.qsize() == MAX_WAITING
    assert listener.get_nowait().event == Warned(text="3")


def test_only_the_last_warnings_are_kept_and_those_that_hold_no_longer_go():
    board = Board()
    for number in range(MAX_WARNINGS + 5):
        board.warn("not-saved" if number % 2 else "clock", str(number))
    assert len(board.warnings) == MAX_WARNINGS
    assert board.warnings[-1] == Warned(code="clock", text=str(MAX_WARNINGS + 4))
    board.withdraw("not-saved")
    assert len(board.warnings) == MAX_WARNINGS // 2
    assert all(one.code == "clock" for one in board.warnings)


def test_a_device_that_is_lost_is_a_warning_and_an_event_until_it_is_back():
    board = Board()
    listener = board.subscribe()
    lost = replace(READY, lost={"cuda:1": "no such device"}, unlimited="needs root")
    for ready in (lost, lost):
        warn_of_devices(board, ready)
        assert [one.code for one in board.warnings] == ["gpu-power", "device-lost"]
    text = "cuda:1 can't be used, training goes on without it: no such device"
    assert board.warnings[1].text == text
    assert Warned(text=text, code="device-lost") in [listener.get_nowait().event for _ in "12"]
    warn_of_devices(board, READY)
    assert board.warnings == []
