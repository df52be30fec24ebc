"""What the programs share that run a framework's own unit tests."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.repository import REPO
from unickpt.testing.launch import environment

Outcomes = dict[str, dict[str, Any]]  # by test


def run(command: Sequence[str], place: Path, limit_s: float, extra: Mapping[str, str], only: Sequence[str] | None) -> bool:
    """Run one job, its output in ``log``, and return whether it ended within the limit.

    Args:
        command: of pytest, with a plugin that reads the variables.
        place: folder of its results.
        limit_s: seconds.
        extra: variables.
        only: names of the tests to run. None: all.
    """
    chosen = {} if only is None else {"UNICKPT_UNIT_ONLY": "\n".join(only)}
    variables = environment(UNICKPT_UNIT_REPORT=str(place), PYTEST_DEBUG_TEMPROOT=str(place), **extra, **chosen)
    with (place / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=REPO, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            job.wait(limit_s)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end_all(place)
            job.wait()


def _end_all(place: Path) -> None:
    """Kill what is left of a job: ranks with sessions of their own, and background processes that outlive these."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("UNICKPT_UNIT_REPORT") == str(place):
                process.kill()
        except psutil.Error:
            continue
    time.sleep(0.5)


def counts(found: Outcomes) -> dict[str, int]:
    """Return how many tests have each outcome."""
    every = [test["outcome"] for test in found.values()]
    return {outcome: every.count(outcome) for outcome in dict.fromkeys(every)}


def missing_module(log: Path) -> str:
    """Return what an import in a log did not find; '' if there is nothing."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = re.search(r"(?:ModuleNotFoundError: No module named|ImportError: cannot import name) '([^']+)'", text)
    return found[1] if found else ""
