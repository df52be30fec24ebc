"""Records of the kernel's log (``/dev/kmsg``, kernel documentation, ABI/testing/dev-kmsg) that bear on a job. Pure.

Only records of the kernel itself count: a program can write into the log, but not with the kernel's facility.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unickpt.diagnosis.hardware import xids
from unickpt.diagnosis.hardware.events import EventKind, HostEvent

_HEAD = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_BYTES = 1024
OF_LIMIT = 1  # code of an event: the limit of a container was reached, and not that of the host
_NO_DISK = re.compile(r"(?:fd|sr|loop|z?ram)\d")  # floppies, discs, images: not what a job trains from
_LONGEST = 64  # characters of a name


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One record.

    Attributes:
        by_kernel: whether the kernel has written it.
        at_us: time in microseconds since the boot.
        text: its first line.
    """

    by_kernel: bool
    at_us: int
    text: str


def parse_record(line: str) -> KernelRecord | None:
    """Parse a record; None if it is none. Lines of properties, which begin with a space, are no records."""
    found = _HEAD.match(line)
    if found is None:
        return None
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), found[4])
    return KernelRecord(int(found[1]) >> 3 == 0, int(found[3]), text)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A kind of record: ``mark`` is in its text, and ``pattern``, whose groups are fields of the event, is found there."""

    kind: EventKind
    mark: str
    pattern: re.Pattern[str]


def _rule(kind: EventKind, mark: str, pattern: str) -> _Rule:
    return _Rule(kind, mark, re.compile(pattern))


_PCI = r"(?P<device>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])"
_RULES = (
    _rule(EventKind.XID, "Xid (", r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+)"),
    _rule(EventKind.SWITCH, "SXid (", r"SXid \(PCI:(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+), Fatal"),
    _rule(EventKind.GPU_LOST, "fallen off the bus", r"NVRM: (?:.*?GPU (?P<device>[0-9a-fA-F:.]{6,}[0-9a-fA-F]))?"),
    _rule(EventKind.MACHINE_CHECK, "Machine Check", r"CPU (?P<device>\d+): Machine Check.*Bank \d+: (?P<status>[0-9a-f]{16})"),
    _rule(EventKind.MACHINE_CHECK, "[Hardware Error]", r"event severity: (?:fatal|recoverable)"),
    _rule(EventKind.MACHINE_CHECK, "[Hardware Error]", r"\[Hardware Error\]: Uncorrected"),
    _rule(EventKind.MEMORY, "EDAC", r"EDAC (?P<device>MC\d+): (?P<amount>\d+) UE\b"),
    _rule(EventKind.MEMORY, "hardware memory corruption",
          r"Killing (?P<name>.+):(?P<pid>\d+) due to hardware memory corruption"),
    _rule(EventKind.PCIE, "PCIe Bus Error", rf"{_PCI}.*severity=Uncorrect(?:ed|able) \(Fatal\)"),
    _rule(EventKind.PCIE, "AER:", rf"{_PCI}.*AER: Uncorrect(?:ed|able) \(Fatal\) error"),
    _rule(EventKind.CPU_HOT, "temperature", r"(?P<device>CPU\d+): (?:Core|Package) temperature (?:is )?above threshold"),
    _rule(EventKind.LOCKUP, "soft lockup",
          r"CPU#(?P<device>\d+) stuck for (?P<amount>\d+)s! \[(?P<name>.+):(?P<pid>\d+)\]"),
    _rule(EventKind.BLOCKED, "blocked for more than",
          r"task (?P<name>.+):(?P<pid>\d+) blocked for more than (?P<amount>\d+) seconds"),
    _rule(EventKind.OUT_OF_MEMORY, "oom-kill:",
          r"task_memcg=(?P<device>[^,]*),task=(?P<name>.+),pid=(?P<pid>\d+),uid="),
    _rule(EventKind.OUT_OF_MEMORY, "Killed process", r"Killed process (?P<pid>\d+),? \((?P<name>.+?)\)"),
    _rule(EventKind.DISK, "error, dev ", r"(?:I/O|critical \w+) error, dev (?P<device>[\w-]+)"),
    _rule(EventKind.DISK, "Buffer I/O error", r"Buffer I/O error on dev(?:ice)? (?P<device>[\w-]+)"),
    _rule(EventKind.DISK, "nvme ", r"nvme (?P<device>nvme\d+): (?:controller is down|Disabling device|I/O .* timeout, "
                                   r"(?:aborting|reset|disable))"),
    _rule(EventKind.DISK, "md/raid", r"Disk failure on (?P<device>[\w-]+)"),
    _rule(EventKind.FILE_SYSTEM, "EXT4-fs error", r"EXT4-fs error \(device (?P<device>[^)]+)\)"),
    _rule(EventKind.FILE_SYSTEM, "EXT4-fs (",
          r"EXT4-fs \((?P<device>[^)]+)\): (?:Remounting filesystem read-only|.*I/O error)"),
    _rule(EventKind.FILE_SYSTEM, "XFS (", r"XFS \((?P<device>[^)]+)\): .*(?:[Cc]orruption|I/O [Ee]rror|Shutting down)"),
    _rule(EventKind.FILE_SERVER, "not responding", r"nfs: server (?P<device>\S+) not responding"),
    _rule(EventKind.NETWORK_CARD, "mlx", rf"{_PCI}.*(?:Port module event\[error\]|health compromised|insufficient power)"),
    _rule(EventKind.NETWORK_CARD, "NETDEV WATCHDOG", r"NETDEV WATCHDOG: (?P<device>[\w.-]+) .*timed out"),
    _rule(EventKind.LINK_DOWN, "ink", r"(?P<device>[\w.-]+): (?:NIC )?[Ll]ink (?:is )?[Dd]own\b"),
)  # fmt: skip
_OF_PROCESS = re.compile(r"\bpid='?(\d+)'?(?:, name=([^,]+))?")
_RSS = re.compile(r"anon-rss:(\d+)kB")
_UNCORRECTED = 1 << 63 | 1 << 61  # valid, and uncorrected, in the status of a bank


def event_of(record: KernelRecord, at_ns: int) -> HostEvent | None:
    """Return the event that a record tells of, at a time on the wall clock; None if it does not bear on a job."""
    if not record.by_kernel:
        return None
    for rule in _RULES:
        found = rule.pattern.search(record.text) if rule.mark in record.text else None
        if found is not None:
            return _event(rule.kind, {key: value or "" for key, value in found.groupdict().items()}, record.text, at_ns)
    return None


def _event(kind: EventKind, fields: dict[str, str], text: str, at_ns: int) -> HostEvent | None:
    device, name = fields.get("device", ""), fields.get("name", "")
    code, pid, amount = int(fields.get("code") or 0), int(fields.get("pid") or 0), float(fields.get("amount") or 1)
    if kind is EventKind.XID:
        if not xids.counts(code, text):
            return None
        of_process = _OF_PROCESS.search(text)
        pid, name = (int(of_process[1]), of_process[2] or "") if of_process is not None else (0, "")
    if kind is EventKind.MACHINE_CHECK and "status" in fields and int(fields["status"], 16) & _UNCORRECTED != _UNCORRECTED:
        return None
    if kind is EventKind.DISK and _NO_DISK.match(device):
        return None
    if kind is EventKind.OUT_OF_MEMORY:
        used = _RSS.search(text)
        amount = float(int(used[1]) * _BYTES) if used is not None else 0.0
        code = OF_LIMIT if "emory cgroup" in text else 0
    return HostEvent(kind, device[: _LONGEST * 4], at_ns, at_ns, amount, code, pid, name[:_LONGEST])
