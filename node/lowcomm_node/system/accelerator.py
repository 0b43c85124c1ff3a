"""Load and memory of the device that trains: a GPU as NVIDIA's driver reports it, or the processor.

The daemon looks, which loads no torch: NVML, the driver's library, is enough.
"""

import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import psutil

from lowcomm_node.system.machine import cores_allowed

WINDOW = 10
"""Looks, one a second, over which a load is averaged."""
EVERY_SECONDS = 1.0
STALE_SECONDS = 5.0
"""Age from which a reading counts no longer: the driver hangs, or has lost the GPU."""
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device that trains, at one moment."""

    kind: str
    """`gpu` or `cpu`."""
    name: str
    """As its maker calls it."""
    load: float | None = None
    """Share of the last ten seconds in which a GPU computed, for any program; of a processor the
    share of its cores that the trainer took. Null until it is known."""
    memory_taken: int | None = None
    """Bytes of the GPU's memory that are taken, by any program; null for a processor."""
    memory_total: int | None = None
    """Bytes of the GPU's memory; null for a processor."""


class AcceleratorMeter(Protocol):
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
        self._spent: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)

    def look(self, now: float) -> Accelerator:
        try:
            process = psutil.Process(self._pid)
            spent = process.cpu_times()
            cores = min(len(os.sched_getaffinity(self._pid)), cores_allowed())
        except (psutil.Error, OSError, AttributeError):  # gone, or not Linux
            return Accelerator(kind="cpu", name=self._name)
        self._spent.append((now, spent.user + spent.system))
        (first, before), (last, after) = self._spent[0], self._spent[-1]
        load = min(1.0, (after - before) / (last - first) / cores) if last > first else None
        return Accelerator(kind="cpu", name=self._name, load=load)

    def close(self) -> None:
        pass


class Gpu:
    """A GPU, read in a thread: a driver in trouble may never return from a call."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._reading: tuple[float, Accelerator] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="gpu", daemon=True).start()

    def look(self, now: float) -> Accelerator:
        if self._reading is None or now - self._reading[0] > STALE_SECONDS:
            name = self._reading[1].name if self._reading else "GPU"
            return Accelerator(kind="gpu", name=name)
        return self._reading[1]

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        import pynvml  # of nvidia-ml-py; loads the driver's library at the first call

        loads: deque[float] = deque(maxlen=WINDOW)
        try:
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            name = str(pynvml.nvmlDeviceGetName(device))
            while not self._closed.is_set():
                rates: Any = pynvml.nvmlDeviceGetUtilizationRates(device)
                memory: Any = pynvml.nvmlDeviceGetMemoryInfo(device)
                loads.append(rates.gpu / 100)
                now = Accelerator(
                    kind="gpu",
                    name=name,
                    load=sum(loads) / len(loads),
                    memory_taken=memory.used,
                    memory_total=memory.total,
                )
                self._reading = (monotonic(), now)
                self._closed.wait(EVERY_SECONDS)
        except pynvml.NVMLError:  # no library, or a device without figures, such as a part of one
            return


def meter_of(device: str, gpu: str, pid: int | None) -> AcceleratorMeter | None:
    """Meter for the device of a trainer, as torch names it; ``gpu``: its UUID, if it is one.

    None for a GPU of another maker, and for a trainer without a process of its own.
    """
    if gpu:
        return Gpu(gpu)
    return Processor(pid) if device == "cpu" and pid is not None else None


def processor_name() -> str:
    """Name of this machine's processor, as the kernel has it."""
    try:
        lines = _CPUINFO.read_text(errors="replace", encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or "processor"
