"""Recorded sources of hardware: a small tree of ``/dev``, ``/proc``, ``/sys`` and NVML, and faults that change it.

The forms of records and files are those of the kernel's documentation (ABI/testing/dev-kmsg, ABI/stable/sysfs-class-infiniband,
accounting/psi, cgroup-v2), of its sources, and of NVIDIA's Xid catalogue and NVML reference; the values are made up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unickpt.diagnosis.hardware.gpus import GpuReading
from unickpt.diagnosis.hardware.sources import Roots

GPUS = ("0000:3b:00", "0000:86:00")
ERROR, USER = 3, 12  # priority of a record of the kernel, and of one that a program has written


class HardwareTree:
    """A host whose hardware is sound, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._sequence = folder, 100
        self.roots = Roots(folder / "dev", folder / "proc", folder / "sys", folder / "nvml.json")
        self.write("dev/kmsg", "")
        for name in ("cpu", "memory", "io"):
            self.pressure(name, 0.0)
        port = "sys/class/infiniband/mlx5_0/ports/1"
        for name in ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors"):
            self.write(f"{port}/counters/{name}", "3")
        for name in ("local_ack_timeout_err", "rnr_nak_retry_err"):
            self.write(f"{port}/hw_counters/{name}", "7")
        self.write(f"{port}/state", "4: ACTIVE")
        self.write(f"{port}/rate", "400 Gb/sec (4X NDR)")
        for name in ("rx_errors", "tx_errors", "rx_missed_errors", "rx_dropped", "tx_dropped"):
            self.write(f"sys/class/net/eth0/statistics/{name}", "5")
        for name, text in {"carrier_changes": "2", "operstate": "up", "speed": "100000", "device/vendor": "0x15b3"}.items():
            self.write(f"sys/class/net/eth0/{name}", text)
        self.write("sys/class/net/veth1/operstate", "up")  # made by software
        self.write("sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\n")
        self._throttled = 0.0
        self.throttle(0.0)
        self._gpus = {gpu: GpuReading(clock_mhz=1980, most_mhz=1980, celsius=60) for gpu in GPUS}
        self.gpu(GPUS[0])

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")  # readers see one text or the other
        fresh.write_text(text)
        fresh.replace(path)

    def add(self, name: str, more: int) -> None:
        self.write(name, str(int((self.folder / name).read_text()) + more))

    def pressure(self, name: str, seconds: float) -> None:
        total = int(seconds * 1e6)
        lines = [f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total}" for kind in ("some", "full")]
        self.write(f"proc/pressure/{name}", "\n".join(lines) + "\n")

    def throttle(self, seconds: float) -> None:
        """Let the container's processor limit stop it for some more time."""
        self._throttled += seconds
        text = f"usage_usec 9000\nnr_throttled 9\nthrottled_usec {int(self._throttled * 1e6)}\n"
        self.write("sys/fs/cgroup/cpu.stat", text)

    def gpu(self, device: str, **changed: Any) -> None:
        self._gpus[device] = GpuReading(**{**asdict(self._gpus[device]), **changed})
        self.write("nvml.json", json.dumps({name: asdict(one) for name, one in self._gpus.items()}))

    def lose(self, device: str) -> None:
        del self._gpus[device]
        self.write("nvml.json", json.dumps({name: asdict(one) for name, one in self._gpus.items()}))

    def log(self, text: str, *, priority: int = ERROR, ago_s: float = 0.0) -> None:
        """Add a record to the log of the kernel."""
        self._sequence += 1
        at_us = max(int(time.monotonic() * 1e6 - ago_s * 1e6), 0)
        with (self.folder / "dev/kmsg").open("a") as file:
            file.write(f"{priority},{self._sequence},{at_us},-;{text}\n SUBSYSTEM=pci\n")


Change = Callable[[HardwareTree, int], None]  # of a tree; the number is that of the rank's process


@dataclass(frozen=True)
class Case:
    """A fault, or what looks like one.

    Attributes:
        name: what it is.
        change: makes it. It may be called again and again while the fault lasts.
        quoted: what the line of the verdict says of it; '' if it must not be quoted.
        broken: whether it shows that the host is broken.
        hint: what the sentence on what to do next has in it; '' if that has nothing to do with it.
        slow: whether it makes a rank slow. Otherwise it hangs.
        dead: whether the process is killed.
        before: whether it was so before the agent began to look.
        data: whether the rank waits for data.
    """

    name: str
    change: Change
    quoted: str = ""
    broken: bool = False
    hint: str = ""
    slow: bool = False
    dead: bool = False
    before: bool = False
    data: bool = False


def _xid(text: str, **more: Any) -> Change:
    return lambda tree, pid: tree.log(f"NVRM: Xid (PCI:{GPUS[0]}): {text.format(pid=pid)}", **more)


def _log(text: str, **more: Any) -> Change:
    return lambda tree, pid: tree.log(text.format(pid=pid), **more)


def _all(*changes: Change) -> Change:
    def change(tree: HardwareTree, pid: int) -> None:
        for each in changes:
            each(tree, pid)

    return change


def _killed(tree: HardwareTree, pid: int, *, group: str = "/kubepods/pod1/main", of_group: bool = True) -> None:
    kind = "CONSTRAINT_MEMCG" if of_group else "CONSTRAINT_NONE"
    tree.log(
        f"oom-kill:constraint={kind},nodemask=(null),cpuset=main,mems_allowed=0-1,oom_memcg={group},task_memcg={group},"
        f"task=python,pid={pid},uid=1000",
        priority=6,
    )
    head = "Memory cgroup out of memory" if of_group else "Out of memory"
    tree.log(
        f"{head}: Killed process {pid} (python) total-vm:204800000kB, anon-rss:67108864kB, file-rss:1024kB, shmem-rss:0kB, "
        "UID:1000 pgtables:140000kB oom_score_adj:0"
    )


FAULTS = (
    Case("Xid 79: GPU off the bus", _xid("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
         "Xid 79 0000:3b:00", broken=True, hint="restart the machine"),
    Case("Xid 48: double-bit error", _xid("48, pid={pid}, name=python, DBE (double bit error) ECC Error"),
         "Xid 48 0000:3b:00", broken=True, hint="reset the GPU"),
    Case("Xid 74: NVLink", _xid("74, pid={pid}, name=python, NVLink: fatal error detected on link 4"),
         "Xid 74 0000:3b:00", broken=True, hint="reset the GPU"),
    Case("Xid 119: GSP time-out", _xid("119, pid={pid}, name=python, Timeout waiting for RPC from GSP!"),
         "Xid 119 0000:3b:00", broken=True, hint="reset the GPU"),
    Case("NVML: uncorrectable errors", lambda tree, _: tree.gpu(GPUS[1], uncorrected=2),
         "uncorrectable GPU memory error 0000:86:00", broken=True, hint="reset the GPU"),
    Case("NVML: a GPU less", lambda tree, _: tree.lose(GPUS[1]),
         "lost GPU 0000:86:00", broken=True, hint="restart the machine"),
    Case("NVSwitch: fatal SXid", _log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 sourcetrack timeout"),
         "SXid 24007 0000:c1:00.0", broken=True, hint="reset the GPU"),
    Case("machine check, uncorrected",
         _log("mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: be00000000010090", priority=2),
         "machine check 4", broken=True, hint="have the machine tested"),
    Case("EDAC: uncorrectable", _log("EDAC MC1: 1 UE memory read error on CPU_SrcID#0_Channel#2 (channel:2 slot:0)"),
         "uncorrectable memory error MC1", broken=True, hint="have the machine tested"),
    Case("PCIe: fatal", _log("pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer"),
         "PCIe error 0000:3a:00.0", broken=True, hint="have the machine tested"),
    Case("OOM killer, limit of the container", _killed, "out of memory /kubepods/pod1/main",
         hint="ask for less memory", dead=True),
    Case("OOM killer, memory of the host", lambda tree, pid: _killed(tree, pid, group="/user.slice", of_group=False),
         "out of memory /user.slice", hint="ask for less memory", dead=True),
    Case("OOM kill in the container's counters",
         lambda tree, _: tree.write("sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax 90\noom 1\noom_kill 1\n"),
         "out of memory /", hint="ask for less memory", dead=True),
    Case("hot GPU", lambda tree, _: tree.gpu(GPUS[0], reasons=0x48, clock_mhz=900, celsius=91),
         "hot GPU 0000:3b:00", broken=True, hint="look at its cooling", slow=True),
    Case("power brake", lambda tree, _: tree.gpu(GPUS[0], reasons=0x88, clock_mhz=600),
         "GPU power 0000:3b:00", broken=True, hint="power supply", slow=True),
    Case("a disk fails", _log("I/O error, dev nvme1n1, sector 7814032 op 0x0:(READ) flags 0x80700 phys_seg 4 prio class 2"),
         "disk error nvme1n1", broken=True, hint="have the disk replaced", data=True),
    Case("a file server is silent", _log("nfs: server filer7 not responding, still trying"),
         "silent file server filer7", hint="look at the file server", data=True),
    Case("the processor limit of the container",
         lambda tree, _: tree.throttle(5.0),
         "processor limit /", hint="raise the processor limit", slow=True),
)  # fmt: skip

LOOK_ALIKES = (
    Case("Xid 79 of an hour ago", _xid("79, GPU has fallen off the bus.", ago_s=3600.0), before=True),
    Case("a program writes an Xid", _xid("79, GPU has fallen off the bus.", priority=USER)),
    Case("Xid 13, 31 and 43 of this process", _all(
        *(_xid(f"{code}, pid={{pid}}, name=python, Ch 00000008") for code in (13, 31, 43))
    ), "Xid 43 0000:3b:00; Xid 31 0000:3b:00; Xid 13 0000:3b:00", hint="mostly an error of the program"),
    Case("Xid 31 of another job", _xid("31, pid=4194000, name=python, Ch 00000010, MMU Fault")),
    Case("Xid 45 and 63", _all(
        _xid("63, pid={pid}, Row Remapper: New row marked for remapping"), _xid("45, pid={pid}, name=python, Ch 00000010")
    )),
    Case("non-fatal NVLink event", _xid("149, NETIR_LINK_EVT  Nonfatal   XC0 i0 Link 01 (0x021425c6 0x00000000)")),
    Case("victim in another container", lambda tree, _: _killed(tree, 4194001, group="/kubepods/pod2/other"),
         dead=True),
    Case("corrected machine check",
         _log("mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: 8c00004000010090", priority=2)),
    Case("corrected memory error", _log("EDAC MC1: 1 CE memory read error on CPU_SrcID#0_Channel#2", priority=4)),
    Case("corrected PCIe error", _log("pcieport 0000:3a:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer")),
    Case("idle GPU, set clocks, power cap", lambda tree, _: tree.gpu(GPUS[0], reasons=0x1 | 0x2 | 0x4, clock_mhz=1400)),
    Case("a slowdown while the power state changes", lambda tree, _: tree.gpu(GPUS[0], reasons=0x8, clock_mhz=1900)),
    Case("some replays of NVLink", lambda tree, _: tree.gpu(GPUS[0], replays=12)),
    Case("two dropped packets", lambda tree, _: tree.add("sys/class/net/eth0/statistics/rx_dropped", 2)),
    Case("a link without a disk", _log("ata3: SATA link down (SStatus 0 SControl 300)", priority=6)),
    Case("a mount option",
         _log("EXT4-fs (vda): mounted filesystem with ordered data mode. Opts: errors=remount-ro", priority=6)),
    Case("an image", _log("I/O error, dev loop4, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2")),
    Case("a lost interrupt", _log("nvme nvme0: I/O 22 QID 3 timeout, completion polled", priority=4)),
    Case("another process blocked", _log("INFO: task kworker/u9:1:4194002 blocked for more than 120 seconds.")),
    Case("full page cache", lambda tree, _: tree.write(
        "sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax 90000\noom 0\noom_kill 0\n")),
)  # fmt: skip
