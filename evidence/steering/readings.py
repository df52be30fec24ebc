"""What a job under steering has logged: times of orders and verdicts, and the steps of its workers."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import time
from collections.abc import Sequence

from tests.jobs.steering.agents import Agents


def logged_s(job: Agents, words: str, after_s: float) -> float | None:
    """Return when the first line with these words was logged, in seconds since 1970, with milliseconds."""
    found = []
    for path in job.outputs:
        for line in path.read_text(errors="replace").splitlines():
            stamp = re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]", line)
            if words in line and stamp:
                at_s = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + int(stamp[2]) / 1000
                found += [at_s] if at_s >= after_s - 0.01 else []
    return min(found, default=None)


def verdict_s(job: Agents, after_s: float) -> float | None:
    """Return when the first verdict was written, in seconds since 1970."""
    files = [folder / "verdicts.jsonl" for folder in job.rings()]
    lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut, because the memory was full
            found.append(json.loads(line)["at_ns"] / 1e9)
    return min((at_s for at_s in found if at_s >= after_s), default=None)


def seconds(values: Sequence[float | None]) -> str:
    """Return median and range as text."""
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return f"{known[0]:.1f} s"
    return f"{statistics.median(known):.1f} s ({min(known):.1f} to {max(known):.1f})" if known else "-"
