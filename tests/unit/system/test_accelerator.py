"""What must hold for what a node tells of the device that trains: it is that of the driver or of
the kernel, and no driver in trouble holds up or ends a node."""

import os
import threading
from time import monotonic
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from helpers.cards import FakeCard, FakeLibrary
from helpers.waiting import until
from lowcomm_node.errors import ConfigError
from lowcomm_node.system.accelerator import (
    STALE_SECONDS,
    Accelerator,
    Card,
    GpuMeter,
    Processor,
    meter_of,
    names_of,
    open_card,
)


def test_a_driver_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch):
    hanging, looked = threading.Event(), threading.Event()

    def memory(card: str) -> SimpleNamespace:
        if looked.is_set():
            hanging.wait(30)
        looked.set()
        return SimpleNamespace(used=3, total=8)

    FakeLibrary(monkeypatch).calls["nvmlDeviceGetMemoryInfo"] = memory
    meter = GpuMeter("GPU-1")
    until(lambda: meter.look(monotonic()).load == 0.5, 30, "its first look")
    assert meter.look(monotonic() + STALE_SECONDS + 1) == Accelerator(kind="gpu", name="Large 9")
    hanging.set()


def test_what_trains_is_what_is_looked_at():
    own = os.getpid()
    assert isinstance(meter_of("cpu", "", own), Processor)
    assert isinstance(meter_of("cpu (rank 1)", "", own), Processor)
    assert meter_of("mps:0", "", own).look(0.0) == Accelerator(kind="gpu", name="")
    assert isinstance(meter_of("cuda:0", "GPU-1", own), GpuMeter)


def test_devices_that_an_owner_names_are_known_without_torch(monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library.cards += [FakeCard("GPU-2"), FakeCard("GPU-3")]
    assert names_of("auto") == ["auto"] and names_of("cuda:1") == ["cuda:1"]
    assert names_of("0,cpu,xpu:2") == ["cuda:0", "cpu", "xpu:2"]
    assert names_of("all") == ["cuda:0", "cuda:1", "cuda:2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-2")
    assert names_of("all") == ["cuda:0", "cuda:1"]


def test_a_card_says_what_it_does_and_how_hot_it_is(monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(monkeypatch)
    library.cards.append(other := FakeCard("GPU-2"))
    other.load, other.degrees = 0.9, 70
    known = {"kind": "gpu", "name": "Large 9", "memory_taken": 3, "memory_total": 8}
    assert Card("GPU-2").load() == Accelerator(load=0.9, temperature=70, **known)

    def silent(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    library.calls["nvmlDeviceGetTemperature"] = silent
    assert Card("GPU-1").load() == Accelerator(load=0.5, temperature=None, **known)


def test_the_load_of_a_processor_is_known_where_no_affinity_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    meter = Processor(os.getpid())
    assert meter.look(1.0).load is None
    assert 0.0 <= (meter.look(2.0).load or 0.0) <= 1.0 and meter.look(2.0).load is not None


def test_who_uses_a_card_is_told_as_far_as_its_driver_knows(monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(monkeypatch)
    library.computing, library.shares = [7, 8], {8: 0.4, 9: 0.05}
    assert Card().users() == {7: (True, 0.0), 8: (True, 0.4), 9: (False, 0.05)}
    library.fault = pynvml.NVML_ERROR_NOT_FOUND  # no process has done anything
    assert Card().users() == {7: (True, 0.0), 8: (True, 0.0)}
    library.fault = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert Card().users() == {7: (True, None), 8: (True, None)}


@pytest.mark.parametrize(
    ("visible", "device", "is_there"),
    [
        *((None, "cuda", True), (None, "auto", True), (None, "cuda:1", False)),
        *(("GPU-0,GPU-1", "cuda:1", True), ("GPU-0,GPU-1", "cuda", False)),
        *(("1, 0", "cuda:1", True), ("1,0", "cuda", False), ("-1", "cuda", False)),
    ],
)
def test_a_card_is_the_one_that_the_trainer_takes(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, is_there: bool
):
    FakeLibrary(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if is_there:
        assert open_card("--yield-to-gpu", device=device).name == "Large 9"
    else:
        with pytest.raises(ConfigError, match="--yield-to-gpu needs a card of NVIDIA"):
            open_card("--yield-to-gpu", device=device)


def test_a_setting_for_a_card_is_refused_in_a_line_where_none_is(monkeypatch: pytest.MonkeyPatch):
    for device in ("cpu", "mps", "xpu:1"):
        with pytest.raises(ConfigError, match="is another device: drop --yield-to-gpu"):
            open_card("--yield-to-gpu", device=device)
    FakeLibrary(monkeypatch).uuid = ""
    with pytest.raises(ConfigError) as caught:
        open_card("--yield-to-gpu", "GPU-1")
    assert str(caught.value) == (
        "--yield-to-gpu needs a card of NVIDIA and its driver, and none answers (Not Found): drop "
        "--yield-to-gpu; --duty and --not-while work on any machine."
    )
