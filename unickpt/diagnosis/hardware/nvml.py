"""GPUs of NVIDIA through NVML, if ``pynvml`` (the package nvidia-ml-py) is installed. A thread of its own reads, because calls
into a driver whose GPU has failed may not come back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unickpt.diagnosis.hardware.gpus import GpuReading
from unickpt.diagnosis.hardware.sources import Roots

EVERY_S = 10.0
SILENT_S = 60.0  # that one reading may take before the driver counts as silent
Reading = dict[str, GpuReading]
_UNCORRECTED, _VOLATILE, _DOUBLE_BIT, _SM, _CORE = 1, 0, 1, 1, 0  # constants of nvml.h
_LINKS = ("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",)
_REPLAYS = ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL")


def installed() -> bool:
    """Return whether Python's package for NVML is installed. It is not imported."""
    return find_spec("pynvml") is not None


class GpuThread:
    """Reads the GPUs again and again. ``reading`` returns the newest result."""

    def __init__(self, read: Callable[[], Reading], every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._lock = threading.Lock()
        self._newest: tuple[Reading, int] | None = None
        self._begun_s = 0.0  # of the reading in progress
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="unickpt-nvml", daemon=True).start()

    def reading(self) -> tuple[Reading, int] | None:
        """Return the newest reading and its number; None before the first one, and if there is no GPU."""
        with self._lock:
            return self._newest

    def silent_s(self) -> float:
        """Return for how many seconds the driver has not answered, if that is long; otherwise 0."""
        with self._lock:
            waited_s = time.monotonic() - self._begun_s if self._begun_s else 0.0
        return waited_s if waited_s >= SILENT_S else 0.0

    def close(self) -> None:
        """Let the thread end."""
        self._stop.set()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            with self._lock:
                self._begun_s = time.monotonic()
            found: Reading = {}
            with contextlib.suppress(Exception):  # no driver, no GPU, or a call that this driver does not have
                found = self._read()
            number += 1
            with self._lock:
                self._begun_s = 0.0
                if found or self._newest is not None:
                    self._newest = found, number
            self._stop.wait(self._every_s)


def gpu_thread(roots: Roots) -> GpuThread | None:
    """Return a running thread; None without NVML."""
    if roots.nvml is not None:
        path = roots.nvml
        return GpuThread(lambda: _recorded(path), every_s=0.1) if path.exists() else None
    return GpuThread(_Nvml()) if installed() else None


def _recorded(path: Path) -> Reading:
    return {device: GpuReading(**fields) for device, fields in json.loads(path.read_text()).items()}


class _Nvml:
    """Reads all GPUs. The first call initialises NVML, for the life of this process. A GPU that cannot be read is left out."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def __call__(self) -> Reading:
        if self._nvml is None:
            nvml: Any = import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
        found = {}
        for index in range(self._nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(self._nvml.NVMLError):
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                found[_name(self._nvml.nvmlDeviceGetPciInfo(device).busId)] = _gpu(self._nvml, device)
        return found


def _name(bus: Any) -> str:
    """Return ``0000:3b:00``, as in the kernel's log, of ``00000000:3B:00.0``."""
    text = bus.decode() if isinstance(bus, bytes) else str(bus)
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _gpu(nvml: Any, device: Any) -> GpuReading:
    def told(call: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return call()
        except (nvml.NVMLError, AttributeError):  # not supported by this device or driver
            return otherwise

    nvml.nvmlDeviceGetPowerState(device)  # raises if the GPU is lost
    rows = told(lambda: nvml.nvmlDeviceGetRemappedRows(device), (0, 0, 0, 0))
    pages = told(lambda: len(nvml.nvmlDeviceGetRetiredPages(device, _DOUBLE_BIT)), 0)
    return GpuReading(
        uncorrected=int(told(lambda: nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _VOLATILE), 0)),
        retired=int(rows[1]) + int(pages),
        unreplaced=bool(rows[3]),
        reasons=int(told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device), 0)),
        clock_mhz=int(told(lambda: nvml.nvmlDeviceGetClockInfo(device, _SM), 0)),
        most_mhz=int(told(lambda: nvml.nvmlDeviceGetMaxClockInfo(device, _SM), 0)),
        celsius=int(told(lambda: nvml.nvmlDeviceGetTemperature(device, _CORE), 0)),
        recoveries=told(lambda: _fields(nvml, device, _LINKS), 0),
        replays=told(lambda: _fields(nvml, device, _REPLAYS), 0),
    )


def _fields(nvml: Any, device: Any, names: tuple[str, ...]) -> int:
    values = nvml.nvmlDeviceGetFieldValues(device, [getattr(nvml, name) for name in names])
    return sum(int(value.value.ullVal) for value in values if value.nvmlReturn == 0)
