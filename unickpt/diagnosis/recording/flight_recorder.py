"""Progress of collectives on a device, from torch's flight recorder (``FlightRecorder.hpp``, ``ProcessGroupStatus``).

The host sees only the beginning of calls that end on a device. NCCL's watchdog counts for each process group the collectives
given to the device and those that have ended there; before the first, the count is -1. Only these counts are read: querying
the device, or dumping single calls, from a thread beside training would break a graph that is being captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch._C._distributed_c10d as _c10d

Counts = Sequence[tuple[int, int]]  # per process group of this process: collectives begun, collectives ended


def counts() -> Counts:
    """Return the current counts; empty if torch records none, or in an unknown format."""
    found: list[tuple[int, int]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[[bool, bool], bytes] | None = getattr(_c10d, name, None)
        try:
            groups = json.loads(dump(False, True)).get("pg_status", {}) if dump is not None else {}
            found += [
                (int(group["last_enqueued_collective"]), max(int(group["last_completed_collective"]), 0))
                for group in groups.values()
            ]
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):  # unknown format
            return ()
    return found


def in_flight(group: Any, known: Counts) -> int | None:
    """Return how many collectives of a process group have not ended on the device.

    Args:
        group: process group. It is found by its number of collectives, since the flight recorder uses other names.
        known: counts of all groups.

    Returns:
        None if unknown: no group has begun that many collectives, or several have with different progress.
    """
    try:
        begun = int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # the backend does not count
        return None
    left = {other - ended for other, ended in known if other == begun}
    return left.pop() if len(left) == 1 else None
