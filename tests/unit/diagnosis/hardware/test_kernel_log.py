"""Records of the kernel's log: what each tells of, and what is no fault."""

from __future__ import annotations

import pytest

from unickpt.diagnosis.hardware.events import EventKind, HostEvent
from unickpt.diagnosis.hardware.kernel_log import OF_LIMIT, event_of, parse_record
from unickpt.diagnosis.hardware.xids import Bearing, xid

GPU = "0000:3b:00"


def told(text: str, priority: int = 3) -> HostEvent | None:
    record = parse_record(f"{priority},17,4000000,-;{text}")
    assert record is not None
    return event_of(record, 9)


def test_a_record_has_the_form_of_the_documentation() -> None:
    record = parse_record(r"6,339,5140900,-,caller=T42;NET: a\x5cb\x0asecond line")
    assert record is not None
    assert (record.by_kernel, record.at_us, record.text) == (True, 5140900, "NET: a\\b\nsecond line")
    assert parse_record(" SUBSYSTEM=acpi") is None
    assert parse_record("") is None


@pytest.mark.parametrize(
    ("text", "kind", "device", "number"),
    [
        (f"NVRM: Xid (PCI:{GPU}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", EventKind.XID, GPU, 79),
        (f"NVRM: Xid ({GPU}): 94, pid=77, name=python, Contained: CE User Channel", EventKind.XID, GPU, 94),
        ("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01", EventKind.XID, "0009:01:00", 149),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20009, Fatal, Link 01", EventKind.SWITCH, "0000:c1:00.0", 20009),
        (f"NVRM: GPU {GPU}.0: GPU has fallen off the bus.", EventKind.GPU_LOST, f"{GPU}.0", 0),
        (
            rf"NVRM: The NVIDIA GPU {GPU}.0\x0aNVRM: (PCI ID: 10de:2330) installed in this system has\x0aNVRM: "
            r"fallen off the bus and is not responding to commands.", EventKind.GPU_LOST, f"{GPU}.0", 0,
        ),
        ("mce: [Hardware Error]: CPU 2: Machine Check Exception: 5 Bank 4: b200000000070f0f", EventKind.MACHINE_CHECK, "2", 0),
        ("{1}[Hardware Error]: event severity: fatal", EventKind.MACHINE_CHECK, "", 0),
        ("EDAC MC0: 2 UE memory scrubbing error on DIMM_A1", EventKind.MEMORY, "MC0", 0),
        ("Memory failure: 0x12345: Killing python:777 due to hardware memory corruption", EventKind.MEMORY, "", 0),
        ("pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0", EventKind.PCIE, "0000:3a:00.0", 0),
        ("I/O error, dev nvme1n1, sector 7814 op 0x0:(READ) flags 0x0", EventKind.DISK, "nvme1n1", 0),
        ("critical medium error, dev sdb, sector 7814 op 0x0:(READ)", EventKind.DISK, "sdb", 0),
        ("Buffer I/O error on dev dm-0, logical block 13, lost async page write", EventKind.DISK, "dm-0", 0),
        ("nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller", EventKind.DISK, "nvme4", 0),
        ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", EventKind.DISK, "nvme0n1p1", 0),
        ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python", EventKind.FILE_SYSTEM, "sda1", 0),
        ("XFS (dm-3): Metadata I/O Error (0x1) detected at xfs_trans_read_buf", EventKind.FILE_SYSTEM, "dm-3", 0),
        ("nfs: server filer7 not responding, still trying", EventKind.FILE_SERVER, "filer7", 0),
        ("mlx5_core 0000:5c:00.0 ens1f0np0: Link down", EventKind.LINK_DOWN, "ens1f0np0", 0),
        ("bnxt_en 0000:31:00.0 ens2: NIC Link is Down", EventKind.LINK_DOWN, "ens2", 0),
        (
            "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature",
            EventKind.NETWORK_CARD, "0000:5c:00.0", 0,
        ),
        ("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [pt_data:22549]", EventKind.LOCKUP, "18", 0),
        ("CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)", EventKind.CPU_HOT, "CPU3", 0),
    ],
)  # fmt: skip
def test_what_a_record_tells(text: str, kind: EventKind, device: str, number: int) -> None:
    event = told(text)
    assert event is not None
    assert (event.kind, event.device, event.code, event.begin_ns) == (kind, device, number, 9)
    assert told(text, priority=12) is None  # a program has written it


@pytest.mark.parametrize(
    "text",
    [
        f"NVRM: Xid (PCI:{GPU}): 45, pid=77, name=python, Ch 00000010",
        f"NVRM: Xid (PCI:{GPU}): 63, pid=77, Row Remapper: New row marked for remapping, reset gpu to activate.",
        f"NVRM: Xid (PCI:{GPU}): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        f"NVRM: Xid (PCI:{GPU}): 149, NETIR_LINK_EVT  Nonfatal XC0 i0 Link 01",
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link 01",
        "mce: [Hardware Error]: Machine check events logged",
        "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 5: 8c00004000010090",
        "{2}[Hardware Error]: event severity: corrected",
        "EDAC MC0: 1 CE memory read error on DIMM_A1",
        "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ)",
        "I/O error, dev sr0, sector 0", "nvme nvme0: I/O 22 QID 3 timeout, completion polled",
        "EXT4-fs (vda): mounted filesystem with ordered data mode. Opts: errors=remount-ro",
        "EXT4-fs (sda1): error count since last fsck: 3",
        "XFS (dm-3): Unmounting Filesystem", "nfs: server filer7 OK", "ata3: SATA link down (SStatus 0 SControl 300)",
        "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged", "mlx5_core 0000:5c:00.0 ens1: Link up",
        "docker0: port 1(veth1) entered disabled state", "python[77]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so",
    ],
)  # fmt: skip
def test_what_is_no_fault(text: str) -> None:
    assert told(text) is None


def test_the_victim_of_the_oom_killer_is_named_with_its_size() -> None:
    first = told("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a/b,task_memcg=/a/b,"
                 "task=python3,pid=77,uid=0")  # fmt: skip
    assert first is not None
    assert (first.pid, first.name, first.device) == (77, "python3", "/a/b")
    limit = told("Memory cgroup out of memory: Killed process 77 (python3) total-vm:9kB, anon-rss:2097152kB, file-rss:0kB")
    host = told("Out of memory: Killed process 77 (python3) total-vm:9kB, anon-rss:2097152kB, file-rss:0kB, shmem-rss:0kB")
    old = told("Killed process 77 (python3) total-vm:9kB, anon-rss:2097152kB, file-rss:0kB")
    for event, code in ((limit, OF_LIMIT), (host, 0), (old, 0)):
        assert event is not None
        assert (event.kind, event.pid, event.name, event.code) == (EventKind.OUT_OF_MEMORY, 77, "python3", code)
        assert event.amount == 2 << 30


@pytest.mark.parametrize(
    ("code", "bearing"),
    [(79, Bearing.BROKEN), (48, Bearing.BROKEN), (95, Bearing.BROKEN), (94, Bearing.LIMITED), (13, Bearing.PROGRAM),
     (31, Bearing.PROGRAM), (43, Bearing.PROGRAM), (63, Bearing.NOTHING), (92, Bearing.NOTHING), (9999, Bearing.LIMITED)],
)  # fmt: skip
def test_what_a_number_says_of_the_host(code: int, bearing: Bearing) -> None:
    assert xid(code).bearing is bearing
