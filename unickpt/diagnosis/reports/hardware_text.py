"""What the hardware of a host has told, in words: the event, and what to do about it."""

from __future__ import annotations

import shlex

from unickpt.diagnosis.detectors.hints import LooksAtHardware
from unickpt.diagnosis.hardware.events import EventKind, HostEvent
from unickpt.diagnosis.hardware.kernel_log import OF_LIMIT
from unickpt.diagnosis.hardware.xids import Bearing, xid
from unickpt.diagnosis.reports.wording import clock_time

_GIB = 1 << 30
_OF_GPU = frozenset(
    {
        EventKind.XID, EventKind.SWITCH, EventKind.GPU_LOST, EventKind.GPU_SILENT, EventKind.GPU_MEMORY, EventKind.GPU_HOT,
        EventKind.GPU_POWER, EventKind.NVLINK,
    }
)  # fmt: skip
_OF_LINK = frozenset({EventKind.LINK_DOWN, EventKind.LINK_SLOWER, EventKind.LINK_ERRORS, EventKind.NETWORK_CARD})


def event_text(event: HostEvent) -> str:
    """The event, without its time."""
    process = f", process {event.pid}{f' ({event.name})' if event.name else ''}" if event.pid else ""
    on, times = f" of {event.device}" if event.device else "", f"{event.amount:.0f} "
    match event.kind:
        case EventKind.XID:
            meaning = xid(event.code).name
            return f"Xid {event.code}{f' ({meaning})' if meaning else ''} of GPU {event.device}{process}"
        case EventKind.SWITCH:
            return f"SXid {event.code}, fatal, of NVSwitch {event.device}"
        case EventKind.GPU_LOST:
            return f"GPU {event.device or 'of unknown number'} has fallen off the bus"
        case EventKind.GPU_SILENT:
            return f"NVIDIA's driver has not answered for {event.amount:.0f} s"
        case EventKind.GPU_MEMORY:
            return f"{times}uncorrectable memory errors of GPU {event.device}"
        case EventKind.GPU_HOT:
            return f"GPU {event.device} is slowed down because it is too hot ({event.amount:.0f} C)"
        case EventKind.GPU_POWER:
            return f"GPU {event.device} is slowed down by its power supply (clock {event.amount:.0f} MHz)"
        case EventKind.NVLINK:
            return f"{times}NVLink errors of GPU {event.device}"
        case EventKind.OUT_OF_MEMORY:
            return _out_of_memory(event)
        case EventKind.BLOCKED | EventKind.LOCKUP:
            what = "blocked in the kernel" if event.kind is EventKind.BLOCKED else f"processor {event.device} locked up"
            return f"{what} for {event.amount:.0f} s{process}"
        case EventKind.LINK_SLOWER:
            return f"link {event.device} has {event.amount:.0%} of its earlier speed"
        case EventKind.LINK_DOWN:
            return f"link {event.device} is, or was, down"
        case EventKind.LINK_ERRORS | EventKind.RETRANSMITS | EventKind.LOST_PACKETS:
            return f"{times}{event.kind.value}{on}"
        case EventKind.MEMORY_PRESSURE | EventKind.IO_PRESSURE | EventKind.CPU_PRESSURE:
            what = {EventKind.MEMORY_PRESSURE: "memory", EventKind.IO_PRESSURE: "storage"}.get(event.kind, "a processor")
            return f"processes wait for {what} {event.amount:.0%} of the time"
        case EventKind.CPU_LIMIT:
            return f"the processor limit of its container stops it {event.amount:.0%} of the time"
        case EventKind.FILE_SERVER:
            return f"file server {event.device} does not respond"
        case EventKind.CLOCK_SET:
            return f"the clock was set by {event.amount:+.1f} s"
        case EventKind.CLOCK_APART:
            ahead = "ahead of" if event.amount > 0 else "behind"
            return f"its clock is {abs(event.amount):.1f} s {ahead} those of other hosts"
    return f"{event.kind.value}{on}{process}"


def _out_of_memory(event: HostEvent) -> str:
    used = f" with {event.amount / _GIB:.1f} GiB" if event.amount >= _GIB / 10 else ""
    where = "the limit of its container" if event.code == OF_LIMIT else "the memory of the host" if event.pid else "its limit"
    who = f"process {event.pid}{f' ({event.name})' if event.name else ''}" if event.pid else f"{event.amount:.0f} processes"
    used = used if event.pid else ""
    verb = "was" if event.pid or event.amount == 1 else "were"
    return f"{who} {verb} killed{used} because {where} was reached"


def short_text(event: HostEvent) -> str:
    """The event in a few words, for the line of a verdict."""
    number = f" {event.code}" if event.kind in (EventKind.XID, EventKind.SWITCH) else ""
    return f"{event.kind.value}{number}{f' {event.device}' if event.device else ''}"


def timed_text(event: HostEvent) -> str:
    """The event with its time, and until when it goes on."""
    begin, end = clock_time(event.begin_ns), clock_time(event.end_ns)
    return f"{event_text(event)} at {begin}" if begin == end else f"{event_text(event)} from {begin} to {end}"


def hardware_next(hint: LooksAtHardware, *, steered: bool) -> str:
    """What to do about an event that explains a verdict, without the command."""
    event, what = hint.event, f"{event_text(hint.event)} on {hint.host}"
    if event.bearing is Bearing.PROGRAM:
        return f"{what}: mostly an error of the program; run it with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
    if event.bearing is Bearing.BROKEN:
        out = "take the host out" if steered else "start the job again without this host"
        return f"{what}: {out}, and {_repair(event)}"
    return f"{what}: {_relief(event)}"


def _repair(event: HostEvent) -> str:
    if event.kind in _OF_GPU:
        if event.kind in (EventKind.GPU_HOT, EventKind.GPU_POWER):
            return "look at its cooling and power supply"
        lost = event.kind is EventKind.GPU_LOST or event.code == 79
        return "restart the machine" if lost else "reset the GPU (nvidia-smi --gpu-reset); if it comes again, have it replaced"
    if event.kind in _OF_LINK:
        return "look at the cable, the card and the port of the switch"
    if event.kind in (EventKind.DISK, EventKind.FILE_SYSTEM):
        return "have the disk replaced"
    return "have the machine tested"


def _relief(event: HostEvent) -> str:
    match event.kind:
        case EventKind.OUT_OF_MEMORY:
            more = "or raise the limit" if event.code == OF_LIMIT or not event.pid else "or look for what else uses it"
            return f"ask for less memory (fewer workers of the data loader, smaller buffers), {more}"
        case EventKind.CPU_LIMIT:
            return "raise the processor limit of the container, or start fewer threads and workers"
        case EventKind.CPU_HOT:
            return "look at the cooling of the machine"
        case EventKind.FILE_SERVER:
            return "look at the file server"
        case EventKind.XID:
            return "start the job again; if it comes again, reset the GPU"
    return "look in the log of the kernel"


def hardware_command(hint: LooksAtHardware, *, steered: bool) -> str:
    """The command that takes the host out, or shows more; '' for none."""
    event = hint.event
    if event.bearing is Bearing.BROKEN and steered:
        return f"unickpt hosts park {shlex.quote(hint.host)}"
    if event.kind in _OF_GPU:
        return "nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE,ROW_REMAPPER"
    if event.kind in _OF_LINK:
        card = event.device.partition("/")[0]
        return f"ibstat {shlex.quote(card)}" if "/" in event.device else f"ethtool -S {shlex.quote(card)}"
    if event.kind is EventKind.OUT_OF_MEMORY:
        return "dmesg -T | grep -i -e 'out of memory' -e 'killed process' | tail"
    return "" if event.kind is EventKind.CPU_LIMIT else "dmesg -T | tail -n 50"
