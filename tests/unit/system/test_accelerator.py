"""What must hold for what a node tells of the device that trains: it is that of the driver or of
the kernel, and no driver in trouble holds up or ends a node."""

import os
import threading
from time import monotonic
from typing import Any

import pytest

from helpers.waiting import until
from lowcomm_node.system import accelerator
from lowcomm_node.system.accelerator import STALE, Accelerator, Driver, Gpu, Processor, meter_of


class Telling:
    """A driver of one GPU."""

    def __init__(self, *loads: float) -> None:
        self.loads = list(loads)

    def find(self, uuid: str) -> Any:
        if uuid != "GPU-1":
            raise OSError("no such GPU")
        return uuid

    def name(self, device: Any) -> str:
        return "Large 9"

    def load(self, device: Any) -> float:
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]

    def memory(self, device: Any) -> tuple[int, int]:
        return 3, 8


def test_the_load_of_a_processor_is_the_share_of_its_cores_that_the_trainer_took(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(accelerator, "cores_allowed", lambda: float("inf"))
    meter = Processor(os.getpid())
    assert meter.look(100.0).load is None, "nothing to compare with yet"
    first, spent = meter._told[0]
    meter._told[0] = (first, spent - 4.0)
    told = meter.look(102.0)
    assert (told.kind, told.memory_total) == ("cpu", None)
    assert told.load == pytest.approx(4.0 / 2.0 / 4, abs=0.1)
    assert told.name
    meter.close()


def test_a_process_that_has_gone_has_no_load():
    assert Processor(2**22 + 1).look(1.0).load is None


def test_a_gpu_tells_the_mean_of_its_last_looks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accelerator, "EVERY", 0.0)
    meter = Gpu(Telling(0.0, 1.0), "GPU-1")  # type: ignore[arg-type]
    until(lambda: (meter.look(monotonic()).load or 0) > 0.8, 30, "the mean of ten looks")
    told = meter.look(monotonic())
    assert (told.kind, told.name, told.memory_taken, told.memory_total) == ("gpu", "Large 9", 3, 8)
    meter.close()


@pytest.mark.parametrize("driver", [Telling(0.5), Driver("libthereisnone.so.1")])
def test_a_gpu_of_which_nothing_can_be_told_has_no_figures(driver: Any):
    meter = Gpu(driver, "GPU-2")
    until(lambda: "gpu" not in [one.name for one in threading.enumerate()], 30, "it gives up")
    assert meter.look(monotonic()) == Accelerator(kind="gpu", name="GPU")
    meter.close()


def test_a_driver_that_hangs_is_waited_for_by_nobody():
    hanging, there = threading.Event(), threading.Event()

    class Hanging(Telling):
        def load(self, device: Any) -> float:
            if there.is_set():
                hanging.wait(30)
            there.set()
            return 0.5

    meter = Gpu(Hanging(0.5), "GPU-1")  # type: ignore[arg-type]
    until(lambda: meter.look(monotonic()).load == 0.5, 30, "its first look")
    assert meter.look(monotonic() + STALE + 1) == Accelerator(kind="gpu", name="Large 9")
    meter.close()
    hanging.set()


def test_what_trains_is_what_is_looked_at():
    assert isinstance(meter_of("cpu", "", os.getpid()), Processor)
    assert meter_of("cpu", "", None) is None
    assert meter_of("mps", "", os.getpid()) is None
    meter = meter_of("cuda:0", "GPU-1", os.getpid())
    assert isinstance(meter, Gpu)
    meter.close()
