"""Readings of GPUs, compared with those before. Pure. Names and bits are those of NVML (docs.nvidia.com/deploy/nvml-api)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unickpt.diagnosis.hardware.events import EventKind, HostEvent

# Clock event reasons. Idle (1), set clocks (2), the power cap (4), synchronised boost (16) and display clocks (256) are usual.
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
_HOT, _POWER = SW_THERMAL | HW_THERMAL, HW_POWER_BRAKE
_SLOWED = 0.7  # of the highest clock: a slowdown for which nothing else is named, and not a change of the power state
MOST_REPLAYS = 100  # of NVLink between two readings: some are usual


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one time. What the device does not tell is 0.

    Attributes:
        uncorrected: uncorrectable memory errors since the driver was loaded.
        retired: pages that were retired for an uncorrectable error, or rows that were replaced for one.
        unreplaced: whether a row could not be replaced.
        reasons: clock event reasons, a mask.
        clock_mhz, most_mhz: clock of the multiprocessors, and the highest one.
        celsius: temperature.
        recoveries: NVLink recoveries that were needed.
        replays: NVLink replays and checksum errors.
    """

    uncorrected: int = 0
    retired: int = 0
    unreplaced: bool = False
    reasons: int = 0
    clock_mhz: int = 0
    most_mhz: int = 0
    celsius: int = 0
    recoveries: int = 0
    replays: int = 0


class Gpus:
    """Finds what has changed between two readings: ``{device: reading}``."""

    def __init__(self) -> None:
        self._before: dict[str, GpuReading] = {}

    def events(self, reading: Mapping[str, GpuReading], then_ns: int, now_ns: int) -> list[HostEvent]:
        """Add a reading, and return what has changed since the one before."""
        found = [
            HostEvent(EventKind.GPU_LOST, device, then_ns, now_ns) for device in sorted(self._before.keys() - reading.keys())
        ]
        for device, now in reading.items():
            before = self._before.get(device)
            if before is not None:
                found += [
                    HostEvent(kind, device, then_ns, now_ns, float(amount)) for kind, amount in _changes(before, now).items()
                ]
        self._before = {**self._before, **reading}
        return found


def _changes(before: GpuReading, now: GpuReading) -> dict[EventKind, float]:
    found: dict[EventKind, float] = {}
    worse = max(
        now.uncorrected - before.uncorrected, now.retired - before.retired, int(now.unreplaced and not before.unreplaced)
    )
    if worse > 0:
        found[EventKind.GPU_MEMORY] = worse
    if now.recoveries > before.recoveries or now.replays - before.replays >= MOST_REPLAYS:
        found[EventKind.NVLINK] = max(now.recoveries - before.recoveries, 0) + max(now.replays - before.replays, 0)
    lasting = now.reasons & before.reasons  # a reason at one reading alone may be a change of the power state
    if lasting & _HOT:
        found[EventKind.GPU_HOT] = now.celsius
    elif lasting & _POWER or (lasting & HW_SLOWDOWN and now.clock_mhz < _SLOWED * now.most_mhz):
        found[EventKind.GPU_POWER] = now.clock_mhz
    return found
