"""The files of the kernel that tell of the hardware of this host. Each may be missing, or closed to this user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unickpt.diagnosis.hardware import counters
from unickpt.diagnosis.hardware.counters import Counter, CounterRule
from unickpt.diagnosis.hardware.events import EventKind

VARIABLE = "UNICKPT_HARDWARE_ROOT"  # for tests: folder with dev/kmsg, proc, sys and nvml.json in place of the system's
KERNEL_LOG, NVML, INFINIBAND, NETWORK, PRESSURE, LIMITS = (
    "kernel log", "NVML", "InfiniBand", "network", "pressure", "limits of containers",
)  # fmt: skip
DECISIVE = (KERNEL_LOG, NVML)  # where broken hardware shows: without one of them, no event says nothing
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # of the kernel: its log has the numbers of this one
_CHUNK, _MOST = 8192, 1 << 22  # bytes of one read, and of one look


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the files are. ``replayed``: whether they are a recording."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    nvml: Path | None = None

    @property
    def replayed(self) -> bool:
        """Whether the files are a recording."""
        return self.nvml is not None

    @classmethod
    def of_environment(cls) -> Roots:
        """Return the system's, unless the variable names a recording."""
        named = os.environ.get(VARIABLE, "")
        return cls(Path(named, "dev"), Path(named, "proc"), Path(named, "sys"), Path(named, "nvml.json")) if named else cls()

    @property
    def same_numbers(self) -> bool:
        """Whether the kernel's log has the same numbers of processes as this process: not in a container."""
        with contextlib.suppress(OSError):
            return self.replayed or os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
        return False


class KernelLog:
    """Reads the log of the kernel, from its beginning on, without waiting.

    Attributes:
        readable: whether this user may read it.
    """

    def __init__(self, roots: Roots) -> None:
        self._rest = ""
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(roots.dev / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.readable = self._file >= 0

    def lines(self) -> list[str]:
        """Return the new records. Lines of properties are left out."""
        text, read = [self._rest], 0
        while self.readable and read < _MOST:
            try:
                chunk = os.read(self._file, _CHUNK)
            except BlockingIOError:  # no more
                break
            except BrokenPipeError:  # records were overwritten before they were read: go on with the next one
                continue
            except OSError:
                self.readable = False
                break
            if not chunk:
                break
            read += len(chunk)
            text.append(chunk.decode(errors="replace"))
        *lines, self._rest = "".join(text).split("\n")
        return [line for line in lines if line and not line.startswith(" ")]

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self.readable = -1, False


class Ports:
    """Counters and speeds of network cards and InfiniBand ports. A file that cannot be read once is not tried again: firmware
    may keep a port to itself, and the driver complains in the log about each try."""

    def __init__(self, roots: Roots) -> None:
        self._net, self._infiniband = roots.sys / "class/net", roots.sys / "class/infiniband"
        self._closed: set[str] = set()

    def readable(self) -> tuple[str, ...]:
        """Return the names of the sources that are there."""
        found = [(INFINIBAND, any(self._ports())), (NETWORK, any(self._cards()))]
        return tuple(name for name, there in found if there)

    def read(self) -> tuple[dict[Counter, int], dict[str, float]]:
        """Return counters, and the speed by device."""
        rises: dict[Counter, int] = {}
        speeds: dict[str, float] = {}
        for device, folder in self._ports():
            rises.update(self._counters(device, folder, counters.INFINIBAND))
            state, rate = self._text(f"{folder}/state"), self._text(f"{folder}/rate")
            if state:
                speeds[device] = counters.parse_rate(rate) or 1.0 if "ACTIVE" in state else 0.0
        for device, folder in self._cards():
            rises.update(self._counters(device, folder, counters.NETWORK))
            state = self._text(f"{folder}/operstate")
            if state in ("up", "down"):
                speeds[device] = (
                    max(counters.parse_rate(self._text(f"{folder}/speed", again=True)), 1.0) if state == "up" else 0.0
                )
        return rises, speeds

    def _ports(self) -> Iterator[tuple[str, Path]]:
        for device in _folders(self._infiniband):
            for port in _folders(device / "ports"):
                yield f"{device.name}/{port.name}", port

    def _cards(self) -> Iterator[tuple[str, Path]]:
        """Yield the network cards; those that only software makes have no device."""
        return ((card.name, card) for card in _folders(self._net) if (card / "device").exists())

    def _counters(self, device: str, folder: Path, rules: dict[str, CounterRule]) -> Iterator[tuple[Counter, int]]:
        for name, rule in rules.items():
            text = self._text(f"{folder}/{name}")
            if text.isdigit():
                yield Counter(device, name, rule), int(text)

    def _text(self, path: str, *, again: bool = False) -> str:
        """Return the text of a file. ``again``: it cannot be read at times, as the speed of a card that is down."""
        if path in self._closed:
            return ""
        try:
            return _read(path).strip()
        except OSError:
            if not again:
                self._closed.add(path)
            return ""


class Limits:
    """Pressure on a host, and what the control groups of the ranks have run into."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._paths: dict[int, dict[str, str]] = {}

    def readable(self) -> tuple[str, ...]:
        """Return the names of the sources that are there."""
        groups = [self._roots.sys / "fs/cgroup" / name for name in ("cgroup.controllers", "memory", "unified")]
        found = [(PRESSURE, self._roots.proc / "pressure/memory"), *((LIMITS, group) for group in groups)]
        return tuple(dict.fromkeys(name for name, path in found if path.exists()))

    def shares(self, pids: Iterable[int]) -> dict[tuple[EventKind, str], float]:
        """Return the seconds since the boot of each pressure, and of the time in which each control group may not run."""
        found: dict[tuple[EventKind, str], float] = {}
        for (name, line), (kind, _) in counters.PRESSURES.items():
            total = counters.parse_pressure(_text(self._roots.proc / "pressure" / name)).get(line)
            if total is not None:
                found[kind, ""] = total
        for path in self.groups(pids, "cpu"):
            for root, scale in (("fs/cgroup", 1e6), ("fs/cgroup/cpu", 1e9), ("fs/cgroup/cpu,cpuacct", 1e9)):
                pairs = counters.parse_pairs(_text(_below(self._roots.sys / root, path) / "cpu.stat"))
                limited = pairs.get("throttled_usec", pairs.get("throttled_time"))
                if limited is not None:
                    found[EventKind.CPU_LIMIT, path] = limited / scale
        return found

    def kills(self, pids: Iterable[int]) -> dict[Counter, int]:
        """Return how many processes of each control group were killed for lack of memory."""
        found = {}
        for path in self.groups(pids, "memory"):
            for name in ("fs/cgroup/{}/memory.events", "fs/cgroup/memory/{}/memory.oom_control"):
                folder, file = name.split("/{}/")
                killed = counters.parse_pairs(_text(_below(self._roots.sys / folder, path) / file)).get("oom_kill")
                if killed is not None:
                    found[Counter(path, "oom_kill", counters.OOM_KILLS)] = killed
        return found

    def groups(self, pids: Iterable[int], controller: str) -> set[str]:
        """Return the control groups of processes, also of those that have ended since."""
        found = set()
        for pid in pids:
            if pid not in self._paths:
                read = counters.parse_groups(_text(self._roots.proc / str(pid) / "cgroup"))
                if not read and self._roots.replayed:  # a recording has other numbers of processes
                    read = {"": "/"}
                if read:
                    self._paths[pid] = read
            paths = self._paths.get(pid, {})
            path = paths.get(controller) or paths.get("")
            if path is not None:
                found.add(path)
        return found


def readable_sources(roots: Roots) -> dict[str, bool]:
    """Return which sources this user can read on this host. NVML is not asked: ``nvml.py``."""
    log = KernelLog(roots)
    try:
        there = {KERNEL_LOG} if log.readable else set()
    finally:
        log.close()
    there |= {*Ports(roots).readable(), *Limits(roots).readable()}
    return {name: name in there for name in (KERNEL_LOG, INFINIBAND, NETWORK, PRESSURE, LIMITS)}


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(path) if not entry.name.startswith("."))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path: Path | str) -> str:
    """Return the text of a small file, by three calls of the system: many files are read every few seconds."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _CHUNK).decode(errors="replace")
    finally:
        os.close(file)
