"""What the pytest plugins of the programs share that run a framework's own unit tests.

It imports nothing of ``tests``: the frameworks' trees have a package of that name.
"""

from __future__ import annotations

import os
from typing import Any


def keep_chosen(items: list[Any]) -> None:
    """Leave out the tests that the job was not asked for."""
    if "UNICKPT_UNIT_ONLY" in os.environ:
        chosen = set(os.environ["UNICKPT_UNIT_ONLY"].splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]


def reason_of(report: Any, most: int = 2000) -> str:
    """Return why a test did not pass, from a report of pytest."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr[2] if report.skipped else report.longrepr)[:most]
