"""Programs that may hang, such as a call into a file system that does not answer, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_MOST_BYTES = 1 << 20


def answer_of(module: str, arguments: list[str], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run the function ``main`` of a module in another process, and return the JSON object that it prints last.

    The process finds the same packages as this one. One that does not end in time is killed, and left alone if a file
    system holds it.

    Returns:
        The object, or ``{"problem": why there is none}``.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main(sys.argv[1:])"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as err:  # such as a container that may not open /dev/null
        return {"problem": str(err)}
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return {"problem": f"no answer in {seconds:g} s"}
    lines = printed[-_MOST_BYTES:].decode(errors="replace").splitlines()
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(lines[-1]) if lines else None
        if isinstance(found, dict):
            return found
    said = errors[-_MOST_BYTES:].decode(errors="replace").strip().splitlines()
    ended = f"killed by signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"problem": f"{ended}: {said[-1]}" if said else ended}
