"""Collective timing and diagnosis: find the rank or the link that a job waits for.

Each room imports only the rooms above it in this list:

    host        processes, stacks and TCP counters of this host, as the kernel reports them
    options     user options of timing
    recording   hooks that record collectives into a ring in shared memory
    snapshot    state of the ranks of a host or a job at one time
    detectors   pure functions from a snapshot to verdicts
    reports     verdicts as text, HTML report, Perfetto trace, metrics
    agent       process on each host that takes snapshots, combines them, and writes verdicts to the log
    session     timing of one training process
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unickpt.diagnosis.reports.verdict_line import parse_line

__all__ = ["parse_line"]


def __getattr__(name: str) -> Any:
    """Import public names when they are used: training processes do not need them."""
    if name == "parse_line":
        from unickpt.diagnosis.reports.verdict_line import parse_line

        return parse_line
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
