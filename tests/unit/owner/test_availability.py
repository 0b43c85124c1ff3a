"""What must hold for the owner's rules: hours, idleness, battery and a pause are kept to, and the
reason is told."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cards import FakeCard, FakeLibrary
from helpers.waiting import until
from lowcomm_node.errors import ConfigError
from lowcomm_node.owner import availability
from lowcomm_node.owner.availability import (
    Availability,
    IdleDetector,
    read_logind,
    running,
)
from lowcomm_node.owner.rules import FOREVER, MachineUse, Rule, holds, read_schedule
from lowcomm_node.owner.settings import NodeSettings

HERE = timezone(timedelta(hours=2))


def at(text: str) -> datetime:
    """A time in the week of Monday, 5 January 2026: ``Tue 21:59``."""
    day, clock = text.split()
    hour, minute = map(int, clock.split(":"))
    number = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun").index(day)
    return datetime(2026, 1, 5, hour, minute, 30, tzinfo=HERE) + timedelta(days=number)


# Hours


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (
            "22:00-07:00",
            ["Mon 22:00", "Tue 00:00", "Tue 06:59", "Sun 23:59", "Mon 00:10"],
            ["Mon 21:59", "Mon 07:00"],
        ),
        ("09:00-17:30", ["Sun 09:00", "Wed 17:29"], ["Sun 08:59", "Wed 17:30"]),
        ("12:00-13:00, 22:00-24:00", ["Mon 12:30", "Mon 23:59"], ["Tue 00:00", "Mon 13:00"]),
        ("Fri 22:00-07:00", ["Fri 22:00", "Sat 06:59"], ["Sat 22:00", "Fri 06:00"]),
        ("Sun 22:00-07:00", ["Sun 23:00", "Mon 06:59"], ["Mon 07:00", "Tue 06:00"]),
        (
            "Mon-Fri 18:00-08:00, Sat 00:00-24:00",
            ["Mon 18:00", "Sat 12:00", "Sat 07:00"],
            ["Sun 12:00", "Mon 12:00"],
        ),
        (
            "Sat-Mon 10:00-11:00",
            ["Sat 10:30", "Sun 10:30", "Mon 10:30"],
            ["Tue 10:30", "Fri 10:30"],
        ),
    ],
)
def test_a_schedule_means_local_time_and_reaches_over_midnight(
    text: str, inside: list[str], outside: list[str]
) -> None:
    schedule = read_schedule(text)
    assert schedule is not None and str(schedule) == text
    assert [time for time in inside if not schedule.allows(at(time))] == []
    assert [time for time in outside if schedule.allows(at(time))] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("22-7", "no window of time: write such as 22:00-07:00"),
        ("22:00", "no window"),
        ("", "no window"),
        ("22:00-25:00", "25:00 is no time of day"),
        ("22:60-23:00", "22:60 is no time of day"),
        ("07:00-07:00", "for the whole day write 00:00-24:00"),
        ("24:00-07:00", "begins at 24:00"),
        ("Mo 07:00-08:00", "no window"),
        ("Mon-Foo 07:00-08:00", "Foo is no day"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_with_what_to_write(
    text: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        read_schedule(text)


MINUTES = st.integers(0, 7 * 24 * 60 - 1)


@given(st.integers(0, 1439), st.integers(1, 1439), MINUTES)
def test_when_a_schedule_changes_is_the_first_time_at_which_it_says_something_else(
    start: int, length: int, now: int
) -> None:
    end = (start + length) % 1440
    schedule = read_schedule(f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}")
    assert schedule is not None
    moment = datetime(2026, 1, 5, tzinfo=HERE) + timedelta(minutes=now)
    change = schedule.changes(moment)
    assert change is not None and moment < change <= moment + timedelta(days=1)
    said = schedule.allows(moment)
    minutes = int((change - moment).total_seconds()) // 60
    assert all(
        schedule.allows(moment + timedelta(minutes=one)) == said for one in range(0, minutes, 7)
    )
    assert schedule.allows(change - timedelta(minutes=1)) == said != schedule.allows(change)


# What keeps it from training

RULES: dict[str, Any] = {"only_idle": True, "on_battery": False, "yield_to_gpu": True}
NIGHT = NodeSettings.model_validate({"home": "/", "schedule": "22:00-07:00", **RULES})


def test_each_rule_has_its_reason() -> None:
    noon = at("Mon 12:00")
    until = noon.timestamp() + 1800
    gpu: dict[str, Any] = {"gpu_idle": 30.0, "gpu_used_by": "python (process 7)"}
    use: dict[str, Any] = {"idle": 20.0, "used_by": "a key was pressed", "program": "steam"}
    machine = MachineUse(**use, **gpu, on_battery=True)
    found = list(holds(NIGHT, until, machine, noon))
    assert [hold.rule for hold in found] == [
        *(Rule.OWNER, Rule.SCHEDULE, Rule.PROGRAM, Rule.GPU, Rule.IN_USE, Rule.BATTERY)
    ]
    assert [hold.reason for hold in found] == [
        "paused by you until 12:30",
        "outside its schedule 22:00-07:00 until 22:00",
        "steam runs, which --not-while names",
        "python (process 7) computes on the GPU: waits until it has ended for 1m30s",
        "the machine is in use (a key was pressed): waits until it is left alone for 9m40s",
        "the machine runs on its battery",
    ]
    assert found[0].until == until and found[1].until == at("Mon 22:00").timestamp() - 30
    fine = MachineUse(idle=600.0, gpu_idle=120.0, on_battery=False)
    assert list(holds(NIGHT, noon.timestamp(), fine, at("Mon 23:00"))) == [], "the pause is over"
    assert list(holds(NIGHT, None, MachineUse(), at("Mon 23:00"))) == [], (
        "what can't be told keeps nobody from training"
    )


# Pause and resume


class World:
    """Clock and machine of an availability."""

    def __init__(self, home: Path, **rules: Any) -> None:
        self.settings = NodeSettings.model_validate({"home": home, **rules})
        self.now, self.machine = at("Mon 12:00").timestamp(), MachineUse()
        self.file = home / "pause.json"
        self.elapsed = 100.0

    def start(self) -> Availability:
        return Availability(
            self.settings, lambda: self.machine, lambda: self.now, lambda: self.elapsed
        )

    def later(self, one: Availability, seconds: float) -> Rule | None:
        self.now += seconds
        self.elapsed += seconds
        one._machine = self.machine
        one.update()
        return one.hold.rule if one.hold else None


def test_a_pause_lasts_as_long_as_it_was_told_also_over_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    one = world.start()
    assert one.hold is None
    one.pause(1800.0)
    assert one.hold is not None and one.hold.until == world.now + 1800
    again = world.start()
    assert again.hold == one.hold
    assert world.later(again, 1799.0) is Rule.OWNER
    assert world.later(again, 1.0) is None
    one.pause(None)
    assert world.later(world.start(), 1e9) is Rule.OWNER
    one.resume()
    assert world.start().hold is None and not world.file.exists()


def test_a_pause_lasts_as_long_as_it_was_told_whatever_becomes_of_the_clock(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.now += 3600.0  # ahead when the pause begins
    one = world.start()
    one.pause(1800.0)
    world.now -= 3600.0
    assert world.later(one, 1799.0) is Rule.OWNER
    assert one.hold is not None and one.hold.until == world.now + 1
    restarted = world.start()
    assert world.later(one, 1.0) is None
    assert world.later(restarted, 1799.0) is None, "no longer than the whole pause after a restart"
    one.pause(1800.0)
    world.now += 3600.0  # ahead while it lasts
    assert world.later(one, 1799.0) is Rule.OWNER


def test_resume_overrules_a_rule_until_it_has_been_kept_once(tmp_path: Path) -> None:
    day = 86400.0
    zone = at("Mon 12:00").astimezone()  # the machine's own zone decides
    hour = (zone.hour + 2) % 24
    world = World(
        tmp_path,
        schedule=f"{hour:02}:00-{(hour + 1) % 24:02}:00",
        on_battery=False,
    )
    one = world.start()
    assert one.hold is not None and one.hold.rule is Rule.SCHEDULE
    one.resume()
    assert one.hold is None
    assert world.later(one, 0.0) is None
    world.machine = MachineUse(on_battery=True)
    assert world.later(one, 1.0) is Rule.BATTERY, "which did not hold when it was resumed"
    world.machine = MachineUse()
    assert world.later(one, 1.0) is None
    assert world.later(one, 2 * 3600) is None, "inside its hours"
    assert world.later(one, 3600.0) is Rule.SCHEDULE, "the rule counts again"
    one.resume()
    one.pause(60.0)
    assert world.later(one, 61.0) is Rule.SCHEDULE, "a pause ends what was overruled"
    assert world.later(one, day) is Rule.SCHEDULE


async def test_who_waits_is_told_at_once(tmp_path: Path) -> None:
    one = World(tmp_path).start()
    held = asyncio.create_task(one.held.wait())
    await one.free.wait()
    assert not held.done()
    one.pause(60.0)
    await asyncio.wait_for(held, 1)
    free = asyncio.create_task(one.free.wait())
    one.resume()
    await asyncio.wait_for(free, 1)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"until": "x"}', '{"until": 1, "seconds": "x"}']
)
def test_a_damaged_pause_is_named_with_its_remedy(tmp_path: Path, content: str) -> None:
    world = World(tmp_path)
    world.file.write_text(content)
    with pytest.raises(ConfigError, match=r"pause\.json can't be read: remove it"):
        world.start()


# The machine


@pytest.mark.parametrize(
    ("answer", "since"),
    [
        ("b true\nt 1700000000000000\n", 1.7e9),
        ("b false\nt 0\n", 1.8e9),
        ("", None),
        ("x", None),
        ("b true\nt x", None),
    ],
)
def test_what_logind_says_is_read(answer: str, since: float | None) -> None:
    assert read_logind(answer, 1.8e9) == since


async def test_a_look_that_fails_keeps_neither_hours_nor_later_looks_from_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "LOOK_EVERY", 0.001)
    clock = [datetime(2026, 1, 5, 21, 59).astimezone().timestamp()]
    looks: list[MachineUse | Exception] = [RuntimeError("no such sensor")] * 3
    warnings: list[str] = []

    def look() -> MachineUse:
        found = looks.pop() if len(looks) > 1 else looks[0]
        if isinstance(found, Exception):
            raise found
        return found

    rules = {"home": tmp_path, "schedule": "00:00-22:00", "on_battery": False}
    one = Availability(NodeSettings.model_validate(rules), look, lambda: clock[0])
    running = asyncio.create_task(one.run(warnings.append))
    try:
        async with asyncio.timeout(20):
            await one.free.wait()
            clock[0] += 120
            await one.held.wait()
            assert one.hold is not None and one.hold.rule is Rule.SCHEDULE
            clock[0] += 7200
            await one.free.wait()
            looks[0] = MachineUse(on_battery=True)
            await one.held.wait()
            assert one.hold is not None and one.hold.rule is Rule.BATTERY
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(warnings) == 1 and "no such sensor" in warnings[0]


# Other programs


@contextmanager
def program(path: Path, orphaned: bool = False) -> Iterator[int]:
    """The process id of a program of this name, which ends with the block."""
    path.write_text("#!/bin/sh\nread line\n")
    path.chmod(0o755)
    start = 'exec 3<&0; "$0" <&3 >&2 & echo $!' if orphaned else 'echo $$; exec "$0"'
    with subprocess.Popen(
        ["/bin/sh", "-c", start, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdin is not None and starter.stdout is not None
        pid = int(starter.stdout.readline())
        if orphaned:
            starter.wait(20)
        until(lambda: psutil.Process(pid).name() == path.name, 20, "the program runs")
        yield pid
        starter.stdin.close()
        if not orphaned:
            until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 20, "it has ended")
            assert running([path.name], ()) == "", "nobody has waited for it, yet it has ended"


async def test_a_node_waits_while_a_program_runs_that_its_owner_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "LOOK_EVERY", 0.01)
    rules = {"home": tmp_path, "not_while": ["steam-x, Blender-X", "y.exe"]}
    settings = NodeSettings.model_validate(rules)
    assert settings.not_while == ("steam-x", "Blender-X", "y.exe")
    with program(tmp_path / "blender-x", orphaned=True):
        one = Availability(settings)
        assert one.hold is not None and one.hold.rule is Rule.PROGRAM
        assert one.hold.reason == "Blender-X runs, which --not-while names"
        task = asyncio.create_task(one.run())
    try:
        await asyncio.wait_for(one.free.wait(), 60)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_names_of_programs_match_as_wholes_and_our_own_processes_are_none(tmp_path: Path) -> None:
    with program(tmp_path / "Y-lowcomm.EXE") as pid:
        assert running(["x", "y-lowcomm"], ()) == "y-lowcomm"
        assert running(["y-low", "lowcomm.exe", "-"], ()) == ""
        assert running(["y-lowcomm"], {pid}) == ""


def test_others_on_the_gpu_hold_a_node_and_the_idle_rule_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, other = FakeLibrary(monkeypatch), os.getppid()
    monkeypatch.setattr(availability, "_since_typed", lambda: None)
    monkeypatch.setattr(availability, "_since_logind", lambda: None)

    def look(computing: list[int], shares: dict[int, float], device: str = "auto") -> MachineUse:
        library.computing, library.shares = computing, shares
        rules = {"home": tmp_path, "yield_to_gpu": True, "only_idle": True, "device": device}
        detector = IdleDetector(NodeSettings.model_validate(rules))
        for gpu in detector.gpus:
            until(lambda gpu=gpu: gpu.look(monotonic()) is not None, 20, "the driver's answer")
        return detector.look()

    with program(tmp_path / "trainer") as ours:
        own = dict.fromkeys((os.getpid(), ours, 2**22 + 1), 0.9)  # that is of a host
        for computing, shares, computed, busy in (
            ([other], {other: 0.03}, True, False),
            ([other, *own], {other: 0.0, **own}, False, False),  # it waits for work
            ([], {other: 0.3, **own}, False, True),  # it draws
        ):
            use = look(computing, shares)
            assert (use.gpu_idle < 10, f"(process {other})" in use.gpu_used_by) == (computed,) * 2
            assert use.used_by == ("other programs take 30% of the GPU" if busy else "")
            assert (use.idle is not None and use.idle < 10) == busy
            assert look(computing, shares, "cpu").gpu_idle == FOREVER
        library.cards.insert(0, FakeCard("GPU-0"))
        for device, seen in (("0", False), ("0,1", True), ("all", True)):
            assert (look([other], {other: 0.03}, device).gpu_idle < 10) == seen, device
            assert (look([], {other: 0.3}, device).used_by != "") == seen, device
        del library.cards[0]
        library.fault = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert look([other], {}).gpu_idle < 10, "the driver can't tell"
