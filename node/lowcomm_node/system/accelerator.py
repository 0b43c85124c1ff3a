"""What the device does that trains: a GPU as NVIDIA's driver tells, or the processor.

The daemon looks, which loads no torch: the driver brings a library of its own.
"""

import ctypes
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import psutil

from lowcomm_node.system.machine import cores_allowed

WINDOW = 10
"""Looks, one a second, over which a load is told."""
EVERY = 1.0
STALE = 5.0
"""Seconds after which what a driver told last is no news: it hangs, or has lost the GPU."""
_LIBRARY = "libnvidia-ml.so.1"
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device that trains, at one moment."""

    kind: str
    """`gpu` or `cpu`."""
    name: str
    """As its maker calls it."""
    load: float | None = None
    """Share of the last ten seconds in which a GPU computed, for whomever; of a processor the share
    of its cores that the trainer took. Null until it is known."""
    memory_taken: int | None = None
    """Bytes of the GPU's memory that are taken, by whomever; null for a processor."""
    memory_total: int | None = None
    """Bytes of the GPU's memory; null for a processor."""


class Meter(Protocol):
    """Looks at one device."""

    def look(self, now: float) -> Accelerator:
        """The device now; ``now``: monotonic seconds. Called once a second."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class Processor:
    """The cores that a process takes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._name = processor_name()
        self._told: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)

    def look(self, now: float) -> Accelerator:
        try:
            process = psutil.Process(self._pid)
            spent = process.cpu_times()
            cores = min(len(os.sched_getaffinity(self._pid)), cores_allowed())
        except (psutil.Error, OSError, AttributeError):  # gone, or not Linux
            return Accelerator(kind="cpu", name=self._name)
        self._told.append((now, spent.user + spent.system))
        (first, before), (last, after) = self._told[0], self._told[-1]
        load = (after - before) / (last - first) / cores if last > first else None
        return Accelerator(
            kind="cpu", name=self._name, load=None if load is None else min(1.0, load)
        )

    def close(self) -> None:
        pass


class Gpu:
    """One GPU, asked in a thread: a driver in trouble may keep a call for ever."""

    def __init__(self, driver: "Driver", uuid: str) -> None:
        """``driver``: is not asked before the thread runs."""
        self._driver = driver
        self._uuid = uuid
        self._told: tuple[float, Accelerator] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="gpu", daemon=True).start()

    def look(self, now: float) -> Accelerator:
        if self._told is None or now - self._told[0] > STALE:
            return Accelerator(kind="gpu", name=self._told[1].name if self._told else "GPU")
        return self._told[1]

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        loads: deque[float] = deque(maxlen=WINDOW)
        try:
            device = self._driver.find(self._uuid)
            name = self._driver.name(device)
            while not self._closed.is_set():
                loads.append(self._driver.load(device))
                taken, total = self._driver.memory(device)
                told = Accelerator(
                    kind="gpu",
                    name=name,
                    load=sum(loads) / len(loads),
                    memory_taken=taken,
                    memory_total=total,
                )
                self._told = (monotonic(), told)
                self._closed.wait(EVERY)
        except OSError:  # no library, or a device of which it can't tell, such as a part of one
            return


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Driver:
    """NVIDIA's management library (NVML). Methods raise OSError for what it does not tell."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._path = library
        self._library: ctypes.CDLL | None = None

    def find(self, uuid: str) -> ctypes.c_void_p:
        """The handle of a GPU, by its UUID."""
        if self._library is None:
            self._library = ctypes.CDLL(self._path)
            self._call("nvmlInit_v2")
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        return device

    def name(self, device: ctypes.c_void_p) -> str:
        """What its maker calls it."""
        told = ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetName", device, told, ctypes.c_uint(len(told)))
        return told.value.decode(errors="replace")

    def load(self, device: ctypes.c_void_p) -> float:
        """Share of the last second, or of a part of it, in which it computed."""
        told = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(told))
        return told.gpu / 100

    def memory(self, device: ctypes.c_void_p) -> tuple[int, int]:
        """Bytes that are taken, and bytes in all."""
        told = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(told))
        return told.used, told.total

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise OSError(f"{self._path} lacks {name}") from None
        if status != 0:
            raise OSError(f"{name} answers {status}")


def meter_of(device: str, gpu: str, pid: int | None) -> Meter | None:
    """What looks at the device of a trainer, as torch names it; ``gpu``: its UUID, if it is one.

    None where nothing tells: a GPU of another maker, or a trainer without a process of its own."""
    if gpu:
        return Gpu(Driver(), gpu)
    return Processor(pid) if device == "cpu" and pid is not None else None


def processor_name() -> str:
    """As the kernel calls the processor of this machine."""
    try:
        lines = _CPUINFO.read_text(errors="replace", encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or "processor"
