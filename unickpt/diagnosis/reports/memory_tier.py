"""The memory tier in metrics and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unickpt.base.memory_status import MemoryStatus

HELP = {
    "unickpt_memory_held_bytes": "Bytes of checkpoints and copies in the memory of a host, at the end of the last save.",
    "unickpt_memory_refused_connections": "Connections that the keeper of a host has refused since its start.",
    "unickpt_memory_generation": "Number of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_step": "Step of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_age_seconds": "Age of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_confirm_seconds": "Time from the call of a save until its copies were complete, of that checkpoint.",
    "unickpt_memory_confirm_longest_seconds": "The longest such time.",
    "unickpt_memory_saves_total": "Saves into memory, by outcome. Skipped ones went to disk because of a failure.",
}
OUTCOMES = ("confirmed", "uncopied", "failed", "skipped")


def memory_values(status: MemoryStatus | None, now_s: float) -> Iterator[tuple[str, dict[str, str], float]]:
    """Return name, labels and value of each metric.

    Args:
        status: state of the tier; None without one.
        now_s: seconds since the epoch.
    """
    if status is None:
        return
    for each in status.hosts:
        labels = {"host": each.host, "rank": str(each.rank)}
        yield "unickpt_memory_held_bytes", labels, float(each.held_bytes)
        yield "unickpt_memory_refused_connections", labels, float(each.refused)
    if status.generation:
        yield "unickpt_memory_generation", {}, float(status.generation)
        yield "unickpt_memory_step", {}, float(status.step)
        yield "unickpt_memory_age_seconds", {}, max(now_s - status.begun_s, 0.0)
        yield "unickpt_memory_confirm_seconds", {}, status.confirm_s
        yield "unickpt_memory_confirm_longest_seconds", {}, status.longest_s
    for outcome in OUTCOMES:
        yield "unickpt_memory_saves_total", {"outcome": outcome}, float(getattr(status, outcome))


def memory_section(status: MemoryStatus | None, now_s: float) -> dict[str, Any] | None:
    """Return the section of a report as JSON types; None without a tier. Arguments as in ``memory_values``."""
    return None if status is None else {**status.as_json(), "age_s": max(now_s - status.begun_s, 0.0)}
