"""Collective timing and diagnosis: find the rank or the link that a job waits for."""

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
