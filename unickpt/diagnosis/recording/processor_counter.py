"""Whether the processor's time stamp counter runs steadily on all processors of this host, so that it can be counted on.

The kernel tests this itself: the counter is its clock source only while that is so. Two flags of every processor say that it
runs at one rate in all power states.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_FLAGS = frozenset({"constant_tsc", "nonstop_tsc"})
_PROCESSORS = Path("/proc/cpuinfo")
_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def steady(processors: str, source: str) -> bool:
    """Return whether the counter runs steadily.

    Args:
        processors: text of ``/proc/cpuinfo``.
        source: name of the kernel's clock source.
    """
    flags = [line.partition(":")[2].split() for line in processors.splitlines() if line.startswith("flags")]
    return source.strip() == "tsc" and bool(flags) and all(set(each) >= _FLAGS for each in flags)


def steady_here() -> bool:
    """Return whether the counter of this host runs steadily; False if the kernel does not say."""
    with contextlib.suppress(OSError):
        return steady(_PROCESSORS.read_text(), _SOURCE.read_text())
    return False
