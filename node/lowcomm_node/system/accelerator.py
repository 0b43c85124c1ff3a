"""Devices that train: how busy each is, and for cards of NVIDIA who uses them."""

import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep, time
from typing import Any, Generic, TypeVar

import psutil

from lowcomm_node.errors import ConfigError
from lowcomm_node.system.machine import PROC, cores_allowed

WINDOW = 10
"""Looks, one a second, over which a load is averaged."""
STALE_SECONDS = 5.0
"""Age from which a reading counts no longer: the driver hangs, or has lost the GPU."""
UNUSED_SECONDS = 60.0
"""Seconds after the last look in which a GPU is read on."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device that trains, at one moment."""

    device: str = ""
    """Torch's name of it."""
    kind: str
    """`gpu` or `cpu`."""
    name: str
    """Name that its maker gives it; empty where only torch knows the device."""
    load: float | None = None
    """Share of the last ten seconds in which a GPU computed, for any program; of a processor the
    share of its cores that the trainer took. Null until it is known."""
    memory_taken: int | None = None
    """Bytes of the GPU's memory that any program takes; null for a processor."""
    memory_total: int | None = None
    """Bytes of the GPU's memory; null for a processor."""
    temperature: int | None = None
    """Degrees Celsius; null for devices that do not say."""
    speed: float | None = None
    """Speed beside that of the fastest, by a product of matrices at the start; null for a device
    that trains alone."""


class Processor:
    """Meter of the cores that a process takes. Look at it once a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._spent: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)
        self._name = "processor"
        with suppress(OSError, AttributeError):
            text = (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace")
            self._name = re.findall(r"^model name\s*: (.+)$", text, re.M)[0]

    def look(self, now: float) -> Accelerator:
        """The device now; ``now``: monotonic seconds."""
        load = None
        with suppress(psutil.Error):  # it has gone
            spent = self._process.cpu_times()
            own = getattr(self._process, "cpu_affinity", lambda: range(os.cpu_count() or 1))()
            cores = min(len(own), cores_allowed())
            self._spent.append((now, spent.user + spent.system))
            (first, before), (last, after) = self._spent[0], self._spent[-1]
            load = min(1.0, (after - before) / (last - first) / cores) if last > first else None
        return Accelerator(kind="cpu", name=self._name, load=load)


def nvml() -> Any:
    """NVIDIA's library, ready for use. Raises pynvml.NVMLError without a driver."""
    import pynvml  # of nvidia-ml-py; loads the driver's library at the first call

    pynvml.nvmlInit()
    return pynvml


class Card:
    """A card of NVIDIA, by its UUID, or as ``--device`` names it. Calls raise NVMLError."""

    def __init__(self, uuid: str = "", device: str = "cuda") -> None:
        self._nvml = nvml()
        place = device.partition(":")[2] or "0"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = dict(enumerate(visible.split(","))) if visible else {}
        known = uuid or chosen.get(int(place), place).strip()
        if known.isdecimal():
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(int(known))
        else:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(known)
        self.name = str(self._nvml.nvmlDeviceGetName(self._handle))
        self._milliwatts_before: int | None = None
        """Its limit of power, where that was changed."""
        self._loads: deque[float] = deque(maxlen=WINDOW)

    def load(self) -> Accelerator:
        """Its load and memory, for all programs. Call it once a second."""
        self._loads.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        degrees = None
        with suppress(ConfigError):
            degrees = self.temperature()
        return Accelerator(
            kind="gpu",
            name=self.name,
            load=sum(self._loads) / len(self._loads),
            memory_taken=memory.used,
            memory_total=memory.total,
            temperature=degrees,
        )

    def temperature(self) -> int:
        """Degrees Celsius. Raises ConfigError where the card does not say."""
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        try:
            return int(self._nvml.nvmlDeviceGetTemperature(self._handle, sensor))
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"--max-gpu-temp: {self.name} does not say its temperature ({error}): drop it, or "
                "use --duty."
            ) from None

    def limit_power(self, watts: int) -> tuple[float, str]:
        """Limit its power until ``free_power``. Where that is not allowed: which share of the
        present limit this is, and why. Raises ConfigError that says what is possible."""
        try:
            bounds = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
            before = self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle)
        except self._nvml.NVMLError as error:
            raise ConfigError(f"--gpu-power {watts}: {error}: use --duty instead.") from None
        least, most = bounds
        if not least <= 1000 * watts <= most:
            possible = f"{self.name} takes {least / 1000:g} to {most / 1000:g} W"
            raise ConfigError(f"--gpu-power {watts}: {possible}: choose a number within.")
        if before > 1000 * watts:
            try:
                self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, 1000 * watts)
            except self._nvml.NVMLError as error:
                return 1000 * watts / before, str(error)
            self._milliwatts_before = before
        return 1.0, ""

    def free_power(self) -> None:
        """Set back what ``limit_power`` changed."""
        if (before := self._milliwatts_before) is not None:
            with suppress(self._nvml.NVMLError):  # the driver has gone
                self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, before)

    def users(self) -> dict[int, tuple[bool, float | None]]:
        """Processes that can compute on it, or have just drawn there: whether they can compute, and
        their share of the last seconds; None if the driver does not say."""
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        computing, shares, unused = {one.pid for one in processes}, dict[int, float](), 0.0
        try:
            since = int((time() - WINDOW) * 1e6)
            for one in self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since):
                shares[one.pid] = max(shares.get(one.pid, 0.0), one.smUtil / 100)
        except self._nvml.NVMLError as error:
            # Where no process has done anything, the driver finds no samples.
            if error.value not in (self._nvml.NVML_ERROR_NOT_FOUND, self._nvml.NVML_SUCCESS):
                unused = None
        return {
            pid: (pid in computing, shares.get(pid, unused)) for pid in computing | shares.keys()
        }


def names_of(devices: str) -> list[str]:
    """The devices that an owner names, each by its own name; without torch."""
    import pynvml

    if devices == "all":
        visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), 1
        with suppress(pynvml.NVMLError):  # no driver of NVIDIA: its first card is missed later
            count = len(visible.split(",")) if visible else nvml().nvmlDeviceGetCount()
        return [f"cuda:{place}" for place in range(count)]
    return [f"cuda:{name}" if name.isdecimal() else name for name in devices.split(",")]


def open_card(flag: str, uuid: str = "", device: str = "cuda") -> Card:
    """The card that a setting is for. Raises ConfigError if there is none."""
    import pynvml

    if device.partition(":")[0] not in ("auto", "cuda"):
        raise ConfigError(f"{flag} is for cards of NVIDIA; this is another device: drop {flag}.")
    try:
        return Card(uuid, device)
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"{flag} needs a card of NVIDIA and its driver, and none answers ({error}): drop "
            f"{flag}; --duty and --not-while work on any machine."
        ) from None


class Polled(Generic[T]):
    """Read a card once a second, on a thread: a driver may never return from a call."""

    def __init__(self, begin: Callable[[], Callable[[], T]]) -> None:
        """``begin``: returns what reads; a reading ends with the first NVMLError."""
        self._reading: tuple[float, T] | None = None
        self._looked = monotonic()
        threading.Thread(target=self._run, args=(begin,), daemon=True).start()

    def look(self, now: float) -> T | None:
        """The last reading; None without a fresh one. ``now``: monotonic seconds."""
        self._looked, reading = now, self._reading
        return None if reading is None or now - reading[0] > STALE_SECONDS else reading[1]

    def _run(self, begin: Callable[[], Callable[[], T]]) -> None:
        import pynvml

        # No library, or a device without figures, such as a part of a GPU.
        with suppress(pynvml.NVMLError):
            read = begin()
            while monotonic() - self._looked < UNUSED_SECONDS:
                self._reading = (monotonic(), read())
                sleep(1.0)


class GpuMeter:
    """Meter of a GPU, by its UUID."""

    def __init__(self, uuid: str) -> None:
        self._name = "GPU"
        self._polled = Polled(lambda: Card(uuid).load)

    def look(self, now: float) -> Accelerator:
        """The device now; ``now``: monotonic seconds."""
        latest = self._polled.look(now) or Accelerator(kind="gpu", name=self._name)
        self._name = latest.name
        return latest


class Unknown:
    """Stands for the meter of a GPU of another maker."""

    def look(self, now: float) -> Accelerator:
        """Nothing is known but that it trains."""
        return Accelerator(kind="gpu", name="")


Meter = GpuMeter | Processor | Unknown


def meter_of(device: str, gpu: str, pid: int) -> Meter:
    """Meter for a device that trains, as torch calls it; ``gpu``: its UUID, if it is a card of
    NVIDIA; ``pid``: of the process. Raises psutil.Error if that has ended."""
    if gpu:
        return GpuMeter(gpu)
    return Processor(pid) if device.startswith("cpu") else Unknown()
