"""How far a device is with collectives, as torch's flight recorder knows it (``FlightRecorder.hpp``, ``ProcessGroupStatus``).

Of calls that end on a device, the host sees the beginning alone. NCCL's watchdog counts for each process group how many it has
given to the device, and how many have ended there. Only these counts are read: to ask the device itself, from a thread beside
training, would break a graph that is being captured, and so would a dump of single calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch._C._distributed_c10d as _c10d

Counts = Sequence[tuple[int, int]]  # of each process group of this process: collectives that were begun, and that have ended


def counts() -> Counts:
    """Of this moment; nothing where torch does not record flights, or in a form that this release does not know."""
    found: list[tuple[int, int]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[[bool, bool], bytes] | None = getattr(_c10d, name, None)
        try:
            groups = json.loads(dump(False, True)).get("pg_status", {}) if dump is not None else {}
            found += [
                (int(group["last_enqueued_collective"]), int(group["last_completed_collective"])) for group in groups.values()
            ]
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):  # another torch tells it otherwise
            return ()
    return found


def in_flight(group: Any, known: Counts) -> int | None:
    """How many collectives of a process group have not ended on the device.

    Args:
        group: which says itself how many it has begun: the flight recorder has other names for groups.
        known: of all groups.

    Returns:
        None if that cannot be told: none of them has begun so many, or several have, and are not equally far.
    """
    try:
        begun = int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # its backend does not count, or this torch does not tell
        return None
    left = {other - ended for other, ended in known if other == begun}
    return left.pop() if len(left) == 1 else None
