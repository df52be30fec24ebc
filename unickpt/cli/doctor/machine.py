"""The machine and its software: versions, memory, limits, clock, variables of the environment. No package is imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from unickpt import __version__
from unickpt.base.hook_sources import SourceTree, from_folders
from unickpt.base.private_files import SHARED_MEMORY
from unickpt.cli.doctor.frameworks import folders_of
from unickpt.diagnosis.hardware import nvml
from unickpt.diagnosis.hardware.sources import NVML, Roots, readable_sources

_PACKAGES = (
    "torch", "deepspeed", "megatron-core", "transformers", "accelerate", "peft", "trl", "lightning", "pytorch-lightning",
    "vllm", "numpy", "safetensors", "xxhash", "wrapt", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11",
)  # fmt: skip
_DRIVERS = ("fsspec", "s3fs", "gcsfs", "adlfs", "ossfs", "huggingface-hub")
_PREFIXES = ("UNICKPT_", "NCCL_", "TORCH", "PYTORCH_", "CUDA_", "DS_", "GLOO_", "FI_", "UCX_")
_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH", "LD_PRELOAD", "TMPDIR",
    "HF_HUB_OFFLINE", "MEGATRON_LM",
)  # fmt: skip
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_DRIVER = Path("/proc/driver/nvidia/version")
_UNSYNCHRONISED, _CLOCK_ERROR = 0x40, 5  # STA_UNSYNC and TIME_ERROR of adjtimex(2)


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of the host.

    Attributes:
        source: what the kernel reads, such as ``tsc``, or ''.
        synchronised: whether something keeps it at the time of others (NTP, PTP); None if the kernel does not tell.
        error_ms: the largest error by the kernel, or None.
    """

    source: str
    synchronised: bool | None
    error_ms: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """A host, as its processes see it.

    Attributes:
        system: kernel, processor and C library.
        shared_bytes, shared_free_bytes: size of ``/dev/shm`` and what is free of it; None if there is none.
        memlock_bytes: limit of locked memory; None without a limit.
        memory_bytes: memory of the host.
        clock: its clock.
        driver: NVIDIA's driver, or ''.
        told: whether each source that tells of the hardware can be read. Of NVML: whether its package is installed.
    """

    system: str
    shared_bytes: int | None
    shared_free_bytes: int | None
    memlock_bytes: int | None
    memory_bytes: int
    clock: Clock
    driver: str
    told: Mapping[str, bool] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of installed packages that it works with. None is imported."""
    found = {"python": platform.python_version(), "unickpt": __version__}
    found |= {name: version for name in _PACKAGES if (version := _version(name))}
    cuda = SourceTree(from_folders([each.parent for each in folders_of("torch")])).constants("torch.version").get("cuda")
    return found | ({"cuda (of torch)": str(cuda)} if cuda else {})


def drivers() -> dict[str, str]:
    """Return the versions of fsspec and of its installed drivers."""
    return {name: version for name in _DRIVERS if (version := _version(name))}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that concern this package, torch, NCCL and the launchers. Values are as they are."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(_PREFIXES) or name in _NAMES}


def machine() -> Machine:
    """Read the facts of this host."""
    shared = None
    with contextlib.suppress(OSError):
        shared = os.statvfs(SHARED_MEMORY)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    library = " ".join(platform.libc_ver()).strip() or "unknown C library"
    return Machine(
        f"{platform.system()} {platform.release()} {platform.machine()}, {library}",
        None if shared is None else shared.f_blocks * shared.f_frsize,
        None if shared is None else shared.f_bavail * shared.f_frsize,
        None if limit == resource.RLIM_INFINITY else limit,
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        _clock(),
        _first_line(_DRIVER),
        {**readable_sources(Roots.of_environment()), NVML: nvml.installed()},
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``, with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def _clock() -> Clock:
    """Ask the kernel by ``adjtimex``, which sets nothing without modes."""
    asked, state = _Timex(), -1
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(asked))
    if state < 0:
        return Clock(_first_line(_CLOCK_SOURCE), None, None)
    synchronised = state != _CLOCK_ERROR and not asked.status & _UNSYNCHRONISED
    return Clock(_first_line(_CLOCK_SOURCE), synchronised, asked.maxerror / 1e3 if synchronised else None)
