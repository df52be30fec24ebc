"""Rings with handmade identities and records."""

from __future__ import annotations

import os
from typing import Any

from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring import Identity, RingWriter


def put(ring: RingWriter, number: int) -> None:
    ring.put(number, number * 10, 0, 0, 0, number, 4, 4, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 7, 99)


def here(**more: Any) -> Identity:
    return Identity(
        **{"rank": 3, "world": 8, "pid": os.getpid(), "host": "a", "job": "j", "monotonic_ns": 5, "wall_ns": 6, **more}
    )
