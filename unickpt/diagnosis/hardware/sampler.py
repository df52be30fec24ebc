"""All sources of a host, each read now and then: the kernel's log at every look, files every few seconds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from unickpt.diagnosis.hardware import counters
from unickpt.diagnosis.hardware.counters import Levels, Rises, Shares
from unickpt.diagnosis.hardware.events import EventKind, EventLog, HostEvent, HostHardware, of_job
from unickpt.diagnosis.hardware.gpus import Gpus
from unickpt.diagnosis.hardware.kernel_log import event_of, parse_record
from unickpt.diagnosis.hardware.nvml import gpu_thread
from unickpt.diagnosis.hardware.sources import KERNEL_LOG, NVML, KernelLog, Limits, Ports, Roots

EVERY_S = 5.0  # between two readings of files
_EARLIER_NS = 120 * 1_000_000_000  # before the first look: older records of the kernel are not of this job
_TOGETHER_NS = 10 * 1_000_000_000  # between readings with the same event: it goes on
_APART_NS = 600 * 1_000_000_000  # that the clock of the kernel's log may be behind
_CLOCK_NS = 250_000_000  # by which the wall clock may move between two looks
_LEAST = {kind: least for kind, least in counters.PRESSURES.values()} | {EventKind.CPU_LIMIT: counters.CPU_LIMIT_SHARE}


class HardwareSampler:
    """What the hardware of this host has told since the first look.

    Args:
        roots: where the sources are; default: as the environment says.
        every_s: seconds between two readings of files.
    """

    def __init__(self, roots: Roots | None = None, every_s: float = EVERY_S) -> None:
        self._every_ns = int(every_s * 1e9)
        self._roots = roots or Roots.of_environment()
        self._kernel, self._ports, self._limits = KernelLog(self._roots), Ports(self._roots), Limits(self._roots)
        self._gpus = gpu_thread(self._roots)
        self._files = (*self._ports.readable(), *self._limits.readable())
        self._log = EventLog()
        self._rises, self._kills, self._levels, self._shares, self._readings = Rises(), Rises(), Levels(), Shares(), Gpus()
        self._read_ns = self._gpu_ns = self._look_ns = 0
        self._gpu_number = 0
        self._clock_ns: int | None = None
        self._victims: dict[int, str] = {}  # control groups of processes that are being killed

    def close(self) -> None:
        """Read no more."""
        self._kernel.close()
        if self._gpus is not None:
            self._gpus.close()

    def look(self, now_ns: int, pids: Sequence[int], *, at_once: bool = False) -> HostHardware:
        """Look once.

        Args:
            now_ns: time on the wall clock.
            pids: processes of the ranks of this host, also those that have ended.
            at_once: whether to read the files, too, because something has just happened.
        """
        offset_ns = now_ns - time.monotonic_ns()
        self._note_clock(now_ns, offset_ns)
        self._read_kernel(now_ns, offset_ns)
        if at_once or now_ns - self._read_ns >= self._every_ns or now_ns < self._read_ns:
            self._read_files(now_ns, pids)
        self._read_gpus(now_ns)
        self._look_ns = now_ns
        groups = sorted(self._limits.groups(pids, "memory"))
        events = of_job(self._log.newest(now_ns), pids, groups, same_numbers=self._roots.same_numbers)
        return HostHardware(self._sources(), tuple(events))

    def _sources(self) -> tuple[str, ...]:
        found = [KERNEL_LOG] if self._kernel.readable else []
        if self._gpus is not None and self._gpus.reading() is not None and not self._gpus.silent_s():
            found.append(NVML)
        return (*found, *self._files)

    def _note_clock(self, now_ns: int, offset_ns: int) -> None:
        if self._clock_ns is not None and abs(moved_ns := offset_ns - self._clock_ns) > _CLOCK_NS:
            self._log.add(HostEvent(EventKind.CLOCK_SET, "", now_ns, now_ns, moved_ns / 1e9))
        self._clock_ns = offset_ns

    def _read_kernel(self, now_ns: int, offset_ns: int) -> None:
        """Read new records. The clock of the log runs apart from others, so a new record is of after the last look."""
        for line in self._kernel.lines():
            record = parse_record(line)
            if record is None:
                continue
            at_ns = min(record.at_us * 1000 + offset_ns, now_ns)
            if not self._look_ns and at_ns < now_ns - _EARLIER_NS:
                continue
            event = event_of(record, at_ns if at_ns < self._look_ns - _APART_NS else max(at_ns, self._look_ns))
            if event is not None and event.kind is EventKind.OUT_OF_MEMORY:
                event = self._victim(event)
            if event is not None:
                self._log.add(event, within_ns=_TOGETHER_NS)

    def _victim(self, event: HostEvent) -> HostEvent | None:
        """Join the two records about a process that is killed: the first has its control group, the second its size."""
        if event.device:
            self._victims[event.pid] = event.device
            return None
        return dataclasses.replace(event, device=self._victims.pop(event.pid, ""))

    def _read_files(self, now_ns: int, pids: Sequence[int]) -> None:
        then_ns, self._read_ns = self._read_ns or now_ns, now_ns
        rises, speeds = self._ports.read()
        found = [
            *self._rises.events(rises, then_ns, now_ns),
            *self._levels.events(speeds, then_ns, now_ns),
            *self._kills.events(self._limits.kills(pids), then_ns, now_ns),
            *self._shares.events(self._limits.shares(pids), _LEAST, then_ns, now_ns),
        ]
        for event in found:
            self._log.add(event, within_ns=_TOGETHER_NS)

    def _read_gpus(self, now_ns: int) -> None:
        if self._gpus is None:
            return
        silent_s = self._gpus.silent_s()
        if silent_s:
            event = HostEvent(EventKind.GPU_SILENT, "", now_ns - int(silent_s * 1e9), now_ns, silent_s)
            self._log.add(event, within_ns=_TOGETHER_NS)
        newest = self._gpus.reading()
        if newest is None or newest[1] == self._gpu_number:
            return
        reading, self._gpu_number = newest
        then_ns, self._gpu_ns = self._gpu_ns or now_ns, now_ns
        for event in self._readings.events(reading, then_ns, now_ns):
            self._log.add(event, within_ns=3 * _TOGETHER_NS)
